/* Run and Stop of a tab, one way for all: what was pressed and is not over yet, the keys, and what Stop waits for. */

import { listen } from "./elements.js";

/** The work of a tab, as its buttons start and stop it.
 *
 * `view` has a root, a card, `busy` (an event "busy" on the root tells that it changed), the `kind` of what it says,
 * say(kind, text, why) and done(). `name`: in data-NAME of the page stands whether it is going on, and NAME-over is the
 * event by which the server's part says that what a press began has ended, whatever became of it.
 */
export class Runs {
  /** `run`, `stop`: ids of buttons. `keys`: whether Control+Enter presses the first of `run`. `idle`: what is said where
   * a run ended before it began. */
  constructor(view, { name, run, stop, keys = true, idle = "" }) {
    const over = /** @type {"race-over"} */ (name + "-over");
    this.view = view;
    this.name = name;
    this.run = run;
    this.stop = stop;
    this.idle = idle;
    this.sent = 0;
    this.tell();
    view.root.addEventListener("busy", () => this.tell());
    listen(view.root, "click", (event) => this.click(event), true);
    listen(view.root, over, () => this.over());
    listen(view.root, "keydown", (event) => this.key(event, keys));
  }

  tell() {
    const { view, name, stop } = this;
    document.documentElement.dataset[name] = view.busy ? "busy" : "idle";
    const button = /** @type {HTMLButtonElement | null} */ (document.getElementById(stop));
    if (button) button.disabled = !view.busy;
  }

  press(id = this.run[0]) {
    document.getElementById(id)?.click();
  }

  /** Before Gradio hears of it. */
  click(event) {
    const pressed = event.target.closest?.("button")?.id;
    if (pressed === this.stop) this.stopped();
    else if (pressed && this.run.includes(pressed)) {
      if (!this.view.busy) return this.started();
      event.stopImmediatePropagation();
      event.preventDefault();
      this.refused();
    }
  }

  started() {
    this.sent += 1;
    this.view.busy = true;
    this.view.say("starting", "Starting\u2026", "");
  }

  /** Pressed while another run is on. */
  refused() {}

  stopped() {
    if (this.view.busy) this.view.say("stopping", "Stopping\u2026");
  }

  over() {
    this.sent = Math.max(0, this.sent - 1);
    if (this.sent || !this.view.busy) return;
    if (this.view.kind === "starting") this.view.say("idle", this.idle, "");
    this.view.done();
  }

  /** Only of the tab that is shown. */
  key(event, keys) {
    const { view } = this;
    if (event.defaultPrevented || !view.root.checkVisibility()) return;
    if (keys && event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
      event.preventDefault();
      this.press();
    } else if (event.key === "Escape") {
      if (view.card.span) view.card.hide();
      else if (view.busy) this.press(this.stop);
    }
  }
}
