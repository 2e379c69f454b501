// One turn of the conversation on the page: the prompt, the answer, and its details.

import { make, seconds } from "./dom.js";
import { explanation } from "./explain.js";
import { timings } from "./timings.js";

export class Turn {
  constructor(prompt) {
    this.text = "";
    this.thought = make("p", { className: "thought", hidden: true });
    this.answer = make("p", { className: "text" });
    this.notes = make("div", { className: "notes" });
    this.beside = make("div", { className: "beside" });
    this.body = make("article", { className: "answer running", "aria-label": "Answer" });
    this.body.append(this.thought, this.answer, this.notes);
    this.element = make(
      "li",
      { className: "turn" },
      make("p", { className: "asked", textContent: prompt }),
      this.body,
      this.beside,
    );
    this.began = performance.now();
    this.chunks = 0;
    this.beside.append(make("p", { className: "hint waiting", textContent: "Waiting …" }));
  }

  add(delta) {
    const thought = delta.reasoning_content ?? delta.reasoning;
    if (thought) {
      this.thought.hidden = false;
      this.thought.append(thought);
    }
    if (delta.content) {
      this.text += delta.content;
      this.answer.append(delta.content);
    }
    if (thought || delta.content) {
      if (!this.chunks) this.firstAt = performance.now();
      this.chunks += 1;
      this.show();
    }
  }

  // While it runs: what this page has measured. The router's own numbers arrive at the end.
  show() {
    const now = performance.now();
    const parts = [`First text after ${seconds((this.firstAt - this.began) / 1000)}`];
    parts.push(`${seconds((now - this.began) / 1000)} so far`);
    this.beside.firstChild.textContent = parts.join(" · ");
  }

  // explain: returns the router's record of it.
  finish(usage, baton, explain) {
    this.end();
    this.beside.replaceChildren(...timings(usage, baton));
    if (baton) this.beside.append(explanation(explain));
  }

  stopped() {
    this.end();
    this.notes.append(make("p", { className: "hint", textContent: "Stopped." }));
    this.beside.replaceChildren();
  }

  // Why the answer is missing or incomplete; `again` is called to try again.
  fail(error, again) {
    this.end();
    const button = make("button", { type: "button", className: "quiet", textContent: "Try again" });
    button.addEventListener("click", again);
    const box = make("div", { className: "failure", role: "alert" });
    box.append(make("p", { textContent: error.message }), button);
    this.notes.append(box);
    this.beside.replaceChildren();
    if (error.retryAfter) this.countDown(button, Math.ceil(error.retryAfter));
  }

  countDown(button, left) {
    button.disabled = left > 0;
    button.textContent = left > 0 ? `Try again in ${left} s` : "Try again";
    if (left > 0) setTimeout(() => this.countDown(button, left - 1), 1000);
  }

  end() {
    this.body.classList.remove("running");
  }
}
