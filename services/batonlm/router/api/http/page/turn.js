// One turn of a conversation on the page: the prompt, the answer, and what the relay did for it.

import { announce, button, copier, make, seconds } from "./dom.js";
import { Markdown } from "./markdown.js";
import { brief, telemetry } from "./telemetry.js";

const SPOKEN = 2000; // Characters of an answer that are read aloud by themselves.
const ENDINGS = {
  stopped: "Stopped.",
  running: "The page was closed while this was being answered.",
  length: "The answer is cut at its greatest length.",
};

// What is kept of a turn. state: running, finished, stopped or failed. usage, baton: of the last chunk.
// record: the router's, see telemetry.js.
export function newTurn(prompt) {
  return { prompt, text: "", thought: "", state: "running", finish: null, error: null, model: null, id: null, seed: null, usage: null, baton: null, record: null };
}

export class Turn {
  // on: its Chat, which is called to edit(turn, text) and for again(turn).
  constructor(data, on) {
    this.data = data;
    this.on = on;
    this.asked = make("div", { className: "asked" });
    this.thought = make("p", { className: "thought", dir: "auto" });
    this.thinking = make("details", { className: "thinking", hidden: true, open: data.state === "running" });
    this.thinking.append(make("summary", { textContent: "Reasoning" }), this.thought);
    this.answer = new Markdown();
    this.notes = make("div", { className: "notes" });
    this.actions = make("div", { className: "actions" });
    this.body = make("article", { className: "answer", "aria-label": "Answer" });
    this.body.append(this.thinking, this.answer.element, this.notes, this.actions);
    this.brief = make("summary");
    this.numbers = make("div", { className: "numbers" });
    this.beside = make("details", { className: "beside", "aria-label": "What the relay did" }, this.brief, this.numbers);
    this.element = make("li", { className: "turn" }, this.asked, this.body, this.beside);
    this.showPrompt();
    this.thoughts(data.thought);
    this.answer.append(data.text);
  }

  // The beginning of an answer.
  begin() {
    this.began = performance.now();
    this.body.classList.add("running");
    this.body.setAttribute("aria-busy", "true");
    this.brief.textContent = "Waiting …";
    this.numbers.replaceChildren(make("p", { className: "hint waiting", textContent: "Waiting …" }));
  }

  add(delta) {
    const thought = delta.reasoning_content ?? delta.reasoning;
    if (!thought && !delta.content) return;
    if (thought) {
      this.data.thought += thought;
      this.thoughts(thought);
    }
    if (delta.content) {
      this.data.text += delta.content;
      this.answer.append(delta.content);
    }
    // What this page measures. The router's own numbers arrive at the end.
    const now = performance.now();
    this.firstAt ??= now;
    const first = `First text after ${seconds((this.firstAt - this.began) / 1000)}`;
    this.brief.textContent = `${first} · ${seconds((now - this.began) / 1000)} so far`;
    this.numbers.firstChild.textContent = this.brief.textContent;
  }

  thoughts(text) {
    if (!text) return;
    this.thinking.hidden = false;
    this.thought.append(text);
  }

  // Shows a turn that is over. error: how it failed just now, or undefined.
  end(error) {
    const { data } = this;
    this.body.classList.remove("running");
    this.body.removeAttribute("aria-busy");
    this.answer.end();
    this.notes.replaceChildren();
    if (data.state === "failed") this.failure(error);
    const note = ENDINGS[data.state] ?? ENDINGS[data.finish];
    if (note) this.notes.append(make("p", { className: "hint", textContent: note }));
    const copy = copier(() => data.text, { "aria-label": "Copy the answer" });
    this.again = button("Regenerate", () => this.on.again(this), { className: "small again", hidden: data.state === "failed" });
    this.actions.replaceChildren(...(data.text ? [copy] : []), this.again);
    if (data.model) this.actions.append(make("span", { className: "hint", textContent: data.model }));
    this.measured();
  }

  measured() {
    // Of a request that was refused there is nothing to show.
    const { usage, record } = this.data;
    this.beside.hidden = !usage && !record;
    this.brief.textContent = brief(this.data);
    this.numbers.replaceChildren(...telemetry(this.data));
  }

  speak() {
    const { text, state } = this.data;
    const rest = text.length > SPOKEN ? " … The answer goes on." : "";
    announce(`${state === "stopped" ? "Stopped" : "Answer"}: ${text.slice(0, SPOKEN)}${rest}`);
  }

  // Why the answer is missing or incomplete.
  failure(error) {
    const again = button("Try again", () => this.on.again(this), { className: "quiet again" });
    const message = make("p", { textContent: this.data.error });
    const box = make("div", { className: "failure" }, message, again);
    if (error) box.setAttribute("role", "alert");
    this.notes.append(box);
    if (error?.retryAfter) this.countDown(again, Math.ceil(error.retryAfter));
  }

  countDown(again, left) {
    again.disabled = left > 0;
    again.textContent = left > 0 ? `Try again in ${left} s` : "Try again";
    if (left > 0) setTimeout(() => this.countDown(again, left - 1), 1000);
  }

  // Only the newest answer can be made again, because later turns build on it. open: shows the numbers.
  newest(is, open) {
    this.body.classList.toggle("newest", is);
    this.beside.open = open;
  }

  showPrompt() {
    const edit = button("Edit", () => this.edit(), { "aria-label": "Edit this message" });
    const copy = copier(() => this.data.prompt, { "aria-label": "Copy this message" });
    const text = make("p", { className: "prompt", dir: "auto", textContent: this.data.prompt });
    this.asked.replaceChildren(text, make("div", { className: "actions" }, edit, copy));
  }

  edit() {
    const area = make("textarea", { value: this.data.prompt, dir: "auto", "aria-label": "Edited message" });
    const stop = () => {
      this.showPrompt();
      this.asked.querySelector("button").focus();
    };
    const send = () => {
      const text = area.value.trim();
      if (text) this.on.edit(this, text);
    };
    const sending = button("Send", send, { className: "" });
    const foot = make("div", { className: "actions" }, sending, button("Cancel", stop, { className: "quiet" }));
    const note = make("p", { className: "hint", textContent: "What follows this message is replaced." });
    this.asked.replaceChildren(make("div", { className: "editing" }, area, foot, note));
    area.addEventListener("keydown", (event) => {
      if (event.isComposing) return;
      if (event.key === "Escape") {
        event.stopPropagation();
        stop();
      }
      if (event.key === "Enter" && !event.shiftKey) {
        event.preventDefault();
        send();
      }
    });
    area.focus();
    this.asked.scrollIntoView({ block: "nearest" });
  }
}
