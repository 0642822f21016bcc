/* A round drawn: a chain of drafted tokens as a row of chips, a tree as a tree. */

import { make, shape } from "../page/elements.js";
import { isTree, lastAccepted } from "./story.js";
import { quoted } from "./text.js";

const NODE = { height: 20, gap: 5, between: 26, character: 7.3, longest: 12 };
const SMALLEST_TREE = 0.72;

/**
 * The round as it stands at `moment`. `chosen`: the position that is looked at (-1: the emitted token, null: none);
 * `pick(position)` is called when a token is chosen.
 */
export function roundDrawing(round, moment, chosen, pick) {
  return isTree(round) ? treeDrawing(round, moment, chosen, pick) : chainDrawing(round, moment, chosen, pick);
}

/** What a drawn token is at `moment`: its outcome, "pending", or null where it is not there yet. */
function standing(round, moment, position) {
  if (position < 0) return moment.emitted ? round.emitted.outcome : null;
  if (position >= moment.drafted) return null;
  return moment.pending(position) ? "pending" : round.drafted[position].outcome;
}

function chainDrawing(round, moment, chosen, pick) {
  const row = make("div", "round-chain");
  for (const [position, token] of placesOf(round)) {
    const kind = standing(round, moment, position);
    const chip = make("button", "chip");
    chip.type = "button";
    chip.append(chipText(token, kind));
    chip.classList.toggle("absent", kind === null);
    chip.disabled = kind === null || !pick;
    if (position === chosen) chip.setAttribute("aria-current", "true");
    chip.setAttribute("aria-label", quoted(token.text) + ", " + (kind ?? "not yet"));
    if (pick) chip.addEventListener("click", () => pick(position));
    row.append(chip);
  }
  return row;
}

function chipText(token, kind) {
  const text = make("span", "swatch", quoted(token.text));
  if (kind) text.dataset.kind = kind;
  return text;
}

/** [position, token] of all tokens of a round, the emitted one last at -1. */
export function placesOf(round) {
  const places = [...round.drafted.entries()];
  if (round.emitted) places.push([-1, round.emitted]);
  return places;
}

/** Nodes with their place: `x`, `y` and `width` in pixels, `parent` a node or the root. The root is the text so far. */
function treeLayout(round) {
  const nodes = placesOf(round).map(([position, token]) => ({
    position,
    token,
    label: shortened(quoted(token.text)),
    under: position < 0 ? lastAccepted(round) : (token.parent ?? -1),
    children: [],
    parent: null,
    depth: 0,
    x: 0,
    y: 0,
    width: 0,
  }));
  const root = { position: null, depth: 0, x: 4, y: 0, width: 8, children: [] };
  const at = new Map(nodes.map((node) => [node.position, node]));
  for (const node of nodes) {
    node.parent = node.under < 0 ? root : at.get(node.under);
    node.depth = node.parent.depth + 1;
    node.parent.children.push(node);
  }
  const widths = [root.width];
  for (const node of nodes) widths[node.depth] = Math.max(widths[node.depth] ?? 0, nodeWidth(node));
  const lefts = [root.x];
  for (let i = 1; i < widths.length; i += 1) lefts[i] = lefts[i - 1] + widths[i - 1] + NODE.between;
  for (const node of nodes) Object.assign(node, { x: lefts[node.depth], width: nodeWidth(node) });
  let next = 0;
  const place = (node) => {
    node.children.forEach(place);
    const { children } = node;
    node.y = children.length ? (children[0].y + children.at(-1).y) / 2 : NODE.height / 2 + 2 + (NODE.height + NODE.gap) * next++;
  };
  place(root);
  return { root, nodes, width: lefts.at(-1) + widths.at(-1) + 4, height: next * (NODE.height + NODE.gap) };
}

function nodeWidth(node) {
  return [...node.label].length * NODE.character + (node.token.outcome === "bonus" ? 22 : 12);
}

function shortened(text) {
  const characters = [...text];
  return characters.length > NODE.longest ? characters.slice(0, NODE.longest - 1).join("") + "\u2026" : text;
}

function treeDrawing(round, moment, chosen, pick) {
  const { root, nodes, width, height } = treeLayout(round);
  const words = "Tree of " + round.drafted.length + " drafted tokens, from the text so far on the left";
  const svg = shape("svg", { class: "round-tree", width, height, viewBox: "0 0 " + width + " " + height });
  svg.setAttribute("role", "group");
  svg.setAttribute("aria-label", words);
  const shown = nodes.filter((node) => standing(round, moment, node.position) !== null);
  for (const node of shown) svg.append(edge(node, standing(round, moment, node.position)));
  svg.append(shape("circle", { class: "tree-root", cx: root.x + 4, cy: root.y, r: 4 }));
  for (const node of shown) svg.append(treeNode(node, standing(round, moment, node.position), chosen, pick));
  const box = make("div", "round-tree-box");
  box.append(svg);
  return box;
}

function edge(node, kind) {
  const from = node.parent.x + node.parent.width;
  const middle = (from + node.x) / 2;
  const d = "M" + from + " " + node.parent.y + "C" + middle + " " + node.parent.y + " " + middle + " " + node.y + " " +
    node.x + " " + node.y;
  return shape("path", { class: "tree-edge", "data-kind": kind, d });
}

function treeNode(node, kind, chosen, pick) {
  const group = shape("g", { class: "tree-node", "data-kind": kind, role: "button", tabindex: pick ? 0 : -1 });
  group.setAttribute("aria-label", quoted(node.token.text) + ", " + kind);
  if (node.position === chosen) group.setAttribute("aria-current", "true");
  const top = node.y - NODE.height / 2;
  group.append(
    shape("title", {}, quoted(node.token.text) + ", " + kind),
    shape("rect", { x: node.x, y: top, width: node.width, height: NODE.height, rx: 3 }),
    shape("path", { class: "tree-foot", d: "M" + node.x + " " + (top + NODE.height - 1) + "h" + node.width }),
    shape("text", { x: node.x + 6, y: node.y + 4 }, (kind === "bonus" ? "\u2726" : "") + node.label),
  );
  if (!pick) return group;
  group.addEventListener("click", () => pick(node.position));
  group.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" && event.key !== " ") return;
    event.preventDefault();
    pick(node.position);
  });
  return group;
}

/** Make a drawn tree as large as there is room for, but never too small to be read. */
export function fitTree(drawing, width, height) {
  const tree = drawing.querySelector("svg.round-tree");
  if (!tree) return;
  const { width: wide, height: high } = tree.viewBox.baseVal;
  const size = Math.max(SMALLEST_TREE, Math.min(1, width / wide, height / high));
  tree.setAttribute("width", wide * size);
  tree.setAttribute("height", high * size);
}
