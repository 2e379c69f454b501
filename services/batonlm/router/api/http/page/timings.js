// Draws the time of an answer by stage, and the workers that served it.

import { make, seconds } from "./dom.js";

const STAGES = [
  ["tokenize", "Tokenize"],
  ["turn", "Turn"],
  ["prefill_queue", "Queue"],
  ["prefill", "Prefill"],
  ["network", "Network"],
  ["hand_over", "Hand-over"],
  ["decode", "Decode"],
  ["detokenize", "Detokenize"],
];
const BEFORE_FIRST_TOKEN = STAGES.slice(0, 5).map(([stage]) => stage);

function bar(label, total, parts) {
  const spoken = parts.map(([, name, spent]) => `${name} ${seconds(spent)}`).join(", ");
  const row = make("div", { className: "bar", role: "img", "aria-label": `${label}: ${spoken}` });
  for (const [stage, name, spent] of parts) {
    const part = make("span", { className: `part of-${stage}`, title: `${name}: ${seconds(spent)}` });
    part.style.flexGrow = String(spent / total);
    row.append(part);
  }
  return make(
    "div",
    { className: "timeline" },
    make("span", { textContent: label }),
    make("span", { className: "number", textContent: seconds(total) }),
    row,
  );
}

function bars(baton) {
  const spent = STAGES.map(([stage, name]) => [stage, name, baton.stages[`${stage}_s`]]);
  const first = spent.filter(([stage]) => BEFORE_FIRST_TOKEN.includes(stage));
  const rest = baton.first_token_s - first.reduce((sum, [, , value]) => sum + value, 0);
  if (rest > 0) first.push(["rest", "First text", rest]);
  const legend = spent
    .filter(([, , value]) => value > 0)
    .map(([stage, name, value]) =>
      make(
        "li",
        {},
        make("i", { className: `part of-${stage}` }),
        name,
        make("span", { className: "number", textContent: seconds(value) }),
      ),
    );
  return [
    bar("To the first token", baton.first_token_s, first),
    bar("Whole answer", baton.total_s, spent),
    make("ul", { className: "legend" }, ...legend),
  ];
}

function tile(className, name, value, unit) {
  return make(
    "div",
    { className: `tile ${className}` },
    make("dt", { textContent: name }),
    make("dd", {}, value, make("small", { textContent: unit })),
  );
}

function tiles(usage, baton) {
  const after = baton.total_s - baton.first_token_s;
  const speed = usage.completion_tokens > 1 && after > 0 ? (usage.completion_tokens - 1) / after : 0;
  const [first, unit] = seconds(baton.first_token_s).split(" ");
  return make(
    "dl",
    { className: "tiles" },
    tile("first", "First token", first, unit),
    tile("speed", "Speed", speed ? speed.toFixed(speed < 100 ? 1 : 0) : "–", "tok/s"),
    tile("tokens", "Answer", String(usage.completion_tokens), "tokens"),
  );
}

function meter(side, found, of) {
  const filled = make("span", { className: "filled" });
  filled.style.width = `${of ? (100 * Math.min(found, of)) / of : 0}%`;
  return make(
    "div",
    { className: `meter ${side}` },
    make("span", { textContent: `Cached on ${side}` }),
    make("span", { className: "number", textContent: `${found} of ${of}` }),
    make("div", { className: "track", "aria-hidden": "true" }, filled),
  );
}

function facts(baton) {
  const moved = baton.kv_bytes;
  const size = moved < 1e6 ? `${(moved / 1e3).toFixed(0)} kB` : `${(moved / 1e6).toFixed(1)} MB`;
  const found = [];
  if (moved) found.push(`${size} of KV handed over`);
  if (baton.moves) found.push(`moved ${baton.moves}×`);
  const again = baton.attempts - 1 - baton.moves;
  if (again > 0) found.push(`tried again ${again}×`);
  return found.join(" · ");
}

function workers(list) {
  return make(
    "ul",
    { className: "workers", "aria-label": "Served by" },
    ...list.map((worker) =>
      make(
        "li",
        { className: worker.role, title: `${worker.role} ${worker.instance_id}` },
        make("b", { textContent: worker.role }),
        make("span", { textContent: worker.address || worker.instance_id }),
      ),
    ),
  );
}

// Returns the timings beside one answer. baton: from the API, or undefined without timings.
export function timings(usage, baton) {
  if (!baton) {
    const text = `${usage.completion_tokens} tokens. This router does not tell more.`;
    return [make("p", { className: "hint", textContent: text })];
  }
  const prefilled = baton.workers.some((worker) => worker.role === "prefill");
  const found = [tiles(usage, baton), ...bars(baton)];
  if (prefilled) found.push(meter("prefill", baton.cached_tokens.prefill, usage.prompt_tokens));
  found.push(meter("decode", baton.cached_tokens.decode, usage.prompt_tokens));
  found.push(workers(baton.workers));
  const more = facts(baton);
  if (more) found.push(make("p", { className: "hint", textContent: more }));
  return found;
}
