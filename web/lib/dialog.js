// A modal dialog of the browser's own: focus stays inside, Escape closes, focus returns to where it was.

import { button, h } from "./dom.js";
import { t } from "./words.js";

/** Opens a dialog with a title line and `content`; `onClose` runs once when it goes. */
export function openDialog(title, content, { extra = [], onClose } = {}) {
  const opener = document.activeElement;
  const close = button("✕", () => dialog.close(), { key: "close", kind: "close" });
  close.setAttribute("aria-label", t("dialog.close"));
  const heading = h("h3", { id: "ql-dialog-title" }, title);
  const dialog = h(
    "dialog",
    { class: "ql-dialog", "aria-labelledby": "ql-dialog-title" },
    h("header", {}, heading, h("div", { class: "ql-dialog-extra" }, extra), close),
    content,
  );
  // ComfyUI's shortcuts (R, Delete, Ctrl+Enter) must not act behind the dialog.
  for (const event of ["keydown", "keyup", "copy", "paste", "wheel"]) dialog.addEventListener(event, (e) => e.stopPropagation());
  dialog.addEventListener("click", (event) => {
    if (event.target === dialog) dialog.close(); // the backdrop
  });
  dialog.addEventListener("close", () => {
    dialog.remove();
    opener?.focus?.();
    onClose?.();
  });
  document.body.append(dialog);
  dialog.showModal();
  return dialog;
}
