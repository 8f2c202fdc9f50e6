// The pack's settings and the values they give.

import { app } from "../../../scripts/app.js";

const RULES = "QuantLoader.DefaultRules";
const EXECUTION = "QuantLoader.DefaultExecution";
const PANEL = "QuantLoader.ShowPanel";

const listeners = new Set();
let shown; // set by the first onChange; the store itself changes only after it

export const SETTINGS = [
  {
    id: PANEL,
    category: ["Quant Loader", "Panel", "Show"],
    name: "Show the file check on the nodes",
    tooltip: "The panel says whether a file is sound before you press Run. Off, the check still runs with every prompt.",
    type: "boolean",
    defaultValue: true,
    onChange: (visible) => {
      shown = visible;
      listeners.forEach((listener) => listener());
    },
  },
  {
    id: RULES,
    category: ["Quant Loader", "New nodes", "Rules"],
    name: "Rules of new nodes",
    tooltip: "strict: to the letter of the format. compatible: dialects whose meaning is certain are accepted too.",
    type: "combo",
    options: ["strict", "compatible"],
    defaultValue: "strict",
  },
  {
    id: EXECUTION,
    category: ["Quant Loader", "New nodes", "Execution"],
    name: "Execution of new nodes",
    tooltip: "auto takes the fastest correct kernel for each layer.",
    type: "combo",
    options: ["auto", "native", "int8", "exact"],
    defaultValue: "auto",
  },
];

const value = (id) =>
  app.extensionManager?.setting?.get(id) ?? SETTINGS.find((setting) => setting.id === id).defaultValue;

export const settings = {
  rules: () => value(RULES),
  showPanel: () => (shown ?? value(PANEL)) !== false,
  /** [widget name, value] pairs for a node that was just made. */
  defaults: () => [
    ["rules", value(RULES)],
    ["execution", value(EXECUTION)],
  ],
  onPanelChange: (listener) => listeners.add(listener),
};
