// Markdown as elements. What a model wrote is never parsed as HTML: it becomes text nodes, and links to http and https only.
// Every loop goes forward: time is linear in the text, but for a bounded number of looks ahead.
"use strict";

const DEEPEST = 12;
const MOST_LOOKS = 24;

/** Shows text in a container. Blocks that have not changed since the last call keep their elements. */
function showMarkdown(container, text) {
  const blocks = blocksOf(text.split("\n"));
  const old = container.blocks ?? [];
  let same = 0;
  while (same < blocks.length && same < old.length && blocks[same] === old[same]) same++;
  while (container.childNodes.length > same) container.lastChild.remove();
  for (const block of blocks.slice(same)) container.append(blockNode(block, 0));
  container.blocks = blocks;
}

const FENCE = /^ {0,3}(~{3,}|(?!`*[^`]+`)`{3,})\s*([^\s`]*)/; // ```code``` in one line is none
const ITEM = /^( *)([-*+]|\d{1,9}[.)])(?: +|$)/;
const HEADING = /^ {0,3}(#{1,6}) +(.*)$/;
const RULE = /^ {0,3}(?:(?:\* *){3,}|(?:- *){3,}|(?:_ *){3,})$/;
const QUOTE = /^ {0,3}>/;

/** The source of each block, as one string: a fence, a list, a quote, a table, a heading, a rule or a paragraph. */
function blocksOf(lines) {
  const blocks = [];
  for (let i = 0; i < lines.length; ) {
    if (!lines[i].trim()) {
      i++;
      continue;
    }
    const end = blockEnd(lines, i);
    blocks.push(lines.slice(i, end).join("\n").trimEnd());
    i = end;
  }
  return blocks;
}

function blockEnd(lines, start) {
  const first = lines[start];
  const fence = FENCE.exec(first);
  if (fence) return fenceEnd(lines, start, fence[1]);
  if (RULE.test(first) || HEADING.test(first)) return start + 1;
  const item = ITEM.exec(first);
  if (item) return listEnd(lines, start, item[1].length);
  const quoted = QUOTE.test(first);
  let i = start + 1;
  while (i < lines.length && lines[i].trim() && (quoted ? QUOTE.test(lines[i]) : !beginsBlock(lines[i]))) i++;
  return i;
}

function beginsBlock(line) {
  return FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line) || ITEM.test(line);
}

function fenceEnd(lines, start, fence) {
  for (let i = start + 1; i < lines.length; i++) {
    const line = lines[i].trim();
    if (line.startsWith(fence) && !line.replaceAll(fence[0], "")) return i + 1;
  }
  return lines.length;
}

/** Items, what is indented below them, and blank lines between those. A fence inside is taken whole. */
function listEnd(lines, start, indent) {
  let i = start + 1;
  let end = i;
  while (i < lines.length) {
    const line = lines[i];
    const item = ITEM.exec(line);
    if (line.trim()) {
      const deeper = line.search(/\S/) > indent + 1;
      const joins = item ? item[1].length >= indent && !RULE.test(line) : deeper || (end === i && !beginsBlock(line));
      if (!joins) break;
      const fence = FENCE.exec(line.trimStart());
      if (fence && deeper) i = fenceEnd(lines, i, fence[1]) - 1;
      end = i + 1;
    }
    i++;
  }
  return end;
}

function blockNode(source, depth) {
  const lines = source.split("\n");
  const fence = FENCE.exec(lines[0]);
  if (fence) return codeNode(lines, fence);
  const heading = HEADING.exec(lines[0]);
  if (heading) return inline(el(`h${Math.min(6, heading[1].length + 1)}`), heading[2]);
  if (RULE.test(lines[0])) return el("hr");
  if (QUOTE.test(lines[0]) && depth < DEEPEST) {
    return nested(el("blockquote"), lines.map((line) => line.replace(/^ {0,3}> ?/, "")), depth);
  }
  if (ITEM.test(lines[0]) && depth < DEEPEST) return listNode(lines, depth);
  if (lines.length > 1 && lines[0].includes("|") && dividerOf(lines[1])) return tableNode(lines);
  return inline(el("p"), lines.map((line) => line.trimStart()).join("\n"));
}

function nested(node, lines, depth) {
  for (const block of blocksOf(lines)) node.append(blockNode(block, depth + 1));
  return node;
}

function codeNode(lines, fence) {
  const last = lines[lines.length - 1].trim();
  const closed = lines.length > 1 && last.startsWith(fence[1]) && !last.replaceAll(fence[1][0], "");
  const code = lines.slice(1, closed ? -1 : undefined).join("\n");
  return el("div", { className: "code" },
    el("div", { className: "code-head" }, el("span", {}, fence[2] || "text"), copyButton(() => code)),
    el("pre", { tabIndex: 0 }, el("code", {}, code)));
}

function listNode(lines, depth) {
  const [, indent, mark] = ITEM.exec(lines[0]);
  const ordered = /\d/.test(mark);
  const list = el(ordered ? "ol" : "ul", ordered ? { start: parseInt(mark, 10) } : {});
  const tight = lines.every((line) => line.trim());
  const items = [];
  for (const line of lines) {
    const item = ITEM.exec(line);
    if (item && item[1].length <= indent.length + 1) items.push([line.slice(item[0].length)]);
    else items[items.length - 1].push(line);
  }
  for (const item of items) {
    let width = mark.length + indent.length + 3;
    for (const line of item.slice(1)) if (line.trim()) width = Math.min(width, line.search(/\S/));
    const node = nested(el("li"), item.map((line, i) => (i && line.trim() ? line.slice(width) : line)), depth);
    if (tight && node.firstChild?.nodeName === "P") node.firstChild.replaceWith(...node.firstChild.childNodes);
    list.append(node);
  }
  return list;
}

function cellsOf(line) {
  const inner = line.trim().replace(/^\|/, "").replace(/(?<!\\)\|$/, "");
  return inner.split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
}

function dividerOf(line) {
  return cellsOf(line).every((cell) => /^:?-+:?$/.test(cell));
}

function tableNode(lines) {
  const aligns = cellsOf(lines[1]).map((cell) => (!cell.endsWith(":") ? "" : cell.startsWith(":") ? "center" : "right"));
  const row = (line, tag) => {
    const cells = cellsOf(line);
    return el("tr", {}, ...aligns.map((align, i) => inline(el(tag, { className: align }), cells[i] ?? "")));
  };
  return el("div", { className: "wide" },
    el("table", {},
      el("thead", {}, row(lines[0], "th")),
      el("tbody", {}, ...lines.slice(2).map((line) => row(line, "td")))));
}

// ---- inside of a line ----

const SPECIAL = /[\\`*_~[!<\n]|https?:\/\//g;
const ADDRESS = /\(\s*((?:\\\S|[^\s()\\]|\((?:\\\S|[^\s()\\])*\))*)(?:\s[^)]{0,500})?\)/y; // parentheses in it come in pairs
const URL_END = /[\s<>"`]|[.,;:!?)\]'*_]{1,8}(?=\s|$)/g;

function inline(node, text, depth = 0) {
  const none = new Set(); // what was looked for in vain, and is not looked for again
  let plain = 0;
  let at = 0;
  const take = (child, from, to) => {
    if (from > plain) node.append(text.slice(plain, from));
    node.append(child);
    plain = at = to;
  };
  for (;;) {
    SPECIAL.lastIndex = at;
    const found = SPECIAL.exec(text);
    if (!found) break;
    const start = found.index;
    at = start + 1;
    const special = found[0];
    if (special === "\n") take(el("br"), start, start + 1);
    else if (special === "\\") {
      if (/[!-/:-@[-`{-~]/.test(text[start + 1] ?? "")) take(text[start + 1], start, start + 2);
    } else if (special.length > 1) {
      if (depth >= DEEPEST) continue;
      URL_END.lastIndex = start;
      const end = URL_END.exec(text)?.index ?? text.length;
      take(linkNode(text.slice(start, end), text.slice(start, end)), start, end);
    } else if (special === "`") takeCode(text, start, take, none);
    else if (special === "[" || special === "!") takeLink(text, start, take, none, depth);
    else if (special !== "<" && depth < DEEPEST) takeEmphasis(text, start, take, none, depth);
  }
  if (plain < text.length) node.append(text.slice(plain));
  return node;
}

/** Where `wanted` stands next. Once it is found nowhere it is not looked for again. */
function next(text, wanted, from, none) {
  if (none.has(wanted)) return -1;
  const found = text.indexOf(wanted, from);
  if (found < 0) none.add(wanted);
  return found;
}

function takeCode(text, start, take, none) {
  const ticks = /`+/y;
  ticks.lastIndex = start;
  const mark = ticks.exec(text)[0];
  let end = next(text, mark, start + mark.length, none);
  for (let looks = 0; end >= 0 && text[end + mark.length] === "`" && looks < MOST_LOOKS; looks++) {
    while (text[end] === "`") end++;
    end = next(text, mark, end, none);
  }
  if (end < 0) return take(mark, start, start + mark.length);
  const code = text.slice(start + mark.length, end);
  const trimmed = code.startsWith(" ") && code.endsWith(" ") && code.trim() ? code.slice(1, -1) : code;
  return take(el("code", {}, trimmed.replaceAll("\n", " ")), start, end + mark.length);
}

/** [text](address) and ![text](address): an image is shown as a link, because nothing is fetched. */
function takeLink(text, start, take, none, depth) {
  const open = text[start] === "!" ? start + 1 : start;
  if (text[open] !== "[") return;
  const middle = next(text, "](", open, none);
  if (middle < 0 || depth >= DEEPEST) return;
  if (next(text, ")", middle, none) < 0) return;
  const label = text.slice(open + 1, middle);
  if (label.includes("[") || label.includes("\n\n")) return;
  ADDRESS.lastIndex = middle + 1;
  const found = ADDRESS.exec(text);
  const address = found?.[1].replace(/\\([!-/:-@[-`{-~])/g, "$1");
  const link = found && linkNode(address, null);
  if (link) take(inline(link, label || address, DEEPEST), start, ADDRESS.lastIndex);
}

/** A link, or its text alone where it leads to anything but the web. */
function linkNode(address, text) {
  let url = null;
  try {
    url = new URL(address);
  } catch {
    // Not an address.
  }
  if (url?.protocol !== "http:" && url?.protocol !== "https:") return text === null ? null : document.createTextNode(text);
  const link = el("a", { href: url.href, target: "_blank", rel: "noopener noreferrer nofollow", title: url.href });
  if (text !== null) link.append(text);
  return link;
}

const EMPHASIS = [["***", ["em", "strong"]], ["**", ["strong"]], ["__", ["strong"]], ["~~", ["del"]], ["*", ["em"]], ["_", ["em"]]];

function takeEmphasis(text, start, take, none, depth) {
  for (const [mark, tags] of EMPHASIS) {
    if (!text.startsWith(mark, start)) continue;
    const inner = start + mark.length;
    const inWord = mark[0] === "_" && /\w/.test(text[start - 1] ?? "");
    if (!/\S/.test(text[inner] ?? "") || inWord) break;
    const end = closing(text, mark, inner, none);
    if (end < 0) continue;
    const [outer, ...more] = tags.map((tag) => el(tag));
    if (more.length) outer.append(more[0]);
    inline(more[0] ?? outer, text.slice(inner, end), depth + 1);
    return take(outer, start, end + mark.length);
  }
  const run = /(.)\1*/y;
  run.lastIndex = start;
  const marks = run.exec(text)[0];
  return take(marks, start, start + marks.length);
}

function closing(text, mark, from, none) {
  let end = next(text, mark, from + 1, none);
  for (let looks = 0; end >= 0 && looks < MOST_LOOKS; looks++) {
    let runEnd = end;
    while (text[runEnd] === mark[0]) runEnd++;
    const ends = /\S/.test(text[end - 1]) && !(mark[0] === "_" && /\w/.test(text[runEnd] ?? ""));
    if (ends && (runEnd - end === mark.length || runEnd - end === 3)) return runEnd - mark.length;
    end = next(text, mark, runEnd, none);
  }
  return -1;
}

function copyButton(text) {
  const button = el("button", { type: "button", className: "copy", onclick: copy }, "Copy");
  async function copy() {
    try {
      await navigator.clipboard.writeText(text());
      button.textContent = "Copied";
    } catch {
      button.textContent = "Not allowed";
    }
    setTimeout(() => (button.textContent = "Copy"), 1200);
  }
  return button;
}
