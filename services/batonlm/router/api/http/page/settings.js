// What the reader sets: sampling, system message, model, API key. Settings belong to a conversation, and
// the newest ones to the next conversation. The key stays in this tab.

const KEY = "baton-api-key";
const LATEST = "baton-settings";
const NUMBERS = ["temperature", "top_p", "repetition_penalty", "top_k", "seed", "max_completion_tokens"];
const TEXTS = ["stop_text", "system"];

const field = (id) => document.getElementById(id);

// A browser may refuse storage; what it would have kept is then lost with the page.
function kept(storage, name) {
  try {
    return window[storage].getItem(name);
  } catch {
    return null;
  }
}

function keep(storage, name, value) {
  try {
    window[storage].setItem(name, value);
  } catch {
    // See `kept`.
  }
}

// keyChanged: called when another key was typed.
export function start(keyChanged) {
  field("sampling").addEventListener("input", show);
  field("sampling").addEventListener("change", () => keep("localStorage", LATEST, JSON.stringify(read())));
  field("sampling").addEventListener("reset", () => {
    setTimeout(() => {
      show();
      keep("localStorage", LATEST, JSON.stringify(read()));
    });
  });
  field("key").value = kept("sessionStorage", KEY) ?? "";
  field("key").addEventListener("change", () => {
    keep("sessionStorage", KEY, key());
    keyChanged();
  });
  for (const form of [field("sampling"), field("access")]) {
    form.addEventListener("submit", (event) => event.preventDefault());
  }
  try {
    write(JSON.parse(kept("localStorage", LATEST) ?? "{}"));
  } catch {
    // It is not ours.
  }
}

function show() {
  for (const range of document.querySelectorAll("#sampling input[type=range]")) {
    document.querySelector(`output[for=${range.id}]`).value = range.value;
  }
}

export const key = () => field("key").value.trim();

// Returns whether every setting can be sent, and shows the first one that cannot.
export const valid = () => field("sampling").checkValidity();

export function complain() {
  field("sampling").reportValidity();
}

// Returns the settings as they are kept.
export function read() {
  return Object.fromEntries([...NUMBERS, ...TEXTS].map((name) => [name, field(name).value]));
}

export function write(settings) {
  for (const name of [...NUMBERS, ...TEXTS]) {
    if (typeof settings?.[name] === "string") field(name).value = settings[name];
  }
  show();
}

// Returns the parameters of a request; empty ones are left to the router. The seed is a BigInt: those
// that routers draw have more digits than a number holds.
export function sampling() {
  const found = {};
  for (const name of NUMBERS) {
    const { value, valueAsNumber } = field(name);
    if (!Number.isFinite(valueAsNumber)) continue;
    found[name] = name === "seed" ? BigInt(/^\d+$/.test(value) ? value : valueAsNumber) : valueAsNumber;
  }
  const stops = field("stop_text").value.split("\n").filter(Boolean);
  if (stops.length) found.stop = stops;
  return found;
}

export const system = () => field("system").value.trim();
