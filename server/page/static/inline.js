// The text within a block of Markdown: emphasis, code, links, escapes. Takes time linear in the text.

import { make } from "./dom.js";

const OPEN = 24; // marks that may be open at once, and so the depth of nesting
const TAGS = { "*": "em", _: "em", "**": "strong", __: "strong", "~~": "del" };
const SPECIAL = /[\\`*_~[\]&]|https?:\/\//g;
const ESCAPABLE = /[!-/:-@[-`{-~\n]/;
const DESTINATION = /\([ \t]*<?((?:[^\s()<>[\]]|\([^\s()<>[\]]*\))*)>?(?:[ \t]+"[^"\n]*")?[ \t]*\)/y;
const ADDRESS = /https?:\/\/[^\s<>"`[\]]+/y;
const ENTITY = /&(?:(amp|lt|gt|quot|nbsp)|#(\d{1,7})|#x([\da-f]{1,6}));/iy;
const ENTITIES = { amp: "&", lt: "<", gt: ">", quot: '"', nbsp: "\u00a0" };
const isSpace = (letter) => /\s/.test(letter);
const isMark = (letter) => /[\p{P}\p{S}]/u.test(letter);

// The text of lines of the source, {text, at}, from which text nodes are made from left to right.
export class Lines {
  constructor(lines) {
    this.lines = lines;
    this.text = lines.map(({ text }) => text).join("\n");
    [this.line, this.start] = [0, 0]; // where the nodes are, and where that line begins
  }

  // Calls `add` for each text node; `newline` is the text of the end of a line, or null for a line break.
  emit(from, to, add, newline = null) {
    while (from < to) {
      const { text, at } = this.lines[this.line];
      const end = Math.min(to, this.start + text.length);
      if (from < end) {
        add(textNode(this.text.slice(from, end), at + from - this.start));
        from = end;
      } else {
        add(newline === null ? make("br") : document.createTextNode(newline));
        this.line += 1;
        this.start += text.length + 1;
        from = this.start;
      }
    }
  }
}

function textNode(text, at) {
  return Object.assign(document.createTextNode(text), { at });
}

// The address if a link may lead there, or null.
function safeAddress(text) {
  try {
    const url = new URL(text);
    return ["http:", "https:", "mailto:"].includes(url.protocol) ? url.href : null;
  } catch {
    return null; // a relative address would lead to this server
  }
}

function linkTo(href, nodes) {
  const link = make("a", { href, title: href, target: "_blank", rel: "noopener noreferrer nofollow" }, nodes);
  for (const inner of link.querySelectorAll("a")) inner.replaceWith(...inner.childNodes);
  return link;
}

// The nodes of the lines' text.
export function inline(lines) {
  const parser = new Parser(lines);
  parser.parse();
  return parser.nodes;
}

class Parser {
  constructor(lines) {
    this.source = new Lines(lines);
    this.text = this.source.text;
    this.frames = [{ mark: "", nodes: [] }]; // marks that are open, and the nodes since; the first one is the text itself
    this.shown = 0; // the place up to which nodes were made
    this.ticks = null;
  }

  get nodes() {
    return this.frames[0].nodes;
  }

  parse() {
    for (let at = 0; ;) {
      SPECIAL.lastIndex = at;
      const found = SPECIAL.exec(this.text);
      if (!found) break;
      at = this.read(found[0][0], found.index);
    }
    this.show(this.text.length);
    while (this.frames.length > 1) this.dissolve(1);
  }

  // Reads what begins at a place; returns where it ends.
  read(letter, at) {
    if (letter === "\\") return this.readEscape(at);
    if (letter === "`") return this.readCode(at);
    if (letter === "[") return this.readBracket(at);
    if (letter === "]") return this.readLink(at);
    if (letter === "&") return this.readEntity(at);
    return letter === "h" ? this.readAddress(at) : this.readEmphasis(letter, at);
  }

  // Makes nodes of the text up to a place, and goes on behind `skipped` characters.
  show(to, skipped = 0) {
    const { nodes } = this.frames[this.frames.length - 1];
    this.source.emit(this.shown, to, (node) => nodes.push(node));
    this.shown = to + skipped;
  }

  add(node) {
    this.frames[this.frames.length - 1].nodes.push(node);
  }

  open(mark, at, length) {
    if (this.frames.length > OPEN) this.dissolve(1);
    this.show(at);
    const frame = { mark, nodes: [] };
    this.frames.push(frame);
    this.show(at + length); // the mark itself, which is left out once it is closed
    frame.length = frame.nodes.length;
  }

  // Makes an open mark text.
  dissolve(index) {
    const [{ nodes }] = this.frames.splice(index, 1);
    for (const node of nodes) this.frames[index - 1].nodes.push(node);
  }

  // The nodes since the mark of a frame, which is closed.
  close(index) {
    while (this.frames.length > index + 1) this.dissolve(index + 1);
    const { nodes, length } = this.frames.pop();
    return nodes.slice(length);
  }

  find(mark) {
    return this.frames.findLastIndex((frame) => frame.mark === mark);
  }

  readEscape(at) {
    if (!ESCAPABLE.test(this.text[at + 1] ?? "")) return at + 1;
    this.show(at, 1);
    return at + 2;
  }

  readEntity(at) {
    ENTITY.lastIndex = at;
    const [whole, name, decimal, hexadecimal] = ENTITY.exec(this.text) ?? [];
    const code = decimal ? Number(decimal) : parseInt(hexadecimal, 16);
    if (!whole || code > 0x10ffff) return at + 1;
    this.show(at, whole.length);
    this.add(textNode(name ? ENTITIES[name.toLowerCase()] : String.fromCodePoint(code), at));
    return at + whole.length;
  }

  readCode(at) {
    const length = this.runAt(at);
    const end = this.closing(length, at + length);
    if (end === undefined) return at + length;
    const padded = this.text[at + length] === " " && this.text[end - 1] === " " && end - at - length > 2;
    const code = make("code");
    this.show(at, length + padded);
    this.source.emit(this.shown, end - padded, (node) => code.append(node), " ");
    this.add(code);
    this.shown = end + length;
    return this.shown;
  }

  runAt(at) {
    let end = at;
    while (this.text[end] === this.text[at]) end += 1;
    return end - at;
  }

  // The next run of as many backticks. Places are asked for in their order, so that each run is looked at once.
  closing(length, from) {
    if (!this.ticks) {
      this.ticks = new Map();
      for (const { 0: run, index } of [...this.text.matchAll(/`+/g)].reverse()) {
        if (!this.ticks.has(run.length)) this.ticks.set(run.length, []);
        this.ticks.get(run.length).push(index);
      }
    }
    const places = this.ticks.get(length);
    while (places.length && places[places.length - 1] < from) places.pop();
    return places.pop();
  }

  readBracket(at) {
    const picture = this.text[at - 1] === "!" && this.shown < at;
    this.open("[", at - picture, 1 + picture);
    return at + 1;
  }

  readLink(at) {
    const index = this.find("[");
    if (index < 0) return at + 1;
    DESTINATION.lastIndex = at + 1;
    const found = DESTINATION.exec(this.text);
    const address = found && safeAddress(found[1]);
    if (!address) {
      while (this.frames.length > index) this.dissolve(index);
      return at + 1;
    }
    this.show(at, 1 + found[0].length);
    this.add(linkTo(address, this.close(index)));
    return this.shown;
  }

  readAddress(at) {
    ADDRESS.lastIndex = at;
    const [found] = ADDRESS.exec(this.text) ?? [""];
    const closed = !found.includes("(");
    let length = found.length;
    while (length && (".,;:!?'*_~".includes(found[length - 1]) || (closed && found[length - 1] === ")"))) length -= 1;
    const address = /\w/.test(this.text[at - 1] ?? "") ? null : safeAddress(found.slice(0, length));
    if (!address) return at + 4;
    this.show(at, length);
    this.add(linkTo(address, [textNode(found.slice(0, length), at)]));
    return this.shown;
  }

  // A run of marks closes what it can, and then opens what it can, by CommonMark's rules of flanking.
  readEmphasis(letter, at) {
    const run = this.runAt(at);
    const [before, after] = [this.text[at - 1] ?? " ", this.text[at + run] ?? " "];
    const left = !isSpace(after) && (!isMark(after) || isSpace(before) || isMark(before));
    const right = !isSpace(before) && (!isMark(before) || isSpace(after) || isMark(after));
    const opens = left && (letter !== "_" || !right || isMark(before));
    const closes = right && (letter !== "_" || !left || isMark(after));
    if (run > 3 || (letter === "~" && run !== 2)) return at + run;
    let rest = run;
    while (rest && closes) {
      const index = this.frames.findLastIndex(({ mark }) => mark[0] === letter && mark.length <= rest);
      if (index < 0) break;
      const { mark } = this.frames[index];
      this.show(at + run - rest, mark.length);
      this.add(make(TAGS[mark], {}, this.close(index)));
      rest -= mark.length;
    }
    while (rest && opens) {
      const length = Math.min(2, rest);
      this.open(letter.repeat(length), at + run - rest, length);
      rest -= length;
    }
    return at + run;
  }
}
