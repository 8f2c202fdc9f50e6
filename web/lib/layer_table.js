// "All layers": every layer of a file with its format, shape, scale, kernel and faults; searchable, sortable.

import { openDialog } from "./dialog.js";
import { copyButton, h } from "./dom.js";
import { bytes, formatClass, formatName, groupOf, inOrder, scaleOf } from "./figures.js";
import { reportText } from "./file_view.js";
import { t } from "./words.js";

const PAGE = 400; // rows drawn at once: a model of 5,000 layers must not stop the page

function rowsOf(check, plan) {
  const rows = new Map();
  for (const layer of check.layers) {
    const group = plan?.groups?.[plan.layers[layer.name]];
    rows.set(layer.name, {
      name: layer.name,
      format: formatName(layer.format),
      formatId: layer.format,
      shape: layer.shape.join(" × "),
      weights: layer.shape[0] * layer.shape[1],
      bytes: layer.bytes,
      scale: scaleOf(layer),
      group: groupOf(layer),
      kernel: group ? `${group.backend} ${group.operator}`.trim() : "",
      slow: Boolean(group?.slow),
      faults: [],
    });
  }
  for (const fault of check.faults) {
    if (fault.layer === null) continue;
    if (!rows.has(fault.layer)) {
      rows.set(fault.layer, {
        name: fault.layer, format: "", formatId: "", shape: "", weights: 0, bytes: 0,
        scale: "", group: "", kernel: "", slow: false, faults: [],
      });
    }
    rows.get(fault.layer).faults.push(fault);
  }
  return [...rows.values()].sort(byName);
}

const severity = (row) => {
  if (row.faults.some((fault) => fault.severity === "error")) return 2;
  return row.faults.some((fault) => fault.severity === "warning") ? 1 : 0;
};

const byText = (key) => (a, b) => inOrder(a[key], b[key]);
const byName = byText("name");
const COLUMNS = [
  { key: "name", compare: byName },
  { key: "format", compare: byText("format") },
  { key: "shape", compare: (a, b) => a.weights - b.weights },
  { key: "bytes", compare: (a, b) => a.bytes - b.bytes },
  { key: "scale", compare: byText("scale") },
  { key: "group", compare: byText("group") },
  { key: "kernel", compare: byText("kernel") },
  { key: "faults", compare: (a, b) => severity(a) - severity(b) || a.faults.length - b.faults.length },
];

function rowElement(row) {
  const worst = severity(row);
  return h(
    "tr",
    { class: worst === 2 ? "ql-row-error" : worst === 1 ? "ql-row-warning" : "" },
    h("th", { scope: "row", class: "ql-name" }, row.name),
    h("td", {}, row.format && [h("span", { class: `ql-dot ${formatClass(row.formatId)}`, "aria-hidden": "true" }), row.format]),
    h("td", { class: "ql-number" }, row.shape),
    h("td", { class: "ql-number" }, row.bytes ? bytes(row.bytes) : ""),
    h("td", {}, row.scale),
    h("td", {}, row.group),
    h("td", { class: row.slow ? "ql-slow" : "" }, row.kernel),
    h("td", {}, row.faults.map((fault) => h("div", { class: `ql-fault-${fault.severity}`, title: fault.fix }, h("code", {}, fault.rule), " ", fault.message))),
  );
}

const text = (row) => [row.name, row.format, row.formatId, row.shape, row.scale, row.group, row.kernel, ...row.faults.flatMap((f) => [f.rule, f.message])].join(" ").toLowerCase();

export function openTable(check, plan) {
  const rows = rowsOf(check, plan);
  const searchable = new Map(rows.map((row) => [row, text(row)]));
  let sort = { column: null, down: false };
  let limit = PAGE;

  const body = h("tbody", {});
  const count = h("span", { class: "ql-muted", role: "status", "aria-live": "polite" });
  const more = h("button", { type: "button", class: "ql-button", on: { click: () => { limit += PAGE; draw(); } } }, t("table.more"));
  const search = h("input", { type: "search", class: "ql-search", placeholder: t("table.search"), "aria-label": t("table.search"), on: { input: () => { limit = PAGE; draw(); } } });
  const heads = COLUMNS.map((column) =>
    h(
      "th",
      { scope: "col", "aria-sort": "none" },
      h("button", { type: "button", class: "ql-sort", on: { click: () => sortBy(column) } }, t(`column.${column.key}`), h("span", { class: "ql-arrow", "aria-hidden": "true" })),
    ),
  );

  function sortBy(column) {
    // Up, down, and back to the order of the layers.
    if (sort.column !== column) sort = { column, down: column.key === "faults" };
    else if (sort.down === (column.key === "faults")) sort = { column, down: !sort.down };
    else sort = { column: null, down: false };
    draw();
  }

  function draw() {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const found = rows.filter((row) => words.every((word) => searchable.get(row).includes(word)));
    if (sort.column) found.sort((a, b) => (sort.down ? -1 : 1) * sort.column.compare(a, b) || byName(a, b));
    body.replaceChildren(...found.slice(0, limit).map(rowElement));
    count.textContent = t("table.count", { shown: Math.min(found.length, limit), all: rows.length });
    more.hidden = found.length <= limit;
    heads.forEach((head, index) => {
      const state = sort.column !== COLUMNS[index] ? "none" : sort.down ? "descending" : "ascending";
      head.setAttribute("aria-sort", state);
      head.querySelector(".ql-arrow").textContent = { none: "", ascending: " ▲", descending: " ▼" }[state];
    });
  }

  draw();
  openDialog(
    `${check.file} — ${t(`verdict.${check.verdict}`)}`,
    [
      h("div", { class: "ql-table-bar" }, search, count),
      h("div", { class: "ql-table-box", tabindex: 0, role: "region", "aria-label": t("table.open") }, h("table", { class: "ql-table" }, h("thead", {}, h("tr", {}, heads)), body), more),
    ],
    {
      extra: [
        copyButton(t("copy.text"), t("copied"), () => reportText(check, plan)),
        copyButton(t("copy.json"), t("copied"), () => JSON.stringify(check, null, 1)),
      ],
    },
  );
  search.focus();
}
