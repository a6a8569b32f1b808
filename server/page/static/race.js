// The race: one prompt and seed, first with drafts and then without, each alone on the server; then both clocks side by side.

import { play } from "./api.js";
import { Answer } from "./answer.js";
import { Run } from "./run.js";

class Lane {
  constructor(element, request, onSelect) {
    this.clock = element.querySelector(".clock");
    this.count = element.querySelector(".count");
    this.onSelect = onSelect;
    this.run = new Run(request);
    this.answer = new Answer(element.querySelector(".answer"), this.run, onSelect);
    this.reset();
  }

  reset() {
    this.clock.textContent = "0.000 s";
    this.count.textContent = "";
  }

  tick(run, milliseconds) {
    this.clock.textContent = `${(milliseconds / 1000).toFixed(3)} s`;
    const { tokens, steps } = run.stats;
    this.count.textContent = steps ? `${tokens} tokens in ${steps} steps` : "";
  }

  async drive(signal) {
    await play(this.run, signal, () => {
      this.answer.render();
      this.tick(this.run, this.run.lastAt);
    });
  }

  // Shows the run again as it was at `milliseconds` after its request; true at its end.
  replay(milliseconds) {
    const { events } = this.run;
    while (this.shown.events.length < events.length && events[this.shown.events.length].at <= milliseconds) {
      this.shown.add(events[this.shown.events.length]);
    }
    this.answer.render();
    this.tick(this.shown, Math.min(milliseconds, this.run.lastAt));
    return this.shown.events.length === events.length;
  }

  rewind() {
    this.shown = new Run(this.run.request);
    this.answer = new Answer(this.answer.element, this.shown, this.onSelect);
  }
}

export class Race {
  constructor(section, onSelect) {
    this.section = section;
    this.onSelect = onSelect;
    this.verdict = section.querySelector(".verdict");
    this.again = section.querySelector(".again");
    this.again.addEventListener("click", () => this.replay());
    this.turn = 0; // counts races and replays, so that a new one ends the replay before it
  }

  get answers() {
    return this.lanes ? this.lanes.map((lane) => lane.answer) : [];
  }

  // Runs both. The drafted one goes first: the other way round, it could draft from the plain one's answer.
  // Neither continues a session of the form's name, which may know the answer.
  async start({ path, body }, signal) {
    this.turn += 1;
    this.section.setAttribute("aria-busy", "false"); // no replay
    const drafted = { ...body, session_id: undefined };
    const plain = { ...drafted, speculation: { ...body.speculation, drafter: "none", max_nodes: 0 } };
    const elements = this.section.querySelectorAll(".lane");
    this.lanes = [drafted, plain].map((each, number) => new Lane(elements[number], { path, body: each }, this.onSelect));
    this.section.hidden = false;
    this.section.scrollIntoView({ block: "nearest" });
    this.again.hidden = true;
    this.verdict.classList.remove("equal");
    try {
      this.verdict.textContent = "The drafted run is on its way.";
      await this.lanes[0].drive(signal);
      this.verdict.textContent = "Now the same without drafts.";
      await this.lanes[1].drive(signal);
    } catch (error) {
      this.verdict.textContent = "The race was not finished.";
      throw error;
    }
    this.judge();
    this.again.hidden = false;
  }

  judge() {
    const [drafted, plain] = this.lanes.map((lane) => lane.run);
    const times = [drafted, plain].map((run) => run.lastAt);
    const equal = drafted.text === plain.text && drafted.ids.join() === plain.ids.join();
    this.verdict.classList.toggle("equal", equal);
    const [seconds, plainSeconds] = times.map((time) => `${(time / 1000).toFixed(2)} s`);
    const ratio = (times[1] / times[0]).toFixed(2);
    const words = `Drafted ${seconds}, plain ${plainSeconds}: ${ratio} times as fast.`;
    this.verdict.textContent = equal
      ? `Equal texts. ${words}`
      : `The texts differ. ${words} GET /version says whether rows are invariant, so that drafts change no text.`;
  }

  replay() {
    const turn = (this.turn += 1);
    const started = performance.now();
    this.section.setAttribute("aria-busy", "true");
    for (const lane of this.lanes) lane.rewind();
    const frame = () => {
      if (turn !== this.turn) return;
      const elapsed = performance.now() - started;
      const ended = this.lanes.map((lane) => lane.replay(elapsed));
      if (ended.every(Boolean)) this.section.setAttribute("aria-busy", "false");
      else requestAnimationFrame(frame);
    };
    requestAnimationFrame(frame);
  }
}
