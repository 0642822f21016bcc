/* What tsc cannot read out of the scripts: events that the page sends itself, and what our code keeps on elements. */

/** Words to say; a text to copy, or a file to save as `name`. */
interface TakeAwayParts {
  say?: string;
  error?: boolean;
  copy?: string;
  name?: string;
  type?: string;
  text?: string;
}

interface DocumentEventMap {
  /** The controls of the sidebar by name, whenever one changed. */
  "settings-changed": CustomEvent<Record<string, any>>;
  /** They are as the address asks. */
  "address-read": Event;
  /** How many lanes Compare shows. */
  "lane-count": CustomEvent<number>;
  /** An entry of the visit in a form, or what is ready to be handed over. */
  "take-away": CustomEvent<{ form: string; number: number } | TakeAwayParts>;
}

interface DocumentEventMap {
  /** What a press of a tab's button began has ended. */
  "race-over": Event;
  "comparison-over": Event;
  "training-over": Event;
  /** Controls that another tab sets, to be run once they stand there. */
  "run-with": CustomEvent<Record<string, any>>;
}

interface EventTarget {
  /** Of elements; a document or a window, which can be targets too, has none. */
  closest?<E extends Element = HTMLElement>(selectors: string): E | null;
}

/* Elements are HTML's unless it is said otherwise. */
interface ParentNode {
  querySelector<K extends keyof HTMLElementTagNameMap>(selectors: K): HTMLElementTagNameMap[K] | null;
  querySelector<E extends Element = HTMLElement>(selectors: string): E | null;
  querySelectorAll<K extends keyof HTMLElementTagNameMap>(selectors: K): NodeListOf<HTMLElementTagNameMap[K]>;
  querySelectorAll<E extends Element = HTMLElement>(selectors: string): NodeListOf<E>;
}
interface Element {
  closest<E extends Element = HTMLElement>(selectors: string): E | null;
}

/** A token's element in a stream. */
interface HTMLSpanElement {
  token?: any;
  round?: any;
  position?: number;
  /** Of a mark: the guesses that are folded into it, and the one that it stands for. */
  guesses?: HTMLSpanElement[];
  guess?: HTMLSpanElement;
}
