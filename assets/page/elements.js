/* Elements made in one line each; texts enter the page through `textContent` alone. What is heard on an element's behalf. */

const SVG = "http://www.w3.org/2000/svg";

/**
 * @template {keyof HTMLElementTagNameMap} K
 * @param {K} tag
 * @param {string} [className]
 * @param {string} [text]
 * @returns {HTMLElementTagNameMap[K]}
 */
export function make(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

/**
 * @template {keyof SVGElementTagNameMap} K
 * @param {K} tag
 * @param {Record<string, string | number>} attributes
 * @param {string} [text]
 * @returns {SVGElementTagNameMap[K]}
 */
export function shape(tag, attributes, text) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, String(value));
  if (text !== undefined) made.textContent = text;
  return made;
}

/**
 * Hear of an event anywhere on the page for as long as an element is part of it.
 * @template {keyof DocumentEventMap} K
 * @param {Element} element
 * @param {K} type
 * @param {(event: DocumentEventMap[K]) => void} hear
 * @param {boolean | AddEventListenerOptions} [options]
 */
export function listen(element, type, hear, options) {
  const heard = (event) => {
    if (element.isConnected) hear(event);
    else document.removeEventListener(type, heard, options);
  };
  document.addEventListener(type, heard, options);
}
