// What an agent of the AI SDK does with tools; prints what was called and answered, as JSON.
// `node with_ai_sdk.mjs API`: `chat` or `responses`.

import { createOpenAI } from '@ai-sdk/openai'
import { createOpenAICompatible } from '@ai-sdk/openai-compatible'
import { generateText, stepCountIs, streamText, tool } from 'ai'
import { z } from 'zod'

const create = process.argv[2] === 'responses' ? createOpenAI : createOpenAICompatible
const provider = create({
  name: 'baton',
  baseURL: process.env.OPENAI_BASE_URL,
  apiKey: process.env.OPENAI_API_KEY,
})
const called = []
const tools = {
  get_weather: tool({
    description: 'Get the weather in a city.',
    inputSchema: z.object({ city: z.string() }),
    execute: async ({ city }) => {
      called.push(['get_weather', { city }])
      return { temperature: 21, condition: 'sunny' }
    },
  }),
  multiply: tool({
    description: 'Multiply two numbers.',
    inputSchema: z.object({ a: z.number(), b: z.number() }),
    execute: async ({ a, b }) => {
      called.push(['multiply', { a, b }])
      return String(a * b)
    },
  }),
}
const asked = {
  model: provider(process.env.MODEL), tools, temperature: 0, stopWhen: stepCountIs(4),
}
const whole = await generateText({ ...asked, prompt: 'What is the weather in Paris?' })
const stream = streamText({ ...asked, prompt: 'What is 213 * 47?' })
console.log(JSON.stringify({ answers: [whole.text, await stream.text], called }))
