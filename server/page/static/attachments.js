// Pictures and text files that are pasted, dropped or chosen for the next message: {name, url} or {name, text}.

import { make } from "./dom.js";

const LARGEST_BYTES = 20 << 20;

export class Attachments {
  // `sees` says whether the chosen model reads pictures; null = not known before it is loaded. `complain` gets an Error.
  constructor(list, sees, complain) {
    Object.assign(this, { list, sees, complain });
    this.files = [];
  }

  // Takes what is pasted into an element or dropped on it.
  listen(element) {
    const take = (event, data) => {
      if (!data.files.length) return; // text is the browser's
      event.preventDefault();
      this.take([...data.files]);
    };
    element.addEventListener("paste", (event) => take(event, event.clipboardData));
    element.addEventListener("drop", (event) => take(event, event.dataTransfer));
    element.addEventListener(
      "dragover",
      (event) => event.dataTransfer.types.includes("Files") && event.preventDefault(),
    );
  }

  async take(files) {
    for (const file of files) {
      try {
        this.add(await this.read(file));
      } catch (error) {
        this.complain(error);
      }
    }
  }

  async read(file) {
    const { name, size, type } = file;
    if (size > LARGEST_BYTES) throw new Error(`${name} was left out: it is larger than 20 MB.`);
    if (type.startsWith("image/")) {
      if (this.sees() !== false) return { name, url: await dataUrl(file) };
      throw new Error("The picture was left out: it needs a chat with a model that reads pictures.");
    }
    const text = textOf(await file.arrayBuffer());
    if (text === null) throw new Error(`${name} was left out: it is neither a picture nor a text in UTF-8.`);
    return { name, text };
  }

  add(file) {
    this.files.push(file);
    const button = make("button", { type: "button", title: `Remove ${file.name}` }, shown(file));
    button.addEventListener("click", () => {
      this.files.splice(this.files.indexOf(file), 1);
      button.remove();
    });
    this.list.append(button);
  }

  clear() {
    this.files = [];
    this.list.replaceChildren();
  }
}

function textOf(bytes) {
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(bytes);
    return text.includes("\0") ? null : text;
  } catch {
    return null;
  }
}

function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.addEventListener("load", () => resolve(reader.result));
    reader.addEventListener("error", () => reject(reader.error));
    reader.readAsDataURL(file);
  });
}

// A picture, or a file's name.
export function shown({ name, url }) {
  return url ? make("img", { src: url, alt: name }) : make("span", { class: "file" }, name);
}

// A text with its files, as the content of a message.
export function contentOf(text, files) {
  const fenced = files.filter((file) => !file.url).map((file) => `${file.name}:\n${fence(file.text)}\n\n`);
  const whole = fenced.join("") + text;
  const pictures = files.filter((file) => file.url).map(({ url }) => ({ type: "image_url", image_url: { url } }));
  return pictures.length ? [...pictures, { type: "text", text: whole }] : whole;
}

function fence(text) {
  let mark = "```";
  while (text.includes(mark)) mark += "`";
  return `${mark}\n${text}\n${mark}`;
}
