// A client of this router's OpenAI API, independent of the page.

const LIST_TIMEOUT_MS = 10_000;

export class ApiError extends Error {
  // status: 0 without an answer. retryAfter: seconds, or null.
  constructor(message, status, retryAfter = null) {
    super(message);
    this.status = status;
    this.retryAfter = retryAfter;
  }
}

function headers(key) {
  return key ? { authorization: `Bearer ${key}` } : {};
}

async function ask(path, options) {
  let response;
  try {
    response = await fetch(path, { cache: "no-store", ...options });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The router does not answer.", 0);
  }
  if (response.ok) return response;
  const after = Number.parseFloat(response.headers.get("retry-after") ?? "");
  let message = `The router answered ${response.status}.`;
  try {
    message = (await response.json()).error.message;
  } catch {
    // The body is not JSON: only the status is known.
  }
  throw new ApiError(message, response.status, Number.isFinite(after) ? after : null);
}

async function json(path, key) {
  const signal = AbortSignal.timeout(LIST_TIMEOUT_MS);
  const response = await ask(path, { headers: headers(key), signal });
  try {
    return await response.json();
  } catch {
    throw new ApiError("The router's answer broke off.", 0);
  }
}

// Returns the names of the models that generate.
export async function models(key) {
  const { data } = await json("v1/models", key);
  return data.filter((model) => model.task === "generate").map((model) => model.id);
}

// Returns the router's record of one answer. id: of its chunks.
export function explained(id, key) {
  return json(`requests/${encodeURIComponent(id)}`, key);
}

// Yields the chunks of one streamed answer. A complete answer ends with a chunk that has `usage`, and
// `baton` if the router sends timings. Each has `seed`, the seed in use, as a string.
export async function* chat(body, key, signal) {
  const { seed: wanted, ...rest } = body;
  const text = JSON.stringify({ ...rest, stream: true, stream_options: { include_usage: true } });
  const response = await ask("v1/chat/completions", {
    method: "POST",
    headers: { ...headers(key), "content-type": "application/json", "x-baton-timings": "true" },
    // JSON.stringify writes no BigInt.
    body: wanted === undefined ? text : `${text.slice(0, -1)},"seed":${wanted}}`,
    signal,
  });
  const seed = response.headers.get("x-baton-seed");
  let counted = false;
  for await (const data of events(response.body)) {
    if (data === "[DONE]" && counted) return;
    if (data === "[DONE]") break;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ApiError(chunk.error.message, response.status);
    counted ||= Boolean(chunk.usage);
    yield { ...chunk, seed };
  }
  throw new ApiError("The answer broke off.", 0);
}

async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      let read;
      try {
        read = await reader.read();
      } catch (error) {
        if (error.name === "AbortError") throw error;
        throw new ApiError("The connection broke.", 0);
      }
      if (read.done) return;
      const parts = (rest + read.value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        if (part.startsWith("data: ")) yield part.slice(6);
      }
    }
  } finally {
    reader.releaseLock();
  }
}
