/* From the page to a person: a text into the clipboard, a text as a file. */

import { make } from "./elements.js";

/** Copy a text; false where the browser does not let the page. Without a clipboard (no https, not this machine), the old way. */
export async function copyText(text) {
  try {
    if (!navigator.clipboard) throw new Error("no clipboard");
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const area = make("textarea", "announce");
    area.value = text;
    document.body.append(area);
    area.select();
    const copied = document.execCommand("copy");
    area.remove();
    return copied;
  }
}

export function saveText({ name, type, text }) {
  const link = make("a");
  link.href = URL.createObjectURL(new Blob([text], { type: type + ";charset=utf-8" }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}
