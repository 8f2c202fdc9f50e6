// Looks at the files again while the page is in front: a file may be exchanged, repaired or finish downloading.

import { app } from "../../../scripts/app.js";

const EVERY = 2500; // milliseconds; an unchanged file costs the server one stat

/** The nodes of a graph and of the subgraphs in it. */
function nodesOf(graph, found = new Set()) {
  for (const node of graph?.nodes ?? []) {
    if (found.has(node)) continue;
    found.add(node);
    if (node.subgraph) nodesOf(node.subgraph, found);
  }
  return found;
}

/** The frontend tells nodes that they were removed, but not those of a subgraph that went as a whole. */
function dropGone(panels) {
  const here = nodesOf(app.rootGraph ?? app.graph);
  for (const panel of panels) if (!here.has(panel.node)) panels.delete(panel);
}

export function watchFiles(panels) {
  const look = () => {
    if (document.visibilityState !== "visible") return;
    dropGone(panels);
    panels.forEach((panel) => panel.refresh());
  };
  setInterval(look, EVERY);
  document.addEventListener("visibilitychange", look);
  window.addEventListener("focus", look);
}
