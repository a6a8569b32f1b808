// A look at the running server: its models, memory, streams and tokens, and what all requests had. Renewed while it is open.

import * as api from "./api.js";
import { make, number } from "./dom.js";

const LOOK_MS = 1000; // between two readings, over which tokens are counted
const HIDDEN = "This server does not show its metrics here. They may be on a port of their own, or need another key.";
const MEMORY = { file: "file", weights: "weights", caches: "caches up to", rest: "rest" };
const LATENCIES = [
  ["Time to first token", "time_to_first_token_seconds"],
  ["Between tokens", "inter_token_latency_seconds"],
  ["Whole request", "request_duration_seconds"],
];

export class ServerView {
  // `details` has a div for the tables.
  constructor(details) {
    this.details = details;
    this.before = null;
    details.addEventListener("toggle", () => this.look());
    document.addEventListener("visibilitychange", () => this.look());
  }

  async look() {
    clearTimeout(this.timer);
    if (!this.details.open || document.hidden) return;
    const place = this.details.querySelector("div");
    try {
      const now = await read();
      place.replaceChildren(...tables(now, this.before));
      this.before = now;
    } catch (error) {
      place.replaceChildren(make("p", { class: "quiet" }, error.message));
    }
    clearTimeout(this.timer); // of a look that has begun meanwhile
    this.timer = setTimeout(() => this.look(), LOOK_MS);
  }
}

async function read() {
  const [models, { memory }, text] = await Promise.all([api.models(), api.version(), api.metrics()]);
  return { at: performance.now(), models, memory, samples: text === null ? null : parse(text) };
}

// The samples of Prometheus' text format: [{name, labels, value}], of Outrider's names without "outrider_".
export function parse(text) {
  const samples = [];
  for (const line of text.split("\n")) {
    const found = /^outrider_([a-z_:]+)(?:\{(.*)\})? (\S+)$/i.exec(line);
    if (!found) continue;
    const labels = Object.fromEntries(
      [...(found[2] ?? "").matchAll(/(\w+)="([^"]*)"/g)].map(([, name, value]) => [name, value]),
    );
    samples.push({ name: found[1], labels, value: Number(found[3]) });
  }
  return samples;
}

// The sum of all samples of a name by the value of a label; without one, by that of no label.
function sums(samples, name, label) {
  const found = new Map();
  for (const sample of samples) {
    const key = sample.labels[label];
    if (sample.name === name) found.set(key, (found.get(key) ?? 0) + sample.value);
  }
  return found;
}

// The upper bound of the bucket that holds the quantile, in seconds; null without samples.
export function quantile(samples, name, share) {
  const buckets = [...sums(samples, `${name}_bucket`, "le")]
    .map(([bound, count]) => [bound === "+Inf" ? Infinity : Number(bound), count])
    .sort(([a], [b]) => a - b);
  const total = buckets.length ? buckets[buckets.length - 1][1] : 0;
  return total ? buckets.find(([, count]) => count >= share * total)[0] : null;
}

function tables(now, before) {
  const parts = Object.entries(MEMORY).filter(([name]) => Number.isFinite(now.memory?.[name]));
  const memory = parts.map(([name, words]) => [words, `${number(now.memory[name] / 1e6, 0)} MB`]);
  const models = now.models.map((model) => modelTable(model, now, before));
  return [
    ...models,
    ...(memory.length ? [table("Memory", ["", "size"], memory)] : []),
    ...(now.samples ? requestTables(now.samples) : [make("p", { class: "quiet" }, HIDDEN)]),
  ];
}

function modelTable({ name, state }, now, before) {
  const several = now.samples?.some(({ labels }) => labels.model); // a server of one model names none
  const count = (sample, { samples } = now) => sums(samples ?? [], sample, "model").get(several ? name : undefined) ?? null;
  const share = (part, whole) => (count(part) === null ? null : count(part) / count(whole));
  const tokens = count("generated_tokens_total");
  const earlier = before?.samples ? (count("generated_tokens_total", before) ?? 0) : null;
  const rate = tokens === null || earlier === null ? null : Math.max(0, tokens - earlier) / ((now.at - before.at) / 1000);
  return table(name, ["", state], [
    ["Running streams", number(count("requests_running"), 0)],
    ["Waiting requests", number(count("requests_waiting"), 0)],
    ["Tokens per second", number(rate)],
    ["Tokens per step", number(share("generated_tokens_total", "steps_total"), 2)],
    ["Prompt tokens reused", percent(share("cached_prompt_tokens_total", "prompt_tokens_total"))],
    ["Cache used", percent(count("kv_cache_usage_ratio"))],
  ]);
}

function requestTables(samples) {
  const accepted = sums(samples, "accepted_tokens_total", "drafter");
  const rows = [...sums(samples, "draft_tokens_total", "drafter")].map(([source, count]) => {
    const hits = accepted.get(source) ?? 0;
    return [source, count, hits, percent(hits / count)];
  });
  const latencies = LATENCIES.map(([label, name]) => {
    return [label, ...[0.5, 0.95].map((share) => milliseconds(quantile(samples, name, share)))];
  });
  return [
    table("Acceptance by source, all requests", ["source", "drafted", "accepted", "share"], rows),
    table("Latency, all requests", ["", "p50", "p95"], latencies),
  ];
}

const percent = (share) => (Number.isFinite(share ?? NaN) ? `${number(100 * share, 0)}%` : "\u2013");

function milliseconds(seconds) {
  if (seconds === null) return "\u2013";
  return Number.isFinite(seconds) ? `\u2264 ${number(1000 * seconds, seconds < 0.001 ? 1 : 0)} ms` : "longer";
}

function table(caption, heads, rows) {
  const head = make("tr", {}, ...heads.map((text) => (text ? make("th", { scope: "col" }, text) : make("td"))));
  const body = rows.map(([first, ...rest]) => {
    return make("tr", {}, make("th", { scope: "row" }, first), ...rest.map((value) => make("td", {}, String(value))));
  });
  return make("table", {}, make("caption", {}, caption), make("thead", {}, head), make("tbody", {}, ...body));
}
