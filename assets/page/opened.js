/* What a visitor has opened once stays open for that visitor, where the browser keeps anything for the page. */

const KEPT = "speculative-decoding-opened";

function all() {
  try {
    return JSON.parse(localStorage.getItem(KEPT)) ?? {};
  } catch {
    return {};
  }
}

export function remembered(name) {
  return all()[name] === true;
}

export function remember(name, open) {
  try {
    localStorage.setItem(KEPT, JSON.stringify({ ...all(), [name]: open }));
  } catch {
    // it begins shut again
  }
}
