// Runs: a refused one's node errors reach the panels, and one toast says the verdict; after one that ended, they ask what ran.

import { api } from "../../../scripts/api.js";
import { app } from "../../../scripts/app.js";
import { t } from "./words.js";

const LOOK_EVERY = 100; // milliseconds
const GIVE_UP_AFTER = 60_000; // a check takes far less; the queue itself may be slow

/** The node of an execution id: "7", or "3:7" for node 7 of the subgraph that node 3 is. */
function nodeOf(executionId) {
  let node = null;
  let graph = app.rootGraph ?? app.graph;
  for (const id of executionId.split(":")) {
    node = graph?.nodes?.find((candidate) => String(candidate.id) === id);
    graph = node?.subgraph;
  }
  return node;
}

/** Our text without the "model_name - " that ComfyUI puts before it; the longest copy is the whole one. */
function refusalText(errors) {
  const texts = errors
    .filter((error) => error.type === "custom_validation_failed")
    .map((error) => String(error.details ?? "").replace(/^[\w ]+ - /, ""));
  return texts.sort((a, b) => b.length - a.length)[0] ?? "";
}

function report(panels, nodeErrors) {
  const verdicts = [];
  const entries = Object.entries(nodeErrors).map(([id, errors]) => [id, errors, nodeOf(id)]);
  for (const panel of panels) {
    const found = entries.find(([, , node]) => node === panel.node);
    const text = found ? refusalText(found[1].errors ?? []) : "";
    panel.showRefusal(text, found?.[0]);
    if (text) verdicts.push(text.split("\n")[0]);
  }
  if (verdicts.length === 0) return;
  app.extensionManager?.toast?.add({
    severity: "error",
    summary: t("toast.refused"),
    detail: verdicts.slice(0, 3).join("\n"),
    life: 7_000,
  });
}

export function followRuns(panels) {
  for (const event of ["execution_success", "execution_error", "execution_interrupted"]) {
    api.addEventListener(event, () => panels.forEach((panel) => void panel.askRan()));
  }
  let looking = null;
  const stop = () => {
    clearInterval(looking);
    looking = null;
  };
  api.addEventListener("promptQueueing", () => {
    stop();
    if (panels.size === 0) return;
    // The frontend offers no event for a refused prompt, but it publishes the errors.
    const before = app.lastNodeErrors;
    const end = performance.now() + GIVE_UP_AFTER;
    looking = setInterval(() => {
      const errors = app.lastNodeErrors;
      if (errors && errors !== before && Object.keys(errors).length > 0) {
        stop();
        report(panels, errors);
      } else if (performance.now() > end) {
        stop();
      }
    }, LOOK_EVERY);
  });
  api.addEventListener("promptQueued", () => {
    // Part of a graph may have been accepted and part refused.
    const errors = app.lastNodeErrors;
    if (errors && Object.keys(errors).length > 0) return;
    stop();
    panels.forEach((panel) => panel.showRefusal(""));
  });
}
