// One conversation: its turns, and at most one answer that is being made.

import { chat as ask, explained } from "./api.js";
import { announce, shortened } from "./dom.js";
import * as settings from "./settings.js";
import { newRow } from "./store.js";
import { newTurn, Turn } from "./turn.js";

const TITLE = 60; // Characters.
const RECORD_PAUSE_MS = 250; // Between looks at the record of a request that the router is still ending.
const RECORD_LOOKS = 4;
const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

export class Chat {
  // page: see main.js. kept: of the store, or null for a new conversation.
  constructor(page, kept = null) {
    this.page = page;
    this.row = kept?.row ?? null;
    this.running = null; // Aborts the answer that is being made.
    this.over = null; // Settles when that answer is over.
    this.model = kept?.content.model ?? "";
    this.settings = kept?.content.settings ?? null;
    this.turns = (kept?.content.turns ?? []).map((data) => new Turn(data, this));
    page.log.replaceChildren(...this.turns.map((turn) => turn.element));
    for (const turn of this.turns) {
      turn.end();
      turn.element.dataset.state = turn.data.state;
    }
    this.mark();
  }

  content() {
    return { model: this.model, settings: this.settings, turns: this.turns.map((turn) => turn.data) };
  }

  // Sends a message. No answer may be running, and the page has to be ready.
  async send(text) {
    this.model = this.page.model();
    this.settings = settings.read();
    this.row ??= newRow(shortened(text, TITLE));
    this.row.usedAt = Date.now();
    const before = this.messages();
    const turn = new Turn(newTurn(text), this);
    this.turns.push(turn);
    this.page.log.append(turn.element);
    this.running = new AbortController();
    turn.begin();
    this.mark();
    this.page.busy(this);
    this.page.save(this);
    announce("Answering.");
    this.over = this.answer(turn, [...before, { role: "user", content: text }]);
    const error = await this.over;
    this.running = null;
    turn.end(error);
    if (!error) turn.speak();
    this.page.busy(this);
    if (error?.status === 401) this.page.unauthorized();
    this.page.save(this);
    if (await this.record(turn.data)) {
      turn.measured();
      await this.page.save(this);
    }
    turn.element.dataset.state = turn.data.state;
  }

  // The conversation goes on from what the reader saw, also of a stopped or broken answer.
  messages() {
    return this.turns
      .map((turn) => turn.data)
      .filter((data) => data.text)
      .flatMap((data) => [
        { role: "user", content: data.prompt },
        { role: "assistant", content: data.text },
      ]);
  }

  // Makes the answer. Returns the error that ended it, or undefined.
  async answer(turn, messages) {
    const { data } = turn;
    const system = settings.system();
    const body = { messages, ...settings.sampling() };
    if (system) body.messages = [{ role: "system", content: system }, ...messages];
    if (this.model) body.model = this.model;
    try {
      for await (const chunk of ask(body, settings.key(), this.running.signal)) {
        data.id = chunk.id;
        data.seed = chunk.seed;
        data.model = chunk.model;
        for (const choice of chunk.choices) {
          turn.add(choice.delta);
          data.finish = choice.finish_reason ?? data.finish;
        }
        if (chunk.usage) [data.usage, data.baton] = [chunk.usage, chunk.baton ?? null];
      }
      data.state = "finished";
    } catch (error) {
      data.state = error.name === "AbortError" ? "stopped" : "failed";
      if (data.state === "stopped") return undefined;
      data.error = error.message;
      return error;
    }
    return undefined;
  }

  // Gets the router's record of a turn. Returns whether there is one.
  async record(data) {
    // A router that reports no timings has no records for clients, either.
    if (!data.id || (data.state === "finished" && !data.baton)) return false;
    try {
      for (let look = 0; look < RECORD_LOOKS; look += 1) {
        data.record = await explained(data.id, settings.key());
        if (data.record.state !== "running") break;
        await pause(RECORD_PAUSE_MS);
      }
      return true;
    } catch {
      // Another router of the same service may have it, or it is no longer kept.
      return false;
    }
  }

  stop() {
    this.running?.abort();
  }

  // Called by a turn: everything from it on is made anew with this text.
  async edit(turn, text) {
    if (!this.page.ready()) return;
    this.stop();
    await this.over;
    const at = this.turns.indexOf(turn);
    for (const gone of this.turns.splice(at)) gone.element.remove();
    this.page.focus();
    this.send(text);
  }

  // Called by the newest turn.
  again(turn) {
    this.edit(turn, turn.data.prompt);
  }

  // Shows which turn is the newest. With room, its numbers are shown; all others' are on request.
  mark() {
    for (const turn of this.turns) {
      const newest = turn === this.turns.at(-1);
      turn.newest(newest, newest && this.page.roomy);
    }
  }
}
