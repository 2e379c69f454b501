// Shows text as Markdown while it grows. marked (vendor/) finds the structure, and this module makes
// elements of it whose text is set as text: markup in an answer is shown, never interpreted.

import { copier, make } from "./dom.js";
import { Lexer } from "./vendor/marked.js";

const OPTIONS = { gfm: true, breaks: true };
const WINDOW = 16_384; // Characters that are parsed at once: some inputs take quadratic time.
const SLICE_MS = 12; // The time after which the browser gets its turn.
const MAX_DEPTH = 24; // Of lists in quotes in lists; beyond it the source is shown.
const PROTOCOLS = new Set(["http:", "https:", "mailto:"]);
const ENTITIES = { amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", nbsp: "\u00a0", mdash: "—", ndash: "–", hellip: "…", copy: "©", times: "×" };
const OPENING = /^( {0,3})(`{3,}|~{3,})([^\n]*)\n/;

// Returns the address if a click on it can do no more than open a page or a letter, else null.
export function safeAddress(href) {
  try {
    const url = new URL(href);
    return PROTOCOLS.has(url.protocol) ? url.href : null;
  } catch {
    return null;
  }
}

function decoded(text) {
  return text.replace(/&(?:#(\d{1,7})|#[xX]([\da-fA-F]{1,6})|([a-z]+));/g, (whole, decimal, hex, name) => {
    if (name) return Object.hasOwn(ENTITIES, name) ? ENTITIES[name] : whole;
    const code = decimal ? Number(decimal) : Number.parseInt(hex, 16);
    return code > 0 && code <= 0x10ffff ? String.fromCodePoint(code) : "\ufffd";
  });
}

function link(token, children) {
  const href = safeAddress(token.href);
  if (href === null) return make("span", { title: "This address is not opened from here." }, ...children);
  return make("a", { href, title: href, target: "_blank", rel: "noopener noreferrer nofollow" }, ...children);
}

function codeBlock(language) {
  const code = make("code");
  const pre = make("pre", { tabIndex: 0, dir: "ltr", "aria-label": language ? `Code, ${language}` : "Code" }, code);
  const copy = copier(() => code.textContent, { "aria-label": "Copy the code" });
  const head = make("div", { className: "code-head" }, make("span", { textContent: language }), copy);
  return { code, element: make("div", { className: "code" }, head, pre) };
}

function table(token, depth) {
  const row = (tag, cells) =>
    make("tr", {}, ...cells.map((cell) =>
      make(tag, { className: cell.align ? `to-${cell.align}` : "" }, ...nodes(cell.tokens, depth)),
    ));
  const head = make("thead", {}, row("th", token.header));
  const body = make("tbody", {}, ...token.rows.map((cells) => row("td", cells)));
  const scroller = { className: "table", tabIndex: 0, role: "region", "aria-label": "Table" };
  return make("div", scroller, make("table", {}, head, body));
}

function list(token, depth) {
  const items = token.items.map((item) => make("li", { className: item.task ? "task" : "" }, ...nodes(item.tokens, depth)));
  if (!token.ordered) return make("ul", {}, ...items);
  return make("ol", { start: Number.isSafeInteger(token.start) ? token.start : 1 }, ...items);
}

function node(token, depth) {
  const inside = () => nodes(token.tokens ?? [], depth + 1);
  switch (token.type) {
    case "space":
    case "def":
      return null;
    case "heading":
      return make(`h${Math.min(token.depth + 2, 6)}`, {}, ...inside());
    case "paragraph":
      return make("p", { dir: "auto" }, ...inside());
    case "blockquote":
      return make("blockquote", {}, ...inside());
    case "list":
      return list(token, depth + 1);
    case "table":
      return table(token, depth + 1);
    case "hr":
      return make("hr");
    case "br":
      return make("br");
    case "checkbox":
      return make("input", { type: "checkbox", checked: token.checked, disabled: true });
    case "code": {
      const block = codeBlock((token.lang ?? "").trim().split(/\s/, 1)[0]);
      block.code.textContent = token.text;
      return block.element;
    }
    case "codespan":
      return make("code", { textContent: token.text });
    case "strong":
    case "em":
    case "del":
      return make(token.type, {}, ...inside());
    case "link":
      return link(token, inside());
    case "image":
      // An image would be loaded from elsewhere, and so tell its host who reads this.
      return link(token, [decoded(token.text) || token.href]);
    case "text":
      return token.tokens ? make("span", {}, ...inside()) : document.createTextNode(decoded(token.text));
    case "escape":
      return document.createTextNode(token.text);
    default:
      return token.block ? plain(token.raw) : document.createTextNode(token.raw);
  }
}

function nodes(tokens, depth) {
  if (depth > MAX_DEPTH) return [tokens.map((token) => token.raw).join("")];
  return tokens.map((token) => node(token, depth)).filter((made) => made !== null);
}

function plain(text) {
  return make("p", { className: "plain", dir: "auto", textContent: text.replace(/\n+$/, "") });
}

// A text that grows at its end. Everything before the last block is settled: no later text changes it,
// except a link's definition, for which `end` parses once more.
export class Markdown {
  constructor() {
    this.element = make("div", { className: "text" });
    this.text = "";
    this.ended = false;
    this.again = false; // Whether it is being parsed once more.
    this.waiting = undefined; // The timer of the next run.
    this.pause = 0;
    this.links = Object.create(null); // The addresses that the text has defined, as marked keeps them.
    this.reset();
  }

  reset() {
    this.position = 0; // Where the unsettled text begins.
    this.fence = null; // The open code block: its element, and what closes it.
    this.shown = 0; // Characters of text that the elements show.
    this.tail = []; // Elements of the unsettled text.
    this.element.replaceChildren();
  }

  append(text) {
    this.text += text.replaceAll("\r", "");
    this.schedule();
  }

  // No more text comes.
  end() {
    this.ended = true;
    this.schedule();
  }

  schedule(pause = this.pause) {
    this.waiting ??= setTimeout(() => this.run(), pause);
  }

  run() {
    this.waiting = undefined;
    const began = performance.now();
    while (this.step()) {
      if (performance.now() - began > SLICE_MS) {
        this.schedule(0);
        break;
      }
    }
    // The unsettled text is parsed again and again: about a fifth of the time may go to that.
    this.pause = Math.min(1000, Math.max(16, 4 * (performance.now() - began)));
    if (!this.ended || this.position < this.text.length) return;
    if (!this.again && Object.keys(this.links).length) {
      this.again = true;
      this.reset();
      this.schedule();
    } else this.element.dataset.shown = "whole";
  }

  // Shows some more. Returns whether something is left to do.
  step() {
    if (this.position + this.shown >= this.text.length && !(this.ended && this.shown)) return false;
    return this.fence ? this.inFence() : this.inText();
  }

  inText() {
    const window = this.text.slice(this.position, this.position + WINDOW);
    const whole = this.position + window.length === this.text.length;
    const opening = OPENING.exec(window);
    if (opening && !(opening[2][0] === "`" && opening[3].includes("`"))) {
      this.open(opening);
      return true;
    }
    const last = whole && this.ended;
    let tokens;
    try {
      const lexer = new Lexer(OPTIONS);
      lexer.tokens.links = this.links;
      tokens = lexer.lex(window);
    } catch {
      // It nests too deeply for a parser that recurses.
      tokens = [{ type: "html", block: true, raw: window }];
    }
    this.clearTail();
    let settled = tokens.length;
    if (!last) while (settled > 0 && tokens[--settled].type === "space");
    if (settled === 0 && !whole) return this.long(tokens[0], window);
    const done = tokens.slice(0, settled);
    // An opening fence begins a code block of its own, which is not parsed again and again.
    const fence = done.findIndex((token, at) => at > 0 && token.type === "code" && OPENING.test(token.raw));
    if (fence > 0) done.length = fence;
    this.position += done.reduce((sum, token) => sum + token.raw.length, 0);
    this.element.append(...nodes(done, 0));
    this.shown = 0;
    if (last && fence < 0) {
      this.position = this.text.length;
      return false;
    }
    if (fence > 0 || !whole) return true;
    const rest = tokens.slice(settled);
    if (rest[0]?.type === "code" && OPENING.test(rest[0].raw)) return this.position < this.text.length;
    this.tail = nodes(rest, 0);
    this.element.append(...this.tail);
    this.shown = this.text.length - this.position;
    return false;
  }

  // Settles a part of one block that is longer than what is parsed at once.
  long(token, window) {
    if (token.type === "list" && token.items.length > 1) {
      token.items.pop();
      this.element.append(...nodes([token], 0));
      this.position += token.items.reduce((sum, item) => sum + item.raw.length, 0);
      return true;
    }
    const cut = window.lastIndexOf("\n") + 1 || window.length;
    this.element.append(plain(window.slice(0, cut)));
    this.position += cut;
    return true;
  }

  open([line, indent, marks, info]) {
    this.clearTail();
    const block = codeBlock(decoded(info).trim().split(/\s/, 1)[0]);
    const closing = new RegExp(`^ {0,3}${marks[0]}{${marks.length},}[ \\t]*(?:\\n|$)`, "gm");
    this.fence = { code: block.code, closing, indent: indent.length };
    this.element.append(block.element);
    this.position += line.length;
    this.shown = 0;
  }

  inFence() {
    const { code, closing, indent } = this.fence;
    const rest = this.text.slice(this.position, this.position + 8 * WINDOW);
    const whole = this.position + rest.length === this.text.length;
    closing.lastIndex = 0;
    let found = closing.exec(rest);
    // The closing line may still grow into one of the code.
    if (found && !found[0].endsWith("\n") && !(whole && this.ended)) found = null;
    const lines = found ? found.index : rest.lastIndexOf("\n") + 1 || (whole ? 0 : rest.length);
    const end = whole && !found && this.ended ? rest.length : lines;
    const text = rest.slice(0, end);
    code.append(indent ? text.replace(new RegExp(`^ {1,${indent}}`, "gm"), "") : text);
    this.position += end;
    this.shown = 0;
    if (found) {
      this.position += found[0].length;
      this.fence = null;
      return this.position < this.text.length;
    }
    if (!whole) return true;
    this.shown = this.text.length - this.position;
    return false;
  }

  clearTail() {
    for (const element of this.tail) element.remove();
    this.tail = [];
  }
}
