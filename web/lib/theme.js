// Light or dark: read from the theme's own text colour, since frontends mark it in different ways.

function rgb(colour) {
  const context = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  context.fillStyle = colour;
  context.fillRect(0, 0, 1, 1);
  return context.getImageData(0, 0, 1, 1).data;
}

/** Whether the theme writes light on dark. */
function isDark() {
  const text = getComputedStyle(document.documentElement).getPropertyValue("--input-text").trim() || "#ddd";
  const [red, green, blue] = rgb(text);
  return 0.299 * red + 0.587 * green + 0.114 * blue > 127;
}

/** Keeps the class `ql-dark` on the page's root true to the theme. */
export function followTheme() {
  let known = "";
  const look = () => {
    const now = getComputedStyle(document.documentElement).getPropertyValue("--input-text");
    if (now === known) return;
    known = now;
    document.documentElement.classList.toggle("ql-dark", isDark());
  };
  const observer = new MutationObserver(look);
  for (const element of [document.documentElement, document.body]) observer.observe(element, { attributes: true });
  look();
}
