// The tokens of a run on the page, each coloured by the drafter that guessed it.

import { make, number } from "./dom.js";
import { draw, summary, times } from "./tree.js";

const STEPS = { ArrowRight: 1, ArrowLeft: -1 };

// Shows the tokens in `element`. `onSelect(run, step, pinned)` is called for a token under the pointer or chosen.
export class Answer {
  constructor(element, run, onSelect = null) {
    this.element = element;
    this.run = run;
    this.spans = [];
    this.onSelect = onSelect;
    this.place = make("div"); // holds the listeners of this run only
    element.replaceChildren(this.place);
    if (onSelect) this.listen();
  }

  // Shows the tokens that have arrived.
  render() {
    const { tokens } = this.run;
    const known = this.spans.length;
    if (known && known <= tokens.length) this.spans[known - 1].textContent = tokens[known - 1].text;
    const added = tokens.slice(known).map((token, offset) => this.span(token, known + offset));
    this.spans.push(...added);
    this.place.append(...added);
  }

  span(token, index) {
    const kind = token.source ? `drafted source-${token.source}` : "plain";
    const span = make("span", { class: `token ${kind}${token.quiet ? " reasoning" : ""}` }, token.text);
    if (this.onSelect && token.step !== null) {
      span.dataset.index = index;
      span.tabIndex = index === 0 ? 0 : -1; // the arrow keys lead to the others
      span.setAttribute("role", "button");
      span.title = `${token.source ?? "bonus token"}, step ${token.step + 1}`;
    }
    return span;
  }

  listen() {
    const element = this.place;
    const tokenOf = (event) => this.run.tokens[event.target.closest?.("[data-index]")?.dataset.index];
    const select = (event, pinned) => {
      const token = tokenOf(event);
      if (token) this.onSelect(this.run, token.step, pinned);
      return token;
    };
    element.addEventListener("pointerover", (event) => event.pointerType === "mouse" && select(event, false));
    element.addEventListener("click", (event) => select(event, true));
    element.addEventListener("focusin", (event) => event.target.matches(":focus-visible") && select(event, false));
    element.addEventListener("keydown", (event) => {
      if (event.key === "Enter" || event.key === " ") {
        if (select(event, true)) event.preventDefault();
      } else if (event.key in STEPS) {
        this.move(Number(event.target.dataset.index) + STEPS[event.key]);
        event.preventDefault();
      }
    });
  }

  move(index) {
    const span = this.spans[index];
    if (!span) return;
    for (const other of this.place.querySelectorAll('[tabindex="0"]')) other.tabIndex = -1;
    span.tabIndex = 0;
    span.focus();
  }

  mark(step) {
    this.spans.forEach((span, index) =>
      span.classList.toggle("chosen", step !== null && this.run.tokens[index].step === step),
    );
  }
}

// The panel with the draft tree of one step.
export class TreePanel {
  constructor(panel, onShow) {
    this.panel = panel;
    this.onShow = onShow; // called with the run and the step, or null and null
    this.pinned = false;
    [this.title, this.words, this.place] = ["h2", ".summary", ".drawing"].map((part) => panel.querySelector(part));
    panel.querySelector(".close").addEventListener("click", () => this.close());
    panel.querySelector(".previous").addEventListener("click", () => this.show(this.run, this.step - 1, true));
    panel.querySelector(".next").addEventListener("click", () => this.show(this.run, this.step + 1, true));
  }

  show(run, step, pinned) {
    if (step === null || !run.steps[step] || (this.pinned && !pinned)) return;
    if (this.run === run && this.step === step && this.pinned === pinned && !this.panel.hidden) return;
    Object.assign(this, { run, step, pinned });
    const { trace } = run.steps[step];
    this.title.textContent = `Step ${step + 1} of ${run.steps.length}`;
    this.words.textContent = summary(trace);
    this.place.replaceChildren(draw(trace, before(run, step)), times(trace));
    this.panel.hidden = false;
    this.panel.querySelector(".previous").disabled = step === 0;
    this.panel.querySelector(".next").disabled = step === run.steps.length - 1;
    this.onShow(run, step);
  }

  close() {
    this.panel.hidden = true;
    this.pinned = false;
    this.run = null;
    this.onShow(null, null);
  }
}

// The text of the token before a step.
function before(run, step) {
  const token = run.tokens.findLast((each) => each.step !== null && each.step < step);
  return token ? token.text : "prompt";
}

export function showStats(element, run) {
  const { tokens, steps, perStep, perSecond, firstMs } = run.stats;
  const figures = [
    [number(perSecond, 0), "tokens/s"],
    [number(perStep, 2), "tokens/step"],
    [number(firstMs, 0), "ms to first token"],
    [String(tokens), "tokens"],
    [String(steps), "steps"],
  ];
  element.replaceChildren(
    ...figures.map(([value, name]) => make("div", {}, make("dd", {}, value), make("dt", {}, name))),
  );
}

// The legend: each source's colour and how much of what it drafted was accepted; `bonus` is the number of bonus tokens.
export function showLegend(element, acceptance, bonus) {
  const rows = acceptance.map(([source, { drafted, accepted }]) => {
    const share = Math.round((100 * accepted) / drafted);
    const bar = make("i", { class: "bar", "aria-hidden": "true" }, make("b"));
    bar.firstChild.style.width = `${share}%`;
    const name = make("span", { class: `token drafted source-${source}` }, source);
    return make("li", { class: `source-${source}` }, name, bar, make("span", {}, `${accepted} of ${drafted} accepted`));
  });
  const plain = make(
    "li",
    {},
    make("span", { class: "token plain" }, "bonus"),
    make("i"),
    make("span", {}, `${bonus} from the target`),
  );
  element.replaceChildren(...rows, plain);
}
