// The page: a conversation, one answer at a time.

import { chat, explained, models } from "./api.js";
import * as settings from "./settings.js";
import { Turn } from "./turn.js";

const field = (id) => document.getElementById(id);
const log = field("log");
const prompt = field("prompt");
const scroller = field("scroller");

let history = [];
let running = null;

async function findModels() {
  const select = field("model");
  try {
    const names = await models(settings.key());
    const chosen = select.value;
    select.replaceChildren(...names.map((name) => new Option(name, name, false, name === chosen)));
    select.disabled = names.length < 2;
  } catch (error) {
    say(error.message);
    if (error.status === 401) settings.wantKey();
  }
}

function say(text) {
  field("status").textContent = text;
}

function follow() {
  // Not while the reader has scrolled up.
  const left = scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight;
  return left < 120 ? () => (scroller.scrollTop = scroller.scrollHeight) : () => undefined;
}

function busy(abort) {
  running = abort;
  field("send").hidden = abort !== null;
  field("stop").hidden = abort === null;
}

async function send(text) {
  if (running) return;
  const turn = new Turn(text);
  field("welcome").hidden = true;
  log.append(turn.element);
  scroller.scrollTop = scroller.scrollHeight;
  const abort = new AbortController();
  busy(abort);
  say("");
  const system = settings.system();
  const before = history;
  const messages = [...before, { role: "user", content: text }];
  const body = { messages, ...settings.sampling() };
  if (system) body.messages = [{ role: "system", content: system }, ...messages];
  if (field("model").value) body.model = field("model").value;
  let last = null;
  try {
    for await (const chunk of chat(body, settings.key(), abort.signal)) {
      const stay = follow();
      for (const choice of chunk.choices) turn.add(choice.delta);
      if (chunk.usage) last = chunk;
      stay();
    }
    const stay = follow();
    turn.finish(last.usage, last.baton, () => explained(last.id, settings.key()));
    stay();
    say(`Answer: ${turn.text}`);
  } catch (error) {
    if (error.name === "AbortError") turn.stopped();
    else failed(turn, text, error);
  }
  // The conversation continues from what the reader saw, also of a stopped or broken answer.
  const said = turn.text ? [{ role: "assistant", content: turn.text }] : [];
  if (history === before && said.length) history = [...messages, ...said];
  busy(null);
}

function failed(turn, text, error) {
  turn.fail(error, () => {
    if (running) return;
    turn.element.remove();
    send(text);
  });
  scroller.scrollTop = scroller.scrollHeight;
  if (error.status === 401) settings.wantKey();
}

function submit() {
  const text = prompt.value.trim();
  if (!text || running) return;
  prompt.value = "";
  send(text);
}

field("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  submit();
});
prompt.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  submit();
});
field("stop").addEventListener("click", () => running?.abort());
field("clear").addEventListener("click", () => {
  running?.abort();
  history = [];
  log.replaceChildren();
  field("welcome").hidden = false;
  prompt.focus();
});
field("toggle").addEventListener("click", (event) => {
  settings.open(event.currentTarget.getAttribute("aria-expanded") !== "true");
});
for (const button of document.querySelectorAll(".suggestions button")) {
  button.addEventListener("click", () => send(button.textContent));
}
settings.start(findModels);
findModels();
prompt.focus();
