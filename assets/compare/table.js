/* The table of a comparison: a row a lane, sorted by the column whose head was pressed. */

import { make } from "../page/elements.js";
import { quoted } from "../tokens/text.js";

const COLUMNS = [
  { title: "lane", note: "models that it reads", value: (row) => row.lane, draw: drawLane },
  {
    title: "tokens/s",
    note: "median of prompts (slowest to fastest)",
    value: (row) => row.tokens_per_second?.median,
    draw: drawSpeed,
  },
  {
    title: "speed-up",
    note: "× plain decoding of the same target and prompt, median of prompts",
    value: (row) => row.ratio_to_plain?.median,
    draw: drawRatio,
  },
  {
    title: "accepted",
    note: "of the drafted tokens that were judged",
    value: (row) => row.acceptance_rate,
    draw: drawAccepted,
  },
  {
    title: "tokens per pass",
    note: "written for each pass of the target",
    value: (row) => row.tokens_per_round,
    draw: (row) => [row.tokens_per_round == null ? NONE : row.tokens_per_round.toFixed(2)],
  },
  { title: "memory", note: "of the weights", value: weights, draw: (row) => [bytes(weights(row))] },
  {
    title: "same text",
    note: "as plain decoding wrote",
    value: (row) => row.identical && row.identical.same / row.identical.compared,
    draw: drawSame,
  },
  {
    title: "first token",
    note: "median of prompts, milliseconds",
    servers: true,
    value: (row) => row.first_token_seconds,
    draw: (row) => [milliseconds(row.first_token_seconds)],
  },
  {
    title: "per token",
    note: "median and 95th percentile, milliseconds",
    servers: true,
    value: (row) => row.token_seconds,
    draw: (row) => [
      milliseconds(row.token_seconds), ...(row.token_seconds == null ? [] : [make("small", "", "95\u2009%: " + milliseconds(row.token_seconds_p95))]),
    ],
  },
];
const NONE = "\u2013";

function drawLane(row) {
  const name = make("b", "", row.lane + " " + row.name);
  const cell = [name, make("small", "", row.pair + (row.added ? "; added as the baseline" : ""))];
  if (row.error) cell.push(make("small", "lane-error", row.error));
  return cell;
}

function drawSpeed(row) {
  const cell = spread(row, row.tokens_per_second, (n) => n.toFixed(n < 100 ? 1 : 0));
  if (!row.server || !row.tokens_per_second) return cell;
  const clock = { server: "the server\u2019s clock", reader: "the reader\u2019s clock", mixed: "two clocks" }[row.server.clock];
  return [...cell, make("small", "", row.server.counted === "chunks" ? "chunks of text, " + clock : clock)];
}

/** A figure that says nothing is told as such: 1.06 of a lane that drafted nothing is no gain. */
function drawRatio(row) {
  const cell = spread(row, row.ratio_to_plain, (n) => n.toFixed(2));
  if (!row.ratio_to_plain || row.baseline || row.server || row.faster != null) return cell;
  return [...cell, make("small", "", row.drafted ? "within the noise" : "drafted nothing")];
}

/** Servers count every drafted token, ours those that were judged. */
function drawAccepted({ acceptance_rate: rate, server }) {
  const share = rate == null ? NONE : Math.round(100 * rate) + "\u2009%";
  if (!server || server.drafted == null) return [share];
  if (!server.drafted) return [make("span", "quiet", "no drafts")];
  const of = server.accepted + " of " + server.drafted + " drafted";
  return [share, make("small", "", server.shared ? of + ", others\u2019 included" : of)];
}

function milliseconds(seconds) {
  if (seconds == null) return NONE;
  return (1000 * seconds).toFixed(seconds < 0.0995 ? 1 : 0);
}

/** A median, and beside it the range where there was more than one prompt. */
function spread(row, measured, write) {
  if (!measured) return [NONE];
  if (row.prompts < 2) return [write(measured.median)];
  return [write(measured.median), make("small", "", write(measured.min) + " to " + write(measured.max))];
}

function weights(row) {
  return row.weight_bytes && row.weight_bytes.target + row.weight_bytes.draft;
}

export function bytes(n) {
  if (n == null) return NONE;
  const [size, unit] = n >= 1e9 ? [1e9, "GB"] : n >= 1e6 ? [1e6, "MB"] : [1e3, "kB"];
  return (n / size).toFixed(n < 10 * size ? 1 : 0) + "\u2009" + unit;
}

/** A server against another lane: as far as both texts go. */
function drawServerSame(same) {
  if (!same) return [NONE];
  const { lane, same: count, compared, parting } = same;
  if (!parting) return [compared > 1 ? "all " + compared + " as lane " + lane : "as lane " + lane];
  const where = "from " + parting.unit + " " + (parting.position + 1);
  const words = "\u2026" + quoted(parting.shared.slice(-12)) + " | " + quoted(parting.first.slice(0, 12)) + " \u2192 " +
    quoted(parting.second.slice(0, 12));
  const what = compared > 1 ? count + " of " + compared + " as lane " + lane : "differs from lane " + lane;
  return [what, make("small", "", where + ": " + words)];
}

function drawSame({ identical, baseline, prompts, server }) {
  if (!prompts) return [NONE];
  if (server) return drawServerSame(server.same);
  if (baseline) return [make("span", "quiet", "the baseline")];
  if (!identical) return [make("span", "quiet", "drawn by chance")];
  const { same, compared, first, logit_gap: gap } = identical;
  if (same === compared) return [compared > 1 ? "all " + compared + " identical" : "identical"];
  if (compared > 1) return [same + " of " + compared + " identical"];
  const apart = gap == null ? "" : "there the target\u2019s two best logits lie " + gap.toPrecision(2) + " apart";
  return ["differs from token " + first, make("small", "", apart)];
}

export class Table {
  constructor(section) {
    this.section = section;
    this.head = section.querySelector("thead tr");
    this.body = section.querySelector("tbody");
    this.rows = [];
    this.by = 0;
    this.down = false;
    this.columns = [];
  }

  /** Waiting times are shown where a server is: there they are what a reader feels. */
  setColumns(columns) {
    if (columns.length === this.columns.length) return;
    this.columns = columns;
    if (this.by >= columns.length) [this.by, this.down] = [0, false];
    this.cells = columns.map((column, i) => this.headCell(column, i));
    this.head.replaceChildren(...this.cells);
  }

  headCell({ title, note }, i) {
    const cell = make("th");
    cell.scope = "col";
    const button = make("button", "sort");
    button.type = "button";
    button.append(make("span", "", title), make("i", "arrow"));
    button.addEventListener("click", () => {
      // Figures begin with the greatest, lanes with the first.
      this.down = this.by === i ? !this.down : i > 0;
      this.by = i;
      this.draw();
    });
    cell.append(button, make("small", "", note));
    return cell;
  }

  show(rows, caption) {
    this.rows = rows;
    this.setColumns(COLUMNS.filter(({ servers }) => !servers || rows.some((row) => row.server)));
    this.section.querySelector("caption").textContent = caption;
    this.section.hidden = !rows.length;
    this.draw();
  }

  draw() {
    this.cells.forEach((cell, i) => {
      if (i === this.by) cell.setAttribute("aria-sort", this.down ? "descending" : "ascending");
      else cell.removeAttribute("aria-sort");
    });
    this.body.replaceChildren(...inOrder(this.rows, this.columns[this.by].value, this.down).map((row) => tableRow(row, this.columns)));
  }
}

/** Rows by their `value`, lanes in turn where it is equal; rows without a figure stay last, whichever way others stand. */
export function inOrder(rows, value, down) {
  const sign = down ? -1 : 1;
  return [...rows].sort((a, b) => {
    const [one, other] = [value(a), value(b)];
    if (one == null || other == null) return Number(one == null) - Number(other == null) || a.lane - b.lane;
    return sign * (one - other) || a.lane - b.lane;
  });
}

function tableRow(row, columns) {
  const line = make("tr");
  line.dataset.lane = row.lane;
  columns.forEach((column, i) => {
    const cell = make(i ? "td" : "th");
    if (!i) cell.scope = "row";
    cell.append(...column.draw(row));
    line.append(cell);
  });
  return line;
}
