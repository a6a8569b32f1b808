// The server's API: requests, streams and errors in plain words. The key is kept in this module's memory only.

const base = new URL("..", import.meta.url); // the files are at page/
let key = "";

export function setKey(value) {
  key = value.trim();
}

// An error for the user. `kind`: "gone", "key", "full", "loading" or "refused".
export class Problem extends Error {
  constructor(kind, message, param = null) {
    super(message);
    this.kind = kind;
    this.param = param; // the field of the request that the server refuses
  }
}

const JSON_BODY = { "Content-Type": "application/json" };
const GONE = "The server is gone: nothing answers at this address. Start it again, then retry.";
const CUT = "The connection was lost before the answer was complete. The server may have stopped; retry.";

async function request(path, options = {}) {
  const headers = key ? { Authorization: `Bearer ${key}`, ...options.headers } : options.headers;
  try {
    return await fetch(new URL(path, base), { ...options, headers, cache: "no-store", credentials: "omit" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem("gone", GONE);
  }
}

async function problemOf(response) {
  const error = await response.json().then(
    (body) => body?.error,
    () => null,
  );
  const words = error?.message ?? error; // the latter is Ollama's form
  const message = typeof words === "string" ? words : `The server answered with status ${response.status}.`;
  if (response.status === 401) {
    const what = key ? "The API key is wrong; enter another one" : "This server needs an API key; enter it";
    return new Problem("key", `${what} under Settings.`);
  }
  if (response.status === 429) {
    const seconds = response.headers.get("Retry-After");
    return new Problem("full", `The server is full. ${message}${seconds ? ` Retry in ${seconds} s.` : ""}`);
  }
  return new Problem(response.status === 503 ? "loading" : "refused", message, error?.param);
}

// The server's state: {state, words}. Never throws.
export async function status() {
  try {
    const response = await request("ready");
    const { status: state = "full", detail } = await response.json();
    const words = {
      ready: "Ready",
      loading: "Loading the model",
      restarting: "Restarting the model",
      draining: "Shutting down",
      failed: `Failed: ${detail}`,
      full: "Full: the server has no free connection",
    };
    return { state, words: words[state] ?? String(state) };
  } catch {
    return { state: "gone", words: "Gone: no server answers" };
  }
}

export async function models() {
  const response = await request("v1/models");
  if (!response.ok) throw await problemOf(response);
  const { data } = await response.json();
  return data.map(({ id, capabilities, status, size_bytes: size }) => ({
    name: String(id),
    sees: capabilities ? capabilities.includes("vision") : null, // null = not known before it is loaded
    writes: !(capabilities ?? []).some((each) => ["embeddings", "rerank"].includes(each)),
    state: status?.value ?? "loaded",
    size,
  }));
}

// Returns once the model is in memory.
export async function load(name) {
  const body = JSON.stringify({ model: name });
  const response = await request("api/generate", { method: "POST", headers: JSON_BODY, body });
  if (!response.ok) throw await problemOf(response);
}

// The server's version and memory, or {} if it does not tell.
export async function version() {
  const response = await request("version");
  return response.ok ? response.json() : {};
}

// The text of /metrics, or null if this server does not show it here.
export async function metrics() {
  const response = await request("metrics");
  return response.ok ? response.text() : null;
}

// The chunks of a stream. Throws a Problem if it does not reach its end. `onComment` gets what the server says meanwhile.
async function* stream(path, body, signal, onComment) {
  const response = await request(path, { method: "POST", headers: JSON_BODY, body: JSON.stringify(body), signal });
  if (!response.ok) throw await problemOf(response);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let [rest, ended] = ["", false];
  try {
    for (;;) {
      const { value, done } = await reader.read().catch((error) => {
        throw error.name === "AbortError" ? error : new Problem("gone", CUT);
      });
      if (done && ended) return;
      if (done) throw new Problem("gone", CUT);
      const blocks = (rest + value).split("\n\n");
      rest = blocks.pop();
      for (const block of blocks) {
        const data = block
          .split("\n")
          .find((line) => line.startsWith("data: "))
          ?.slice(6);
        if (data === "[DONE]") ended = true;
        if (!data && block.startsWith(": ")) onComment(block.slice(2).trim());
        if (!data || ended) continue;
        const chunk = JSON.parse(data);
        if (chunk.error) throw new Problem("refused", String(chunk.error.message), chunk.error.param);
        yield chunk;
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // has no effect at the end
  }
}

// As `stream`, without the drafts if the server does not show them.
async function* chunksOf({ path, body }, ...rest) {
  try {
    yield* stream(path, body, ...rest);
  } catch (error) {
    if (error.param !== "speculation.trace") throw error;
    yield* stream(path, { ...body, speculation: { ...body.speculation, trace: undefined } }, ...rest);
  }
}

// Streams an answer into a run, and calls `onEvent` after each of its events.
export async function play(run, signal, onEvent, onComment = () => {}) {
  const started = performance.now();
  try {
    for await (const chunk of chunksOf(run.request, signal, onComment)) {
      for (const choice of chunk.choices) {
        run.add({ at: performance.now() - started, ...eventOf(choice) });
        onEvent();
      }
    }
  } catch (error) {
    run.error = error.name === "AbortError" ? "Stopped." : error.message;
    throw error;
  } finally {
    onEvent();
  }
}

function eventOf(choice) {
  const delta = choice.delta ?? {};
  const call = delta.tool_calls?.[0]?.function;
  const content = choice.text ?? delta.content ?? (call ? (call.name ?? "") + (call.arguments ?? "") : "");
  const event = { text: delta.reasoning_content ?? content };
  if (delta.reasoning_content) event.quiet = true;
  if (choice.trace) event.trace = choice.trace;
  if (choice.finish_reason) event.finish = choice.finish_reason;
  return event;
}
