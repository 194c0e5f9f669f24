// Conversations, in the browser's IndexedDB; in this page's memory alone where the browser has none to give. What is attached, all of it
// called images, are records of their own beside them, written once: a conversation is written every second while it is answered. They
// have no store of their own, as its making would wait for tabs with an older page; which passes over such records.
"use strict";

const MOST_IMPORTED = 256 << 20;
const OPENS_WITHIN = 5000;

const store = {
  database: null,
  kept: new Set(), // keys of images

  async open() {
    const request = indexedDB.open("nanovllm", 1);
    request.onupgradeneeded = () => request.result.createObjectStore("conversations", { keyPath: "id" });
    const late = new Promise((_, reject) => setTimeout(reject, OPENS_WITHIN)); // some browsers never answer
    this.database = await Promise.race([settled(request), late]);
  },

  async all() {
    if (!this.database) return [];
    const found = await settled(this.database.transaction("conversations").objectStore("conversations").getAll());
    const blobs = new Map(found.filter(({ blob }) => blob instanceof Blob).map(({ id, blob }) => [id, blob]));
    const conversations = found.map(cleaned).filter(Boolean).sort((a, b) => b.updated - a.updated);
    for (const conversation of conversations) {
      for (const [key, image] of imagesOf(conversation)) image.blob = blobs.get(key) ?? null;
    }
    this.kept = new Set(blobs.keys());
    return conversations;
  },

  async put(conversation) {
    const messages = conversation.messages.map((message) =>
      message.images ? { ...message, images: message.images.map(({ id, name }) => ({ id, name })) } : message);
    await this.write((conversations) => conversations.put({ ...conversation, messages }));
  },

  /** Each in a transaction of its own: one that finds no room undoes no other. */
  async putImages(conversation) {
    const wanted = imagesOf(conversation);
    for (const key of this.kept) {
      if (!key.startsWith(imageKey(conversation, "")) || wanted.has(key)) continue;
      await this.write((images) => images.delete(key));
      this.kept.delete(key);
    }
    for (const [id, { blob }] of wanted) {
      if (!blob || this.kept.has(id)) continue;
      await this.write((images) => images.put({ id, blob }));
      this.kept.add(id);
    }
  },

  async remove(id) {
    await this.write((conversations) => {
      conversations.delete(id);
      conversations.delete(IDBKeyRange.bound(imageKey({ id }, ""), imageKey({ id }, "\uffff")));
    });
  },

  async write(change) {
    if (!this.database) return;
    const transaction = this.database.transaction("conversations", "readwrite");
    change(transaction.objectStore("conversations"));
    transaction.commit(); // at once: the page may be on its way out
    await new Promise((resolve, reject) => {
      transaction.oncomplete = resolve;
      transaction.onerror = transaction.onabort = () => reject(transaction.error);
    });
  },
};

function settled(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

function imagesOf(conversation) {
  const images = conversation.messages.flatMap((message) => message.images ?? []);
  return new Map(images.map((image) => [imageKey(conversation, image.id), image]));
}

function imageKey(conversation, id) {
  return `${conversation.id}/${id}`;
}

function newConversation() {
  return { id: newId(), title: "", updated: Date.now(), messages: [] };
}

function newId() {
  return crypto.randomUUID?.() ?? `${Date.now()}-${Math.random()}`;
}

/** What was stored or imported, as a conversation with everything in its place; null where it is none. */
function cleaned(raw) {
  if (typeof raw !== "object" || raw === null || !Array.isArray(raw.messages)) return null;
  const text = (value) => (typeof value === "string" ? value : "");
  const list = (value) => (Array.isArray(value) ? value : []);
  const image = (each) => {
    const name = text(each?.name).slice(0, 200) || "file";
    return { id: text(each?.id) || newId(), name, blob: blobOf(text(each?.url)) };
  };
  const messages = raw.messages.filter((each) => each?.role === "user" || each?.role === "assistant");
  return {
    id: text(raw.id) || newId(),
    title: text(raw.title).slice(0, 200),
    updated: Number.isFinite(raw.updated) ? raw.updated : Date.now(),
    messages: messages.map((each) => {
      if (each.role === "user") return { role: "user", content: text(each.content), images: list(each.images).map(image) };
      return {
        ...newAnswer(),
        content: text(each.content),
        reasoning: text(each.reasoning),
        calls: list(each.calls).map((call) => ({
          id: text(call?.id),
          name: text(call?.name),
          arguments: text(call?.arguments),
          result: typeof call?.result === "string" ? call.result : null,
        })),
        stats: text(each.stats),
        error: text(each.error),
        thought: Number.isFinite(each.thought) ? each.thought : null,
      };
    }),
  };
}

function newAnswer() {
  return { role: "assistant", content: "", reasoning: "", calls: [], stats: "", error: "", thought: null };
}

/** A file of conversations, with what is attached in it. */
async function exported(conversations) {
  const parts = [];
  for (const conversation of conversations) {
    const messages = await Promise.all(conversation.messages.map(async (message) =>
      message.images?.length ? { ...message, images: await Promise.all(message.images.map(exportedImage)) } : message));
    parts.push(parts.length ? ",\n" : "", JSON.stringify({ ...conversation, messages }, null, 1));
  }
  return new Blob(['{"nanovllm": 1, "conversations": [\n', ...parts, "\n]}\n"], { type: "application/json" });
}

async function exportedImage({ name, blob }) {
  return { name, url: blob ? await dataUrl(blob) : "" };
}

/** The conversations of an exported file, with ids of their own. Fails with what is wrong. */
async function imported(file) {
  if (file.size > MOST_IMPORTED) throw new Error("That file is too large to be conversations.");
  let raw;
  try {
    raw = JSON.parse(await file.text());
  } catch {
    throw new Error("That file is not JSON.");
  }
  const found = (Array.isArray(raw?.conversations) ? raw.conversations : []).map(cleaned).filter(Boolean);
  if (!found.length) throw new Error("That file holds no conversations.");
  return found.map((each) => ({ ...each, id: newId() }));
}
