// The chat: connects conversations, the thread of messages, the composer, the models and the settings.

import * as api from "./api.js";
import { contentOf } from "./attachments.js";
import { Composer } from "./composer.js";
import { add, branchOf, choose, exported, imported, merge, newConversation } from "./conversations.js";
import { download, find } from "./dom.js";
import { Models } from "./models.js";
import { draftsOf, tokensOf } from "./overlay.js";
import { Run } from "./run.js";
import { Sidebar } from "./sidebar.js";
import { complain, say, ServerState } from "./status.js";
import * as store from "./store.js";
import { keepTheme } from "./theme.js";
import { Thread } from "./thread.js";

const SAVE_MS = 2000; // between saves of an answer that grows
const SLOW_MS = 8; // of drawing it
const settings = find("settings");
const fields = find("settings-form").elements;
const running = new Map(); // by the id of an answer: {stopper, conversation}
const removed = new Set(); // ids of conversations
let conversation = newConversation();

const models = new Models({ select: find("model"), button: find("load"), progress: find("progress") }, complain);
const options = { sees: () => models.sees, complain };
const thread = new Thread(find("thread"), {
  edit: (message, text, files) => {
    ask(message.parent, text, files);
    thread.focus();
  },
  regenerate: (message) => {
    answer(conversation, message.parent);
    thread.focus();
  },
  choose: (message) => {
    choose(conversation, message);
    thread.show(conversation);
    thread.focus(message);
    keep(conversation);
  },
  say,
  composer: options,
});
const composer = new Composer(find("composer"), {
  ...options,
  label: "Message",
  onSend: (text, files) => ask(conversation.leaf, text, files),
  onStop: () => stop(conversation),
});
composer.attachments.listen(find("thread"));
const sidebar = new Sidebar({ open, startNew, importFile, exportAll });
const server = new ServerState(() => refreshModels());

async function refreshModels() {
  try {
    await models.refresh();
  } catch (error) {
    failed(error);
  }
}

function failed(error) {
  complain(error);
  if (error.kind === "gone") server.look();
  if (error.kind === "key" && !settings.open) openSettings(fields.key);
}

// Saves a conversation; words say if the browser cannot keep it.
async function keep(changed) {
  if (removed.has(changed.id)) return;
  try {
    await store.save(changed);
  } catch (error) {
    complain(error);
  }
}

async function keepAndList(changed) {
  await keep(changed);
  sidebar.list(conversation.id);
}

function ask(parent, text, files) {
  stop(conversation);
  const message = add(conversation, parent, "user", { text, files: [...files] });
  answer(conversation, message.id);
}

function requestOf({ system, messages }, parent, model) {
  const number = (name) => (fields[name].value === "" ? undefined : Number(fields[name].value));
  const said = branchOf({ messages, leaf: parent }).map(({ role, text, files = [] }) => {
    return { role, content: contentOf(text, files) };
  });
  const first = system.trim() ? [{ role: "system", content: system }] : [];
  return {
    path: "v1/chat/completions",
    body: {
      model,
      messages: [...first, ...said],
      temperature: number("temperature"),
      max_tokens: number("max_tokens"),
      stream: true,
      speculation: isOverlaid() ? { trace: true } : undefined,
    },
  };
}

// Answers the message `parent`, in the background if another conversation is shown meanwhile.
async function answer(talk, parent) {
  stop(talk);
  const model = models.select.value;
  const run = new Run(requestOf(talk, parent, model));
  const message = add(talk, parent, "assistant", { text: "", reasoning: "", model, note: "" });
  const stopper = new AbortController();
  running.set(message.id, { stopper, talk });
  say("");
  show();
  thread.scrollToEnd();
  keepAndList(talk);
  const drawing = new Drawing(message, run);
  let saved = performance.now();
  try {
    await api.play(
      run,
      stopper.signal,
      () => {
        Object.assign(message, { text: run.content, reasoning: run.reasoning });
        drawing.request();
        if (performance.now() - saved < SAVE_MS) return;
        saved = performance.now();
        keep(talk);
      },
      (comment) => drawing.say(comment),
    );
    if (run.finish === "length") message.note = "The answer reached the longest length.";
    const hidden = run.request.body.speculation && !run.steps.length;
    if (talk === conversation) say(hidden ? "Done. This server does not show its drafts." : "Done.");
  } catch (error) {
    message.note = error.name === "AbortError" ? "Stopped." : error.message;
    if (error.kind) failed(error);
  } finally {
    running.delete(message.id);
    if (run.steps.length) message.drafts = draftsOf(run);
    drawing.end();
    composer.running = isRunning();
    keep(talk);
    refreshModels();
  }
}

// Draws an answer once per frame, however many tokens have arrived, and less often if a frame takes long.
class Drawing {
  constructor(message, run) {
    Object.assign(this, { message, run, waits: false, ended: false, words: "Waiting for the answer." });
    this.draw();
  }

  say(words) {
    this.words = `${words[0].toUpperCase()}${words.slice(1)}.`;
    this.request();
  }

  request() {
    if (this.waits) return;
    this.waits = true;
    setTimeout(() => requestAnimationFrame(() => this.ended || this.draw()), this.ms > SLOW_MS ? 2 * this.ms : 0);
  }

  draw() {
    const started = performance.now();
    const words = this.run.text ? "Answering." : this.words;
    thread.update(this.message, words, this.run.steps.length ? tokensOf(this.run) : null);
    this.waits = false;
    this.ms = performance.now() - started;
  }

  end() {
    this.ended = true;
    thread.update(this.message, null, this.message.drafts?.tokens);
  }
}

const answersOf = (talk) => [...running.values()].filter((each) => each.talk === talk);
const isRunning = () => answersOf(conversation).length > 0;
const isOverlaid = () => document.body.classList.contains("overlay");

function stop(talk) {
  for (const { stopper } of answersOf(talk)) stopper.abort();
}

function show() {
  thread.show(conversation);
  composer.running = isRunning();
  document.title = conversation.title ? `${conversation.title} \u2013 Outrider` : "Outrider";
  find("title").textContent = conversation.title || "New chat";
}

function change(other) {
  conversation = other;
  history.replaceState(null, "", `#${other.id}`);
  thread.clear();
  show();
  for (const id of running.keys()) if (other.messages[id]) thread.update(other.messages[id], "Answering.", null);
  thread.scrollToEnd();
  sidebar.mark(other.id);
  say("");
}

// Opens the conversation; the one in memory if an answer to it is running.
async function open(id) {
  const known = [conversation, ...[...running.values()].map(({ talk }) => talk)].find((each) => each.id === id);
  const found = known ?? (await store.load(id));
  if (found) change(found);
  return Boolean(found);
}

function startNew() {
  change(newConversation());
  composer.area.focus();
}

async function importFile(file) {
  try {
    const found = imported(await file.text());
    for (const each of found) {
      removed.delete(each.id);
      await store.save(each);
      if (each.id === conversation.id) merge(conversation, each);
    }
    if (found.length) await open(found[0].id);
    say(`Imported ${found.length} conversation${found.length === 1 ? "" : "s"}.`);
  } catch (error) {
    complain(error);
  }
  sidebar.list(conversation.id);
}

async function exportAll() {
  const all = await Promise.all((await store.list()).map(({ id }) => store.load(id)));
  download("outrider-conversations.json", exported(all.filter(Boolean)));
}

function openSettings(field) {
  fields.title.value = conversation.title;
  fields.system.value = conversation.system;
  settings.showModal();
  field?.focus();
}

async function removeConversation() {
  if (!confirm(`Delete \u201c${conversation.title || "New chat"}\u201d with all its branches?`)) return;
  const { id } = conversation;
  removed.add(id);
  stop(conversation);
  await store.remove(id);
  startNew();
  sidebar.list(conversation.id);
}

fields.title.addEventListener("change", () => {
  conversation.title = fields.title.value.trim();
  show();
  if (conversation.leaf) keepAndList(conversation);
});
fields.system.addEventListener("change", () => {
  conversation.system = fields.system.value;
  if (conversation.leaf) keep(conversation);
});
for (const name of ["temperature", "max_tokens"]) {
  store.preference(name).then((value) => (fields[name].value = value ?? ""));
  fields[name].addEventListener(
    "change",
    () => fields[name].reportValidity() && store.prefer(name, fields[name].value),
  );
}
fields.key.addEventListener("change", () => {
  api.setKey(fields.key.value);
  say("");
  refreshModels();
});
find("open-settings").addEventListener("click", () => openSettings());
find("export").addEventListener("click", () => download("outrider-conversation.json", exported([conversation])));
find("delete").addEventListener("click", () => {
  settings.close();
  removeConversation();
});
find("overlay").addEventListener("click", () => overlaid(!isOverlaid()));

function overlaid(on) {
  document.body.classList.toggle("overlay", on);
  find("overlay").setAttribute("aria-pressed", String(on));
  store.prefer("overlay", on);
}

document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !settings.open && !sidebar.close()) stop(conversation);
  if (event.key.toLowerCase() === "o" && event.shiftKey && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    startNew();
  }
});
addEventListener("pagehide", () => answersOf(conversation).length && keep(conversation));
addEventListener("beforeunload", (event) => store.unsaved.size && event.preventDefault());
addEventListener("hashchange", () => open(location.hash.slice(1)));
store.onChange(async ({ data: id }) => {
  sidebar.list(conversation.id);
  const other = id === conversation.id && !isRunning() && (await store.load(id));
  if (!other) return;
  merge(conversation, other);
  show();
});

keepTheme(fields.theme);
store.preference("overlay").then((on) => on && overlaid(true));
sidebar.list(conversation.id);
if (!location.hash || !(await open(location.hash.slice(1)))) startNew();
