// What a program does with the @anthropic-ai/sdk package of npm; prints what it got as JSON.
import Anthropic from "@anthropic-ai/sdk";

const messages = [{ role: "user", content: "Who are you?" }];
const asked = { model: process.env.MODEL, max_tokens: 12 };
const client = new Anthropic({ baseURL: process.env.HTTP, apiKey: process.env.OPENAI_API_KEY });
const weather = {
  name: "get_weather",
  description: "Get the weather in a city.",
  input_schema: {
    type: "object", properties: { city: { type: "string" } }, required: ["city"],
  },
};

const textOf = (message) =>
  message.content.filter((block) => block.type === "text").map((block) => block.text).join("");

async function failure(wrong) {
  try {
    await client.messages.create({ ...asked, messages, ...wrong });
  } catch (error) {
    return [error.constructor.name, error.status, error.error.error.type, Boolean(error.requestID)];
  }
}

// Calls tools until the model answers, over streams.
async function agent(question) {
  const conversation = [{ role: "user", content: question }], called = [];
  for (;;) {
    const more = { ...asked, max_tokens: 20000, temperature: 0, tools: [weather] };
    const stream = client.messages.stream({ ...more, messages: conversation });
    const message = await stream.finalMessage();
    conversation.push({ role: "assistant", content: message.content });
    if (message.stop_reason !== "tool_use") return [called, textOf(message), message.stop_reason];
    const results = message.content.filter((block) => block.type === "tool_use").map((block) => {
      called.push([block.name, block.input]);
      const content = "It is sunny and 21 degrees.";
      return { type: "tool_result", tool_use_id: block.id, content };
    });
    conversation.push({ role: "user", content: results });
  }
}

const chat = await client.messages.create({ ...asked, messages, temperature: 0 });
const stream = client.messages.stream({ ...asked, messages, temperature: 0 });
let pieces = "";
stream.on("text", (text) => (pieces += text));
const streamed = await stream.finalMessage();
const models = [];
for await (const model of client.models.list()) models.push([model.type, model.id]);
const shown = await client.models.retrieve(process.env.MODEL);
const counted = await client.messages.countTokens({ model: process.env.MODEL, messages });
console.log(JSON.stringify({
  models,
  shown: [shown.id, shown.display_name, new Date(shown.created_at) <= new Date()],
  chat: textOf(chat),
  chat_streamed: pieces,
  stop_reasons: [chat.stop_reason, streamed.stop_reason],
  usage: [chat.usage.output_tokens, streamed.usage.output_tokens],
  counted: [counted.input_tokens, chat.usage.input_tokens + chat.usage.cache_read_input_tokens],
  agent: await agent("What is the weather in Paris?"),
  errors: [await failure({ model: "other" }), await failure({ temperature: -1 })],
}));
