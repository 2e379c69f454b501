// The list of kept conversations: choose, rename, export, delete.

import { button, make } from "./dom.js";
import { MOST } from "./store.js";

const LONGEST_TITLE = 120;
const field = (id) => document.getElementById(id);

export class List {
  // store: of the conversations. on: {choose(id), renamed(row), removed(ids), failed(error)}.
  constructor(store, on) {
    this.store = store;
    this.on = on;
    this.current = null;
    this.rows = [];
    field("delete-all").addEventListener("click", () => this.remove(this.rows));
    field("most").textContent = `Kept in this browser only, ${MOST} at most. Who uses it can read them.`;
  }

  // Reads the list again. current: the id of the conversation on the page, or null.
  async show(current = this.current) {
    this.current = current;
    try {
      this.rows = await this.store.list();
    } catch (error) {
      this.on.failed(error);
    }
    field("delete-all").hidden = this.rows.length === 0;
    const shown = field("chats-list");
    if (shown.querySelector("input")) return; // A title is being typed, which ends with another call.
    // The focus stays on the button that has it, although the button is another one.
    const focused = document.activeElement.closest("#chats-list li");
    const at = focused ? [...focused.querySelectorAll("button")].indexOf(document.activeElement) : -1;
    shown.replaceChildren(...this.rows.map((row) => this.item(row)));
    const again = focused && [...shown.children].find((item) => item.dataset.id === focused.dataset.id);
    if (again) (again.querySelectorAll("button")[at] ?? again.querySelector("button")).focus();
  }

  item(row) {
    const current = row.id === this.current;
    const date = new Date(row.usedAt).toLocaleString();
    const title = make("span", { className: "title", dir: "auto", textContent: row.title || "Untitled" });
    const choose = make("button", { type: "button", className: "choose", title: date }, title);
    choose.addEventListener("click", () => this.on.choose(row.id));
    const item = make("li", { className: current ? "current" : "" }, choose);
    item.dataset.id = row.id;
    if (!current) return item;
    choose.setAttribute("aria-current", "true");
    const about = (name) => ({ "aria-label": `${name} ${row.title}` });
    item.append(
      make(
        "div",
        { className: "actions" },
        button("Rename", () => this.rename(row, item), about("Rename")),
        button("Export", () => this.save(row), about("Export")),
        button("Delete", () => this.remove([row]), about("Delete")),
      ),
    );
    return item;
  }

  rename(row, item) {
    const input = make("input", { type: "text", value: row.title, maxLength: LONGEST_TITLE, dir: "auto", "aria-label": "Title" });
    let over = false;
    const end = async (keep, byKey) => {
      if (over) return;
      over = true;
      const title = input.value.trim();
      try {
        if (keep && title) this.on.renamed(await this.store.rename(row.id, title));
      } catch (error) {
        this.on.failed(error);
      }
      item.replaceChildren();
      await this.show();
      if (byKey) document.querySelector("#chats-list .current .choose")?.focus();
    };
    input.addEventListener("keydown", (event) => {
      if (event.isComposing || !["Enter", "Escape"].includes(event.key)) return;
      event.preventDefault();
      event.stopPropagation();
      end(event.key === "Enter", true);
    });
    input.addEventListener("blur", () => end(true, false));
    item.replaceChildren(input);
    input.select();
  }

  // Saves a conversation as a file: its messages in OpenAI's form, and what was measured.
  async save(row) {
    try {
      const { content } = await this.store.load(row.id);
      const messages = content.turns.flatMap((turn) => [
        { role: "user", content: turn.prompt },
        ...(turn.text ? [{ role: "assistant", content: turn.text }] : []),
      ]);
      const system = content.settings?.system?.trim();
      if (system) messages.unshift({ role: "system", content: system });
      const saved = { title: row.title, model: content.model, messages, settings: content.settings, turns: content.turns };
      const url = URL.createObjectURL(new Blob([JSON.stringify(saved, null, 1)], { type: "application/json" }));
      const name = row.title.replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 40) || "conversation";
      make("a", { href: url, download: `${name}.json` }).click();
      setTimeout(() => URL.revokeObjectURL(url), 60_000);
    } catch (error) {
      this.on.failed(error);
    }
  }

  remove(rows) {
    const question = rows.length === 1 ? `Delete “${rows[0].title}”?` : `Delete all ${rows.length} conversations?`;
    const dialog = field("confirm");
    const close = () => dialog.close();
    const sure = async () => {
      close();
      const ids = rows.map((row) => row.id);
      try {
        await this.store.remove(ids);
        this.on.removed(ids);
      } catch (error) {
        this.on.failed(error);
      }
    };
    const yes = button("Delete", sure, { className: "danger" });
    dialog.replaceChildren(
      make("p", { dir: "auto", textContent: question }),
      make("div", { className: "actions" }, yes, button("Cancel", close, { className: "quiet" })),
    );
    dialog.showModal();
  }
}
