// What the page says: the words below the form, and the server's state in the header.

import * as api from "./api.js";
import { find } from "./dom.js";

const READY_MS = 5000; // between looks at the server's state; shorter while it cannot answer
const WAIT_MS = 1000;
const GONE = "The server is gone: nothing answers. Start it again.";

export function say(words, kind = "") {
  find("words").textContent = words;
  find("words").className = kind;
}

export const complain = (error) => say(error.message, "problem");

// Looks at the server's state again and again. `onReady` is called when it has become ready.
export class ServerState {
  constructor(onReady) {
    this.onReady = onReady;
    this.state = "";
    document.addEventListener("visibilitychange", () => document.hidden || this.look());
    this.look();
  }

  async look() {
    clearTimeout(this.timer);
    const { state, words } = await api.status();
    find("state").textContent = words;
    if (state !== this.state) {
      const changed = this.state !== "";
      this.state = state;
      find("state").dataset.state = state;
      if (state === "ready") this.onReady();
      const known = find("words").className === "problem"; // an answer that has failed says more
      if (changed && state === "gone" && !known) say(GONE, "problem");
      if (changed && state === "ready") say("The server is ready.");
    }
    if (!document.hidden) this.timer = setTimeout(() => this.look(), state === "ready" ? READY_MS : WAIT_MS);
  }
}
