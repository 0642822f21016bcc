/* Explain, where it is in sight: a race or a comparison that ends is the newest run, and is shown. */

export function mount(element, { trigger }) {
  for (const over of ["race-over", "comparison-over"]) {
    document.addEventListener(over, () => {
      if (element.isConnected && element.offsetParent !== null) trigger("refresh");
    });
  }
}
