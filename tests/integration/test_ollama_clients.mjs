// What the clients in JavaScript do with a server that replays answers, and with one whose model answers.
import assert from "node:assert/strict";

const [name, replaying, real, model, values] = process.argv.slice(2);
const { call, final, thought, command, tool, schema } = JSON.parse(values);
const question = [{ role: "user", content: "Write the file proof.txt." }];

async function clients() {
  const { Ollama } = await import("ollama");
  const ollama = new Ollama({ host: replaying });
  assert.deepEqual((await ollama.list()).models.map((each) => each.name), ["long:latest", "static:latest"]);
  assert.ok((await ollama.show({ model: "long" })).capabilities.includes("completion"));

  const answer = await ollama.chat({ model: "long", messages: question, tools: [tool], keep_alive: "1m" });
  assert.equal(answer.message.content, call);
  assert.equal(answer.message.tool_calls[0].function.arguments.command, command);
  const result = { role: "tool", tool_name: "bash", content: "the tool ran" };
  let text = "";
  const messages = [...question, answer.message, result];
  for await (const part of await ollama.chat({ model: "long", messages, tools: [tool], stream: true })) text += part.message.content;
  assert.equal(text, final);
  assert.equal((await ollama.chat({ model: "long", messages: question, think: true })).message.thinking, thought);
  assert.equal((await ollama.embed({ model: "static", input: ["a", "b"] })).embeddings.length, 2);
  await assert.rejects(ollama.chat({ model: "other", messages: question }), /'other' does not exist/);
  for await (const part of await ollama.pull({ model: "long", stream: true })) assert.equal(part.status, "success");

  const own = new Ollama({ host: real });
  const typed = await own.chat({ model, messages: question, format: schema, options: { temperature: 0 } });
  assert.equal(typeof JSON.parse(typed.message.content).yes, "boolean");
  const stream = await own.generate({ model, prompt: "def f", raw: true, stream: true, options: { num_predict: -1 } });
  await assert.rejects(async () => {
    for await (const part of stream) if (part.response) stream.abort();
  }, { name: "AbortError" });
}

async function provider() {
  const { createOllama } = await import("ollama-ai-provider-v2");
  const { embedMany, generateObject, generateText, isStepCount, jsonSchema, streamText } = await import("ai");
  const { z } = await import("zod");
  const ollama = createOllama({ baseURL: `${replaying}/api` });
  const ran = [];
  const bash = {
    description: "Runs a command.",
    inputSchema: z.object({ command: z.string() }).loose(),
    execute: async (input) => (ran.push(input.command), "the tool ran"),
  };
  const prompt = "Write the file proof.txt.";
  const done = await generateText({ model: ollama("long"), prompt, tools: { bash }, stopWhen: isStepCount(3) });
  assert.deepEqual([ran, done.text, done.finishReason], [[command], final, "stop"]);
  assert.ok(done.usage.inputTokens > 0 && done.usage.outputTokens > 0);

  let text = "";
  const thinking = { ollama: { think: true } };
  const streamed = streamText({ model: ollama("long"), prompt, providerOptions: thinking });
  for await (const part of streamed.textStream) text += part;
  assert.deepEqual([text, await streamed.reasoningText], [final, thought]);
  const { embeddings } = await embedMany({ model: ollama.embedding("static"), values: ["a", "b"] });
  assert.equal(embeddings.length, 2);
  const unknown = { statusCode: 404, responseBody: /'other' does not exist/ };
  await assert.rejects(generateText({ model: ollama("other"), prompt, maxRetries: 0 }), unknown);

  const own = createOllama({ baseURL: `${real}/api` });
  const { object } = await generateObject({ model: own(model), prompt, schema: jsonSchema(schema) });
  assert.equal(typeof object.yes, "boolean");
}

await { ollama: clients, "ollama-ai-provider-v2": provider }[name]();
console.log(`${name} passed`);
