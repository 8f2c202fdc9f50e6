// What ran: the `quant_loader` entries in a node's output after it was executed.
//
// An entry is { summary, groups: [{ format, backend, operator, execution, reason, slow, count, calls }] }, or the same as
// JSON text. A loader's groups have no `calls`: they are planned, and have not run yet.

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

/** Whether the entries tell of calls: a loader's entry only says what it planned, as the panel does already. */
const hasRun = (entry) => (entry.groups ?? []).some((group) => group.calls !== undefined);

export function ranView(entries) {
  const list = (Array.isArray(entries) ? entries : [entries]).map(parse).filter(Boolean);
  return h(
    "section",
    { class: "ql-ran" },
    h("h4", {}, t(list.some(hasRun) ? "ran.title" : "ran.loaded")),
    list.map((entry) => [
      entry.summary && h("p", { class: "ql-summary" }, entry.summary),
      hasRun(entry) && h("ul", {}, entry.groups.slice(0, SHOWN).map(row)),
      hasRun(entry) && entry.groups.length > SHOWN && h("p", { class: "ql-muted" }, t("more.groups", { count: entry.groups.length - SHOWN })),
    ]),
  );
}
