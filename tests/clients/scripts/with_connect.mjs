// What a web page does with Connect's own packages; prints what it got as JSON.
import { Code, ConnectError, createClient } from "@connectrpc/connect";
import { createConnectTransport } from "@connectrpc/connect-web";
import { Inference } from "./gen/baton/v1/inference_pb.js";

const messages = [{ role: "user", content: "Who are you?" }];
const options = { stop: { maxTokens: 12 }, sampling: { temperature: 0 } };
const baseUrl = process.env.HTTP;

function client(useBinaryFormat, key) {
  const interceptor = (next) => (request) => {
    request.header.set("authorization", `Bearer ${key}`);
    return next(request);
  };
  const transport = createConnectTransport({
    baseUrl, useBinaryFormat, interceptors: [interceptor],
  });
  return createClient(Inference, transport);
}

async function text(stream) {
  let all = "", tokens = 0;
  for await (const { event } of stream) {
    if (event.event.case === "delta") all += event.event.value.text;
    if (event.event.case === "finished") tokens = event.event.value.completionTokens;
  }
  return [all, tokens];
}

async function failure(work) {
  try {
    await work();
  } catch (error) {
    const known = ConnectError.from(error);
    return [Code[known.code], known.details.map((detail) => detail.type)];
  }
}

const got = { chat: [], models: [], errors: [] };
for (const binary of [false, true]) {
  const inference = client(binary, process.env.OPENAI_API_KEY);
  got.chat.push(await text(inference.chat({ messages, options })));
  got.models.push((await inference.listModels({})).models.map((model) => model.name));
  const wrong = { messages, options: { sampling: { temperature: -1 } } };
  const stranger = client(binary, "wrong");
  got.errors.push(
    await failure(() => text(inference.chat(wrong))),
    await failure(() => text(inference.chat({ messages, model: "nobody" }))),
    await failure(() => text(stranger.chat({ messages }))),
    await failure(() => stranger.listModels({})),
    await failure(() => text(inference.chat({ messages }, { timeoutMs: 1 }))),
  );
}
console.log(JSON.stringify(got));
