// What ran: the server's figures of the latest run under a loader, and the text of a node that reports by itself.

import { h, icon } from "./dom.js";
import { formatName } from "./figures.js";
import { t } from "./words.js";

const SHOWN = 8;

const kernel = (group) => [group.backend, group.operator].filter(Boolean).join(" ");

/** The first names of `count` layers. */
const names = (layers, count) =>
  h(
    "div",
    { class: "ql-layers" },
    layers.flatMap((name, index) => [index > 0 && ", ", h("span", { class: "ql-name" }, name)]),
    count > layers.length && h("span", { class: "ql-muted" }, ` ${t("more.names", { count: count - layers.length })}`),
  );

function row(group, named) {
  const calls = group.calls === undefined ? "" : ` · ${t("ran.calls", { count: group.calls })}`;
  return h(
    "li",
    { class: group.slow ? "ql-slow" : "" },
    h(
      "div",
      {},
      group.slow && [icon("warning"), " "],
      h("b", {}, `${group.count} × ${formatName(group.format)}`),
      h("span", { class: "ql-muted" }, " → "),
      kernel(group),
      calls,
    ),
    named && names(group.layers, group.count),
    group.reason && h("div", { class: "ql-reason" }, group.slow ? `${t("plan.why")}: ${group.reason}` : group.reason),
  );
}

/** "10 INT8 · 3 NVFP4 · 0 dequantised": how many layers computed in which arithmetic. */
function kinds(part) {
  const counts = new Map();
  let lookups = 0;
  for (const group of part.groups) {
    if (group.lookup) lookups += group.count;
    if (group.lookup || group.execution === "exact") continue;
    const kind = group.execution === "int8" ? "INT8" : formatName(group.format);
    counts.set(kind, (counts.get(kind) ?? 0) + group.count);
  }
  return [
    ...[...counts].map(([kind, count]) => `${count} ${kind}`),
    lookups > 0 && t("ran.lookup", { count: lookups }),
    t("ran.dequantised", { count: part.dequantised }),
    t("ran.calls", { count: part.calls }),
  ]
    .filter(Boolean)
    .map((figure) => [" · ", h("span", { class: "ql-figure" }, figure)]);
}

function partView(part, plan, titled) {
  // The plan names the kernel of every layer already: what went as planned and fast is not said twice.
  const planned = new Set((plan?.groups ?? []).map((group) => `${group.format} ${kernel(group)} ${group.reason}`));
  const told = (group) => planned.has(`${group.format} ${kernel(group)} ${group.reason}`);
  const behind = (group) => group.slow || (group.execution === "exact" && !group.lookup);
  const loud = part.groups.filter((group) => behind(group) || !told(group));
  const hidden = Math.max(loud.length - SHOWN, 0) + part.more_groups;
  return [
    titled && h("h5", {}, t(`part.${part.part}`)),
    part.ran === 0 ? h("p", { class: "ql-muted" }, t("ran.none")) : h("p", { class: "ql-ran-line" }, h("b", {}, t("ran.headline", { ran: part.ran, all: part.layers })), kinds(part)),
    h(
      "ul",
      {},
      loud.slice(0, SHOWN).map((group) => row(group, behind(group))),
      hidden > 0 && h("li", { class: "ql-muted" }, t("more.groups", { count: hidden })),
      part.loaded_dequantised.map((group) =>
        h("li", {}, h("div", {}, h("b", {}, `${group.count} × `), t("ran.loading")), names(group.layers, group.count), h("div", { class: "ql-reason" }, group.reason)),
      ),
      part.warnings.map((sentence) => h("li", { class: "ql-slow" }, icon("warning"), " ", sentence)),
    ),
  ];
}

/** The figures of a loader's models (`parts` of /quant-loader/ran); null when nothing was loaded. */
export function figuresView(parts, plan) {
  if (parts.length === 0) return null;
  return h(
    "section",
    { class: "ql-ran" },
    h("h4", {}, t("ran.title", { device: parts[0].device })),
    parts.map((part) => partView(part, plan, parts.length > 1)),
  );
}

function parse(entry) {
  if (typeof entry !== "string") return entry;
  try {
    return JSON.parse(entry);
  } catch {
    return { summary: entry };
  }
}

/**
 * The `quant_loader` entries in a node's output, each { summary, groups: [{ format, backend, operator, execution,
 * reason, slow, count, calls }] } or the same as JSON text. Groups without `calls` are planned, and not shown.
 */
export function reportView(entries) {
  const list = (Array.isArray(entries) ? entries : [entries]).map(parse).filter(Boolean);
  const counted = (entry) => (entry.groups ?? []).filter((group) => group.calls !== undefined);
  return h(
    "section",
    { class: "ql-ran" },
    h("h4", {}, t("ran.report")),
    list.map((entry) => [
      entry.summary && h("p", { class: "ql-summary" }, entry.summary),
      counted(entry).length > 0 && h("ul", {}, counted(entry).slice(0, SHOWN).map((group) => row(group, false))),
      counted(entry).length > SHOWN && h("p", { class: "ql-muted" }, t("more.groups", { count: counted(entry).length - SHOWN })),
    ]),
  );
}
