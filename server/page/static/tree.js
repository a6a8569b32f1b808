// The draft tree of one step as a drawing: accepted nodes along the top, rejected ones below, the bonus token at the end.

import { make } from "./dom.js";

const NS = "http://www.w3.org/2000/svg";
const CHARACTER = 7.6; // width of a character of the nodes' text, in px
const NODE_HEIGHT = 38;
const LINE = 48;
const GAP = 26; // between columns
const MAX_CHARACTERS = 14;

// The text of a token with its white space made visible.
export function visible(text) {
  const runs = text.replace(/ {5,}/g, (spaces) => `\u00b7\u00d7${spaces.length}`);
  const shown = runs.replaceAll(" ", "\u00b7").replaceAll("\n", "\u21b5").replaceAll("\t", "\u21e5");
  if (!shown) return "\u2205";
  return shown.length > MAX_CHARACTERS ? `${shown.slice(0, MAX_CHARACTERS - 1)}\u2026` : shown;
}

// The nodes with their places: {text, parent, depth, line, source, state, label, detail}. Node 0 is the token before the step.
export function layout(trace, before) {
  const { texts, parents, probabilities, sources } = trace.draft;
  const accepted = new Set(trace.accepted);
  const nodes = [{ text: before, parent: null, depth: 0, state: "root", source: null, detail: "" }];
  texts.forEach((text, row) => {
    const parent = parents[row] + 1;
    const state = accepted.has(row) ? "accepted" : "rejected";
    const detail = `${percent(probabilities[row])} ${sources[row]}`;
    nodes.push({ text, parent, depth: nodes[parent].depth + 1, state, source: sources[row], detail });
  });
  if (trace.bonus) {
    const parent = trace.accepted.length ? trace.accepted[trace.accepted.length - 1] + 1 : 0;
    const depth = nodes[parent].depth + 1;
    nodes.push({ text: trace.bonus.text, parent, depth, state: "bonus", source: null, detail: "bonus" });
  }
  const children = nodes.map(() => []);
  nodes.forEach((node, index) => node.parent !== null && children[node.parent].push(index));
  const rank = (index) => (nodes[index].state === "rejected" ? 1 : 0);
  for (const list of children) list.sort((a, b) => rank(a) - rank(b) || a - b);
  const stack = [0];
  let line = -1;
  let above = -1; // depth of the node placed last
  while (stack.length) {
    const index = stack.pop();
    if (nodes[index].depth !== above + 1 || line < 0) line += 1;
    above = nodes[index].depth;
    nodes[index].line = line;
    stack.push(...[...children[index]].reverse());
  }
  return nodes;
}

export function draw(trace, before) {
  const nodes = layout(trace, before);
  const widths = [];
  for (const node of nodes) {
    const characters = Math.max(visible(node.text).length, node.detail.length * 0.8);
    widths[node.depth] = Math.max(widths[node.depth] ?? 0, characters * CHARACTER + 16);
  }
  const lefts = [1];
  widths.forEach((width, depth) => lefts.push(lefts[depth] + width + GAP));
  const width = lefts[widths.length] - GAP + 2;
  const height = (Math.max(...nodes.map((node) => node.line)) + 1) * LINE;
  const drawing = svg("svg", {
    width,
    height,
    viewBox: `0 0 ${width} ${height}`,
    role: "img",
    "aria-label": summary(trace),
  });
  for (const node of nodes) {
    if (node.parent === null) continue;
    const parent = nodes[node.parent];
    const [x0, y0] = [lefts[parent.depth] + widths[parent.depth], middle(parent)];
    const [x1, y1] = [lefts[node.depth], middle(node)];
    const d = `M${x0} ${y0}C${x0 + GAP / 2} ${y0} ${x1 - GAP / 2} ${y1} ${x1} ${y1}`;
    drawing.append(svg("path", { d, class: `edge ${node.state}` }));
  }
  for (const node of nodes) drawing.append(drawNode(node, lefts[node.depth], widths[node.depth]));
  return drawing;
}

function drawNode(node, x, width) {
  const source = node.source ? ` source-${node.source}` : "";
  const group = svg("g", { class: `node ${node.state}${source}` });
  const y = middle(node) - NODE_HEIGHT / 2;
  const title = svg("title", {}, `${visible(node.text)}: ${node.state}${node.detail ? `, ${node.detail}` : ""}`);
  group.append(title, svg("rect", { x, y, width, height: NODE_HEIGHT, rx: 7 }));
  group.append(svg("text", { x: x + 8, y: y + (node.detail ? 16 : 23), class: "token-text" }, visible(node.text)));
  if (node.detail) group.append(svg("text", { x: x + 8, y: y + 31, class: "token-detail" }, node.detail));
  return group;
}

export function summary(trace) {
  const drafted = trace.draft.tokens.length;
  if (!drafted) return "Nothing was drafted; the target gave one token.";
  const rejected = drafted - trace.accepted.length;
  const bonus = trace.bonus ? ", one bonus token" : "";
  return `${drafted} drafted, ${trace.accepted.length} accepted, ${rejected} rejected${bonus}.`;
}

export function times(trace) {
  const { draft_ms: draft, verify_ms: verify, commit_ms: commit } = trace;
  return make("p", { class: "quiet" }, `${reason(trace)}Draft ${draft} ms, verify ${verify} ms, commit ${commit} ms`);
}

// Why as many nodes were verified, if their cost decided.
function reason({ draft, proposed, expected_tokens: expected, gain }) {
  if (expected === null) return "";
  const nodes = `${draft.tokens.length} of ${proposed} nodes verified`;
  return `${nodes}: ${expected} tokens expected, ${gain} times as fast as without a draft. `;
}

const percent = (probability) => `${Math.round(100 * probability)}%`;
const middle = (node) => node.line * LINE + LINE / 2;

function svg(name, attributes, text) {
  const element = document.createElementNS(NS, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  return element;
}
