// The status page: /status.json once a second. Rates are differences between two answers, by the server's own clock.
"use strict";

const EVERY = 1000;
const KEPT = 300; // answers that the charts show, and how many of them
const LEAST = 60; // fill their width
const cards = new Map(); // a model's id -> its view and history
let last = null;

async function poll() {
  try {
    const status = await (await ask("status.json")).json();
    if (last && status.seconds < last.seconds) cards.clear(); // another server
    show(status, last && status.seconds > last.seconds ? last : null);
    last = status;
    document.body.classList.remove("stale");
    byId("problem").hidden = true;
  } catch (error) {
    document.body.classList.add("stale");
    byId("problem").textContent = error instanceof TypeError ? "The server cannot be reached." : error.message;
    byId("problem").hidden = false;
  }
  setTimeout(poll, EVERY);
}

function show(status, before) {
  byId("version").textContent = status.version;
  byId("summary").textContent = `up ${duration(status.seconds)} · ${count(status.http.finished)} HTTP requests`;
  const shown = status.models.map((model) => {
    if (!cards.has(model.id)) cards.set(model.id, modelView());
    const earlier = before?.models.find(({ id }) => id === model.id);
    cards.get(model.id).update(model, earlier, earlier ? status.seconds - before.seconds : null);
    return cards.get(model.id).node;
  });
  const main = byId("models");
  if (shown.length !== main.children.length || shown.some((node, i) => node !== main.children[i])) main.replaceChildren(...shown);
}

function modelView() {
  const state = el("span", { className: "state" });
  const name = el("span", {});
  const facts = el("small", {});
  const generated = figure("generated tok/s", "one", "generation-rate");
  const read = figure("read tok/s", "two", "prompt-rate");
  const rates = chart(["one", "two"], (value) => `${count(value)} tok/s`);
  const runs = figure("running", "one", "running");
  const waits = figure("waiting", "two", "waiting");
  const queue = chart(["one", "two"], count);
  const kinds = [figure("used", "one", "used"), figure("cached", "two", "cached"), figure("free", "idle", "free")];
  const parts = ["one", "two"].map((mark) => el("span", { className: mark }));
  const memory = el("p", { className: "note" });
  const latencies = el("tbody", {});
  const of = el("p", { className: "note" });
  const counts = el("tbody", {});
  const node = el("section", { className: "model" },
    el("h2", {}, name, state, facts),
    el("div", { className: "cards" },
      card("Throughput", "broad", figures(generated, read), rates.node),
      card("Queue", "", figures(runs, waits), queue.node),
      card("KV cache, in blocks", "", figures(...kinds), el("div", { className: "bar" }, ...parts), memory),
      card("Latency of recent requests", "", el("table", {}, row("thead", ["", "median", "95 %"]), latencies), of),
      card("Since the start", "", el("table", {}, counts))));

  function update(model, earlier, seconds) {
    name.textContent = model.id;
    state.textContent = model.state;
    state.dataset.state = model.state;
    facts.textContent = factsOf(model);
    const rate = (what) => (earlier ? Math.max(0, model[what] - earlier[what]) / seconds : 0);
    generated.set(rate("generation_tokens"));
    read.set(rate("prompt_tokens"));
    rates.add([rate("generation_tokens"), rate("prompt_tokens")]);
    runs.set(model.running);
    waits.set(model.waiting);
    queue.add([model.running ?? 0, model.waiting ?? 0]);
    const blocks = model.blocks ?? {};
    ["used", "cached", "free"].forEach((kind, i) => kinds[i].set(blocks[kind]));
    const total = blocks.used + blocks.cached + blocks.free || 1;
    parts[0].style.width = `${((blocks.used ?? 0) / total) * 100}%`;
    parts[1].style.width = `${((blocks.cached ?? 0) / total) * 100}%`;
    memory.textContent = model.facts ? `${bytes(model.facts.kv_bytes)}, ${model.facts.block_size} tokens a block` : "";
    const { of: number, ...times } = model.latencies;
    const names = { queue: "in the queue", first_token: "to the first token", next_token: "between tokens", whole: "in all" };
    latencies.replaceChildren(...Object.entries(names).map(([what, label]) => tr([label, time(times[what]?.p50), time(times[what]?.p95)])));
    of.textContent = number ? `of the last ${number} that came to their end` : "nothing has come to its end yet";
    const { stop, length, repetition, abort, error } = model.finished;
    const { hits, queries } = model.prefix_cache;
    counts.replaceChildren(
      tr(["tokens generated", count(model.generation_tokens)]),
      tr(["tokens of prompts", count(model.prompt_tokens)]),
      tr(["… found in the prefix cache", queries ? `${count(hits)} (${Math.round((hits / queries) * 100)} %)` : "0"]),
      tr(["answers finished", count(stop + length + repetition)]),
      tr(["aborted / failed / refused", [abort, error, model.refused].map(count).join(" / ")]),
      tr(["preemptions / engine restarts", [model.preemptions, model.restarts].map(count).join(" / ")]));
  }
  return { node, update };
}

function card(title, kind, ...children) {
  return el("div", { className: `card ${kind}` }, el("h3", {}, title), ...children);
}

function figures(...all) {
  return el("dl", { className: "figures" }, ...all.map(({ node }) => node));
}

function figure(label, mark, name) {
  const value = el("dd", { "data-figure": name });
  const set = (number) => (value.textContent = number === undefined || number === null ? "–" : count(number));
  return { node: el("div", {}, el("dt", { className: mark }, label), value), set };
}

/** Lines over the last answers, from 0 to the highest of them. */
function chart(marks, label) {
  const svg = svgNode("svg", { preserveAspectRatio: "none", class: "chart", "aria-hidden": "true" });
  const lines = marks.map((mark) => svgNode("path", { class: mark }));
  const bottom = { x1: 0, x2: KEPT - 1, y1: 99.5, y2: 99.5 };
  svg.append(svgNode("line", bottom), ...lines);
  const from = el("span", {});
  const most = el("span", {});
  const history = [];
  function add(values) {
    history.push(values);
    if (history.length > KEPT) history.shift();
    const top = Math.max(1, ...history.flat());
    const span = Math.max(LEAST, history.length);
    svg.setAttribute("viewBox", `0 0 ${span - 1} 100`);
    lines.forEach((line, i) => {
      const points = history.map((each, x) => `${span - history.length + x},${(99 - (each[i] / top) * 97).toFixed(1)}`);
      line.setAttribute("d", points.length > 1 ? `M${points.join("L")}` : "");
    });
    from.textContent = `last ${duration((history.length * EVERY) / 1000)}`;
    most.textContent = `highest ${label(Math.max(...history.flat()))}`;
  }
  return { node: el("div", {}, svg, el("div", { className: "ends" }, from, most)), add };
}

function svgNode(tag, attributes) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  return node;
}

function row(tag, names) {
  return el(tag, {}, el("tr", {}, ...names.map((name) => el("th", {}, name))));
}

function tr([name, ...values]) {
  return el("tr", {}, el("th", { scope: "row" }, name), ...values.map((value) => el("td", {}, value)));
}

function factsOf({ facts, context_len: context }) {
  const parts = facts ? [`${count(facts.num_parameters)} parameters`, `${bytes(facts.weight_bytes)} of ${facts.dtype}`, facts.device] : [];
  if (context) parts.push(`context ${count(context)}`);
  return parts.join(" · ");
}

function count(value) {
  if (value >= 1e9) return `${(value / 1e9).toFixed(2)} G`;
  if (value >= 1e6) return `${(value / 1e6).toFixed(2)} M`;
  return value < 10 && value % 1 ? value.toFixed(1) : Math.round(value).toLocaleString("en");
}

function bytes(value) {
  return value >= 1 << 30 ? `${(value / 2 ** 30).toFixed(1)} GiB` : `${(value / 2 ** 20).toFixed(1)} MiB`;
}

function time(seconds) {
  if (seconds === undefined) return "–";
  return seconds < 1 ? `${(seconds * 1000).toFixed(seconds < 0.01 ? 1 : 0)} ms` : `${seconds.toFixed(2)} s`;
}

function duration(seconds) {
  const whole = Math.floor(seconds);
  const [days, hours, minutes] = [Math.floor(whole / 86400), Math.floor(whole / 3600) % 24, Math.floor(whole / 60) % 60];
  if (days) return `${days} d ${hours} h`;
  if (hours) return `${hours} h ${minutes} min`;
  return minutes ? `${minutes} min ${whole % 60} s` : `${whole} s`;
}

poll();
