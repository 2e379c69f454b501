// The page: one conversation, the list of the others, the settings.

import { models } from "./api.js";
import { Chat } from "./chat.js";
import { announce } from "./dom.js";
import { List } from "./list.js";
import * as settings from "./settings.js";
import { Store } from "./store.js";

const LOOK_AGAIN_MS = 5000; // While no model is served.
const NEAR_END_PX = 120;
const ROOMY_PX = 880; // From this width on, numbers stand beside the answers.

const field = (id) => document.getElementById(id);
const prompt = field("prompt");
const scroller = field("scroller");
const main = document.querySelector("main");
// Beside the conversation there is room for a panel; else it lies over it.
const wide = window.matchMedia("(min-width: 64rem)");

const deleted = new Set(); // Ids of conversations that may still be saved once more by their answer's end.
let chat = null;
let saving = Promise.resolve();
let following = true; // The end of the conversation stays in sight.
let lookAgain;

// What a conversation needs of the page.
const page = {
  log: field("log"),
  model: () => field("model").value,
  focus: () => prompt.focus(),
  roomy: main.clientWidth >= ROOMY_PX,

  // Returns whether a request can be made of the settings, and shows the one that is wrong.
  ready() {
    if (settings.valid()) return true;
    open("settings", true);
    settings.complain();
    return false;
  },

  // An answer begins or is over.
  busy(of) {
    if (of !== chat) return;
    field("send").hidden = chat.running !== null;
    field("stop").hidden = chat.running === null;
    field("welcome").hidden = chat.turns.length > 0;
    if (chat.running) {
      following = true;
      toEnd();
    }
  },

  // Keeps a conversation. Saves happen one after the other, because each takes the row of the one before.
  save(of) {
    saving = saving.then(async () => {
      if (deleted.has(of.row.id)) return;
      try {
        of.row = await store.save(of.row, of.content());
        await list.show(chat.row?.id ?? null);
      } catch (error) {
        notice(error.message);
      }
    });
    return saving;
  },

  unauthorized() {
    open("settings", true);
    field("key").focus();
  },
};

const store = new Store();
const list = new List(store, {
  choose,
  renamed(row) {
    if (row && chat.row?.id === row.id) {
      chat.row = row;
      entitle();
    }
  },
  removed(ids) {
    for (const id of ids) deleted.add(id);
    if (chat.row && ids.includes(chat.row.id)) show(new Chat(page));
    else list.show();
    announce("Deleted.");
  },
  failed: (error) => notice(error.message),
});

// Shows a message above the composer until it is dismissed or what it is about has changed.
function notice(text, about = "") {
  field("notice").hidden = false;
  field("notice").dataset.about = about;
  field("notice-text").textContent = text;
}

function endNotice(about) {
  if (field("notice").dataset.about === about) field("notice").hidden = true;
}

function entitle() {
  document.title = chat.row ? `${chat.row.title} · Baton` : "Baton";
}

function toEnd() {
  scroller.scrollTop = scroller.scrollHeight;
}

function show(next) {
  chat?.stop();
  chat = next;
  if (chat.settings) settings.write(chat.settings);
  if ([...field("model").options].some((option) => option.value === chat.model)) field("model").value = chat.model;
  entitle();
  page.busy(chat);
  following = true;
  list.show(chat.row?.id ?? null);
  if (!wide.matches) open("chats", false);
  if (wide.matches) prompt.focus();
  toEnd();
}

async function choose(id) {
  if (chat.row?.id === id) {
    if (!wide.matches) open("chats", false);
    return;
  }
  try {
    const kept = await store.load(id);
    if (kept) show(new Chat(page, kept));
    else list.show();
  } catch (error) {
    notice(error.message);
  }
}

// Opens or closes one of the panels, `chats` and `settings`. On a narrow page it covers the conversation.
function open(name, wanted) {
  const other = name === "chats" ? "settings" : "chats";
  if (wanted && !wide.matches) open(other, false);
  document.body.classList.toggle(`with-${name}`, wanted);
  field(`toggle-${name}`).setAttribute("aria-expanded", String(wanted));
  const covered = !wide.matches && ["with-chats", "with-settings"].some((one) => document.body.classList.contains(one));
  main.inert = covered;
  if (!wanted && document.activeElement === document.body) field(`toggle-${name}`).focus();
}

async function findModels() {
  clearTimeout(lookAgain);
  const select = field("model");
  try {
    const names = await models(settings.key());
    const chosen = select.value || chat.model;
    select.replaceChildren(...names.map((name) => new Option(name, name, false, name === chosen)));
    if (!names.length) select.append(new Option("no model", ""));
    select.disabled = names.length < 2;
    if (names.length) {
      endNotice("models");
    } else {
      notice("No model is served yet. The page looks again every few seconds.", "models");
      lookAgain = setTimeout(findModels, LOOK_AGAIN_MS);
    }
  } catch (error) {
    notice(error.message, "models");
    if (error.status === 401) page.unauthorized();
    else lookAgain = setTimeout(findModels, LOOK_AGAIN_MS);
  }
}

function submit() {
  const text = prompt.value.trim();
  if (!text || chat.running || !page.ready()) return;
  prompt.value = "";
  chat.send(text);
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
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || event.isComposing || field("confirm").open) return;
  const covering = wide.matches ? null : ["chats", "settings"].find((name) => document.body.classList.contains(`with-${name}`));
  if (covering) {
    open(covering, false);
    field(`toggle-${covering}`).focus();
  } else chat.stop();
});
field("stop").addEventListener("click", () => {
  chat.stop();
  prompt.focus();
});
field("new").addEventListener("click", () => {
  show(new Chat(page));
  prompt.focus();
});
for (const name of ["chats", "settings"]) {
  const toggle = field(`toggle-${name}`);
  toggle.addEventListener("click", () => open(name, toggle.getAttribute("aria-expanded") !== "true"));
}
field("notice-close").addEventListener("click", () => {
  field("notice").hidden = true;
  prompt.focus();
});
for (const suggestion of document.querySelectorAll(".suggestions button")) {
  suggestion.addEventListener("click", () => {
    if (!page.ready()) return;
    chat.send(suggestion.textContent);
    prompt.focus();
  });
}

// The reader who scrolls up or uses something in the conversation is left there.
scroller.addEventListener("scroll", () => {
  following = scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < NEAR_END_PX;
});
page.log.addEventListener("click", () => (following = false));
new ResizeObserver(() => following && toEnd()).observe(page.log);

// Where there is room, the newest answer's numbers are shown beside it.
new ResizeObserver(() => {
  if (main.classList.toggle("roomy", main.clientWidth >= ROOMY_PX) === page.roomy) return;
  page.roomy = !page.roomy;
  chat.mark();
}).observe(main);

document.addEventListener("visibilitychange", () => {
  if (document.visibilityState === "hidden" && chat.running) page.save(chat);
  // Another tab may have changed the list.
  if (document.visibilityState === "visible") list.show();
});

settings.start(findModels);
show(new Chat(page));
wide.addEventListener("change", () => open("chats", wide.matches));
open("chats", wide.matches);
findModels();
prompt.focus();
