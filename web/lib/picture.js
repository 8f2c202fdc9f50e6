// Two small pictures: where the bytes of a checkpoint are, and its layers in order.

import { h, s } from "./dom.js";
import { bytes, formatClass, formatName } from "./figures.js";
import { t } from "./words.js";

/** [{ format, count, bytes }] of a report, most bytes first, and what is not quantised at the end (format null). */
export function shares(check) {
  const byFormat = new Map();
  for (const layer of check.layers) {
    const share = byFormat.get(layer.format) ?? { format: layer.format, count: 0, bytes: 0 };
    share.count += 1;
    share.bytes += layer.bytes;
    byFormat.set(layer.format, share);
  }
  const list = [...byFormat.values()].sort((a, b) => b.bytes - a.bytes);
  const rest = check.size - check.quantized_bytes;
  if (rest > 0) list.push({ format: null, count: 0, bytes: rest });
  return list;
}

const shareName = (share) => (share.format === null ? t("picture.rest") : formatName(share.format));
const shareClass = (share) => (share.format === null ? "ql-f-rest" : formatClass(share.format));

/** A bar of the file by format and bytes, with a legend that carries the same words. */
export function byteBar(check) {
  const list = shares(check);
  const total = list.reduce((sum, share) => sum + share.bytes, 0) || 1;
  const bar = h(
    "div",
    { class: "ql-bar", "aria-hidden": "true" },
    list.map((share) =>
      h("span", {
        class: `ql-bar-part ${shareClass(share)}`,
        style: { "flex-grow": String(Math.max(share.bytes / total, 0.008)) },
        title: `${shareName(share)}: ${bytes(share.bytes)}`,
      }),
    ),
  );
  const legend = h(
    "ul",
    { class: "ql-legend" },
    list.map((share) =>
      h(
        "li",
        { title: bytes(share.bytes) },
        h("span", { class: `ql-dot ${shareClass(share)}`, "aria-hidden": "true" }),
        h("span", {}, shareName(share)),
        h("span", { class: "ql-muted" }, share.count ? ` × ${share.count}` : ` ${bytes(share.bytes)}`),
      ),
    ),
  );
  return [bar, legend];
}

/**
 * The layers in file order as one strip. `marks` is one { kind, label } a layer: `kind` a colour class, `label` what a
 * pointer or the arrow keys read out. `place` is where the reader is ({ name, shown }); kept by the caller, it outlives
 * a strip that is drawn again.
 */
export function layerStrip(names, marks, place = {}) {
  const count = names.length;
  const caption = h("div", { class: "ql-strip-caption ql-muted" }, t("picture.layers", { count }));
  const cursor = s("rect", { class: "ql-strip-cursor", y: 0, height: 1, width: 1, visibility: "hidden" });
  const strip = s(
    "svg",
    {
      class: "ql-strip",
      viewBox: `0 0 ${count} 1`,
      preserveAspectRatio: "none",
      tabindex: 0,
      role: "slider",
      "aria-label": t("picture.strip"),
      "aria-valuemin": 1,
      "aria-valuemax": count,
      "data-ql-key": "strip",
    },
    runs(marks).map(({ kind, start, length }) => s("rect", { class: kind, x: start, y: 0, width: length, height: 1 })),
    cursor,
  );
  let at = names.indexOf(place.name);
  const read = () => {
    const index = Math.max(at, 0);
    strip.setAttribute("aria-valuenow", index + 1);
    strip.setAttribute("aria-valuetext", `${names[index]}, ${marks[index].label}`);
  };
  const point = (index) => {
    at = Math.min(Math.max(index, 0), count - 1);
    Object.assign(place, { name: names[at], shown: true });
    cursor.setAttribute("x", at);
    cursor.setAttribute("visibility", "visible");
    read();
    caption.replaceChildren(h("span", { class: "ql-name" }, names[at]), ` · ${marks[at].label}`);
  };
  const leave = () => {
    if (!strip.isConnected) return; // it was drawn again, and lost the focus by that
    place.shown = false;
    cursor.setAttribute("visibility", "hidden");
    caption.replaceChildren(t("picture.layers", { count }));
  };
  if (place.shown && at >= 0) point(at);
  else read();
  strip.addEventListener("pointermove", (event) => {
    const box = strip.getBoundingClientRect(); // of the screen: right at any zoom of the canvas
    point(Math.floor(((event.clientX - box.left) / box.width) * count));
  });
  strip.addEventListener("pointerleave", leave);
  strip.addEventListener("blur", leave);
  strip.addEventListener("focus", () => point(Math.max(at, 0)));
  strip.addEventListener("keydown", (event) => {
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: count - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    event.stopPropagation();
    point(to);
  });
  return h("div", { class: "ql-strip-box" }, strip, caption);
}

/** Neighbours of one kind become one rectangle: a thousand layers are a handful of elements. */
function runs(marks) {
  const out = [];
  marks.forEach(({ kind }, index) => {
    const last = out.at(-1);
    if (last?.kind === kind) last.length += 1;
    else out.push({ kind, start: index, length: 1 });
  });
  return out;
}
