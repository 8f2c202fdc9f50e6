// The panel of one node: asks the server about the node's files, keeps the answers, lays itself out in either renderer.

import { app } from "../../../scripts/app.js";
import { h, icon } from "./dom.js";
import { fileView } from "./file_view.js";
import { openTable } from "./layer_table.js";
import { chooseValue, keyOf, loadOf, subjectsOf } from "./nodes.js";
import { figuresView, reportView } from "./ran.js";
import { fetchCheck, fetchPlan, fetchRan } from "./server.js";
import { settings } from "./settings.js";
import { t } from "./words.js";

const WIDGET = "quant_loader_panel";
const MAX_HEIGHT = 420; // graph units; longer answers scroll
const MARGIN = 8;

/** Calls `after` whenever `owner[name]` was called, and keeps what was there. */
function chain(owner, name, after) {
  const before = owner[name];
  owner[name] = function chained(...args) {
    const result = before?.apply(this, args);
    after(...args);
    return result;
  };
}

export class NodePanel {
  constructor(node, entry, panels) {
    this.node = node;
    this.entry = entry;
    this.views = new Map();
    this.ran = null; // the server's figures of the latest run
    this.report = null; // what the node itself reported when it was executed
    this.refusal = "";
    this.height = 0;
    this.settled = false;
    this.body = h("div", { class: "ql-body" });
    this.element = h("section", { class: "ql-panel", "aria-label": t("panel.label") }, this.body);
    // Typing in the panel must not reach the canvas, where Delete removes the node.
    for (const event of ["keydown", "keyup", "copy", "paste"]) this.element.addEventListener(event, (e) => e.stopPropagation());
    this.element.addEventListener("wheel", (e) => this.#wheel(e), { passive: true });
    this.widget = node.addDOMWidget(WIDGET, "QUANT_LOADER_PANEL", this.element, {
      serialize: false,
      hideOnZoom: false,
      hideInPanel: true,
      margin: MARGIN,
      getMinHeight: () => this.height,
      getMaxHeight: () => (this.height ? MAX_HEIGHT * 2 : 0),
    });
    this.widget.serialize = false;
    this.sizes = new ResizeObserver(() => this.#layOut());
    this.sizes.observe(this.body);

    for (const name of [...entry.files, entry.folderWidget, "rules", "execution"]) {
      const widget = node.widgets?.find((candidate) => candidate.name === name);
      if (widget) chain(widget, "callback", () => this.refresh());
    }
    chain(node, "onConfigure", () => this.refresh());
    chain(node, "onConnectionsChange", () => queueMicrotask(() => this.refresh()));
    chain(node, "onExecuted", (output) => this.#showReport(output?.quant_loader));
    chain(node, "onAdded", () => {
      panels.add(this);
      this.refresh();
    });
    chain(node, "onRemoved", () => {
      panels.delete(this);
      this.views.forEach((view) => view.abort?.abort());
      this.ranAbort?.abort();
    });
    if (node.graph) panels.add(this);
    // The workflow's values arrive after this call.
    queueMicrotask(() => this.refresh());
    this.draw();
  }

  /** Asks about every file of the node: new ones at once, known ones whether they changed. */
  refresh() {
    if (!settings.showPanel()) return;
    const subjects = subjectsOf(this.node, this.entry);
    const keys = new Set(subjects.map(keyOf));
    let changed = false;
    for (const [key, view] of this.views) {
      if (keys.has(key)) continue;
      view.abort?.abort();
      this.views.delete(key);
      changed = true;
    }
    if (changed) this.#forgetRun();
    for (const subject of subjects) {
      const key = keyOf(subject);
      let view = this.views.get(key);
      if (!view) {
        view = { subject, place: {} };
        this.views.set(key, view);
        this.#forgetRun();
        changed = true;
      }
      if (!subject.linked && !view.abort) void this.#ask(view);
    }
    if (changed) this.drawSoon();
  }

  async #ask(view) {
    view.abort = new AbortController();
    const { signal } = view.abort;
    try {
      const checked = fetchCheck(view.subject, { signal, known: view.checkTag }).then((answer) => {
        if (!answer) return;
        if (view.checkTag) this.#forgetRun(); // another file under the old name
        Object.assign(view, { check: answer.body, checkTag: answer.tag, error: null });
        this.#endRefusal();
        this.draw();
      });
      // Not beside the check: the server would read the header twice, and the verdict would come later.
      const planned = checked.then(async () => {
        const answer = await fetchPlan(view.subject, { signal, known: view.planTag });
        if (!answer) return;
        Object.assign(view, { plan: answer.body, planTag: answer.tag });
        this.drawSoon();
      });
      const [check, plan] = await Promise.allSettled([checked, planned]);
      if (plan.status === "rejected" && !plan.reason.passing) Object.assign(view, { plan: null, planTag: null });
      if (check.status === "rejected") throw check.reason;
      if (view.error) {
        view.error = null;
        this.draw();
      }
      // After the verdict, which must not wait for it.
      if (!this.ranTag) void this.askRan();
    } catch (error) {
      // What is known stays while the server restarts or is busy; the next look asks again.
      if (signal.aborted || (view.check && error.passing)) return;
      if (view.error !== error.message) {
        Object.assign(view, { error: error.message, check: null, checkTag: null });
        this.draw();
      }
    } finally {
      view.abort = null;
    }
  }

  /** The text with which the server refused a run under an execution id, or "" when the last run was taken. */
  showRefusal(text, executionId) {
    if (this.refusal === text) return;
    this.refusal = text;
    this.executionId = executionId;
    this.draw();
    if (text) this.refresh();
  }

  /** The refusal is over once no file of the node is refused any more: another file, other rules, a mended file. */
  #endRefusal() {
    const views = [...this.views.values()];
    if (!this.refusal || views.some((view) => !view.check || view.check.verdict === "refused")) return;
    this.refusal = "";
    this.node.has_errors = false;
    // The frontend keeps the red frame of an error that it does not know until the next run; the cause is gone now.
    const errors = app.lastNodeErrors;
    if (errors && this.executionId in errors) delete errors[this.executionId];
    this.node.graph?.setDirtyCanvas?.(true, true);
  }

  /** Asks what the models that this node made did in the latest run. */
  async askRan() {
    const load = loadOf(this.entry, subjectsOf(this.node, this.entry));
    if (!load || !settings.showPanel()) return;
    this.ranAbort?.abort();
    this.ranAbort = new AbortController();
    const { signal } = this.ranAbort;
    try {
      const answer = await fetchRan(load, { signal, known: this.ranTag });
      if (!answer || signal.aborted) return;
      this.ran = answer.body.parts;
      this.ranTag = answer.tag;
      this.drawSoon();
    } catch (error) {
      // The panel says by the check what is wrong; figures come with the next run.
      if (!signal.aborted) console.debug("Quant Loader: no figures of the latest run,", error.message);
    }
  }

  #forgetRun() {
    this.ranAbort?.abort();
    Object.assign(this, { ran: null, ranTag: null, report: null });
  }

  /** The `quant_loader` entries of the node's output; told of a file that arrived by a link, or by a node without files. */
  #showReport(entries) {
    if (!entries || subjectsOf(this.node, this.entry).some((subject) => !subject.linked)) return;
    this.report = entries;
    this.draw();
  }

  drawSoon() {
    this.waiting ??= setTimeout(() => this.draw(), 120);
  }

  draw() {
    clearTimeout(this.waiting);
    this.waiting = null;
    const focus = this.#focus();
    const open = [...this.body.querySelectorAll("details")].map((details) => details.open);
    const scrolled = this.element.scrollTop;
    this.body.replaceChildren(...(settings.showPanel() ? this.#content() : []));
    const refused = [...this.views.values()].some((view) => view.check?.verdict === "refused" || view.error);
    this.element.classList.toggle("ql-bad", refused);
    this.element.hidden = this.body.childElementCount === 0;
    this.body.querySelectorAll("details").forEach((details, index) => (details.open = open[index] ?? false));
    focus?.()?.focus({ preventScroll: true });
    this.element.scrollTop = scrolled;
    this.#layOut();
  }

  /** How to find what has the focus after a redraw: the same control of the same file; null without a focus. */
  #focus() {
    const key = this.body.contains(document.activeElement) && document.activeElement.dataset.qlKey;
    if (!key) return null;
    const same = () => [...this.body.querySelectorAll(`[data-ql-key="${CSS.escape(key)}"]`)];
    const index = same().indexOf(document.activeElement);
    return () => same()[index];
  }

  #content() {
    const views = [...this.views.values()];
    const actionsOf = (view) => ({
      again: () => this.refresh(),
      acceptCompatible: () => chooseValue(this.node, "rules", "compatible"),
      openTable: () => openTable(view.check, view.plan),
    });
    const parts = [];
    if (this.refusal) {
      parts.push(h("div", { class: "ql-run ql-run-refused" }, icon("refused"), t("run.refused")));
      // The check says the same with more room; without its answer the run's own words stand.
      if (!views.some((view) => view.check?.verdict === "refused")) parts.push(h("p", { class: "ql-run-text" }, this.refusal));
    }
    const single = views.length === 1 && views[0].check;
    // Figures of an earlier run would contradict "the last run was stopped here".
    const ran = this.ran?.length && !this.refusal ? figuresView(this.ran, single ? views[0].plan : null) : null;
    if (ran && !single) parts.push(ran);
    const files = views.flatMap((view) => h("div", { class: "ql-file-view" }, fileView(view, actionsOf(view), views.length > 1, single && ran)));
    if (files.length > 0) parts.push(...files);
    else if (this.entry.files.length > 0) parts.push(h("p", { class: "ql-muted" }, t("state.nothing")));
    if (this.report) parts.push(reportView(this.report));
    // Screen readers hear the verdict when it changes, not the whole panel.
    const verdicts = views.filter((view) => view.check).map((view) => `${view.subject.file}: ${t(`verdict.${view.check.verdict}`)}`);
    this.#announce([this.refusal && t("run.refused"), ...verdicts].filter(Boolean).join(". "));
    return parts;
  }

  #announce(text) {
    this.live ??= this.element.appendChild(h("div", { class: "ql-sr", role: "status", "aria-live": "polite" }));
    if (this.live.textContent !== text) this.live.textContent = text;
  }

  /** Scrolls a long answer; the canvas zooms with every other wheel. */
  #wheel(event) {
    const room = this.element.scrollHeight - this.element.clientHeight;
    if (room > 1 && !event.ctrlKey) event.stopPropagation();
  }

  /** Gives the node the height that the answer needs; keeps what the user added by hand. */
  #layOut() {
    const natural = this.element.hidden ? 0 : Math.min(this.body.offsetHeight + 2, MAX_HEIGHT) + 2 * MARGIN;
    if (natural === this.height || (natural > 0 && this.body.offsetHeight === 0)) return;
    const { node } = this;
    const spare = node.size[1] - node.computeSize()[1];
    this.height = natural;
    if (window.LiteGraph?.vueNodesMode) return; // there the page lays the node out
    const needed = node.computeSize()[1];
    // The first answer after loading finds the height that the workflow brought.
    const height = this.settled ? needed + Math.max(spare, 0) : Math.max(node.size[1], needed);
    this.settled = this.settled || [...this.views.values()].some((view) => view.check);
    node.setSize([node.size[0], height]);
    node.graph?.setDirtyCanvas?.(true, true);
  }
}
