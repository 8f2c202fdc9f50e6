// The pack's routes. Answers are JSON; the browser's cache revalidates them by ETag, so asking again is cheap.

import { api } from "../../../scripts/api.js";

/** A refusal by the server, as one sentence. */
export class ServerError extends Error {
  constructor(status, sentence) {
    super(sentence);
    this.status = status;
  }

  /** Whether asking again may help: no answer at all, or a server that is busy. */
  get passing() {
    return this.status === 0 || this.status === 503;
  }
}

/** { body, tag } of an answer, or null where it still has the tag `known`. `parameters`: an object, or pairs. */
async function ask(route, parameters, { signal, known } = {}) {
  let answer;
  try {
    answer = await api.fetchApi(`/quant-loader/${route}?${new URLSearchParams(parameters)}`, { signal });
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new ServerError(0, "The ComfyUI server does not answer.");
  }
  const tag = answer.headers.get("ETag") ?? "";
  if (answer.ok && tag && tag === known) {
    await answer.body?.cancel();
    return null;
  }
  let body;
  try {
    body = await answer.json();
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new ServerError(answer.status, `The server answered ${answer.status} without a reason.`);
  }
  if (!answer.ok) throw new ServerError(answer.status, body.error ?? `The server answered ${answer.status}.`);
  return { body, tag };
}

export const fetchCheck = ({ folder, file, rules }, options) => ask("check", { folder, file, rules }, options);
export const fetchPlan = ({ folder, file, rules, execution }, options) =>
  ask("plan", { folder, file, rules, execution }, options);
export const fetchRan = ({ folder, files, rules, execution }, options) =>
  ask("ran", [["folder", folder], ...files.map((file) => ["file", file]), ["rules", rules], ["execution", execution]], options);
export const fetchFiles = (options) => ask("files", {}, options);
