// One answer: the events of its stream, and what they add up to. Knows nothing about the page or the network.

const FORMAT = "outrider-run";
const BROKEN = "\ufffd"; // stands for a part of a character in the text of a token
const LOOK_AHEAD = 8; // tokens to skip that have no text of their own
const RATE_STEPS = 8; // steps that the current rate is measured over

// A token's `row` is its node in the draft of its `step`; null = the bonus token.
export class Run {
  constructor(request) {
    this.request = request; // {path, body}
    this.events = []; // {at, text, quiet, trace, finish}; `at` in ms since the request
    this.steps = []; // {trace, at, tokens}
    this.tokens = []; // {text, quiet, step, row, source}
    this.text = "";
    this.content = ""; // the text without reasoning
    this.reasoning = "";
    this.finish = null;
    this.error = null;
    this.waiting = []; // tokens whose text has not arrived
  }

  add(event) {
    this.events.push(event);
    if (event.trace) this.addStep(event.trace, event.at);
    if (event.text) this.addText(event.text, Boolean(event.quiet));
    if (event.finish) this.finish = event.finish;
  }

  addStep(trace, at) {
    const step = this.steps.length;
    const { texts, sources } = trace.draft;
    const own = trace.accepted.map((row) => ({ text: texts[row], step, row, source: sources[row] }));
    if (trace.bonus) own.push({ text: trace.bonus.text, step, row: null, source: null });
    this.steps.push({ trace, at, tokens: own.length });
    this.waiting.push(...own);
  }

  // Divides the text among the tokens that wait for it. The shown text is always the text of the API: where the text of single
  // tokens differs from it, as in the middle of a character, the tokens share the difference.
  addText(text, quiet) {
    this.text += text;
    if (quiet) this.reasoning += text;
    else this.content += text;
    let rest = text;
    while (rest) {
      const head = this.waiting[0];
      if (!head) {
        this.show(null, rest, quiet);
        return;
      }
      if (head.text && rest.startsWith(head.text)) {
        this.waiting.shift();
        this.show(head, head.text, quiet);
        rest = rest.slice(head.text.length);
      } else if (head.text && head.text.startsWith(rest)) {
        this.show(head, rest, quiet);
        head.text = head.text.slice(rest.length); // the rest of the token is held back
        return;
      } else {
        const [skipped, at] = this.nextMatch(rest);
        if (at > 0) this.show(head, rest.slice(0, at), quiet);
        this.waiting.splice(0, skipped);
        rest = rest.slice(at);
      }
    }
  }

  // How many waiting tokens do not match the text, and where the text of the next one begins.
  nextMatch(text) {
    for (let ahead = 1; ahead < Math.min(LOOK_AHEAD, this.waiting.length); ahead += 1) {
      const next = this.waiting[ahead].text;
      const at = next && !next.includes(BROKEN) ? text.indexOf(next) : -1;
      if (at >= 0) return [ahead, at];
    }
    return [1, text.length];
  }

  // Shows text of a token, or more text of the last one if there is no token for it.
  show(token, text, quiet) {
    const last = this.tokens[this.tokens.length - 1];
    const shown = token ? token.shown : last;
    if (shown) {
      shown.text += text;
      return;
    }
    const { step, row, source } = token ?? { step: null, row: null, source: null };
    const added = { text, quiet, step, row, source };
    this.tokens.push(added);
    if (token) token.shown = added;
  }

  get ids() {
    return this.steps.flatMap(({ trace }) => {
      const accepted = trace.accepted.map((row) => trace.draft.tokens[row]);
      return trace.bonus ? [...accepted, trace.bonus.token] : accepted;
    });
  }

  get bonus() {
    return this.steps.filter(({ trace }) => trace.bonus).length;
  }

  get lastAt() {
    return this.events.length ? this.events[this.events.length - 1].at : 0;
  }

  // Tokens per second over the steps from `from` to `to`, without the first one's, whose time is the prompt's.
  rate(from = 0, to = this.steps.length - 1) {
    if (to <= from) return null;
    const tokens = this.steps.slice(from + 1, to + 1).reduce((sum, step) => sum + step.tokens, 0);
    const seconds = (this.steps[to].at - this.steps[from].at) / 1000;
    return seconds > 0 ? tokens / seconds : null;
  }

  rateAt(step) {
    return this.rate(Math.max(0, step - RATE_STEPS), step);
  }

  get stats() {
    const tokens = this.steps.reduce((sum, step) => sum + step.tokens, 0);
    const first = this.events.find((event) => event.trace || event.text);
    return {
      tokens,
      steps: this.steps.length,
      perStep: this.steps.length ? tokens / this.steps.length : null,
      perSecond: this.rate(),
      firstMs: first ? first.at : null,
    };
  }

  // Drafted and accepted nodes of each source that has drafted.
  get acceptance() {
    const counts = new Map();
    const count = (source) => counts.get(source) ?? counts.set(source, { drafted: 0, accepted: 0 }).get(source);
    for (const { trace } of this.steps) {
      for (const source of trace.draft.sources) count(source).drafted += 1;
      for (const row of trace.accepted) count(trace.draft.sources[row]).accepted += 1;
    }
    return counts;
  }

  save() {
    const { request, events, error } = this;
    return JSON.stringify({ format: FORMAT, version: 1, request, events, error }, null, 1);
  }

  // The run of an exported file. Throws an Error with a sentence if the file is not one.
  static load(text) {
    let data;
    try {
      data = JSON.parse(text);
    } catch {
      throw new Error("This file is not JSON; choose a run that this page has exported.");
    }
    if (data?.format !== FORMAT || data.version !== 1 || !Array.isArray(data.events) || !data.events.every(isEvent)) {
      throw new Error("This file is not a run of this page; choose one that it has exported.");
    }
    const { path, body } = data.request ?? {};
    const run = new Run({ path: String(path), body: typeof body === "object" && body ? body : {} });
    for (const event of data.events) run.add(event);
    run.error = typeof data.error === "string" ? data.error : null;
    return run;
  }
}

const isNumber = (value) => Number.isFinite(value);
const isText = (value) => typeof value === "string";
const isList = (value, check) => Array.isArray(value) && value.every(check);

function isEvent(event) {
  const known = isNumber(event?.at) && isText(event.text ?? "") && isText(event.finish ?? "");
  return known && (!event.trace || isTrace(event.trace));
}

function isTrace({ draft, accepted, bonus, ...times }) {
  const size = draft?.tokens?.length;
  const columns = [draft?.tokens, draft?.parents, draft?.probabilities];
  const isRow = (row, below) => Number.isInteger(row) && row < below;
  return (
    columns.every((column) => isList(column, isNumber) && column.length === size) &&
    draft.parents.every((parent, row) => isRow(parent, row) && parent >= -1) &&
    [draft.texts, draft.sources].every((column) => isList(column, isText) && column.length === size) &&
    isList(accepted, (row) => isRow(row, size) && row >= 0) &&
    (bonus === null || (isNumber(bonus?.token) && isText(bonus.text))) &&
    [times.draft_ms, times.verify_ms, times.commit_ms].every(isNumber)
  );
}
