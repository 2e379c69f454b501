// Creates elements. Text is always set as text, so that model output never becomes markup.

export function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name in element) element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

// A button in the page's quiet style. pressed: called with the button.
export function button(text, pressed, properties = {}) {
  const element = make("button", { type: "button", className: "small", textContent: text, ...properties });
  element.addEventListener("click", () => pressed(element));
  return element;
}

// A button that copies a text. text: returns it.
export function copier(text, properties = {}) {
  return button(
    "Copy",
    async (element) => {
      let outcome = "Copied";
      try {
        await navigator.clipboard.writeText(text());
      } catch {
        // Without HTTPS or on refusal there is no clipboard.
        outcome = copySelected(text()) ? "Copied" : "Not allowed";
      }
      element.textContent = outcome;
      announce(outcome);
      setTimeout(() => (element.textContent = "Copy"), 1500);
    },
    properties,
  );
}

// The way of copying that pages have without HTTPS. Returns whether it worked.
function copySelected(text) {
  const focused = document.activeElement;
  const area = make("textarea", { className: "visually-hidden", value: text });
  document.body.append(area);
  area.select();
  const copied = document.execCommand("copy");
  area.remove();
  focused?.focus();
  return copied;
}

// Screen readers read this when they are done with what they read now.
export function announce(text) {
  document.getElementById("status").textContent = text;
}

export function seconds(value) {
  if (value < 0.0995) return `${(value * 1000).toFixed(1)} ms`;
  if (value < 0.9995) return `${Math.round(value * 1000)} ms`;
  return `${value.toFixed(value < 10 ? 2 : 1)} s`;
}

// The lines of a text that a person wrote, in one line of at most `most` characters.
export function shortened(text, most) {
  const line = text.trim().replace(/\s+/g, " ");
  const letters = Array.from(line.slice(0, 2 * most));
  return letters.length > most ? `${letters.slice(0, most - 1).join("")}…` : line;
}
