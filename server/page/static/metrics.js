// The server's own figures over all requests, from /metrics.

import { make, number } from "./dom.js";

// The samples of Prometheus' text format: [{name, labels, value}].
export function parse(text) {
  const samples = [];
  for (const line of text.split("\n")) {
    const found = /^([a-z_:]+)(?:\{(.*)\})? (\S+)$/i.exec(line);
    if (!found) continue;
    const labels = Object.fromEntries(
      [...(found[2] ?? "").matchAll(/(\w+)="([^"]*)"/g)].map(([, name, value]) => [name, value]),
    );
    samples.push({ name: found[1], labels, value: Number(found[3]) });
  }
  return samples;
}

// The upper bound of the bucket that holds the quantile, in seconds; null without samples.
export function quantile(samples, name, share) {
  const buckets = samples
    .filter((sample) => sample.name === `${name}_bucket`)
    .map(({ labels, value }) => [labels.le === "+Inf" ? Infinity : Number(labels.le), value])
    .sort(([a], [b]) => a - b);
  const total = buckets.length ? buckets[buckets.length - 1][1] : 0;
  return total ? buckets.find(([, count]) => count >= share * total)[0] : null;
}

export function show(element, text) {
  if (text === null) {
    const words =
      "This server does not show its metrics here. They may be on a port of their own, or need another key.";
    element.replaceChildren(make("p", { class: "quiet" }, words));
    return;
  }
  const samples = parse(text);
  const sum = (name) => {
    return samples.filter((each) => each.name === `outrider_${name}`).reduce((all, each) => all + each.value, 0);
  };
  const state = [
    ["Running streams", sum("requests_running")],
    ["Waiting requests", sum("requests_waiting")],
    ["Tokens per step", number(sum("generated_tokens_total") / sum("steps_total"), 2)],
    ["Prompt tokens reused", `${number((100 * sum("cached_prompt_tokens_total")) / sum("prompt_tokens_total"), 0)}%`],
  ];
  const values = (name) =>
    new Map(samples.filter((each) => each.name === name).map((each) => [each.labels.drafter, each.value]));
  const drafted = values("outrider_draft_tokens_total");
  const accepted = values("outrider_accepted_tokens_total");
  const rows = [...drafted].map(([source, count]) => {
    const hits = accepted.get(source) ?? 0;
    return [source, count, hits, `${number((100 * hits) / count, 0)}%`];
  });
  const latencies = [
    ["Time to first token", "outrider_time_to_first_token_seconds"],
    ["Between tokens", "outrider_inter_token_latency_seconds"],
    ["Whole request", "outrider_request_duration_seconds"],
  ].map(([label, name]) => [label, ...[0.5, 0.95].map((share) => milliseconds(quantile(samples, name, share)))]);
  element.replaceChildren(
    table("Streams and queue now, all else since the start", ["", "value"], state),
    table("Acceptance by source, all requests", ["source", "drafted", "accepted", "share"], rows),
    table("Latency, all requests", ["", "p50", "p95"], latencies),
  );
}

function milliseconds(seconds) {
  if (seconds === null) return "\u2013";
  return Number.isFinite(seconds) ? `\u2264 ${1000 * seconds} ms` : "> 10 s";
}

function table(caption, heads, rows) {
  const head = make("tr", {}, ...heads.map((text) => make("th", { scope: "col" }, text)));
  const body = rows.map(([first, ...rest]) => {
    return make("tr", {}, make("th", { scope: "row" }, first), ...rest.map((value) => make("td", {}, String(value))));
  });
  return make("table", {}, make("caption", {}, caption), make("thead", {}, head), make("tbody", {}, ...body));
}
