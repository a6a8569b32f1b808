// Pictures that are pasted into the prompt or dropped on it, for the next message.

import { make } from "./dom.js";

export class Pictures {
  // `accept` says whether the chosen model reads pictures, and tells the user if it does not.
  constructor(prompt, list, accept) {
    this.list = list;
    this.accept = accept;
    this.urls = [];
    prompt.addEventListener("paste", (event) => this.take(event, event.clipboardData));
    prompt.addEventListener("drop", (event) => this.take(event, event.dataTransfer));
  }

  take(event, data) {
    const files = [...data.files].filter((file) => file.type.startsWith("image/"));
    if (!files.length) return; // text is the browser's
    event.preventDefault();
    if (!this.accept()) return;
    for (const file of files) {
      const reader = new FileReader();
      reader.addEventListener("load", () => this.add(reader.result));
      reader.readAsDataURL(file);
    }
  }

  add(url) {
    this.urls.push(url);
    const button = make("button", { type: "button", title: "Remove this picture" }, image(url));
    button.addEventListener("click", () => {
      this.urls.splice(this.urls.indexOf(url), 1);
      button.remove();
    });
    this.list.append(button);
  }

  clear() {
    this.urls = [];
    this.list.replaceChildren();
  }

  // The content of a message: the pictures, then the text.
  content(text) {
    if (!this.urls.length) return text;
    return [...this.urls.map((url) => ({ type: "image_url", image_url: { url } })), { type: "text", text }];
  }
}

// The pictures of a message's content, to be shown.
export function shown(content) {
  const parts = typeof content === "string" ? [] : content;
  return parts.filter((part) => part.type === "image_url").map((part) => image(part.image_url.url));
}

const image = (url) => make("img", { src: url, alt: "Picture" });

export function textOf(content) {
  return typeof content === "string" ? content : content.map((part) => part.text ?? "").join("");
}
