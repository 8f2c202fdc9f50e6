// Elements without HTML strings: whatever a file calls its layers stays text.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, properties, children) {
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "on") {
      for (const [event, listener] of Object.entries(value)) element.addEventListener(event, listener);
    } else if (name === "style") {
      for (const [key, setting] of Object.entries(value)) element.style.setProperty(key, setting);
    } else {
      element.setAttribute(name, value === true ? "" : String(value));
    }
  }
  element.append(...children.flat(3).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** h("p", { class: "note", on: { click } }, "text", child, ...): strings become text nodes. */
export const h = (tag, properties = {}, ...children) => fill(document.createElement(tag), properties, children);

/** The same for SVG elements. */
export const s = (tag, properties = {}, ...children) => fill(document.createElementNS(SVG, tag), properties, children);

const PATHS = {
  ok: "M4 10.5 8.2 14.5 16 6",
  refused: "M5.5 5.5l9 9M14.5 5.5l-9 9",
  unquantized: "M5 10h10",
  warning: "M10 5v6.2M10 14.4v.4",
  busy: "M10 4.5a5.5 5.5 0 1 1-5.5 5.5",
};

/** A small sign in the current colour; hidden from screen readers, whose text stands beside it. */
export const icon = (kind) =>
  s(
    "svg",
    { class: `ql-icon ql-icon-${kind}`, viewBox: "0 0 20 20", width: 16, height: 16, "aria-hidden": "true" },
    s("path", { d: PATHS[kind], fill: "none", stroke: "currentColor", "stroke-width": 2.4, "stroke-linecap": "round", "stroke-linejoin": "round" }),
  );

/** A button that says what it does; `key` lets the panel find it again after a redraw. */
export const button = (label, action, { key, kind = "plain", title } = {}) =>
  h("button", { type: "button", class: `ql-button ql-button-${kind}`, "data-ql-key": key ?? label, title, on: { click: action } }, label);

/** Copies text; without the clipboard API (a page served over plain HTTP) through a hidden text area. */
export async function copyText(text) {
  if (navigator.clipboard && window.isSecureContext) {
    await navigator.clipboard.writeText(text);
    return;
  }
  const area = h("textarea", { class: "ql-hidden", "aria-hidden": "true" });
  area.value = text;
  // A modal dialog makes the rest of the page inert, so the area goes into it.
  (document.querySelector("dialog[open]") ?? document.body).append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}

/** A button that copies and says so for a moment. */
export function copyButton(label, done, text, options = {}) {
  const element = button(
    label,
    async () => {
      await copyText(text());
      element.textContent = done;
      setTimeout(() => (element.textContent = label), 1500);
    },
    { key: `copy ${label}`, ...options },
  );
  return element;
}
