// What goes with messages: images, sounds and texts, taken from files, images made small enough to send, shown. One is
// { id, name, blob }; blob is null where the browser had no room to keep it. What a file calls itself is not relied on: its bytes say
// what it is, and all but these kinds is turned away.
"use strict";

const IMAGE_KINDS = [
  ["image/png", /^\x89PNG\r\n\x1a\n/],
  ["image/jpeg", /^\xff\xd8\xff/],
  ["image/webp", /^RIFF.{4}WEBP/s],
  ["image/gif", /^GIF8[79]a/],
  ["image/bmp", /^BM/],
];
const SOUND_KINDS = [
  ["audio/wav", /^RIFF.{4}WAVE/s],
  ["audio/flac", /^fLaC/],
  ["audio/ogg", /^OggS/],
  ["audio/mpeg", /^(ID3|\xff[\xe2\xe3\xf2\xf3\xfa\xfb])/],
  ["audio/mp4", /^.{4}ftyp(?!avi|hei|hev|mif|msf)/s],
];
const LACKS = { image: "reads no images", sound: "hears no sounds" };
const MODALITIES = { image: "image", sound: "audio" };
const LARGEST_TEXT = 1 << 20;
const LARGEST_FILE = 24e6; // in base64 the longest address that Firefox opens
const SENT_AS_IT_IS = 1 << 20;
const LONGEST_SIDE = 2048;
const QUALITY = 0.9;

/** What goes with a message. Fails with what is wrong with the file. */
async function attachedFrom(file) {
  const name = file.name || "file";
  if (file.size > LARGEST_FILE) throw new Error(`“${name}” has more than ${LARGEST_FILE / 1e6} MB.`);
  const bytes = await file.arrayBuffer().catch(() => null); // a copy: the file may change before it is sent, and again
  if (!bytes) throw new Error(`“${name}” cannot be read.`);
  const blob = knownBlob(bytes);
  if (!blob || (kindOf(blob) === "text" && isCalledOtherwise(file))) {
    const images = "an image (PNG, JPEG, WebP, GIF or BMP)";
    throw new Error(`“${name}” is nothing that can be sent: ${images}, a sound (WAV, FLAC, OGG, MP3 or M4A) or a text.`);
  }
  if (kindOf(blob) === "text" && blob.size > LARGEST_TEXT) throw new Error(`“${name}” has more than ${LARGEST_TEXT >> 20} MB of text.`);
  if (kindOf(blob) !== "image") return { id: newId(), name, blob };
  const picture = el("img", { src: await dataUrl(blob) });
  await picture.decode().catch(() => {
    throw new Error(`“${name}” is damaged: it cannot be shown.`);
  });
  return { id: newId(), name, blob: blob.size > SENT_AS_IT_IS ? await smaller(picture, blob) : blob };
}

/** Of the type that its bytes have; null where that is none that can be sent. */
function knownBlob(bytes) {
  const head = String.fromCharCode(...new Uint8Array(bytes.slice(0, 16)));
  const kind = [...IMAGE_KINDS, ...SOUND_KINDS].find(([, beginning]) => beginning.test(head));
  const type = kind?.[0] ?? (isText(bytes) ? "text/plain" : null);
  return type ? new Blob([bytes], { type }) : null;
}

function isText(bytes) {
  try {
    return bytes.byteLength > 0 && !new TextDecoder("utf-8", { fatal: true }).decode(bytes).includes("\0");
  } catch {
    return false;
  }
}

/** Whether a text is called something that is shown or heard: then it is damaged. */
function isCalledOtherwise({ type }) {
  return /^(image|audio|video)\//.test(type) && type !== "image/svg+xml";
}

/** "image", "sound" or "text". */
function kindOf({ type }) {
  return { image: "image", audio: "sound", text: "text" }[type.split("/")[0]];
}

/** A text file as a model reads it: behind its name, in a fence that is longer than any within. */
function fenced(name, text) {
  const fence = "`".repeat(Math.max(2, ...(text.match(/`+/g) ?? []).map((each) => each.length)) + 1);
  return `${name}:\n${fence}\n${text.replace(/\n$/, "")}\n${fence}`;
}

/** The picture drawn anew, at most so long; in its own format, or as PNG where the browser does not write that. */
async function smaller(picture, blob) {
  const { naturalWidth: width, naturalHeight: height } = picture;
  const scale = Math.min(1, LONGEST_SIDE / Math.max(width, height));
  const canvas = el("canvas", { width: Math.max(1, Math.round(width * scale)), height: Math.max(1, Math.round(height * scale)) });
  const context = canvas.getContext("2d");
  context.imageSmoothingQuality = "high";
  context.drawImage(picture, 0, 0, canvas.width, canvas.height);
  const drawn = await new Promise((resolve) => canvas.toBlob(resolve, blob.type, QUALITY));
  return drawn && drawn.size < blob.size ? drawn : blob;
}

function dataUrl(blob) {
  const reader = new FileReader();
  reader.readAsDataURL(blob);
  return new Promise((resolve, reject) => {
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(new Error("What is attached cannot be read any more."));
  });
}

/** What a data URL holds; null where that is nothing that can be sent. */
function blobOf(url) {
  const head = /^data:(image|audio|text)\/[a-z]+;base64,/.exec(url);
  if (!head) return null;
  try {
    const binary = atob(url.slice(head[0].length));
    const bytes = new Uint8Array(binary.length);
    for (let i = 0; i < bytes.length; i++) bytes[i] = binary.charCodeAt(i);
    return knownBlob(bytes.buffer);
  } catch {
    return null;
  }
}

// ---- what is seen of them ----

/** What went with a message that was sent; null where there is nothing. */
function gallery(images) {
  if (!images.length) return null;
  return el("ul", { className: "images", "aria-label": "Attached" }, ...images.map((each) => el("li", {}, attachedNode(each))));
}

/** What will go with a message, each with a button that takes it away. field: that of its text. */
function attachedList(images, field) {
  const node = el("ul", { className: "images taken", "aria-label": "Attached to the message" });
  const list = { node, images, field, add, takeAll };

  function draw() {
    node.replaceChildren(...images.map((each) => el("li", {}, attachedNode(each), remover(each))));
    node.hidden = !images.length;
  }
  function remover(image) {
    return iconButton(`Remove ${image.name}`, "M6 6l12 12M18 6L6 18", () => {
      const at = images.indexOf(image);
      images.splice(at, 1);
      draw();
      (node.children[Math.min(at, images.length - 1)]?.querySelector("button") ?? field).focus();
    });
  }
  function add(image) {
    images.push(image);
    draw();
  }
  function takeAll() {
    const taken = images.splice(0);
    draw();
    return taken;
  }
  draw();
  return list;
}

function attachedNode(image) {
  if (!image.blob) return el("p", { className: "soft" }, `${image.name} was not kept, and is not sent any more`);
  if (kindOf(image.blob) !== "image") return el("p", { className: "file" }, image.name);
  const node = el("img", { alt: image.name, title: image.name });
  dataUrl(image.blob).then((url) => (node.src = url), () => {}); // the alternative text stands there otherwise
  return node;
}
