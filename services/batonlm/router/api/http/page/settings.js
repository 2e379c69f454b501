// The settings of the reader: sampling, system message, API key. The key stays in this tab.

const KEY = "baton-api-key";
const NUMBERS = ["temperature", "top_p", "repetition_penalty", "top_k", "seed"].concat(
  "max_completion_tokens",
);

const field = (id) => document.getElementById(id);

export function start(changed) {
  for (const range of document.querySelectorAll("input[type=range]")) {
    const shown = document.querySelector(`output[for=${range.id}]`);
    range.addEventListener("input", () => (shown.value = range.value));
  }
  field("key").value = sessionStorage.getItem(KEY) ?? "";
  field("key").addEventListener("change", () => {
    sessionStorage.setItem(KEY, key());
    changed();
  });
  for (const form of [field("sampling"), field("access")]) {
    form.addEventListener("submit", (event) => event.preventDefault());
  }
}

export const key = () => field("key").value.trim();

export function wantKey() {
  open(true);
  field("key").focus();
}

export function open(wanted) {
  document.body.classList.toggle("with-settings", wanted);
  field("toggle").setAttribute("aria-expanded", String(wanted));
}

export const system = () => field("system").value.trim();

// Returns the parameters of a request; empty ones are left to the router.
export function sampling() {
  const found = {};
  for (const name of NUMBERS) {
    const value = field(name).valueAsNumber;
    if (Number.isFinite(value)) found[name] = value;
  }
  if (field("stop_text").value) found.stop = [field("stop_text").value];
  return found;
}
