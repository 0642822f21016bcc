/* Settings in the address, and the one way by which a text of this page becomes a file or goes to the clipboard. */

import { copyText, saveText } from "../page/hand_over.js";
import { listen } from "../page/elements.js";

const LONGEST_PROMPT = 2000;
const KEPT = "speculative-decoding-settings";
const WAIT = 250;

/** Whether nobody on another machine can open this address. */
export const onlyHere = (host) => /^(localhost|127(\.\d+){3}|\[::1\])$/.test(host);
const NOT_ELSEWHERE = " Nobody else can open it: this page runs on this machine alone. To show the run to others, send its replay page.";

const embedded = () => window.parent !== window;

/** What the page was asked for. Inside another page it is opened anew from the outer address, so it keeps its own for as
    long as the tab lives. */
export function settingsInAddress(names) {
  const found = new URLSearchParams(location.search);
  if (!embedded() || names.some((name) => found.has(name))) return location.search;
  return sessionStorage.getItem(KEPT) ?? location.search;
}

/** An address with what stands in the controls, by `names`, but for what stands as it began. */
export function addressOf(address, names, start, values) {
  const found = new URL(address);
  names.forEach((name, i) => {
    const text = String(values[i] ?? "");
    const left = text === String(start[i] ?? "") || (name === "prompt" ? text.length > LONGEST_PROMPT : !text);
    if (left) found.searchParams.delete(name);
    else found.searchParams.set(name, text);
  });
  return found;
}

class TakeAway {
  /** `props` names the controls and says how they began; `trigger("take", …)` asks the server for an entry in a form. */
  constructor(root, props, trigger) {
    this.props = props;
    this.trigger = trigger;
    this.notice = root.querySelector(".notice");
    this.values = null;
    this.prompt = props.start[0] ?? "";
    this.read = "";
  }

  /** What a value of the component brings: something to say, to copy or to save; once. */
  update(value) {
    if (!value) return;
    const { id, ...parts } = JSON.parse(value);
    if (id === this.read) return;
    this.read = id;
    this.deliver(parts);
  }

  say(text, error = false) {
    clearTimeout(this.silence);
    this.notice.hidden = !text;
    this.notice.dataset.kind = error ? "error" : "";
    this.notice.setAttribute("role", error ? "alert" : "status");
    this.notice.firstElementChild.textContent = text;
    if (text) this.silence = setTimeout(() => this.say(""), error ? 20_000 : 6000);
  }

  follow(settings) {
    this.values = this.props.names.map((name) => settings[name]);
    this.prompt = settings.prompt ?? "";
    clearTimeout(this.waiting);
    this.waiting = setTimeout(() => {
      const next = this.address();
      if (next.href !== location.href) history.replaceState(history.state, "", next);
      if (embedded()) sessionStorage.setItem(KEPT, next.search);
    }, WAIT);
  }

  /** Of what is set now, which the browser's own address follows a moment later. */
  address() {
    const { names, start } = this.props;
    return this.values ? addressOf(location.href, names, start, this.values) : new URL(location.href);
  }

  async copy(text, done) {
    const copied = await copyText(text);
    if (copied) this.say(done);
    else this.say("The browser does not let this page copy. The text: " + text, true);
  }

  copyLink() {
    const link = this.address();
    link.searchParams.delete("__theme");
    const fits = this.prompt.length <= LONGEST_PROMPT;
    if (fits) link.searchParams.set("prompt", this.prompt);
    const said = fits ? "The link is copied: it opens this page with this prompt and these settings."
      : "The link is copied with the settings; the prompt is too long for a link.";
    this.copy(link.href, said + (onlyHere(link.hostname) ? NOT_ELSEWHERE : ""));
  }

  take(form, number = null) {
    if (form === "link") return this.copyLink();
    this.say(form === "command" ? "" : "Preparing the file\u2026");
    this.trigger("take", { form, number });
  }

  /** @param {TakeAwayParts} parts */
  deliver({ say: text = "", error = false, copy: copied, name, type, text: content }) {
    if (copied !== undefined) return this.copy(copied, text);
    if (name) saveText({ name, type, text: content });
    this.say(text, error);
  }
}

function connectMenu(root, bar) {
  const menu = root.querySelector(".menu");
  if (onlyHere(location.hostname)) root.querySelector("[data-reach]").textContent = "for this machine alone: prompt and settings";
  root.addEventListener("click", (event) => {
    const form = event.target.closest?.("[data-take]")?.dataset.take;
    if (form) {
      menu.open = false;
      bar.take(form);
    } else if (event.target.closest?.(".notice button")) bar.say("");
  });
  listen(root, "click", (event) => {
    if (!menu.contains(event.target)) menu.open = false;
  });
  root.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || !menu.open) return;
    menu.open = false;
    menu.querySelector("summary").focus();
    event.preventDefault();
    event.stopPropagation();
  });
}

export function mount(element, { props, trigger, watch }) {
  const root = element.querySelector(".take-away");
  const bar = new TakeAway(root, props, trigger);
  connectMenu(root, bar);
  listen(root, "settings-changed", ({ detail }) => bar.follow(detail));
  /** Others ask for an entry of the visit in a form, or bring a text to copy or a file to save, and what to say then. */
  listen(root, "take-away", ({ detail }) => ("form" in detail ? bar.take(detail.form, detail.number) : bar.deliver(detail)));
  watch("value", () => bar.update(props.value));
  bar.update(props.value);
}
