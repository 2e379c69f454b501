// Draws the explanation of an answer's placement, on request.

import { make, seconds } from "./dom.js";

function hint(text) {
  return make("p", { className: "hint", textContent: text });
}

// The position of an attempt in the time of the whole request.
function track(attempt, total) {
  const filled = make("span", { className: `filled ${attempt.state}` });
  const ended = attempt.ended_s ?? total;
  filled.style.marginLeft = `${(100 * attempt.began_s) / total}%`;
  filled.style.width = `${(100 * (ended - attempt.began_s)) / total}%`;
  return make("div", { className: "track", "aria-hidden": "true" }, filled);
}

function looked(candidate) {
  const { worker, filter_reason, detail, cost } = candidate;
  const said = detail ? `${filter_reason} (${detail})` : filter_reason;
  return make(
    "li",
    { className: filter_reason === "picked" ? `${worker.role} picked` : worker.role, title: worker.address },
    make("b", { textContent: `${worker.role} ${worker.instance_id}` }),
    make("span", { textContent: said }),
    make("span", { className: "number", textContent: cost ? seconds(cost.total) : "" }),
  );
}

function drawn(attempt, told) {
  const found = [
    make("h4", { textContent: `Attempt ${attempt.number}: ${attempt.state}` }),
    track(attempt, told.total_s),
  ];
  if (attempt.why !== told.split.why) found.push(hint(attempt.why));
  found.push(make("ul", { className: "looked" }, ...attempt.candidates.map(looked)));
  if (attempt.others) found.push(hint(`${attempt.others} more were looked at.`));
  for (const loss of attempt.losses) {
    found.push(hint(`Lost at ${loss.phase} after ${seconds(loss.at_s)}: ${loss.message}`));
  }
  return found;
}

// A box that loads its content when it is opened. ask: returns the answer of GET /requests/{id}.
export function explanation(ask) {
  const body = make("div", { className: "explained" });
  const title = make("summary", { textContent: "Why here?" });
  const box = make("details", { className: "why" }, title, body);
  box.addEventListener("toggle", async () => {
    if (!box.open) return;
    try {
      const told = await ask();
      const attempts = told.attempts.flatMap((attempt) => drawn(attempt, told));
      body.replaceChildren(hint(told.split.why ?? "It had no workers."), ...attempts);
    } catch (error) {
      body.replaceChildren(hint(error.message));
    }
  });
  return box;
}
