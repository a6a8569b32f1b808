// The colours of the drafts over rendered Markdown, by the browser's highlights: they change no node. style.css has the colours.

const painted = new WeakMap(); // of a node, the highlights and their ranges
const supported = typeof Highlight !== "undefined";

// What is kept of a run's drafts, and validated in conversations.js.
export function draftsOf(run) {
  const { perStep, perSecond } = run.stats;
  return { tokens: tokensOf(run), acceptance: [...run.acceptance], bonus: run.bonus, perStep, perSecond };
}

export const tokensOf = (run) =>
  run.tokens.filter(({ quiet }) => !quiet).map(({ text, source }) => [text.length, source]);

// Colours the text of a node. `tokens` are those of the whole answer, [characters, source], whose places its text nodes name.
export function paint(node, tokens) {
  if (!supported) return;
  const [ranges, walker] = [[], document.createTreeWalker(node, NodeFilter.SHOW_TEXT)];
  let [index, end] = [0, tokens.length ? tokens[0][0] : 0];
  for (let text = walker.nextNode(); text; text = walker.nextNode()) {
    if (text.at === undefined) continue;
    const last = text.at + text.length;
    for (let from = text.at; from < last && index < tokens.length;) {
      const to = Math.min(end, last);
      const source = tokens[index][1];
      if (from < to && source) ranges.push([source, rangeOf(text, from - text.at, to - text.at)]);
      from = Math.max(from, to);
      if (end <= from) end += tokens[(index += 1)]?.[0] ?? 0;
    }
  }
  for (const [source, range] of ranges) highlightOf(source).add(range);
  painted.set(node, ranges);
}

export function erase(node) {
  for (const [source, range] of painted.get(node) ?? []) highlightOf(source).delete(range);
  painted.delete(node);
}

function rangeOf(text, from, to) {
  return new StaticRange({ startContainer: text, startOffset: from, endContainer: text, endOffset: to });
}

function highlightOf(source) {
  const name = `draft-${source}`;
  if (!CSS.highlights.has(name)) CSS.highlights.set(name, new Highlight());
  return CSS.highlights.get(name);
}

export const clear = () => supported && CSS.highlights.clear();
