/* Model text as text a person can see: nothing invisible, nothing that reorders its surroundings. */

import { make } from "../page/elements.js";

const HIDDEN = new RegExp(
  // eslint-disable-next-line no-misleading-character-class -- a joiner alone is what is looked for
  "[\\u0000-\\u0008\\u000b-\\u001f\\u007f-\\u009f\\u00ad\\u034f\\u061c\\u115f\\u1160\\u17b4\\u17b5\\u180e\\u200b" +
    "\\u200e\\u200f\\u2028-\\u202e\\u2060-\\u206f\\u3164\\ufeff\\uffa0\\ufff0-\\ufffb\\ud800-\\udfff]" +
    "|[\\u{e0000}-\\u{e0fff}]",
  "gu",
);

/** A control or format character by its picture or its number. */
function named(character) {
  const code = character.codePointAt(0);
  if (code < 0x20) return String.fromCharCode(0x2400 + code);
  if (code === 0x7f) return "\u2421";
  return "\u27e8U+" + code.toString(16).toUpperCase().padStart(4, "0") + "\u27e9";
}

/** Text for the stream: spaces and line breaks stay, what cannot be seen is named. */
export function visible(text) {
  return text.replace(HIDDEN, named);
}

/** Text for the card: blanks are marked too, so that " a" and "a" look different. */
export function quoted(text) {
  if (text === "") return "part of a character";
  return visible(text).replace(/ /g, "\u00b7").replace(/\n/g, "\u23ce").replace(/\t/g, "\u21e5");
}

/** A faint line-break mark; a pseudo-element, so that it is never part of the text. */
function lineBreakMark() {
  return make("i", "nl");
}

/**
 * Put a token's text into its element. A kept line break breaks the line, with a mark where the token is nothing else;
 * a struck one is only marked, so that text nobody keeps does not move the lines.
 */
export function fill(target, text, struck) {
  if (text === "") {
    target.classList.add("partial");
    return;
  }
  const lone = /^[\r\n]+$/.test(text);
  const lines = visible(text.replace(/\r\n/g, "\n")).split("\n");
  lines.forEach((line, i) => {
    if (i > 0) {
      if (struck || lone) target.append(lineBreakMark());
      if (!struck) target.append("\n");
    }
    if (line) target.append(line);
  });
}

/** A probability that is known, or what it is at most: that of a token beyond those recorded. */
export function figure({ value, most = null }) {
  if (value != null) return probability(value);
  return most < 0.0001 ? "<0.0001" : "\u2264" + probability(most);
}

/** A probability in as many digits as tell something. */
export function probability(value) {
  if (value == null) return "\u2013";
  if (value > 0 && value < 0.005) return value < 0.0001 ? "<0.0001" : value.toFixed(4);
  return value.toFixed(2);
}
