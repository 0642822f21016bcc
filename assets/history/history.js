/* The runs of this visit: a list to sort and choose from, and the chosen ones beside each other. */

import { listen, make } from "../page/elements.js";

const LARGEST_FILE = 16e6;
const DASH = "\u2013";
/** Where an entry is shown again, and what may be going on there. */
const PLACES = {
  playground: { name: "the Playground", state: "race", going: "A run" },
  compare: { name: "Compare", state: "comparison", going: "A comparison" },
};

const fixed = (digits, unit = "") => (value) => (value == null ? DASH : value.toFixed(digits) + unit);
const plainly = (value) => (value == null ? DASH : String(value));
const COLUMNS = [
  { key: "number", name: "#", show: plainly },
  { key: "when", name: "Time", show: (value) => new Date(value).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit" }) },
  { key: "prompt", name: "Prompt", show: (value) => value.trim().split("\n")[0] },
  { key: "pair", name: "Pair", show: plainly },
  { key: "precision", name: "Precision", show: plainly },
  { key: "method", name: "Method", show: plainly },
  { key: "draft_length", name: "Draft length", show: plainly, number: true },
  { key: "temperature", name: "Temp.", show: plainly, number: true },
  { key: "speculative", name: "Tokens/s", note: "median of prompts", show: fixed(0), number: true },
  { key: "plain", name: "Plain", note: "tokens/s of plain decoding, median of prompts", show: fixed(0), number: true },
  {
    key: "speedup",
    name: "Speed-up",
    note: "\u00d7 plain decoding of the same target and prompt, median of prompts",
    show: fixed(2, "\u00d7"),
    number: true,
  },
  {
    key: "acceptance",
    name: "Accepted",
    note: "of the drafted tokens that were judged",
    show: (v) => (v == null ? DASH : Math.round(100 * v) + "\u2009%"),
    number: true,
  },
];

/** Rows by one of their figures or words; what is missing is least, and of equals the newest comes first. */
export function inOrder(rows, { key, down }) {
  const rank = (row) => row[key] ?? -Infinity;
  const order = (a, b) => {
    const [x, y] = [rank(a), rank(b)];
    const found = typeof x === "number" && typeof y === "number" ? x - y : String(x).localeCompare(String(y));
    return (down ? -found : found) || b.number - a.number;
  };
  return [...rows].sort(order);
}

/** What the buttons that are greyed out wait for. */
function waits(chosen) {
  if (!chosen) return "Tick one entry to save it or to copy its command, two or more to see them beside each other.";
  return chosen > 1 ? "Saving and copying take one entry at a time: leave one ticked." : "";
}

class History {
  /** `trigger(name, detail)` tells the server. */
  constructor(root, trigger) {
    this.root = root;
    this.trigger = trigger;
    this.rows = [];
    this.chosen = new Set();
    this.sort = { key: "number", down: true };
    this.tools = Object.fromEntries([...root.querySelectorAll("[data-do]")].map((tool) => [tool.dataset.do, tool]));
    this.file = root.querySelector('input[type="file"]');
    this.head();
    this.update("");
  }

  update(value) {
    const { rows = [], shown = 0, say = "", error = false } = value ? JSON.parse(value) : {};
    this.rows = rows;
    this.shown = shown;
    const there = new Set(rows.map((row) => row.number));
    for (const number of this.chosen) if (!there.has(number)) this.chosen.delete(number);
    this.say(say, error);
    this.draw();
  }

  say(text, error = false) {
    const place = this.root.querySelector(".history-say");
    place.setAttribute("role", error ? "alert" : "status");
    place.dataset.kind = error ? "error" : "";
    place.textContent = text;
  }

  head() {
    const row = this.root.querySelector(".history-list thead tr");
    row.append(make("th", "history-mark"));
    row.firstChild.append(make("span", "history-hidden", "Choose"));
    for (const column of COLUMNS) {
      const cell = make("th", column.number ? "number-cell" : "");
      cell.dataset.key = column.key;
      cell.scope = "col";
      const button = make("button", "history-sort", column.name);
      button.type = "button";
      button.title = column.note ?? "";
      button.addEventListener("click", () => this.sortBy(column.key));
      cell.append(button);
      row.append(cell);
    }
    row.append(make("th"));
    row.lastChild.append(make("span", "history-hidden", "Show"));
  }

  sortBy(key) {
    const down = this.sort.key === key ? !this.sort.down : !["prompt", "pair", "precision", "method"].includes(key);
    this.sort = { key, down };
    this.draw();
  }

  sorted() {
    return inOrder(this.rows, this.sort);
  }

  draw() {
    const focused = document.activeElement?.closest?.(".history-list [data-number]")?.dataset.number;
    const kind = document.activeElement?.tagName;
    this.root.querySelector(".history-empty").hidden = this.rows.length > 0;
    for (const [name, tool] of Object.entries(this.tools)) tool.hidden = name !== "open" && !this.rows.length;
    this.root.querySelector(".history-scroll").hidden = !this.rows.length;
    for (const cell of this.root.querySelectorAll(".history-list th[data-key]")) {
      if (cell.dataset.key !== this.sort.key) cell.removeAttribute("aria-sort");
      else cell.setAttribute("aria-sort", this.sort.down ? "descending" : "ascending");
    }
    const body = this.root.querySelector(".history-list tbody");
    body.replaceChildren(...this.sorted().map((row) => this.row(row)));
    if (focused) body.querySelector(`[data-number="${focused}"] ${kind === "INPUT" ? "input" : "button"}`)?.focus();
    this.choose();
  }

  row(row) {
    const made = make("tr");
    made.dataset.number = row.number;
    if (row.number === this.shown) made.setAttribute("aria-current", "true");
    const box = make("input");
    box.type = "checkbox";
    box.checked = this.chosen.has(row.number);
    box.setAttribute("aria-label", `Choose number ${row.number}`);
    box.addEventListener("change", () => {
      if (box.checked) this.chosen.add(row.number);
      else this.chosen.delete(row.number);
      this.choose();
    });
    const mark = make("td", "history-mark");
    mark.append(box);
    made.append(mark);
    for (const column of COLUMNS) made.append(this.cell(row, column));
    const show = make("button", "tool", "Show");
    show.type = "button";
    const { name } = PLACES[row.place];
    show.title = `Show this one again in ${name}`;
    show.setAttribute("aria-label", `Show number ${row.number} in ${name}`);
    show.addEventListener("click", () => this.show(row));
    const last = make("td");
    last.append(show);
    made.append(last);
    return made;
  }

  cell(row, { key, show, number = false }) {
    const cell = make("td", number ? "number-cell" : `history-${key}`, show(row[key]));
    if (key === "prompt") {
      cell.title = row.prompt;
      const tag = row.label ? `opened: ${row.label}` : row.kind === "race" ? "" : row.kind === "load" ? "many readers" : row.kind;
      if (tag) cell.prepend(make("span", "history-tag", tag), " ");
      if (row.stopped) cell.append(" ", make("span", "history-tag", "stopped"));
    }
    if (key === "pair") cell.title = row.pair;
    return cell;
  }

  /** What can be done with as many as are chosen; two or more stand beside each other. */
  choose() {
    for (const row of this.root.querySelectorAll(".history-list tbody tr")) {
      row.toggleAttribute("data-chosen", this.chosen.has(Number(row.dataset.number)));
    }
    for (const one of ["json", "csv", "html", "command"]) this.tools[one].disabled = this.chosen.size !== 1;
    this.tools.remove.disabled = !this.chosen.size;
    this.tools.clear.disabled = !this.rows.length;
    this.root.querySelector(".history-waits").textContent = this.rows.length ? waits(this.chosen.size) : "";
    const columns = this.sorted().filter((row) => this.chosen.has(row.number)).flatMap((row) =>
      row.columns.map((column, index) => ({ ...column, name: `#${row.number}` + (row.columns.length > 1 ? ` lane ${index + 1}` : "") })));
    const section = this.root.querySelector(".history-beside");
    section.hidden = columns.length < 2;
    if (!section.hidden) this.beside(section, columns);
  }

  beside(section, columns) {
    const heads = make("tr");
    heads.append(make("td"));
    for (const column of columns) {
      const head = make("th", "", column.name);
      head.scope = "col";
      heads.append(head);
    }
    section.querySelector("thead").replaceChildren(heads);
    const rows = [];
    let differing = 0;
    for (const part of ["settings", "measured"]) {
      for (const name of Object.keys(columns[0][part])) {
        const values = columns.map((column) => column[part][name] ?? DASH);
        if (values.every((value) => value === DASH)) continue;
        const differs = part === "settings" && new Set(values).size > 1;
        if (differs) differing += 1;
        const row = make("tr");
        row.dataset.part = part;
        row.toggleAttribute("data-differs", differs);
        const head = make("th", "", name);
        head.scope = "row";
        if (differs) head.append(make("span", "history-differs", "differs"));
        row.append(head, ...values.map((value) => make("td", "", value)));
        rows.push(row);
      }
    }
    section.querySelector("tbody").replaceChildren(...rows);
    section.querySelector(".history-note").textContent = differing
      ? `${differing} ${differing === 1 ? "setting differs" : "settings differ"}; all else is equal.`
      : "The settings are equal: what differs below is measurement.";
  }

  show({ number, place }) {
    const { name, state, going } = PLACES[place];
    if (document.documentElement.dataset[state] === "busy") {
      this.say(`${going} is going on in ${name}; show this one when it has ended.`, true);
      return;
    }
    this.trigger("show", { number });
  }

  async open(file) {
    if (!file) return;
    if (file.size > LARGEST_FILE) {
      this.say(`${file.name} is too large: more than ${LARGEST_FILE / 1e6} MB.`, true);
      return;
    }
    this.say(`Reading ${file.name}\u2026`);
    this.trigger("open", { name: file.name, text: await file.text() });
  }
}

export function mount(element, { props, trigger, watch }) {
  const history = new History(element.querySelector(".history"), trigger);
  const { root, tools, file } = history;

  for (const form of ["json", "csv", "html", "command"]) {
    tools[form].addEventListener("click", () => {
      const [number] = history.chosen;
      document.dispatchEvent(new CustomEvent("take-away", { detail: { number, form } }));
    });
  }
  tools.open.addEventListener("click", () => file.click());
  file.addEventListener("change", async () => {
    await history.open(file.files[0]);
    file.value = "";
  });
  root.addEventListener("dragover", (event) => event.preventDefault());
  root.addEventListener("drop", (event) => {
    event.preventDefault();
    history.open(event.dataTransfer.files[0]);
  });
  tools.remove.addEventListener("click", () => trigger("remove", { numbers: [...history.chosen] }));
  tools.clear.addEventListener("click", () => trigger("remove", { numbers: history.rows.map((row) => row.number) }));
  for (const over of /** @type {const} */ (["race-over", "comparison-over"])) listen(root, over, () => trigger("refresh"));

  root.history = history;
  watch("value", () => history.update(props.value));
  history.update(props.value);
}
