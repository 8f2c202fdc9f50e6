// What the panel says about one file: pure functions from answers of the server to elements.

import { button, copyButton, h, icon } from "./dom.js";
import { familyOf } from "./families.js";
import { bytes, formatClass, formatName, inOrder } from "./figures.js";
import { byteBar, layerStrip } from "./picture.js";
import { t } from "./words.js";

const SHOWN_GROUPS = 6;
const SHOWN_PLANS = 5;
const rank = { error: 0, warning: 1, notice: 2 };

/** The names of all layers in order, with those that only a fault names: too broken to be listed as layers. */
const stripLayers = (check) =>
  [...new Set([...check.layers, ...check.faults].map((entry) => entry.name ?? entry.layer))].filter(Boolean).sort(inOrder);

function strip({ check, plan, place }) {
  const names = stripLayers(check);
  if (names.length === 0) return null;
  const formats = new Map(check.layers.map((layer) => [layer.name, layer.format]));
  const worst = new Map();
  for (const fault of check.faults) {
    if (!fault.layer || fault.severity === "notice") continue;
    const known = worst.get(fault.layer);
    if (!known || rank[fault.severity] < rank[known.severity]) worst.set(fault.layer, fault);
  }
  const marks = names.map((name) => {
    const fault = worst.get(name);
    if (fault) return { kind: `ql-m-${fault.severity}`, label: fault.rule };
    const format = formats.get(name);
    const group = plan?.groups[plan.layers[name]];
    if (group?.slow) return { kind: "ql-m-slow", label: `${formatName(format)}, ${t("plan.slow")}` };
    if (check.verdict === "refused") return { kind: "ql-m-sound", label: formatName(format) };
    return { kind: formatClass(format), label: group ? `${formatName(format)}, ${kernelName(group)}` : formatName(format) };
  });
  return layerStrip(names, marks, place);
}

const kernelName = (group) =>
  group.backend === "none" ? t("plan.none") : `${group.backend} ${group.operator}${group.execution ? ` (${group.execution})` : ""}`;

function planList(plan) {
  if (!plan || plan.groups.length === 0) return null;
  const groups = [...plan.groups].sort((a, b) => Number(b.slow) - Number(a.slow) || b.count - a.count);
  const rest = groups.slice(SHOWN_PLANS).reduce((sum, group) => sum + group.count, 0);
  return h(
    "section",
    { class: "ql-plan" },
    h("h4", {}, t("plan.title", { device: plan.device })),
    h(
      "ul",
      {},
      groups.slice(0, SHOWN_PLANS).map((group) =>
        h(
          "li",
          { class: group.slow ? "ql-slow" : "" },
          h(
            "div",
            {},
            group.slow && [icon("warning"), " "],
            h("b", {}, `${group.count} × ${formatName(group.format)}`),
            h("span", { class: "ql-muted" }, " → "),
            kernelName(group),
          ),
          group.reason && h("div", { class: "ql-reason" }, group.slow ? `${t("plan.why")}: ${group.reason}` : group.reason),
        ),
      ),
      rest > 0 && h("li", { class: "ql-muted" }, t("more.layers", { count: rest })),
    ),
  );
}

/** Expected and found of the first fault that a group stands for. */
function evidence(check, group) {
  return check.faults.find(
    (fault) => fault.rule === group.rule && fault.severity === group.severity && (!fault.layer || group.layers.includes(fault.layer)),
  );
}

function groupCard(check, group) {
  const fault = evidence(check, group);
  const message = group.message.replace(/ The same in \d+ more\.$/, ""); // the count stands above it
  const said = (text) => !text || message.includes(text);
  const more = group.count - group.layers.length;
  const family = familyOf(group.rule);
  return h(
    "li",
    { class: `ql-group ql-group-${group.severity}` },
    h(
      "div",
      { class: "ql-group-head" },
      h("b", {}, group.layers.length > 0 ? t(group.count === 1 ? "group.layer" : "group.layers", { count: group.count }) : t(`severity.${group.severity}`)),
      h("code", {}, group.rule),
    ),
    family && h("div", { class: "ql-family" }, t(`family.${family}`)),
    h("p", {}, message),
    group.layers.length > 0 &&
      !(group.count === 1 && message.includes(group.layers[0])) &&
      h(
        "p",
        { class: "ql-layers" },
        group.layers.flatMap((name, index) => [index > 0 && ", ", h("span", { class: "ql-name" }, name)]),
        more > 0 && h("span", { class: "ql-muted" }, ` ${t("more.names", { count: more })}`),
      ),
    fault &&
      !(said(fault.expected) && said(fault.found)) &&
      h(
        "dl",
        {},
        fault.expected && [h("dt", {}, t("fault.expected")), h("dd", {}, fault.expected)],
        fault.found && [h("dt", {}, t("fault.found")), h("dd", {}, fault.found)],
      ),
    group.fix && h("p", { class: "ql-fix" }, h("b", {}, `${t("fault.fix")}: `), group.fix),
  );
}

function groupList(check) {
  const groups = [...check.groups].sort((a, b) => rank[a.severity] - rank[b.severity]);
  const loud = groups.filter((group) => group.severity !== "notice");
  const quiet = groups.filter((group) => group.severity === "notice");
  return [
    loud.length > 0 && h("ul", { class: "ql-groups" }, loud.slice(0, SHOWN_GROUPS).map((group) => groupCard(check, group))),
    loud.length > SHOWN_GROUPS && h("p", { class: "ql-muted" }, t("more.groups", { count: loud.length - SHOWN_GROUPS })),
    quiet.length > 0 &&
      h(
        "details",
        { class: "ql-notices" },
        h("summary", { "data-ql-key": "notices" }, t(quiet.length === 1 ? "notices.one" : "notices.many", { count: quiet.length })),
        h("ul", { class: "ql-groups" }, quiet.map((group) => groupCard(check, group))),
      ),
  ];
}

export function verdictLine(check) {
  return h(
    "div",
    { class: `ql-verdict ql-verdict-${check.verdict}` },
    icon(check.verdict),
    h("b", {}, t(`verdict.${check.verdict}`)),
    h(
      "span",
      { class: "ql-figures" },
      bytes(check.size),
      check.bits_per_weight !== null && check.verdict !== "unquantized" && ` · ${t("figures.bits", { bits: check.bits_per_weight })}`,
    ),
  );
}

/** One line under the verdict, without the word that the verdict has already said. */
function summary(check) {
  if (check.verdict === "unquantized") return h("p", { class: "ql-muted" }, t("state.unquantized"));
  if (check.verdict === "ok") return null; // the legend of the picture says the same
  return h("p", { class: "ql-summary" }, check.summary.replace(/^Refused: /, ""));
}

/** A report as text for a forum or an issue: the verdict, every group, the fixes. */
export function reportText(check, plan) {
  const lines = [`${check.file}: ${t(`verdict.${check.verdict}`)} (${check.rules})`, check.summary];
  for (const [format, count] of Object.entries(check.formats)) lines.push(`${count} × ${formatName(format)}`);
  for (const group of check.groups) {
    lines.push("", `[${group.severity}] ${group.rule} (${group.count}): ${group.message}`);
    if (group.layers.length > 0) lines.push(`  ${group.layers.join(", ")}${group.count > group.layers.length ? ", ..." : ""}`);
    if (group.fix) lines.push(`  ${t("fault.fix")}: ${group.fix}`);
  }
  for (const group of plan?.groups ?? []) lines.push(`${group.count} × ${formatName(group.format)} → ${kernelName(group)}: ${group.reason}`);
  return lines.join("\n");
}

const compatibleAccepts = (check) => Boolean(check.compatible) && check.compatible.verdict !== "refused";

function repairOffer(check) {
  if (!check.repairable || !check.repair_command) return null;
  return h(
    "div",
    { class: "ql-offer" },
    h("p", {}, t("offer.repair", { folder: check.folder })),
    h("code", { class: "ql-command" }, check.repair_command),
    copyButton(t("copy.command"), t("copied"), () => check.repair_command),
  );
}

/** The whole answer for one file. `view` holds { subject, check, plan, error } and `place`, where its reader is; `ran`: what its
 * layers did, which belongs above everything that may have to be scrolled to. */
export function fileView(view, actions, named, ran) {
  const { subject, check, plan, error } = view;
  if (subject.linked) return h("p", { class: "ql-muted" }, t("state.linked"));
  const title = named && h("div", { class: "ql-file ql-name" }, subject.file);
  if (error) {
    return [
      title,
      h("div", { class: "ql-verdict ql-verdict-refused" }, icon("refused"), h("b", {}, t("state.failed"))),
      h("p", {}, error),
      h("div", { class: "ql-buttons" }, button(t("state.again"), actions.again, { key: "again" })),
    ];
  }
  if (!check) return [title, h("div", { class: "ql-verdict ql-busy" }, icon("busy"), h("b", {}, t("state.checking")))];
  return [
    title,
    verdictLine(check),
    summary(check),
    check.layers.length > 0 && check.verdict !== "unquantized" && byteBar(check),
    strip(view),
    ran,
    compatibleAccepts(check) && h("p", { class: "ql-good" }, t("offer.compatible")),
    groupList(check),
    repairOffer(check),
    check.verdict === "ok" && planList(plan),
    h(
      "div",
      { class: "ql-buttons" },
      compatibleAccepts(check) &&
        button(t("offer.compatible.button"), actions.acceptCompatible, { key: "compatible", kind: "main" }),
      (check.layers.length > 0 || check.faults.length > 0) && button(t("table.open"), actions.openTable, { key: "table" }),
      copyButton(t("copy.text"), t("copied"), () => reportText(check, plan)),
      copyButton(t("copy.json"), t("copied"), () => JSON.stringify(check, null, 1)),
    ),
  ];
}
