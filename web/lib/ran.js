// What ran: the `quant_loader` entries in a node's output after it was executed.
//
// An entry is { summary, groups: [{ format, backend, operator, execution, reason, slow, count, calls }] }, or the same as
// JSON text. `calls` is absent where layers were planned and have not run yet.

import { h, icon } from "./dom.js";
import { formatName } from "./figures.js";
import { t } from "./words.js";

const SHOWN = 8;

function parse(entry) {
  if (typeof entry !== "string") return entry;
  try {
    return JSON.parse(entry);
  } catch {
    return { summary: entry };
  }
}

function row(group) {
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
      [group.backend, group.operator].filter(Boolean).join(" "),
      calls,
    ),
    group.reason && h("div", { class: "ql-reason" }, group.reason),
  );
}

export function ranView(entries) {
  const list = (Array.isArray(entries) ? entries : [entries]).map(parse).filter(Boolean);
  return h(
    "section",
    { class: "ql-ran" },
    h("h4", {}, t("ran.title")),
    list.map((entry) => [
      entry.summary && h("p", { class: "ql-summary" }, entry.summary),
      entry.groups?.length > 0 && h("ul", {}, entry.groups.slice(0, SHOWN).map(row)),
      entry.groups?.length > SHOWN && h("p", { class: "ql-muted" }, t("more.groups", { count: entry.groups.length - SHOWN })),
    ]),
  );
}
