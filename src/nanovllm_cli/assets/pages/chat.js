// The chat page: conversations on the left, messages in the middle, a box to write in. State is in four places only: `conversations`
// (kept by store.js), `settings` (kept by the browser), `running` (an AbortController for each conversation that is answered now) and
// `attached` (what goes with the next message: images, and sounds and texts, which are called images, too).
"use strict";

const DEFAULTS = { model: "", system: "", thinking: "", tools: "", ...Object.fromEntries(NUMBERS.map(({ name }) => [name, ""])) };
const SAVE_EVERY = 1000;
const AT_FAULT = [400, 413, 422]; // what a server says of a message that it will never answer

let conversations = [];
let current = newConversation();
const settings = { ...DEFAULTS, ...recall("settings", {}) };
const running = new Map();
let views = [];
let leaving = false;

const log = byId("log");
const input = byId("input");
const attached = attachedList([], input);
const modalities = new Map(); // what a model takes, by its name; undefined where the server does not know
let attaching = null; // a promise while files are read: whether all could be
let choosing = attached; // where files go that are chosen now

// ---- conversations ----

async function restore() {
  try {
    await store.open();
    conversations = await store.all();
    navigator.storage?.persist?.().catch(() => {});
  } catch {
    notice("This browser keeps nothing for this page: conversations end with it.");
  }
  const last = conversations.find((each) => each.id === recall("current", ""));
  show(last ?? newConversation());
}

async function start() {
  await restored;
  buildSettings();
  input.focus();
  await loadModels();
}

function show(conversation) {
  current = conversation;
  keep("current", conversation.id);
  rebuild();
  listConversations();
  log.scrollTop = log.scrollHeight;
  byId("sidebar").classList.remove("shown");
  byId("shade").hidden = true;
}

function begin() {
  show(newConversation());
  notice("");
  input.focus();
}

/** Writes it down, and moves it to the top of the list where something was said. */
async function save(conversation, said = true) {
  if (!conversations.includes(conversation)) {
    if (!said) return;
    conversations.unshift(conversation);
  }
  if (said) {
    conversation.updated = Date.now();
    conversations.sort((a, b) => b.updated - a.updated);
  }
  listConversations();
  let what = "the conversation";
  try {
    await store.put(conversation);
    what = "all that is attached in the conversation";
    await store.putImages(conversation);
  } catch (error) {
    notice(`This browser could not keep ${what}: ${error.message}`);
  }
}

async function forget(conversation) {
  if (!confirm(`Delete “${titleOf(conversation)}”?`)) return;
  running.get(conversation)?.abort();
  conversations = conversations.filter((each) => each !== conversation);
  await store.remove(conversation.id);
  if (conversation === current) begin();
  else listConversations();
}

function titleOf(conversation) {
  if (conversation.title) return conversation.title;
  const asked = conversation.messages.find((each) => each.role === "user");
  const first = asked?.content.trim().replace(/\s+/g, " ") || asked?.images[0]?.name || "";
  return first.length > 48 ? `${first.slice(0, 47)}…` : first || "New conversation";
}

function listConversations() {
  byId("title").textContent = titleOf(current);
  document.title = current.messages.length ? `${titleOf(current)} · nanovllm` : "nanovllm";
  byId("conversations").replaceChildren(...conversations.map((each) => {
    const row = el("div", { className: "conversation" },
      running.has(each) ? el("span", { className: "running", title: "Answering" }) : null,
      el("button", {
        type: "button", className: "open", title: titleOf(each), onclick: () => show(each), ondblclick: () => rename(row, each),
      }, titleOf(each)),
      el("span", { className: "more" },
        iconButton("Rename", "M4 20h4L19 9l-4-4L4 16zM13 7l4 4", () => rename(row, each)),
        iconButton("Delete", "M5 7h14M10 7V4h4v3M7 7l1 13h8l1-13", () => forget(each))));
    row.classList.toggle("current", each === current);
    if (each === current) row.querySelector(".open").setAttribute("aria-current", "true");
    return row;
  }));
}

function rename(row, conversation) {
  const field = el("input", { value: titleOf(conversation), maxLength: 200, "aria-label": "Title", onkeydown, onblur: () => finish(true) });
  let open = true;
  function onkeydown(event) {
    if (event.isComposing) return;
    if (event.key === "Enter") finish(true);
    if (event.key === "Escape") finish(false);
    event.stopPropagation();
  }
  function finish(kept) {
    if (!open) return;
    open = false;
    if (kept && field.value.trim() !== titleOf(conversation)) conversation.title = field.value.trim();
    save(conversation, false);
  }
  row.replaceChildren(field);
  field.select();
}

function iconButton(label, path, onclick) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const shape = document.createElementNS("http://www.w3.org/2000/svg", "path");
  svg.setAttribute("viewBox", "0 0 24 24");
  svg.setAttribute("class", "icon");
  shape.setAttribute("d", path);
  svg.append(shape);
  return el("button", { type: "button", className: "icon", "aria-label": label, title: label, onclick }, svg);
}

// ---- messages ----

function rebuild() {
  views = current.messages.map((message) => (message.role === "user" ? userView(message) : answerView(message)));
  const empty = el("p", { className: "empty" }, el("strong", {}, "nanovllm"), "What would you like to know?");
  byId("messages").replaceChildren(...(views.length ? views.map((view) => view.node) : [empty]));
  refresh();
}

/** Brings what depends on the whole conversation up to date. */
function refresh() {
  for (const view of views) view.update();
  const busy = running.has(current);
  byId("send").hidden = busy;
  byId("stop").hidden = !busy;
}

function action(label, onclick) {
  return el("button", { type: "button", onclick }, label);
}

function userView(message) {
  const text = el("div", { className: "text" }, message.content);
  const actions = el("div", { className: "actions" }, action("Edit", edit), message.content ? copyButton(() => message.content) : null);
  const shown = [gallery(message.images), message.content ? text : null, actions].filter(Boolean);
  const node = el("article", { className: "message user", "aria-label": "You" }, ...shown);
  const conversation = current;

  function edit() {
    const field = el("textarea", { value: message.content, rows: Math.min(12, message.content.split("\n").length + 1), onkeydown });
    const list = attachedList([...message.images], field);
    const more = action("Attach files", () => choose(list));
    const buttons = el("div", { className: "actions" }, action("Cancel", close), more, action("Save and answer", done));
    node.classList.add("editing");
    node.attachedList = list;
    node.replaceChildren(list.node, field, buttons);
    field.focus();
    function onkeydown(event) {
      if (event.isComposing) return;
      if (event.key === "Enter" && !event.shiftKey) {
        event.preventDefault();
        done();
      } else if (event.key === "Escape") {
        event.stopPropagation();
        close();
      }
    }
    async function done() {
      if (attaching && (!(await attaching) || !node.isConnected)) return;
      if ((!field.value.trim() && !list.images.length) || turnedAway(list)) return;
      running.get(conversation)?.abort();
      message.content = field.value;
      message.images = list.images;
      conversation.messages.splice(conversation.messages.indexOf(message) + 1);
      rebuild();
      answer(conversation);
    }
  }
  function close() {
    node.classList.remove("editing");
    node.replaceChildren(...shown);
    input.focus();
  }
  return { node, update() {}, edit };
}

function answerView(message) {
  const conversation = current;
  const thoughts = el("div", { className: "markdown" });
  const summary = el("summary", {});
  const thinking = el("details", { className: "thinking" }, summary, thoughts);
  const reading = el("p", { className: "reading" });
  const content = el("div", { className: "markdown content" });
  const calls = el("div", { className: "calls" });
  const problem = el("p", { className: "problem", role: "alert" });
  const again = action("Again", regenerate);
  const copy = copyButton(() => message.content);
  const stats = el("span", { className: "stats" });
  const actions = el("div", { className: "actions" }, again, copy, stats);
  const node = el("article", { className: "message assistant", "aria-label": "Answer" }, thinking, reading, content, calls, problem, actions);
  let touched = false;
  let shownCalls = "";
  summary.addEventListener("click", () => (touched = true));

  function update() {
    const busy = running.has(conversation) && conversation.messages.at(-1) === message;
    const stillThinking = busy && message.thought === null;
    thinking.hidden = !message.reasoning;
    if (message.reasoning) {
      const thought = message.thought === null ? "Thoughts" : `Thought for ${message.thought.toFixed(1)} s`;
      summary.textContent = stillThinking ? "Thinking…" : thought;
      if (!touched) thinking.open = stillThinking;
      showMarkdown(thoughts, message.reasoning);
    }
    reading.textContent = busy ? (message.reading ?? "") : "";
    reading.hidden = !reading.textContent;
    showMarkdown(content, message.content);
    content.classList.toggle("waiting", busy && !message.content && !message.reasoning && !message.calls.length);
    const wanted = JSON.stringify([message.calls, busy]);
    if (wanted !== shownCalls) {
      shownCalls = wanted;
      calls.replaceChildren(...callNodes(conversation, message, busy));
    }
    problem.textContent = message.error;
    problem.hidden = !message.error;
    actions.hidden = busy;
    copy.hidden = !message.content;
    stats.textContent = message.stats;
  }

  function regenerate() {
    running.get(conversation)?.abort();
    conversation.messages.splice(conversation.messages.indexOf(message));
    rebuild();
    answer(conversation);
  }
  return { node, update };
}

/** A card for each call, with a field for its result where that is still to come: then the conversation goes on. */
function callNodes(conversation, message, busy) {
  const isLast = conversation.messages.at(-1) === message;
  const fields = [];
  const nodes = message.calls.map((call) => {
    const card = el("section", { className: "call" }, el("h3", {}, call.name), el("pre", {}, pretty(call.arguments)));
    if (call.result !== null) card.append(el("pre", { className: "result" }, call.result));
    else if (!busy && isLast) {
      const field = el("textarea", { rows: 2, placeholder: "What it returns", "aria-label": `Result of ${call.name}` });
      fields.push([call, field]);
      card.append(field);
    }
    return card;
  });
  if (fields.length) {
    const done = () => {
      for (const [call, field] of fields) call.result = field.value;
      answer(conversation);
    };
    for (const [, field] of fields) {
      field.addEventListener("keydown", (event) => {
        if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
          event.preventDefault();
          done();
        }
      });
    }
    const label = fields.length > 1 ? "Send results" : "Send result";
    nodes.push(el("button", { type: "button", className: "main calls-done", onclick: done }, label));
  }
  return nodes;
}

function pretty(json) {
  try {
    return JSON.stringify(JSON.parse(json), null, 2);
  } catch {
    return json;
  }
}

// ---- asking ----

async function send() {
  if (attaching && !(await attaching)) return;
  const text = input.value;
  if ((!text.trim() && !attached.images.length) || running.has(current) || turnedAway(attached)) return;
  notice("");
  input.value = "";
  fitInput();
  const images = attached.takeAll();
  await restored;
  current.messages.push({ role: "user", content: text, images });
  answer(current);
}

/** Asks for the next message of a conversation, and shows it as it comes. */
async function answer(conversation) {
  let request;
  try {
    request = requestOf(conversation, settings);
  } catch (error) {
    notice(error.message);
    save(conversation);
    if (conversation === current) rebuild();
    return;
  }
  const message = newAnswer();
  const controller = new AbortController();
  conversation.messages.push(message);
  running.set(conversation, controller);
  save(conversation);
  if (conversation === current) rebuild();
  log.scrollTop = log.scrollHeight;
  let drawn = false;
  let refused = false;
  let saved = performance.now();
  const draw = () => {
    drawn = false;
    if (conversation === current && running.get(conversation) === controller) keepingEnd(() => views.at(-1).update());
  };
  const changed = () => {
    if (!drawn) requestAnimationFrame(draw);
    drawn = true;
    if (performance.now() - saved > SAVE_EVERY) {
      saved = performance.now();
      store.put(conversation).catch(() => {});
    }
  };
  try {
    await streamAnswer(request, message, controller.signal, changed);
  } catch (error) {
    if (controller.signal.aborted) message.stats = "stopped";
    else if (!leaving) message.error = error instanceof TypeError ? "The server cannot be reached." : error.message;
    refused = AT_FAULT.includes(error.status);
  }
  if (running.get(conversation) === controller) running.delete(conversation);
  if (conversations.includes(conversation)) save(conversation);
  if (conversation !== current) return;
  keepingEnd(refresh);
  byId("said").textContent = message.error || message.content.slice(0, 500);
  byId("messages").querySelector(".assistant:last-child .call textarea")?.focus();
  if (refused && !input.value && !attached.images.length) views.at(-2)?.edit?.();
}

// ---- what is attached ----

function choose(list) {
  choosing = list;
  byId("attach-file").click();
}

/** Takes files in their order, behind those that are being read already. */
async function attach(files, list) {
  const mine = (attaching = attachAll(files, list, attaching));
  await mine;
  if (attaching === mine) attaching = null;
}

async function attachAll(files, list, others) {
  const problems = [];
  const fine = (await others) ?? true;
  if (fine) notice("");
  for (const file of files) {
    try {
      const image = await attachedFrom(file);
      if (lacking(image)) throw new Error(`${byId("model").value} ${lacking(image)}.`);
      keepingEnd(() => list.add(image));
      byId("said").textContent = `Attached: ${image.name}`;
    } catch (error) {
      problems.push(error.message);
    }
  }
  if (problems.length) notice(problems.join(" "));
  return fine && !problems.length;
}

/** What the chosen model is known to lack for this; undefined for nothing. */
function lacking({ blob }) {
  const kind = blob ? kindOf(blob) : "text";
  const known = modalities.get(byId("model").value);
  return known && !known.includes(MODALITIES[kind]) ? LACKS[kind] : undefined;
}

/** Whether some of these cannot be sent; then says so. */
function turnedAway({ images }) {
  const lack = images.map(lacking).find(Boolean);
  if (lack) notice(`${byId("model").value} ${lack}: remove them, or choose another model.`);
  return Boolean(lack);
}

/** Where files go that come to this place of the page: to the message that is edited there, or to the next. */
function listAt(place) {
  return place.closest?.(".editing")?.attachedList ?? attached;
}

/** Does something, and stays at the end of the log if that is where it was. */
function keepingEnd(change) {
  const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
  change();
  if (atEnd) log.scrollTop = log.scrollHeight;
}

function notice(text) {
  byId("notice").textContent = text;
  byId("notice").hidden = !text;
}

function fitInput() {
  input.style.height = "auto";
  input.style.height = `${input.scrollHeight}px`;
}

// ---- settings ----

function buildSettings() {
  byId("numbers").replaceChildren(...NUMBERS.map(({ name, label, ...bounds }) =>
    el("label", {}, label, el("input", { id: name, type: "number", inputMode: "decimal", ...bounds }))));
  for (const name of Object.keys(DEFAULTS).filter((each) => each !== "model")) {
    byId(name).addEventListener("input", () => {
      const valid = byId(name).validity.valid;
      settings[name] = valid ? byId(name).value : "";
      keep("settings", settings);
      if (name === "tools") checkTools();
    });
  }
  byId("theme").addEventListener("input", () => {
    keep("theme", byId("theme").value);
    setTheme(byId("theme").value);
  });
  for (const name of ["key", "remember"]) {
    byId(name).addEventListener("change", () => setKey(byId("key").value.trim(), byId("remember").checked));
  }
  byId("settings").addEventListener("close", loadModels);
}

function openSettings() {
  fillSettings();
  byId("settings").showModal();
}

function fillSettings() {
  for (const name of Object.keys(DEFAULTS)) if (name !== "model") byId(name).value = settings[name];
  byId("theme").value = recall("theme", "auto");
  byId("key").value = key;
  byId("remember").checked = recall("key", "") !== "";
  checkTools();
}

function checkTools() {
  const problem = byId("tools-problem");
  problem.hidden = true;
  try {
    parsedTools(settings.tools);
  } catch (error) {
    problem.textContent = error.message;
    problem.hidden = false;
  }
}

async function loadModels() {
  const select = byId("model");
  try {
    const { data } = await (await ask("v1/models")).json();
    for (const { id, architecture } of data) modalities.set(id, architecture?.input_modalities);
    select.replaceChildren(...data.map(({ id }) => el("option", { value: id }, id)));
    if (!data.some(({ id }) => id === settings.model)) settings.model = "";
    select.value = settings.model || data[0]?.id;
  } catch (error) {
    notice(error instanceof TypeError ? "The server cannot be reached." : error.message);
  }
  select.hidden = !select.options.length;
}

// ---- events ----

/** Whether it is files that are dragged. The browser would show them instead of this page. */
function dragged(event, within) {
  if (!event.dataTransfer.types.includes("Files")) return false;
  event.preventDefault();
  document.body.classList.toggle("dropping", within);
  return true;
}

function toggleSidebar(shown) {
  byId("sidebar").classList.toggle("shown", shown);
  byId("shade").hidden = !shown;
}

byId("new").addEventListener("click", begin);
byId("open-sidebar").addEventListener("click", () => toggleSidebar(true));
byId("close-sidebar").addEventListener("click", () => toggleSidebar(false));
byId("shade").addEventListener("click", () => toggleSidebar(false));
byId("open-settings").addEventListener("click", openSettings);
byId("reset").addEventListener("click", () => {
  Object.assign(settings, DEFAULTS, { model: settings.model });
  keep("settings", settings);
  fillSettings();
});
byId("model").addEventListener("change", () => {
  settings.model = byId("model").value;
  keep("settings", settings);
});
byId("stop").addEventListener("click", () => running.get(current)?.abort());
byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
byId("composer").querySelector(".box").prepend(attached.node);
byId("attach").addEventListener("click", () => choose(attached));
byId("attach-file").addEventListener("change", (event) => {
  const files = [...event.target.files];
  event.target.value = "";
  choosing.field.focus();
  attach(files, choosing);
});
document.addEventListener("paste", (event) => {
  const { files, types } = event.clipboardData;
  const isText = types.includes("text/plain") && types.includes("text/html"); // programs put a picture of it beside it
  if (!files.length || isText || document.querySelector("dialog[open]")) return;
  event.preventDefault();
  attach([...files], listAt(event.target));
});
document.addEventListener("dragover", (event) => dragged(event, true));
document.addEventListener("dragleave", (event) => dragged(event, event.relatedTarget !== null));
document.addEventListener("drop", (event) => {
  if (dragged(event, false)) attach([...event.dataTransfer.files], listAt(event.target));
});
byId("to-end").addEventListener("click", () => (log.scrollTop = log.scrollHeight));
log.addEventListener("scroll", () => (byId("to-end").hidden = log.scrollHeight - log.scrollTop - log.clientHeight < 200));
input.addEventListener("input", fitInput);
input.addEventListener("keydown", (event) => {
  if (event.isComposing) return;
  if (event.key === "Enter" && !event.shiftKey) {
    event.preventDefault();
    send();
  } else if (event.key === "ArrowUp" && !input.value && !running.has(current)) {
    event.preventDefault();
    views.findLast((view) => view.edit)?.edit();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !document.querySelector("dialog[open]")) {
    if (byId("sidebar").classList.contains("shown")) toggleSidebar(false);
    else running.get(current)?.abort();
  } else if (event.altKey && event.code === "KeyN") {
    event.preventDefault();
    begin();
  } else if (event.altKey && event.code === "KeyS") {
    event.preventDefault();
    openSettings();
  }
});
addEventListener("pagehide", () => {
  leaving = true;
  for (const conversation of running.keys()) store.put(conversation).catch(() => {});
});
addEventListener("pageshow", () => (leaving = false));
byId("export").addEventListener("click", async () => {
  try {
    const file = await exported(conversations);
    const link = el("a", { href: URL.createObjectURL(file), download: "conversations.json" });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
    if (file.size > MOST_IMPORTED) notice("This file is larger than what can be imported again: too much is attached in it.");
  } catch (error) {
    notice(error.message);
  }
});
byId("import").addEventListener("click", () => byId("import-file").click());
byId("import-file").addEventListener("change", async (event) => {
  const [file] = event.target.files;
  event.target.value = "";
  await restored;
  try {
    for (const conversation of await imported(file)) {
      conversations.push(conversation);
      await save(conversation, false);
    }
    conversations.sort((a, b) => b.updated - a.updated);
    listConversations();
    notice("");
  } catch (error) {
    notice(error.message);
  }
});

// Until then nothing is sent or imported: it would be out of sight once what the browser kept is shown.
const restored = restore();
start();
