/* The table of a comparison: a row a lane, sorted by the column whose head was pressed. */

import { make } from "../page/elements.js";

const COLUMNS = [
  { title: "lane", note: "models that it reads", value: (row) => row.lane, draw: drawLane },
  {
    title: "tokens/s",
    note: "median (slowest to fastest prompt)",
    value: (row) => row.tokens_per_second?.median,
    draw: (row) => spread(row, row.tokens_per_second, (n) => n.toFixed(n < 100 ? 1 : 0)),
  },
  {
    title: "× plain",
    note: "against plain decoding of the same target and prompt",
    value: (row) => row.ratio_to_plain?.median,
    draw: (row) => spread(row, row.ratio_to_plain, (n) => n.toFixed(2)),
  },
  {
    title: "accepted",
    note: "of the drafted tokens that were judged",
    value: (row) => row.acceptance_rate,
    draw: (row) => [row.acceptance_rate == null ? NONE : Math.round(100 * row.acceptance_rate) + "\u2009%"],
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
];
const NONE = "\u2013";

function drawLane(row) {
  const name = make("b", "", row.lane + " " + row.name);
  const cell = [name, make("small", "", row.pair + (row.added ? "; added as the baseline" : ""))];
  if (row.error) cell.push(make("small", "lane-error", row.error));
  return cell;
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

function drawSame({ identical, baseline, prompts }) {
  if (!prompts) return [NONE];
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
    this.cells = COLUMNS.map((column, i) => this.headCell(column, i));
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
    this.section.querySelector("caption").textContent = caption;
    this.section.hidden = !rows.length;
    this.draw();
  }

  draw() {
    this.cells.forEach((cell, i) => {
      if (i === this.by) cell.setAttribute("aria-sort", this.down ? "descending" : "ascending");
      else cell.removeAttribute("aria-sort");
    });
    this.body.replaceChildren(...inOrder(this.rows, COLUMNS[this.by].value, this.down).map(tableRow));
  }

}

/** Rows by their `value`, lanes in turn where it is equal; rows without a figure stay last, whichever way others stand. */
export function inOrder(rows, value, down) {
  const sign = down ? -1 : 1;
  return [...rows].sort((a, b) => {
    const [one, other] = [value(a), value(b)];
    if (one == null || other == null) return (one == null) - (other == null) || a.lane - b.lane;
    return sign * (one - other) || a.lane - b.lane;
  });
}

function tableRow(row) {
  const line = make("tr");
  line.dataset.lane = row.lane;
  COLUMNS.forEach((column, i) => {
    const cell = make(i ? "td" : "th");
    if (!i) cell.scope = "row";
    cell.append(...column.draw(row));
    line.append(cell);
  });
  return line;
}
