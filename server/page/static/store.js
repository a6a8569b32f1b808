// What the browser keeps: conversations and preferences, in its IndexedDB. What it cannot keep stays in memory, and is tried again.

import { merge } from "./conversations.js";

const VERSION = 1;

const done = (request) =>
  new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });

const ended = (transaction) =>
  new Promise((resolve, reject) => {
    transaction.oncomplete = resolve;
    transaction.onabort = () => reject(transaction.error);
  });

function open() {
  const request = indexedDB.open("outrider", VERSION);
  request.onupgradeneeded = () => {
    const conversations = request.result.createObjectStore("conversations", { keyPath: "id" });
    conversations.createIndex("list", ["at", "title"]); // the list is read without the messages
    request.result.createObjectStore("preferences");
  };
  return done(request);
}

const opened = open();
opened.catch(() => {}); // each use says so
const channel = new BroadcastChannel("outrider"); // tells the other tabs of changes

export const unsaved = new Map(); // conversations that the browser could not keep, by id

async function inStore(name, mode, work) {
  const transaction = (await opened).transaction(name, mode);
  const result = work(transaction.objectStore(name), transaction);
  if (mode === "readonly") return result;
  const end = ended(transaction);
  end.catch(() => {}); // awaited below
  await result;
  return end;
}

// Calls `work` when another tab has changed a conversation.
export function onChange(work) {
  channel.addEventListener("message", work);
}

// Keeps a conversation, with the messages that other tabs have added to it. Throws an Error that says what to do.
export async function save(conversation) {
  const held = unsaved.get(conversation.id);
  if (held && held !== conversation) merge(conversation, held);
  try {
    await inStore("conversations", "readwrite", async (store) => {
      const kept = await done(store.get(conversation.id));
      if (kept) merge(conversation, kept);
      await done(store.put(conversation));
    });
    unsaved.delete(conversation.id);
    channel.postMessage(conversation.id);
  } catch (error) {
    unsaved.set(conversation.id, conversation);
    const full = error?.name === "QuotaExceededError";
    const reason = full
      ? "The browser has no room left"
      : `The browser keeps no conversations (${error?.message ?? error})`;
    throw new Error(`${reason}: this one lasts until you close the page; export it, or delete others.`);
  }
}

// {id, title, at} of all conversations, the newest first.
export async function list() {
  const found = new Map();
  try {
    await inStore("conversations", "readonly", (store) => {
      const request = store.index("list").openKeyCursor(null, "prev");
      return new Promise((resolve, reject) => {
        request.onerror = () => reject(request.error);
        request.onsuccess = () => {
          const cursor = request.result;
          if (!cursor) return resolve();
          const [at, title] = cursor.key;
          found.set(cursor.primaryKey, { id: cursor.primaryKey, title, at });
          return cursor.continue();
        };
      });
    });
  } catch {
    // those in memory remain
  }
  for (const { id, title, at } of unsaved.values()) found.set(id, { id, title, at });
  return [...found.values()].sort((a, b) => b.at - a.at);
}

export async function load(id) {
  return unsaved.get(id) ?? inStore("conversations", "readonly", (store) => done(store.get(id))).catch(() => undefined);
}

export async function remove(id) {
  unsaved.delete(id);
  await inStore("conversations", "readwrite", (store) => done(store.delete(id))).catch(() => {});
  channel.postMessage(id);
}

export async function preference(name) {
  return inStore("preferences", "readonly", (store) => done(store.get(name))).catch(() => undefined);
}

export async function prefer(name, value) {
  await inStore("preferences", "readwrite", (store) => done(store.put(value, name))).catch(() => {});
}
