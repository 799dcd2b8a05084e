// SPDX-License-Identifier: Apache-2.0
// The official JavaScript client's main calls, one JSON object of what came back.
import OpenAI from "openai";

const client = new OpenAI({ baseURL: process.argv[2] + "/v1", apiKey: "none", maxRetries: 0 });
const prompt = "Emma was";
const found = {};

const models = [];
for await (const model of client.models.list()) models.push(model.id);
found.models = models;

const whole = await client.completions.create({
  model: "demo", prompt, max_tokens: 12, temperature: 0, logprobs: 2,
});
found.text = whole.choices[0].text;
found.usage = whole.usage;
found.logprobs = whole.choices[0].logprobs.token_logprobs;

let streamed = "";
const stream = await client.completions.create({
  model: "demo", prompt, max_tokens: 12, temperature: 0, stream: true,
});
for await (const part of stream) streamed += part.choices[0]?.text ?? "";
found.streamed = streamed;

const messages = [{ role: "user", content: "Hello." }];
const chat = await client.chat.completions.create({
  model: "demo", messages, max_tokens: 8, temperature: 0,
});
found.chat = chat.choices[0].message.content;
const runner = client.chat.completions.stream({
  model: "demo", messages, max_tokens: 8, temperature: 0,
});
found.chatStreamed = (await runner.finalChatCompletion()).choices[0].message.content;

const schema = {
  type: "object",
  properties: { name: { type: "string", maxLength: 8 }, old: { type: "boolean" } },
  required: ["name", "old"],
  additionalProperties: false,
};
const formed = await client.chat.completions.create({
  model: "demo", messages, max_tokens: 60, temperature: 0,
  response_format: { type: "json_schema", json_schema: { name: "person", strict: true, schema } },
});
found.formed = JSON.parse(formed.choices[0].message.content);

const response = await client.responses.create({
  model: "demo", input: "Hello.", max_output_tokens: 8, temperature: 0, store: false,
});
found.response = response.output_text;

try {
  await client.completions.create({ model: "demo", prompt, max_tokens: -1 });
} catch (error) {
  found.refused = { status: error.status, param: error.param, kind: error.constructor.name };
}
try {
  await client.completions.create({ model: "nobody", prompt });
} catch (error) {
  found.unknown = { status: error.status, code: error.code, kind: error.constructor.name };
}
console.log(JSON.stringify(found));
