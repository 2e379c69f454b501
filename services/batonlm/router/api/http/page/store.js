// Keeps conversations in this browser (IndexedDB): at most MOST of them, with MOST_CHARACTERS together.
// Those that were used least recently are deleted first.
//
// A row is what the list shows: {id, title, usedAt, revision, characters}. The content of a
// conversation is kept apart, so that the list is read without it. Every method raises StoreError.

export const MOST = 200;
const MOST_CHARACTERS = 32_000_000;
const ROWS = "rows";
const CONTENTS = "contents";

export class StoreError extends Error {}

export function newRow(title) {
  const random = crypto.getRandomValues(new Uint8Array(12));
  const id = Array.from(random, (byte) => byte.toString(16).padStart(2, "0")).join("");
  return { id, title, usedAt: Date.now(), revision: 0, characters: 0 };
}

function result(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

const newestFirst = (rows) => rows.sort((a, b) => b.usedAt - a.usedAt);

export class Store {
  #opened;

  constructor(name = "baton") {
    this.#opened = new Promise((resolve) => {
      const request = indexedDB.open(name, 1);
      request.onupgradeneeded = () => {
        request.result.createObjectStore(ROWS, { keyPath: "id" });
        request.result.createObjectStore(CONTENTS);
      };
      resolve(result(request));
    }).catch(() => null);
  }

  // Returns the rows, the one used last first.
  async list() {
    return newestFirst(await this.#run("readonly", (rows) => result(rows.getAll())));
  }

  // Returns {row, content}, or null.
  load(id) {
    return this.#run("readonly", async (rows, contents) => {
      const row = await result(rows.get(id));
      return row ? { row, content: await result(contents.get(id)) } : null;
    });
  }

  // Writes a conversation and returns its row, which the next save takes. Where another tab has saved
  // it in between, it becomes a conversation of its own, and both are kept.
  save(row, content) {
    const characters = JSON.stringify(content).length;
    if (characters > MOST_CHARACTERS) {
      return Promise.reject(new StoreError("This conversation is too long to be kept by the browser."));
    }
    return this.#run("readwrite", async (rows, contents) => {
      const kept = await result(rows.get(row.id));
      const id = kept && kept.revision !== row.revision ? newRow("").id : row.id;
      const saved = { ...row, id, characters, revision: row.revision + 1 };
      rows.put(saved);
      contents.put(content, id);
      let [count, sum] = [0, 0];
      for (const other of newestFirst(await result(rows.getAll()))) {
        count += 1;
        sum += other.characters;
        if ((count > MOST || sum > MOST_CHARACTERS) && other.id !== id) {
          rows.delete(other.id);
          contents.delete(other.id);
        }
      }
      return saved;
    });
  }

  // Returns the new row, or null where the conversation has gone.
  rename(id, title) {
    return this.#run("readwrite", async (rows) => {
      const row = await result(rows.get(id));
      if (!row) return null;
      const renamed = { ...row, title, revision: row.revision + 1 };
      rows.put(renamed);
      return renamed;
    });
  }

  remove(ids) {
    return this.#run("readwrite", async (rows, contents) => {
      for (const id of ids) {
        rows.delete(id);
        contents.delete(id);
      }
    });
  }

  // Runs `work` in one transaction, which is complete when this returns.
  async #run(mode, work) {
    const database = await this.#opened;
    if (database === null) throw new StoreError("This browser keeps no conversations for this page.");
    const transaction = database.transaction([ROWS, CONTENTS], mode);
    const complete = new Promise((resolve, reject) => {
      transaction.oncomplete = resolve;
      transaction.onabort = () => reject(transaction.error);
    });
    complete.catch(() => undefined);
    try {
      const found = await work(transaction.objectStore(ROWS), transaction.objectStore(CONTENTS));
      await complete;
      return found;
    } catch (error) {
      const full = (transaction.error ?? error)?.name === "QuotaExceededError";
      throw new StoreError(
        full
          ? "The browser's storage is full: this conversation is not kept. Delete others to make room."
          : "The browser could not keep or read this conversation.",
      );
    }
  }
}
