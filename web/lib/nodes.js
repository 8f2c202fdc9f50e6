// Which widget of which node names a file, and in which model folder it lies. One row per node id of the pack.

export const NODES = {
  QuantLoaderDiffusionModel: { folder: "diffusion_models", files: ["model_name"] },
  QuantLoaderCheckpoint: { folder: "checkpoints", files: ["ckpt_name"] },
  QuantLoaderTextEncoder: {
    folder: "text_encoders",
    files: ["clip_name1", "clip_name2", "clip_name3", "clip_name4"],
  },
  QuantLoaderControlNet: { folder: "controlnet", files: ["control_net_name"] },
  QuantLoaderModelPatch: { folder: "model_patches", files: ["name"] },
  QuantLoaderInspect: { folderWidget: "folder", files: ["file"], loads: false },
  QuantLoaderKernelReport: { files: [], loads: false }, // shows what ran, checks nothing
};

// What an optional file widget holds when no file is chosen.
const NO_FILE = new Set([undefined, null, "", "none", "None"]);

const widgetOf = (node, name) => node.widgets?.find((widget) => widget.name === name);

/** Whether the widget's value comes from a link, so that the browser cannot know it before the run. */
function isLinked(node, name) {
  return (node.inputs ?? []).some((input) => input.widget?.name === name && input.link != null);
}

/**
 * The files a node would load as it stands: [{ folder, file, rules, execution }], or [{ linked: true }] for a file that
 * arrives by a link.
 */
export function subjectsOf(node, entry) {
  const choice = (name, fallback) => {
    const value = widgetOf(node, name)?.value;
    return typeof value === "string" && value ? value : fallback;
  };
  const folder = entry.folder ?? choice(entry.folderWidget, "");
  const subjects = [];
  for (const name of entry.files) {
    if (isLinked(node, name)) {
      subjects.push({ linked: true, widget: name });
      continue;
    }
    const file = widgetOf(node, name)?.value;
    if (NO_FILE.has(file) || typeof file !== "string") continue;
    subjects.push({
      widget: name,
      folder,
      file,
      rules: choice("rules", "strict"),
      execution: choice("execution", "auto"),
    });
  }
  return subjects;
}

/** What the node's models are known by once they are loaded; null for a node that loads none, or not yet known files. */
export function loadOf(entry, subjects) {
  if (entry.loads === false || subjects.length === 0 || subjects.some((subject) => subject.linked)) return null;
  const [{ folder, rules, execution }] = subjects;
  return { folder, files: subjects.map((subject) => subject.file), rules, execution };
}

/** A name for a subject that changes exactly when another question must be asked. */
export const keyOf = (subject) =>
  subject.linked ? `linked ${subject.widget}` : JSON.stringify([subject.folder, subject.file, subject.rules, subject.execution]);

/** Sets a combo widget as if the user had, in either renderer. */
export function chooseValue(node, name, value) {
  const widget = widgetOf(node, name);
  if (!widget || widget.value === value) return;
  const before = widget.value;
  widget.value = value;
  widget.callback?.(value);
  node.onWidgetChanged?.(name, value, before, widget);
  node.graph?.setDirtyCanvas?.(true, true);
}
