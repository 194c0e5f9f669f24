// What both pages share: making elements, asking the server, the API key.
"use strict";

/** A new element. Names that begin with "on" are listeners, others properties or attributes. Text is text, never markup. */
function el(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name in node) node[name] = value;
    else node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null));
  return node;
}

function byId(id) {
  return document.getElementById(id);
}

// ---- what the browser keeps: a private window may refuse ----

function recall(name, fallback) {
  try {
    return JSON.parse(localStorage.getItem(`nanovllm.${name}`)) ?? fallback;
  } catch {
    return fallback;
  }
}

function keep(name, value) {
  try {
    localStorage.setItem(`nanovllm.${name}`, JSON.stringify(value));
  } catch {
    // This page then forgets it.
  }
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
}
setTheme(recall("theme", "auto"));

// ---- the API key: for this tab, or kept by this browser where the person wants that ----

let key = recall("key", "");
let asking = null;
try {
  key ||= sessionStorage.getItem("nanovllm.key") ?? "";
} catch {
  // As above.
}

function setKey(value, remembered) {
  key = value;
  keep("key", remembered ? value : "");
  try {
    sessionStorage.setItem("nanovllm.key", value);
  } catch {
    // As above.
  }
}

/** Asks for a key once, whoever else is waiting for it. Fails where the person would not give one. */
function askForKey() {
  asking ??= new Promise((resolve, reject) => {
    const input = el("input", { type: "password", autocomplete: "current-password", required: true, id: "key-asked" });
    const remembered = el("input", { type: "checkbox", checked: recall("key", "") !== "" });
    const dialog = el("dialog", { "aria-labelledby": "key-title" },
      el("form", { method: "dialog" },
        el("h2", { id: "key-title" }, "This server wants an API key"),
        key ? el("p", { className: "problem" }, "It does not know the one it was given.") : null,
        el("input", { autocomplete: "username", value: "nanovllm", hidden: true }), // password managers want a name
        el("label", {}, "API key", input),
        el("label", { className: "check" }, remembered, "Keep it in this browser"),
        el("div", { className: "buttons" },
          el("button", { type: "button", onclick: () => dialog.close() }, "Cancel"),
          el("button", { className: "main", value: "given" }, "Continue"))));
    dialog.addEventListener("close", () => {
      dialog.remove();
      asking = null;
      if (dialog.returnValue === "given" && input.value) {
        setKey(input.value.trim(), remembered.checked);
        resolve();
      } else reject(new Error("The server wants an API key."));
    });
    document.body.append(dialog);
    dialog.showModal();
  });
  return asking;
}

/** fetch with the key; a 401 asks for it and tries again. Fails with what the server said where that is an error. */
async function ask(path, options = {}) {
  for (;;) {
    const given = key;
    const headers = { ...options.headers, ...(given ? { authorization: `Bearer ${given}` } : {}) };
    const response = await fetch(path, { ...options, headers });
    if (response.ok) return response;
    if (response.status !== 401) throw Object.assign(new Error(await saidBy(response)), { status: response.status });
    if (given === key) await askForKey();
    options.signal?.throwIfAborted();
  }
}

async function saidBy(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `The server answered ${response.status}.`;
  }
}
