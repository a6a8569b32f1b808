// Making and finding elements, and what pages do with the browser. Text only ever becomes text nodes.

export const find = (id) => document.getElementById(id);

// `children` are nodes, texts, or lists of them.
export function make(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  for (const child of children.flat()) element.append(child); // strings become text nodes
  return element;
}

export const number = (value, digits = 1) =>
  value === null || !Number.isFinite(value) ? "\u2013" : value.toFixed(digits);

// Copies a text; returns what to say about it.
export async function copy(text) {
  if (!navigator.clipboard) return "Browsers copy only on https and localhost; select the text instead.";
  return navigator.clipboard.writeText(text).then(
    () => "Copied.",
    () => "The browser refused to copy; select the text instead.",
  );
}

export function download(name, text) {
  const link = make("a", { download: name });
  link.href = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href));
}
