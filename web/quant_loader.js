// The browser extension: a panel on every loader node, a command that checks all files, settings, an about badge.

import { api } from "../../scripts/api.js";
import { app } from "../../scripts/app.js";
import { openAllFiles } from "./lib/all_files.js";
import { NodePanel } from "./lib/node_panel.js";
import { NODES } from "./lib/nodes.js";
import { followRuns } from "./lib/runs.js";
import { SETTINGS, settings } from "./lib/settings.js";
import { followTheme } from "./lib/theme.js";
import { watchFiles } from "./lib/watch.js";
import { loadWords } from "./lib/words.js";

const COMMAND = "QuantLoader.CheckAll";
const panels = new Set();

function loadStyle() {
  const link = document.createElement("link");
  link.rel = "stylesheet";
  link.href = new URL("./quant_loader.css", import.meta.url).href;
  document.head.append(link);
}

app.registerExtension({
  name: "QuantLoader",
  settings: SETTINGS,
  commands: [
    {
      id: COMMAND,
      label: "Check all quantised models",
      icon: "pi pi-verified",
      function: () => openAllFiles(settings.rules()),
    },
  ],
  menuCommands: [{ path: ["Extensions", "Quant Loader"], commands: [COMMAND] }],
  aboutPageBadges: [
    { label: "Quant Loader", url: "https://github.com/quant-loader/quant-loader", icon: "pi pi-verified" },
  ],

  async init() {
    loadStyle();
    await loadWords(app.extensionManager?.setting?.get("Comfy.Locale") ?? navigator.language);
  },

  setup() {
    followTheme();
    watchFiles(panels);
    followRuns(panels);
    settings.onPanelChange(() => {
      panels.forEach((panel) => {
        panel.refresh();
        panel.draw();
      });
    });
    api.addEventListener("reconnected", () => panels.forEach((panel) => panel.refresh()));
  },

  nodeCreated(node) {
    const entry = NODES[node.comfyClass];
    if (!entry) return;
    // A node that a workflow brings overwrites these with its own values right after.
    for (const [name, value] of settings.defaults()) {
      const widget = node.widgets?.find((candidate) => candidate.name === name);
      if (widget?.options?.values?.includes?.(value)) widget.value = value;
    }
    new NodePanel(node, entry, panels);
  },
});
