// The choice of a model, and loading it. A server of one model has loaded it already.

import * as api from "./api.js";
import { make } from "./dom.js";
import { prefer, preference } from "./store.js";

const LOOK_MS = 1000;
const gigabytes = (bytes) => (bytes ? `, ${(bytes / 1e9).toFixed(1)} GB` : "");

export class Models {
  // `parts` are the select, the button that loads, and the place for the progress.
  constructor({ select, button, progress }, complain) {
    Object.assign(this, { select, button, progress, complain });
    this.known = [];
    select.addEventListener("change", () => {
      prefer("model", select.value);
      this.showState();
    });
    button.addEventListener("click", () => this.load());
  }

  get chosen() {
    return this.known.find(({ name }) => name === this.select.value);
  }

  // Whether the chosen model reads pictures; null if that is not known before it is loaded.
  get sees() {
    return this.chosen?.sees ?? null;
  }

  async refresh() {
    this.known = (await api.models()).filter(({ writes }) => writes);
    const wanted = [
      this.select.value,
      await preference("model"),
      this.known.find(({ state }) => state === "loaded")?.name,
    ];
    this.select.replaceChildren(
      ...this.known.map(({ name, state, size }) => {
        return make("option", { value: name }, state === "loaded" ? name : `${name} (${state}${gigabytes(size)})`);
      }),
    );
    const found = wanted.find((name) => this.known.some((model) => model.name === name));
    if (found) this.select.value = found;
    this.showState();
  }

  showState() {
    this.button.hidden = !this.chosen || this.chosen.state === "loaded";
  }

  // Loads the chosen model, and says how long it has taken so far.
  async load() {
    const { name, size } = this.chosen;
    const started = performance.now();
    const say = () => {
      const seconds = Math.round((performance.now() - started) / 1000);
      this.progress.querySelector("span").textContent = `Loading ${name}${gigabytes(size)}: ${seconds} s`;
    };
    this.button.disabled = true;
    this.progress.hidden = false;
    say();
    const timer = setInterval(say, LOOK_MS);
    try {
      await api.load(name);
    } catch (error) {
      this.complain(error);
    } finally {
      clearInterval(timer);
      this.button.disabled = false;
      this.progress.hidden = true;
      await this.refresh().catch(this.complain);
    }
  }
}
