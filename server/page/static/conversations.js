// A conversation: a tree of messages that only grows. An edited message and a new answer are further children of the same parent.

const FORMAT = "outrider-conversations";
const TITLE = 60; // characters
const isText = (value) => typeof value === "string";
const isNumber = (value) => Number.isFinite(value);
const isId = (value) => isText(value) && /^[a-z\d]{1,64}$/.test(value);

const newId = () => [...crypto.getRandomValues(new Uint32Array(4))].map((part) => part.toString(36)).join("");

// {id, title, at, system, messages, leaf}: `messages` by id, and `leaf` is the id of the last one that is shown.
export function newConversation() {
  return { id: newId(), title: "", at: Date.now(), system: "", messages: {}, leaf: null };
}

// Adds a message below another one, or at the start with `parent` null. `fields` of a user's message: {text, files}; of an
// answer: {text, reasoning, model, note, drafts}.
export function add(conversation, parent, role, fields) {
  const message = { id: newId(), parent, role, at: Date.now(), ...fields };
  conversation.messages[message.id] = message;
  conversation.leaf = message.id;
  conversation.at = message.at;
  conversation.title ||= titleOf(message);
  return message;
}

function titleOf({ text, files }) {
  const line = text.trim().split("\n", 1)[0] || files?.[0]?.name || "";
  return line.length > TITLE ? `${line.slice(0, TITLE)}\u2026` : line;
}

// The shown messages from the first to the leaf.
export function branchOf({ messages, leaf }) {
  const branch = [];
  for (let message = messages[leaf]; message; message = messages[message.parent]) branch.push(message);
  return branch.reverse();
}

// The message and its alternatives, the oldest first.
export function alternatives({ messages }, { parent }) {
  return Object.values(messages)
    .filter((message) => message.parent === parent)
    .sort((a, b) => a.at - b.at);
}

// Shows the branch through a message, and below it the newest messages.
export function choose(conversation, message) {
  for (let next = message; next;) {
    conversation.leaf = next.id;
    const below = alternatives(conversation, { parent: next.id });
    next = below[below.length - 1];
  }
}

// Adds the messages of another copy. Of a message that is in both, the longer text is the later one.
export function merge(conversation, other) {
  for (const message of Object.values(other.messages)) {
    const own = conversation.messages[message.id];
    if (!own) conversation.messages[message.id] = message;
    else if (own.text.length < message.text.length) Object.assign(own, message);
  }
  conversation.leaf ??= other.leaf;
}

export function exported(conversations) {
  return JSON.stringify({ format: FORMAT, version: 1, conversations }, null, 1);
}

// The conversations of an exported file. Throws an Error with a sentence if it is not one.
export function imported(text) {
  let data;
  try {
    data = JSON.parse(text);
  } catch {
    throw new Error("This file is not JSON; choose conversations that this page has exported.");
  }
  const known = data?.format === FORMAT && data.version === 1 && Array.isArray(data.conversations);
  if (!known || !data.conversations.every(isConversation)) {
    throw new Error("This file has no conversations of this page; choose one that it has exported.");
  }
  return data.conversations;
}

function isConversation(conversation) {
  const { id, title, at, system, messages, leaf } = conversation ?? {};
  if (!isId(id) || ![title, system].every(isText) || !isNumber(at) || typeof messages !== "object" || !messages)
    return false;
  const seen = new Set([null]); // parents come before their children, so that there is no circle
  const known = Object.entries(messages).every(([key, message]) => {
    const valid = isMessage(message) && isId(key) && message.id === key && seen.has(message.parent);
    seen.add(key);
    return valid;
  });
  return known && (leaf === null || Object.hasOwn(messages, leaf));
}

function isMessage(message) {
  const { role, text, at, files = [], reasoning = "", model = "", note = "" } = message ?? {};
  const isPicture = (url) => isText(url) && url.startsWith("data:image/");
  return (
    ["user", "assistant"].includes(role) &&
    [text, reasoning, model, note].every(isText) &&
    isNumber(at) &&
    Array.isArray(files) &&
    files.every((file) => isText(file?.name) && (isText(file.text) || isPicture(file.url))) &&
    isDrafts(message.drafts ?? null)
  );
}

// {tokens: [[characters, source]], acceptance: [[source, {drafted, accepted}]], bonus, perStep, perSecond}
function isDrafts(drafts) {
  if (drafts === null) return true;
  const { tokens, acceptance, bonus } = drafts;
  return (
    isNumber(bonus) &&
    [tokens, acceptance].every((rows) => Array.isArray(rows) && rows.every(Array.isArray)) &&
    tokens.every(([size, source]) => isNumber(size) && (source === null || /^[a-z]+$/.test(source))) &&
    acceptance.every(
      ([source, counts]) => /^[a-z]+$/.test(source) && isNumber(counts?.drafted) && isNumber(counts.accepted),
    )
  );
}
