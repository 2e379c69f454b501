// What a program does with the openai package of npm; prints what it got as JSON.
import OpenAI from "openai";

const messages = [{ role: "user", content: "Who are you?" }];
const asked = { model: process.env.MODEL, max_tokens: 12, temperature: 0 };
const client = new OpenAI();

async function failure(wrong) {
  try {
    await client.chat.completions.create({ ...asked, messages, ...wrong });
  } catch (error) {
    return [error.constructor.name, error.status, error.param, Boolean(error.requestID)];
  }
}

async function gathered(stream, text) {
  let all = "", usage = 0;
  for await (const chunk of stream) {
    if (chunk.choices.length) all += text(chunk.choices[0]) ?? "";
    usage = chunk.usage?.completion_tokens ?? usage;
  }
  return [all, usage];
}

const prompt = "The capital of France";
const chat = await client.chat.completions.create({ ...asked, messages });
const [chatStreamed, usage] = await gathered(
  await client.chat.completions.create({
    ...asked, messages, stream: true, stream_options: { include_usage: true },
  }),
  (choice) => choice.delta.content,
);
const completion = await client.completions.create({ ...asked, prompt });
const [completionStreamed] = await gathered(
  await client.completions.create({ ...asked, prompt, stream: true }),
  (choice) => choice.text,
);
const respond = { model: asked.model, temperature: 0, max_output_tokens: 12, input: "Who are you?" };
const response = await client.responses.create(respond);
let responseStreamed = "";
for await (const event of await client.responses.create({ ...respond, stream: true })) {
  if (event.type === "response.output_text.delta") responseStreamed += event.delta;
}
const models = [];
for await (const model of client.models.list()) models.push(model.id);
const limited = new OpenAI({ apiKey: process.env.TIGHT_KEY });
async function limitedChat() {
  const answer = await limited.chat.completions.create({ ...asked, messages });
  return answer.choices[0].message.content;
}
// At once, so that one of them is refused however slow this machine is.
const retried = await Promise.all([1, 2, 3].map(limitedChat));
retried.push(await limitedChat());
console.log(JSON.stringify({
  models,
  chat: chat.choices[0].message.content,
  chat_streamed: chatStreamed,
  usage: [chat.usage.completion_tokens, usage],
  completion: completion.choices[0].text,
  completion_streamed: completionStreamed,
  response: response.output_text,
  response_streamed: responseStreamed,
  errors: [await failure({ model: "other" }), await failure({ temperature: -1 })],
  retried,
}));
