// One turn of the model: the request as the server wants it, and its answer as it streams in.
"use strict";

const NUMBERS = [
  { name: "temperature", label: "Temperature", min: 0, max: 100, step: "any" },
  { name: "top_p", label: "Top-p", min: 0, max: 1, step: "any" },
  { name: "top_k", label: "Top-k", min: 0, step: 1 },
  { name: "min_p", label: "Min-p", min: 0, max: 1, step: "any" },
  { name: "max_tokens", label: "Most tokens", min: 1, step: 1 },
  { name: "reasoning_budget", label: "Most thinking tokens", min: 0, step: 1 },
  { name: "seed", label: "Seed", min: 0, step: 1 },
];
const NO_RESULT = "(no result)";
const PARTS = {
  image: ({ blob }) => ({ type: "image_url", image_url: { url: blob } }),
  sound: ({ blob }) => ({ type: "audio_url", audio_url: { url: blob } }),
  text: (file) => ({ type: "text", file }),
};

/** The messages as OpenAI's API has them: results of tools as messages of their own, empty answers left out. See `withAttached`. */
function wireMessages(messages, system) {
  const wire = system.trim() ? [{ role: "system", content: system }] : [];
  for (const message of messages) {
    if (message.role === "user") wire.push({ role: "user", content: userContent(message) });
    else if (message.content || message.calls.length) {
      const calls = message.calls.map((call) => ({
        id: call.id, type: "function", function: { name: call.name, arguments: call.arguments || "{}" },
      }));
      wire.push({
        role: "assistant",
        content: message.content || null,
        ...(message.reasoning ? { reasoning_content: message.reasoning } : {}),
        ...(calls.length ? { tool_calls: calls } : {}),
      });
      for (const call of message.calls) wire.push({ role: "tool", tool_call_id: call.id, content: call.result ?? NO_RESULT });
    }
  }
  return wire;
}

/** What is attached comes first: a model reads what is asked of it when it has seen it. */
function userContent({ content, images }) {
  const parts = images.filter(({ blob }) => blob).map((each) => PARTS[kindOf(each.blob)](each));
  if (!parts.length) return content;
  return content.trim() ? [...parts, { type: "text", text: content }] : parts;
}

/** Puts addresses and texts where `wireMessages` left what they are made of: that takes reading it. */
async function withAttached(request) {
  for (const part of request.messages.flatMap(({ content }) => content ?? [])) {
    const sent = part.image_url ?? part.audio_url;
    if (sent) sent.url = await dataUrl(sent.url);
    if (part.file) {
      part.text = fenced(part.file.name, await part.file.blob.text());
      delete part.file;
    }
  }
  return request;
}

/** Tools from what a person typed: bare functions, or as OpenAI's API has them. Fails with what is wrong. */
function parsedTools(text) {
  if (!text.trim()) return [];
  let tools;
  try {
    tools = JSON.parse(text);
  } catch (error) {
    throw new Error(`Tools: ${error.message}`);
  }
  if (!Array.isArray(tools)) throw new Error("Tools: a list is needed, in square brackets");
  return tools.map((tool) => {
    const bare = tool?.function ?? tool;
    if (typeof bare?.name !== "string") throw new Error('Tools: each needs a "name"');
    return { type: "function", function: bare };
  });
}

function requestOf(conversation, settings) {
  const request = {
    messages: wireMessages(conversation.messages, settings.system),
    stream: true,
    stream_options: { include_usage: true },
    return_progress: true,
  };
  if (settings.model) request.model = settings.model;
  for (const { name } of NUMBERS) if (settings[name] !== "") request[name] = Number(settings[name]);
  if (settings.thinking) request.enable_thinking = settings.thinking === "on";
  const tools = parsedTools(settings.tools);
  if (tools.length) request.tools = tools;
  return request;
}

/** Fills the answer as it comes; changed() is called for each piece. Fails with what the server said. */
async function streamAnswer(request, answer, signal, changed) {
  const started = performance.now();
  const seconds = () => (performance.now() - started) / 1000;
  const body = JSON.stringify(await withAttached(request));
  const response = await ask("v1/chat/completions", {
    method: "POST", headers: { "content-type": "application/json" }, body, signal,
  });
  let first = null;
  let finish = null;
  let usage = null;
  for await (const data of eventsOf(response.body)) {
    if (data === "[DONE]") break;
    const event = JSON.parse(data);
    if (event.error) throw new Error(event.error.message);
    usage = event.usage ?? usage;
    if (event.prompt_progress) answer.reading = readingOf(event.prompt_progress);
    const choice = event.choices?.[0];
    if (!choice) continue;
    finish = choice.finish_reason ?? finish;
    const { content, reasoning_content: reasoning, tool_calls: calls } = choice.delta ?? {};
    if (content || reasoning || calls) {
      first ??= seconds();
      delete answer.reading;
    }
    if (reasoning) answer.reasoning += reasoning;
    if (content || calls) {
      if (answer.reasoning && answer.thought === null) answer.thought = seconds();
      answer.content += content ?? "";
      for (const call of calls ?? []) takeCall(answer.calls, call);
    }
    changed();
  }
  if (finish === null) throw new Error("The answer broke off.");
  if (usage) answer.stats = statsOf(usage, first, seconds(), finish);
}

/** How far the prompt is read, where there is more to come. */
function readingOf({ processed, total }) {
  return processed < total ? `Reading the prompt: ${processed.toLocaleString()} of ${total.toLocaleString()} tokens` : "";
}

function takeCall(calls, piece) {
  const call = (calls[piece.index] ??= { id: "", name: "", arguments: "", result: null });
  if (piece.id) call.id = piece.id;
  if (piece.function?.name) call.name = piece.function.name;
  call.arguments += piece.function?.arguments ?? "";
}

function statsOf(usage, first, total, finish) {
  const parts = [`${usage.completion_tokens} tokens`];
  if (usage.completion_tokens > 1 && first !== null && total - first > 0.02) {
    const rate = (usage.completion_tokens - 1) / (total - first);
    parts.push(`${rate < 10 ? rate.toFixed(1) : Math.round(rate)} tok/s`);
  }
  if (first !== null) parts.push(`first after ${first.toFixed(2)} s`);
  if (finish === "length") parts.push("cut off at the limit");
  return parts.join(" · ");
}

/** The data of server-sent events, as the bytes come in: lines may be cut anywhere. Comments and other fields are passed over. */
async function* eventsOf(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let data = [];
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const raw of lines) {
        const line = raw.endsWith("\r") ? raw.slice(0, -1) : raw;
        if (line.startsWith("data:")) data.push(line.slice(line[5] === " " ? 6 : 5));
        else if (!line && data.length) {
          yield data.join("\n");
          data = [];
        }
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
