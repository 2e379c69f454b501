// What a program does with the ollama package of npm; prints what it got as JSON.
import { Ollama } from "ollama";

const model = process.env.MODEL;
const messages = [{ role: "user", content: "Who are you?" }];
const asked = { model, options: { temperature: 0, num_predict: 12 } };
const client = new Ollama({
  host: process.env.HTTP, headers: { Authorization: `Bearer ${process.env.OPENAI_API_KEY}` },
});
const weather = {
  type: "function",
  function: {
    name: "get_weather",
    description: "Get the weather in a city.",
    parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
  },
};

async function failure(work) {
  try {
    await work();
  } catch (error) {
    return [error.status_code, error.message];
  }
}

// Calls tools until the model answers, over streams.
async function agent(question) {
  const conversation = [{ role: "user", content: question }], called = [];
  for (;;) {
    let content = "", calls = [];
    const more = { model, options: { temperature: 0 }, tools: [weather], stream: true };
    for await (const part of await client.chat({ ...more, messages: conversation })) {
      content += part.message.content ?? "";
      calls = calls.concat(part.message.tool_calls ?? []);
    }
    if (!calls.length) return [called, content];
    conversation.push({ role: "assistant", content, tool_calls: calls });
    for (const { function: { name, arguments: given } } of calls) {
      called.push([name, given]);
      const said = "It is sunny and 21 degrees.";
      conversation.push({ role: "tool", tool_name: name, content: said });
    }
  }
}

const loaded = await client.generate({ model, prompt: "", keep_alive: "5m" });
const chat = await client.chat({ ...asked, messages });
const pieces = [];
for await (const part of await client.chat({ ...asked, messages, stream: true })) pieces.push(part);
const text = await client.generate({ ...asked, prompt: "Who are you?" });
console.log(JSON.stringify({
  models: (await client.list()).models.map((each) => each.model),
  running: (await client.ps()).models.map((each) => each.model),
  capabilities: (await client.show({ model })).capabilities,
  loaded: [loaded.done, loaded.done_reason, loaded.response],
  chat: chat.message.content,
  chat_streamed: pieces.map((part) => part.message.content).join(""),
  generated: text.response,
  done: [chat.done_reason, pieces.at(-1).done_reason, text.done_reason],
  counts: [chat.eval_count, pieces.at(-1).eval_count],
  agent: await agent("What is the weather in Paris?"),
  errors: [
    await failure(() => client.chat({ model: "other", messages })),
    await failure(() => client.pull({ model: "other" })),
  ],
}));
