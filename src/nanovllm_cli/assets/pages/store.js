// Conversations, in the browser's IndexedDB; in this page's memory alone where the browser has none to give.
"use strict";

const MOST_IMPORTED = 64 << 20;
const OPENS_WITHIN = 5000;

const store = {
  database: null,

  async open() {
    const request = indexedDB.open("nanovllm", 1);
    request.onupgradeneeded = () => request.result.createObjectStore("conversations", { keyPath: "id" });
    const late = new Promise((_, reject) => setTimeout(reject, OPENS_WITHIN)); // some browsers never answer
    this.database = await Promise.race([settled(request), late]);
  },

  async all() {
    if (!this.database) return [];
    const found = await settled(this.database.transaction("conversations").objectStore("conversations").getAll());
    return found.map(cleaned).filter(Boolean).sort((a, b) => b.updated - a.updated);
  },

  async put(conversation) {
    await this.write((conversations) => conversations.put(structuredClone(conversation)));
  },

  async remove(id) {
    await this.write((conversations) => conversations.delete(id));
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

function newConversation() {
  return { id: crypto.randomUUID?.() ?? `${Date.now()}-${Math.random()}`, title: "", updated: Date.now(), messages: [] };
}

/** What was stored or imported, as a conversation with everything in its place; null where it is none. */
function cleaned(raw) {
  if (typeof raw !== "object" || raw === null || !Array.isArray(raw.messages)) return null;
  const text = (value) => (typeof value === "string" ? value : "");
  const messages = raw.messages.filter((each) => each?.role === "user" || each?.role === "assistant");
  return {
    id: text(raw.id) || newConversation().id,
    title: text(raw.title).slice(0, 200),
    updated: Number.isFinite(raw.updated) ? raw.updated : Date.now(),
    messages: messages.map((each) => {
      if (each.role === "user") return { role: "user", content: text(each.content) };
      const calls = Array.isArray(each.calls) ? each.calls : [];
      return {
        ...newAnswer(),
        content: text(each.content),
        reasoning: text(each.reasoning),
        calls: calls.map((call) => ({
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

function exported(conversations) {
  return JSON.stringify({ nanovllm: 1, conversations }, null, 1);
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
  return found.map((each) => ({ ...each, id: newConversation().id }));
}
