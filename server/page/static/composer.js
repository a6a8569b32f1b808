// Writes a message: a text with files. Enter sends it, Shift+Enter begins a line. Used for new messages and for edited ones.

import { Attachments } from "./attachments.js";
import { make } from "./dom.js";

const TALLEST = 0.4; // of the window

export class Composer {
  // `onSend(text, files)` takes the message. `onStop` is called while `running`. `sees` and `complain` as of Attachments.
  constructor(element, { label, onSend, sees, complain, onStop = null, onCancel = null }) {
    this.onSend = onSend;
    this.isRunning = false;
    this.area = make("textarea", { rows: "1", "aria-label": label, placeholder: label });
    const list = make("div", { class: "pictures", role: "group", "aria-label": "Files of the message" });
    this.attachments = new Attachments(list, sees, complain);
    const chooser = make("input", { type: "file", multiple: "", hidden: "" });
    const attach = make("button", { type: "button", class: "attach", title: "Pictures and text files" }, "Attach");
    this.button = make("button", { class: "main" }, "Send");
    const cancel = onCancel ? [make("button", { type: "button" }, "Cancel")] : [];
    const buttons = make("div", { class: "buttons" }, attach, chooser, cancel, this.button);
    const form = make("form", { class: "composer" }, list, this.area, buttons);
    element.append(form);
    attach.addEventListener("click", () => chooser.click());
    chooser.addEventListener("change", () => {
      this.attachments.take([...chooser.files]);
      chooser.value = "";
    });
    cancel[0]?.addEventListener("click", onCancel);
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.isRunning) onStop();
      else this.send();
    });
    this.area.addEventListener("input", () => this.fit());
    this.area.addEventListener("keydown", (event) => this.onKey(event, onCancel));
    this.attachments.listen(this.area);
  }

  onKey(event, onCancel) {
    const touch = matchMedia("(pointer: coarse)").matches; // its keyboard has no Shift+Enter
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing && !touch) {
      event.preventDefault();
      this.send();
    } else if (event.key === "Escape" && onCancel) {
      event.stopPropagation();
      onCancel();
    }
  }

  set running(running) {
    this.isRunning = running;
    this.button.textContent = running ? "Stop" : "Send";
    this.button.title = running ? "Escape" : "Enter";
  }

  fit() {
    this.area.style.height = "auto";
    this.area.style.height = `${Math.min(this.area.scrollHeight + 2, TALLEST * innerHeight)}px`;
  }

  fill(text, files) {
    this.area.value = text;
    for (const file of files) this.attachments.add(file);
    this.fit();
    this.area.focus();
  }

  send() {
    const [text, files] = [this.area.value, this.attachments.files];
    if (this.isRunning || (!text.trim() && !files.length)) return;
    this.onSend(text, files);
    this.area.value = "";
    this.attachments.clear();
    this.fit();
  }
}
