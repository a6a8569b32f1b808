// Markdown as DOM nodes. Promises that no text becomes markup: elements are made by name, links lead to web and mail addresses
// only, and nothing is loaded. Takes time linear in the text. Each text node has `at`, its place in the source.

import { make } from "./dom.js";
import { highlight } from "./highlight.js";
import { inline, Lines } from "./inline.js";

const DEPTH = 12; // of quotes and lists within each other; what is deeper stays text
const MARKER = /^([ \t]*)([-*+]|\d{1,9}[.)])(?=[ \t]|$)/;

// A text that grows. Blocks that are finished keep their nodes.
export class Markdown {
  constructor(element) {
    this.element = element;
    this.blocks = []; // {start, end, node}
  }

  // Shows a text that begins with the one shown before. Returns the nodes that are new, and those that are gone.
  update(text) {
    const open = this.blocks.splice(-2); // a line may still continue the last but one, as a list's
    const from = this.blocks.length ? this.blocks[this.blocks.length - 1].end : 0;
    const lines = linesOf(text, from);
    const [added, gone] = [[], new Set(open.map(({ node }) => node))];
    for (const { from: first, to, build } of blocksOf(lines, 0)) {
      const [start, end] = [lines[first].at, lines[to - 1].at + lines[to - 1].text.length];
      const same = open.find((block) => block.start === start && block.end === end);
      const node = same?.node ?? build();
      this.blocks.push({ start, end, node });
      if (!same) added.push(node);
      else gone.delete(node);
    }
    for (const node of gone) node.remove();
    for (const node of added) this.element.append(node); // what stays comes before it
    return { added, gone };
  }
}

function linesOf(text, from) {
  let at = from;
  return text
    .slice(from)
    .split("\n")
    .map((line) => {
      const found = { text: line.endsWith("\r") ? line.slice(0, -1) : line, at };
      at += line.length + 1;
      return found;
    });
}

// The blocks of lines: {from, to, build}, where `build` makes the node.
function* blocksOf(lines, depth) {
  for (let from = 0; from < lines.length;) {
    if (isBlank(lines[from])) from += 1;
    else {
      const block = { from, ...(kindAt(lines, from, depth) ?? paragraph)(lines, from, depth) };
      yield block;
      from = block.to;
    }
  }
}

// What begins at a line; null for a paragraph.
function kindAt(lines, index, depth) {
  const { text } = lines[index];
  if (fenceOf(text)) return fence;
  if (/^ {0,3}#{1,6}(?=[ \t]|$)/.test(text)) return heading;
  if (isRule(text)) return rule;
  if (depth < DEPTH && /^ {0,3}>/.test(text)) return quote;
  if (depth < DEPTH && MARKER.test(text)) return list;
  if (text.includes("|") && index + 1 < lines.length && isDelimiter(lines[index + 1].text)) return table;
  return null;
}

const isBlank = ({ text }) => !text.trim();
const isRule = (text) => /^(-{3,}|\*{3,}|_{3,})$/.test(text.replace(/[ \t]/g, ""));
const isDelimiter = (text) => /^[ \t|:-]+$/.test(text) && text.includes("-") && text.includes("|");
const cut = ({ text, at }, count) => ({ text: text.slice(count), at: at + count });

function fill(element, lines, depth) {
  for (const { build } of blocksOf(lines, depth)) element.append(build());
  return element;
}

const filled = (name, lines, attributes = {}) => make(name, attributes, inline(lines));

function paragraph(lines, from, depth) {
  let to = from + 1;
  const interrupts = (index) => {
    const number = /^[ \t]*(\d+)[.)]/.exec(lines[index].text);
    return kindAt(lines, index, depth) && !(number && number[1] !== "1"); // "1984." at the start of a line is no list
  };
  while (to < lines.length && !isBlank(lines[to]) && !interrupts(to)) to += 1;
  return { to, build: () => filled("p", lines.slice(from, to)) };
}

function heading(lines, from) {
  const level = lines[from].text.trimStart().search(/[^#]|$/);
  const line = cut(lines[from], lines[from].text.indexOf("#") + level);
  const shown = cut(line, line.text.length - line.text.trimStart().length);
  return { to: from + 1, build: () => filled("h2", [shown], { class: `level-${level}` }) }; // a chat has no order of levels
}

function rule(_, from) {
  return { to: from + 1, build: () => make("hr") };
}

function fenceOf(text) {
  const [whole, mark] = /^ {0,3}(`+|~+)/.exec(text) ?? ["", ""];
  const info = text.slice(whole.length);
  return mark.length < 3 || (mark[0] === "`" && info.includes("`")) ? null : { mark, info: info.trim(), whole };
}

function fence(lines, from) {
  const { mark, info, whole } = fenceOf(lines[from].text);
  const closes = ({ text }) => {
    const line = text.trim();
    return line.length >= mark.length && line[0] === mark[0] && fenceOf(line)?.info === "";
  };
  let end = from + 1;
  while (end < lines.length && !closes(lines[end])) end += 1;
  const code = lines.slice(from + 1, end).map((line) => strip(line, whole.length - mark.length));
  return { to: Math.min(lines.length, end + 1), build: () => codeBlock(code, info.split(/[\s{,]/, 1)[0]) };
}

function codeBlock(lines, language) {
  const source = new Lines(lines);
  const code = make("code");
  for (const { from, to, kind } of highlight(source.text, language.toLowerCase())) {
    const place = kind ? make("span", { class: kind }) : code;
    source.emit(from, to, (node) => place.append(node), "\n");
    if (kind) code.append(place);
  }
  const label = make("span", {}, language.slice(0, 30));
  const head = make(
    "div",
    { class: "code-head" },
    label,
    make("button", { type: "button", class: "copy-code" }, "Copy"),
  );
  return make("div", { class: "code" }, head, scrolling("pre", "Code", code));
}

// Something wide, which the keyboard can scroll.
function scrolling(name, label, ...children) {
  return make(name, { class: "scroll", tabindex: "0", role: "group", "aria-label": label }, ...children);
}

function quote(lines, from, depth) {
  let to = from;
  while (to < lines.length && /^ {0,3}>/.test(lines[to].text)) to += 1;
  const inner = lines.slice(from, to).map((line) => cut(line, /^ {0,3}> ?/.exec(line.text)[0].length));
  return { to, build: () => fill(make("blockquote"), inner, depth + 1) };
}

const indentOf = (text) => [.../^[ \t]*/.exec(text)[0]].reduce((sum, letter) => sum + (letter === "\t" ? 4 : 1), 0);

// Without as many columns of white space.
function strip(line, columns) {
  let count = 0;
  for (let left = columns; left > 0 && " \t".includes(line.text[count] || "x"); count += 1) {
    left -= line.text[count] === "\t" ? 4 : 1;
  }
  return cut(line, count);
}

function markerOf(text) {
  const found = MARKER.exec(text);
  if (!found || isRule(text)) return null;
  const [whole, space, mark] = found;
  return { indent: indentOf(space), kind: mark[mark.length - 1], number: parseInt(mark, 10), width: whole.length + 1 };
}

function list(lines, from, depth) {
  const { kind, number } = markerOf(lines[from].text);
  const items = [];
  const next = (index) => {
    while (index < lines.length && isBlank(lines[index])) index += 1;
    return index;
  };
  let to = from;
  for (let at = from; at < lines.length && markerOf(lines[at].text)?.kind === kind; at = next(to)) {
    const { indent, width } = markerOf(lines[at].text);
    const item = [cut(lines[at], Math.min(width, lines[at].text.length))];
    let columns = null; // of white space to leave out, which are fewer if the lines are indented less
    for (to = at + 1; to < lines.length; to += 1) {
      const [line, follower] = [lines[to], next(to)];
      const within = follower < lines.length && indentOf(lines[follower].text) >= indent + 2;
      if (!within && (isBlank(line) || kindAt(lines, to, depth))) break;
      for (; to < follower; to += 1) item.push(lines[to]); // blank lines
      if (within) columns ??= Math.min(width, indentOf(lines[to].text));
      item.push(strip(lines[to], columns ?? width));
    }
    items.push(item);
  }
  return {
    to,
    build: () =>
      make(
        Number.isNaN(number) ? "ul" : "ol",
        start(number),
        items.map((each) => itemOf(each, depth)),
      ),
  };
}

const start = (number) => (number > 1 ? { start: String(number) } : {});

function itemOf([first, ...rest], depth) {
  const [box] = /^[ \t]*\[[ xX]\] /.exec(first.text) ?? [""];
  const item = make("li", box ? { class: "task" } : {}, ...(box ? [/x/i.test(box) ? "\u2611 " : "\u2610 "] : []));
  return fill(item, [cut(first, box.length), ...rest], depth + 1);
}

// The cells of a table's row, divided at the bars that have no backslash.
function cellsOf({ text, at }) {
  const [cells, end] = [[], text.trimEnd().length];
  let begin = text.length - text.trimStart().length;
  if (text[begin] === "|") begin += 1;
  for (let index = begin; index <= end; index += 1) {
    if (text[index] === "\\") index += 1;
    else if (index === end ? begin < end : text[index] === "|") {
      const cell = text.slice(begin, index);
      cells.push({ text: cell.trim(), at: at + begin + cell.length - cell.trimStart().length });
      begin = index + 1;
    }
  }
  return cells;
}

function table(lines, from) {
  let to = from + 2;
  while (to < lines.length && lines[to].text.includes("|")) to += 1;
  const sides = cellsOf(lines[from + 1]).map(({ text }) => {
    return text.endsWith(":") ? { class: text.startsWith(":") ? "center" : "right" } : {};
  });
  const row = (line, name) => {
    return make(
      "tr",
      {},
      cellsOf(line).map((cell, index) => filled(name, [cell], sides[index] ?? {})),
    );
  };
  const build = () => {
    const body = lines.slice(from + 2, to).map((line) => row(line, "td"));
    return scrolling(
      "div",
      "Table",
      make("table", {}, make("thead", {}, row(lines[from], "th")), make("tbody", {}, body)),
    );
  };
  return { to, build };
}
