// Draws what the relay did for one answer: time by stage, workers, cache, and why it ran there.

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

function hint(text) {
  return make("p", { className: "hint", textContent: text });
}

// Returns the numbers of one answer, or null. A stream's last chunk has them (`baton`); of an answer
// that did not reach it, the router's record (GET /requests/{id}) has them.
function numbers({ baton, usage, record }) {
  if (baton) {
    return { ...baton, prompt_tokens: usage.prompt_tokens, output_tokens: usage.completion_tokens };
  }
  if (!record) return null;
  const last = record.attempts.at(-1);
  return {
    ...record,
    output_tokens: record.choices?.[0]?.output_tokens ?? 0,
    attempts: record.num_attempts,
    cached_tokens: {
      prefill: last?.prefill_cached_tokens ?? 0,
      decode: last?.decode_cached_tokens ?? 0,
    },
  };
}

function speedOf(found) {
  const after = found.total_s - found.first_token_s;
  return found.output_tokens > 1 && after > 0 ? (found.output_tokens - 1) / after : 0;
}

function perSecond(speed) {
  return speed ? speed.toFixed(speed < 100 ? 1 : 0) : "–";
}

function bar(label, total, parts) {
  const spoken = parts.map(([, name, spent]) => `${name} ${seconds(spent)}`).join(", ");
  const row = make("div", { className: "bar", role: "img", "aria-label": `${label}: ${spoken}` });
  for (const [stage, name, spent] of parts) {
    const part = make("span", { className: `part of-${stage}`, title: `${name}: ${seconds(spent)}` });
    part.style.flexGrow = String(total ? spent / total : 0);
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

function bars(found) {
  const spent = STAGES.map(([stage, name]) => [stage, name, found.stages[`${stage}_s`]]);
  const drawn = [];
  if (found.first_token_s) {
    const first = spent.filter(([stage]) => BEFORE_FIRST_TOKEN.includes(stage));
    const rest = found.first_token_s - first.reduce((sum, [, , value]) => sum + value, 0);
    if (rest > 0) first.push(["rest", "First text", rest]);
    drawn.push(bar("To the first token", found.first_token_s, first));
  }
  drawn.push(bar("Whole answer", found.total_s, spent));
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
  return [...drawn, make("ul", { className: "legend" }, ...legend)];
}

function tile(className, name, value, unit) {
  return make(
    "div",
    { className: `tile ${className}` },
    make("dt", { textContent: name }),
    make("dd", {}, value, make("small", { textContent: unit })),
  );
}

function tiles(found) {
  const [first, unit] = found.first_token_s ? seconds(found.first_token_s).split(" ") : ["–", ""];
  return make(
    "dl",
    { className: "tiles" },
    tile("first", "First token", first, unit),
    tile("speed", "Speed", perSecond(speedOf(found)), "tok/s"),
    tile("tokens", "Answer", String(found.output_tokens), "tokens"),
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

function facts(found, seed) {
  const moved = found.kv_bytes;
  const size = moved < 1e6 ? `${(moved / 1e3).toFixed(0)} kB` : `${(moved / 1e6).toFixed(1)} MB`;
  const said = [];
  if (moved) said.push(`${size} of KV handed over`);
  if (found.moves) said.push(`moved ${found.moves}×`);
  const again = found.attempts - 1 - found.moves;
  if (again > 0) said.push(`tried again ${again}×`);
  if (seed) said.push(`seed ${seed}`);
  return said.join(" · ");
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
        " ",
        make("span", { textContent: worker.address || worker.instance_id }),
      ),
    ),
  );
}

// The position of an attempt in the time of the whole request.
function track(attempt, total) {
  const filled = make("span", { className: `filled ${attempt.state}` });
  const ended = attempt.ended_s ?? total;
  filled.style.marginLeft = `${(100 * attempt.began_s) / total}%`;
  filled.style.width = `${(100 * (ended - attempt.began_s)) / total}%`;
  return make("div", { className: "track", "aria-hidden": "true" }, filled);
}

function candidate({ worker, filter_reason, detail, cost }) {
  const outcome = detail ? `${filter_reason} (${detail})` : filter_reason;
  return make(
    "li",
    { className: filter_reason === "picked" ? `${worker.role} picked` : worker.role, title: worker.address },
    make("b", { textContent: `${worker.role} ${worker.instance_id}` }),
    make("span", { textContent: outcome }),
    make("span", { className: "number", textContent: cost ? seconds(cost.total) : "" }),
  );
}

function attempt(one, record) {
  const drawn = [make("h4", { textContent: `Attempt ${one.number}: ${one.state}` }), track(one, record.total_s)];
  if (one.why !== record.split.why) drawn.push(hint(one.why));
  drawn.push(make("ul", { className: "looked" }, ...one.candidates.map(candidate)));
  if (one.others) drawn.push(hint(`${one.others} more were looked at.`));
  for (const loss of one.losses) {
    drawn.push(hint(`Lost at ${loss.phase} after ${seconds(loss.at_s)}: ${loss.message}`));
  }
  return drawn;
}

function explanation(record) {
  const body = make("div", { className: "explained" });
  const box = make("details", { className: "why" }, make("summary", { textContent: "Attempts and candidates" }), body);
  box.addEventListener(
    "toggle",
    () => body.append(...record.attempts.flatMap((one) => attempt(one, record))),
    { once: true },
  );
  return [make("p", { className: "reason", textContent: record.split.why ?? "It had no workers." }), box];
}

// Returns one line of it, for where there is little room.
export function brief(data) {
  const found = numbers(data);
  if (!found) return data.usage ? `${data.usage.completion_tokens} tokens` : "";
  const first = found.first_token_s ? `First token ${seconds(found.first_token_s)}` : "No token";
  const speed = speedOf(found);
  const cached = Math.max(found.cached_tokens.prefill, found.cached_tokens.decode);
  const parts = [first, speed ? `${perSecond(speed)} tok/s` : "", cached ? `${cached} of ${found.prompt_tokens} cached` : ""];
  return parts.filter(Boolean).join(" · ");
}

// Returns all of it, as elements. data: of a turn that is over.
export function telemetry(data) {
  const found = numbers(data);
  if (!found) return data.usage ? [hint(`${data.usage.completion_tokens} tokens. This router reports no timings.`)] : [];
  const drawn = [tiles(found), ...bars(found)];
  if (found.workers.some((worker) => worker.role === "prefill")) {
    drawn.push(meter("prefill", found.cached_tokens.prefill, found.prompt_tokens));
  }
  drawn.push(meter("decode", found.cached_tokens.decode, found.prompt_tokens));
  drawn.push(workers(found.workers));
  const more = facts(found, data.seed);
  if (more) drawn.push(hint(more));
  if (data.record) drawn.push(...explanation(data.record));
  return drawn;
}
