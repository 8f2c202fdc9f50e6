// Numbers and names as people read them.

const UNITS = ["B", "KB", "MB", "GB", "TB"];

/** 12345678 -> "12.3 MB" (decimal units, as file managers and download pages count). */
export function bytes(count) {
  let value = count;
  let unit = 0;
  while (value >= 1000 && unit < UNITS.length - 1) {
    value /= 1000;
    unit += 1;
  }
  const digits = unit === 0 || value >= 100 ? 0 : 1;
  return `${value.toFixed(digits)} ${UNITS[unit]}`;
}

const FORMATS = {
  int8_tensorwise: "INT8",
  convrot_w4a4: "W4A4 ConvRot",
  asym_w4a8_int8: "W4A8",
  nvfp4: "NVFP4",
  mxfp8: "MXFP8",
  float8_e4m3fn: "FP8 E4M3",
  float8_e5m2: "FP8 E5M2",
  quanto_int8: "Quanto INT8",
};

/** A format's everyday name; one that we do not know keeps its own. */
export const formatName = (format) => FORMATS[format] ?? format;

/** The class that colours a format, the same everywhere. */
export const formatClass = (format) => `ql-f-${Object.hasOwn(FORMATS, format) ? format : "other"}`;

/** What a layer's annotations say about its scales: "row", "tensor", "16", "rows rotated by 256", ... */
export function scaleOf(layer) {
  const notes = layer.annotations ?? {};
  const get = (key) => notes[key] ?? notes[`_${key}`];
  if (get("is_rowwise")) return "row";
  if (get("is_tensorwise_scalar")) return "tensor";
  if (layer.format === "nvfp4") return "block 16";
  if (layer.format === "mxfp8") return "block 32";
  if (get("group_size")) return "group";
  return "";
}

export function groupOf(layer) {
  const notes = layer.annotations ?? {};
  const get = (key) => notes[key] ?? notes[`_${key}`];
  if (get("convrot")) return `ConvRot ${get("convrot_groupsize") ?? 256}`;
  const size = get("group_size") ?? get("convrot_groupsize");
  return size ? String(size) : "";
}

/** Names as people count: block 2 before block 10. A file's own order says nothing, it follows types and alphabets. */
export const inOrder = new Intl.Collator("en", { numeric: true }).compare;
