/* What this tab sets in the sidebar and wants to see run: the Playground runs it once it stands there. */

export function mount(element, { props, watch }) {
  watch("value", () => {
    const { controls: detail } = JSON.parse(props.value);
    document.dispatchEvent(new CustomEvent("run-with", { detail }));
  });
}
