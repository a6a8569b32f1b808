// The messages of the shown conversation. An answer that grows changes its own last blocks only.

import { showLegend } from "./answer.js";
import { shown } from "./attachments.js";
import { Composer } from "./composer.js";
import { alternatives, branchOf } from "./conversations.js";
import { copy, make, number } from "./dom.js";
import { Markdown } from "./markdown.js";
import * as overlay from "./overlay.js";

const NEAR = 60; // px from the end, within which the view follows the answer

export class Thread {
  // `actions`: edit(message, text, files), regenerate(message), choose(message), say(words), and `composer`, its options.
  constructor(element, actions) {
    Object.assign(this, { element, actions });
    this.views = new Map();
    element.addEventListener("click", async ({ target }) => {
      if (target.matches(".copy-code"))
        actions.say(await copy(target.closest(".code").querySelector("code").textContent));
    });
  }

  // Shows the branch of a conversation; messages that are shown already stay as they are.
  show(conversation) {
    const branch = branchOf(conversation);
    const ids = new Set(branch.map(({ id }) => id));
    for (const [id, view] of this.views) if (!ids.has(id)) this.remove(id, view);
    for (const message of branch) {
      if (!this.views.has(message.id)) this.add(message);
      this.views.get(message.id).showBranches(alternatives(conversation, message));
    }
    this.element.classList.toggle("empty", !branch.length);
  }

  add(message) {
    const view = message.role === "user" ? new Question(message, this.actions) : new Reply(message, this.actions);
    this.views.set(message.id, view);
    this.element.append(view.element);
  }

  remove(id, view) {
    view.element.remove();
    view.erase();
    this.views.delete(id);
  }

  clear() {
    for (const [id, view] of this.views) this.remove(id, view);
    overlay.clear();
  }

  // Shows what has been added to an answer. `progress` are words while it runs, and null at its end.
  update(message, progress, tokens) {
    const { scrollHeight, scrollTop, clientHeight } = this.element;
    this.views.get(message.id)?.update(progress, tokens);
    if (scrollHeight - scrollTop - clientHeight < NEAR) this.scrollToEnd();
  }

  // Moves the focus from a message that is gone to the branches of another one, or to all messages.
  focus(message = null) {
    const button = message && this.views.get(message.id).branches.querySelector("button:enabled");
    (button ?? this.element).focus({ preventScroll: true });
  }

  scrollToEnd() {
    this.element.scrollTop = this.element.scrollHeight;
  }
}

// What questions and replies share: the article and the buttons below it.
class View {
  constructor(message, actions, label) {
    Object.assign(this, { message, actions });
    this.body = make("div", { class: "body" });
    this.buttons = make("div", { class: "actions" });
    this.branches = make("span", { class: "branches", role: "group", "aria-label": "Branches" });
    this.element = make("article", { class: message.role, "aria-label": label }, this.body, this.buttons);
    this.button("Copy", async () => actions.say(await copy(message.text)));
  }

  button(name, work) {
    const button = make("button", { type: "button" }, name);
    button.addEventListener("click", work);
    this.buttons.append(button);
  }

  showBranches(all) {
    const index = all.indexOf(this.message);
    const step = (offset, name, sign) => {
      const button = make("button", { type: "button", "aria-label": name }, sign);
      button.disabled = !all[index + offset];
      button.addEventListener("click", () => this.actions.choose(all[index + offset]));
      return button;
    };
    const place = make("span", {}, `${index + 1} of ${all.length}`);
    this.branches.replaceChildren(step(-1, "Previous branch", "\u2039"), place, step(1, "Next branch", "\u203a"));
    this.branches.hidden = all.length < 2;
    this.buttons.append(this.branches);
  }

  erase() {}
}

class Question extends View {
  constructor(message, actions) {
    super(message, actions, "You");
    this.button("Edit", () => this.edit());
    this.show();
  }

  show() {
    const { text, files } = this.message;
    const pictures = make("div", { class: "pictures" }, files.map(shown));
    this.body.replaceChildren(pictures, make("p", { class: "text", dir: "auto" }, text));
    this.buttons.hidden = false;
  }

  edit() {
    this.body.replaceChildren();
    this.buttons.hidden = true;
    const onCancel = () => {
      this.show();
      this.buttons.querySelector("button:nth-of-type(2)").focus();
    };
    const onSend = (text, files) => {
      this.show();
      this.actions.edit(this.message, text, files);
    };
    const composer = new Composer(this.body, { ...this.actions.composer, label: "Edited message", onSend, onCancel });
    composer.fill(this.message.text, this.message.files);
  }
}

class Reply extends View {
  constructor(message, actions) {
    super(message, actions, message.model ? `Answer of ${message.model}` : "Answer");
    this.button("Regenerate", () => actions.regenerate(message));
    this.buttons.append(make("span", { class: "quiet" }, message.model));
    const [thought, text] = ["reasoning", "answer-text"].map((name) =>
      make("div", { class: `markdown ${name}`, dir: "auto" }),
    );
    this.thought = new Markdown(thought);
    this.text = new Markdown(text);
    this.reasoning = make("details", {}, make("summary", {}, "Reasoning"), thought);
    this.note = make("p", { class: "note" });
    this.drafts = make("div", { class: "drafts" });
    this.body.append(this.reasoning, text, this.note, this.drafts);
    this.update(null, message.drafts?.tokens);
  }

  update(progress, tokens) {
    const { text, reasoning = "", note = "", drafts } = this.message;
    this.thought.update(reasoning);
    this.reasoning.hidden = !reasoning;
    const { added, gone } = this.text.update(text);
    for (const node of gone) overlay.erase(node);
    for (const node of tokens ? added : []) overlay.paint(node, tokens);
    this.element.setAttribute("aria-busy", String(progress !== null));
    this.note.textContent = progress ?? note;
    this.buttons.hidden = progress !== null;
    if (progress === null && drafts) this.showDrafts(drafts);
  }

  showDrafts({ acceptance, bonus, perStep, perSecond }) {
    const list = make("ul", { class: "legend", "aria-label": "Sources of the tokens" });
    showLegend(list, acceptance, bonus);
    const words = `${number(perSecond)} tokens per second, ${number(perStep, 2)} per step`;
    this.drafts.replaceChildren(make("p", { class: "quiet" }, words), list);
  }

  erase() {
    for (const { node } of this.text.blocks) overlay.erase(node);
  }
}
