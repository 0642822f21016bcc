/* Reads a growing value of JSON lines (app/tokens/__init__.py, `Window`) and hands each event to its sink once. */

export class EventReader {
  /** `sink` has begin(), take(event), flush() and lost(). */
  constructor(sink) {
    this.sink = sink;
    this.head = "";
    this.over = new Set();
  }

  /** Read what is new in the value: the lines past those read, or all of them where it is another run's. */
  update(value) {
    if (!value) return;
    if (!this.head || !value.startsWith(this.head)) {
      if (!this.newWindow(value)) return;
    }
    const lines = value.slice(this.read).split("\n");
    this.read = value.length;
    for (const line of lines) {
      if (!line) continue;
      if (this.skip > 0) this.skip -= 1;
      else {
        this.seen += 1;
        this.sink.take(JSON.parse(line));
      }
    }
    this.sink.flush();
  }

  /** The value began anew: with the last lines of the same run, with another run, or late with one that is over. */
  newWindow(value) {
    const head = value.slice(0, value.indexOf("\n") + 1);
    const { id, from } = JSON.parse(head);
    if (this.over.has(id)) return false;
    this.head = head;
    this.read = head.length;
    if (id !== this.id) {
      if (this.id) this.over.add(this.id);
      this.id = id;
      this.seen = 0;
      this.sink.begin();
    }
    this.skip = this.seen - from;
    if (this.skip < 0) this.sink.lost();
    return true;
  }
}
