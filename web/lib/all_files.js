// "Check all quantised models": every file of the model folders, one after the other, with its verdict.

import { openDialog } from "./dialog.js";
import { button, h, icon } from "./dom.js";
import { bytes, formatName } from "./figures.js";
import { openTable } from "./layer_table.js";
import { fetchCheck, fetchFiles } from "./server.js";
import { t } from "./words.js";

const AT_ONCE = 2; // as many as the server reads at a time

export async function openAllFiles(rules) {
  const stop = new AbortController();
  const progress = h("progress", { class: "ql-progress", value: 0, max: 1, "aria-label": t("all.title") });
  const status = h("p", { class: "ql-muted", role: "status", "aria-live": "polite" }, t("state.checking"));
  const list = h("tbody", {});
  const heads = ["file", "verdict", "size", "formats"].map((key) => h("th", { scope: "col" }, t(`all.${key}`)));
  const table = h("table", { class: "ql-table" }, h("thead", {}, h("tr", {}, heads)), list);
  openDialog(t("all.title"), [h("div", { class: "ql-table-bar" }, progress, status), h("div", { class: "ql-table-box", tabindex: 0 }, table)], {
    onClose: () => stop.abort(),
  });
  try {
    await checkAll(rules, stop.signal, { progress, status, list });
  } catch (error) {
    if (!stop.signal.aborted) status.textContent = error.message;
  }
}

async function checkAll(rules, signal, { progress, status, list }) {
  const { body } = await fetchFiles({ signal });
  const targets = body.folders.flatMap(({ folder, files }) => files.map((file) => ({ folder, file, rules })));
  const counts = { ok: 0, refused: 0, unquantized: 0, failed: 0 };
  let done = 0;
  progress.max = Math.max(targets.length, 1);
  const rows = targets.map((target) => {
    const row = h("tr", {}, h("th", { scope: "row", class: "ql-name" }, h("span", { class: "ql-muted" }, `${target.folder} / `), target.file), h("td", { colspan: 3, class: "ql-muted" }, "…"));
    list.append(row);
    return row;
  });
  const say = () => {
    progress.value = done;
    status.textContent = t("all.progress", { done, all: targets.length, ...counts });
  };
  const next = targets.entries();
  const worker = async () => {
    for (const [index, target] of next) {
      try {
        const { body: check } = await fetchCheck(target, { signal });
        counts[check.verdict] += 1;
        fillRow(rows[index], check);
      } catch (error) {
        if (signal.aborted) return;
        counts.failed += 1;
        rows[index].lastChild.textContent = error.message;
        rows[index].classList.add("ql-row-error");
      }
      done += 1;
      say();
    }
  };
  say();
  await Promise.all(Array.from({ length: AT_ONCE }, worker));
}

function fillRow(row, check) {
  row.lastChild.remove();
  if (check.verdict === "refused") row.classList.add("ql-row-error");
  const formats = Object.entries(check.formats).map(([format, count]) => `${formatName(format)} × ${count}`);
  const verdict = button(t(`verdict.${check.verdict}`), () => openTable(check, null), { kind: "link" });
  row.append(
    h("td", { class: `ql-verdict-${check.verdict}` }, icon(check.verdict), " ", verdict, check.verdict === "refused" && h("div", { class: "ql-muted" }, check.summary)),
    h("td", { class: "ql-number" }, bytes(check.size)),
    h("td", {}, formats.join(", ")),
  );
}
