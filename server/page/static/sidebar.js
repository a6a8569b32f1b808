// The list of conversations, and what one does with all of them.

import { find, make } from "./dom.js";
import * as store from "./store.js";

export class Sidebar {
  // `actions`: open(id), startNew(), importFile(file), exportAll()
  constructor(actions) {
    this.rows = [];
    find("new").addEventListener("click", () => this.run(actions.startNew));
    find("menu").addEventListener("click", () => this.toggle(!this.isOpen));
    const beside = (event) => {
      if (!this.isOpen) return;
      event.preventDefault();
      event.stopPropagation();
      this.close();
    };
    document.querySelector("main").addEventListener("click", beside, true);
    find("export-all").addEventListener("click", actions.exportAll);
    find("import").addEventListener("click", () => find("file").click());
    find("file").addEventListener("change", ({ target }) => {
      if (target.files.length) actions.importFile(target.files[0]);
      target.value = "";
    });
    find("search").addEventListener("input", () => this.filter());
    find("conversations").addEventListener("click", ({ target }) => {
      const id = target.closest("[data-id]")?.dataset.id;
      if (id) this.run(() => actions.open(id));
    });
  }

  get isOpen() {
    return document.body.classList.contains("menu");
  }

  run(work) {
    this.close();
    work();
  }

  toggle(open) {
    document.body.classList.toggle("menu", open);
    find("menu").setAttribute("aria-expanded", String(open));
    if (open) find("new").focus();
  }

  // Closes it where it lies over the page, as on a phone; returns whether it was open.
  close() {
    const was = this.isOpen;
    if (was) this.toggle(false);
    if (was) find("menu").focus();
    return was;
  }

  async list(current) {
    const all = await store.list();
    this.rows = all.map(({ id, title, at }) => {
      const time = new Date(at).toLocaleString();
      return make("li", {}, make("button", { type: "button", "data-id": id, title: time }, title || "Untitled"));
    });
    find("conversations").replaceChildren(...this.rows);
    this.mark(current);
    this.filter();
  }

  mark(current) {
    for (const { firstChild: button } of this.rows) {
      if (button.dataset.id === current) button.setAttribute("aria-current", "page");
      else button.removeAttribute("aria-current");
    }
  }

  filter() {
    const words = find("search").value.trim().toLowerCase();
    for (const row of this.rows) row.hidden = !row.textContent.toLowerCase().includes(words);
  }
}
