/* Settings in the address, and the one way by which a text of this page becomes a file or goes to the clipboard. */
"use strict";

const LONGEST_PROMPT = 2000;
const KEPT = "speculative-decoding-settings";
const root = element.querySelector(".take-away");
const notice = root.querySelector(".notice");
const menu = root.querySelector(".menu");
const embedded = window.parent !== window;
let prompt = props.start[0] ?? "";
let timer = 0;
let read = "";

function say(text, error = false) {
  clearTimeout(timer);
  notice.hidden = !text;
  notice.dataset.kind = error ? "error" : "";
  notice.setAttribute("role", error ? "alert" : "status");
  notice.firstElementChild.textContent = text;
  if (text) timer = setTimeout(() => say(""), error ? 20_000 : 6000);
}

/** This page's address with what stands in the controls, but for what stands as it began. */
function address(values) {
  const found = new URL(location.href);
  props.names.forEach((name, i) => {
    const text = String(values[i] ?? "");
    const left = text === String(props.start[i] ?? "") || (name === "prompt" ? text.length > LONGEST_PROMPT : !text);
    if (left) found.searchParams.delete(name);
    else found.searchParams.set(name, text);
  });
  return found;
}

/** A page inside another one is opened anew from the outer address, so it keeps its own for as long as the tab lives. */
window.settingsInAddress = () => {
  const found = new URLSearchParams(location.search);
  if (!embedded || props.names.some((name) => found.has(name))) return location.search;
  return sessionStorage.getItem(KEPT) ?? location.search;
};

let waiting = 0;
document.addEventListener("settings-changed", ({ detail }) => {
  prompt = detail[0] ?? "";
  clearTimeout(waiting);
  waiting = setTimeout(() => {
    const next = address(detail);
    if (next.href !== location.href) history.replaceState(history.state, "", next);
    if (embedded) sessionStorage.setItem(KEPT, next.search);
  }, 250);
});

async function copy(text, done) {
  try {
    if (!navigator.clipboard) throw new Error("no clipboard");
    await navigator.clipboard.writeText(text);
  } catch {
    const area = document.createElement("textarea");
    area.value = text;
    document.body.append(area);
    area.select();
    const copied = document.execCommand("copy");
    area.remove();
    if (!copied) return say("The browser does not let this page copy. The text: " + text, true);
  }
  say(done);
}

function save({ name, type, text }) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type: type + ";charset=utf-8" }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}

function copyLink() {
  const link = new URL(location.href);
  link.searchParams.delete("__theme");
  const fits = prompt.length <= LONGEST_PROMPT;
  if (fits) link.searchParams.set("prompt", prompt);
  copy(link.href, fits ? "The link is copied: it opens this page with this prompt and these settings."
    : "The link is copied with the settings; the prompt is too long for a link.");
}

function take(form, number = null) {
  if (form === "link") return copyLink();
  say(form === "command" ? "" : "Preparing the file\u2026");
  trigger("take", { form, number });
}

function deliver({ say: text = "", error = false, copy: copied, ...file }) {
  if (copied !== undefined) return copy(copied, text);
  if (file.name) save(file);
  say(text, error);
}

function update(value) {
  if (!value) return;
  const { id, ...parts } = JSON.parse(value);
  if (id === read) return;
  read = id;
  deliver(parts);
}

root.addEventListener("click", (event) => {
  const form = event.target.closest?.("[data-take]")?.dataset.take;
  if (form) {
    menu.open = false;
    take(form);
  } else if (event.target.closest?.(".notice button")) say("");
});
document.addEventListener("click", (event) => {
  if (!menu.contains(event.target)) menu.open = false;
});
root.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || !menu.open) return;
  menu.open = false;
  menu.querySelector("summary").focus();
  event.preventDefault();
  event.stopPropagation();
});
/** Others ask for an entry of the visit in a form, or bring a text to copy or a file to save, and what to say then. */
document.addEventListener("take-away", ({ detail }) => {
  if (detail.form) return take(detail.form, detail.number);
  deliver(detail);
});
watch("value", () => update(props.value));
update(props.value);
