// The pack's routes. Answers are JSON; the browser's cache revalidates them by ETag, so asking again is cheap.

import { api } from "../../../scripts/api.js";

/** A refusal by the server, as one sentence. */
export class ServerError extends Error {
  constructor(status, sentence) {
    super(sentence);
    this.status = status;
  }
}

async function ask(route, parameters, signal) {
  const answer = await api.fetchApi(`/quant-loader/${route}?${new URLSearchParams(parameters)}`, { signal });
  let body;
  try {
    body = await answer.json();
  } catch {
    throw new ServerError(answer.status, `The server answered ${answer.status} without a reason.`);
  }
  if (!answer.ok) throw new ServerError(answer.status, body.error ?? `The server answered ${answer.status}.`);
  return { body, tag: answer.headers.get("ETag") ?? "" };
}

export const fetchCheck = ({ folder, file, rules }, signal) => ask("check", { folder, file, rules }, signal);
export const fetchPlan = ({ folder, file, rules, execution }, signal) =>
  ask("plan", { folder, file, rules, execution }, signal);
export const fetchFiles = (signal) => ask("files", {}, signal);
