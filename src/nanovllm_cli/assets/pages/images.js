// Images of messages: taken from files, made small enough to send, shown. One is { id, name, blob }; blob is null where the browser had
// no room to keep it. What a file calls itself is not relied on: its first bytes say what it is, and all but these kinds is turned away.
"use strict";

const IMAGE_KINDS = [
  ["image/png", /^\x89PNG\r\n\x1a\n/],
  ["image/jpeg", /^\xff\xd8\xff/],
  ["image/webp", /^RIFF.{4}WEBP/s],
  ["image/gif", /^GIF8[79]a/],
  ["image/bmp", /^BM/],
];
const LARGEST_FILE = 24e6; // in base64 the longest address that Firefox opens
const SENT_AS_IT_IS = 1 << 20;
const LONGEST_SIDE = 2048;
const QUALITY = 0.9;

/** An image of a message. Fails with what is wrong with the file. */
async function imageFrom(file) {
  const name = file.name || "image";
  if (file.size > LARGEST_FILE) throw new Error(`“${name}” has more than ${LARGEST_FILE / 1e6} MB.`);
  const bytes = await file.arrayBuffer().catch(() => null); // a copy: the file may change before it is sent, and again
  if (!bytes) throw new Error(`“${name}” cannot be read.`);
  const blob = imageBlob(bytes, String.fromCharCode(...new Uint8Array(bytes.slice(0, 16))));
  if (!blob) throw new Error(`“${name}” is no image that can be sent: PNG, JPEG, WebP, GIF or BMP.`);
  const picture = el("img", { src: await dataUrl(blob) });
  await picture.decode().catch(() => {
    throw new Error(`“${name}” is damaged: it cannot be shown.`);
  });
  return { id: newId(), name, blob: blob.size > SENT_AS_IT_IS ? await smaller(picture, blob) : blob };
}

/** null where it is none. head: its first bytes, each as a character. */
function imageBlob(bytes, head) {
  const kind = IMAGE_KINDS.find(([, beginning]) => beginning.test(head));
  return kind ? new Blob([bytes], { type: kind[0] }) : null;
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
    reader.onerror = () => reject(new Error("An image cannot be read any more."));
  });
}

/** What a data URL of an image holds; null where it is none. */
function blobOf(url) {
  const head = /^data:image\/[a-z]+;base64,/.exec(url);
  if (!head) return null;
  try {
    const binary = atob(url.slice(head[0].length));
    const bytes = new Uint8Array(binary.length);
    for (let i = 0; i < bytes.length; i++) bytes[i] = binary.charCodeAt(i);
    return imageBlob(bytes, binary.slice(0, 16));
  } catch {
    return null;
  }
}

// ---- what is seen of them ----

/** The images of a message that was sent; null where it has none. */
function imageGallery(images) {
  if (!images.length) return null;
  return el("ul", { className: "images", "aria-label": "Images" }, ...images.map((each) => el("li", {}, imageNode(each))));
}

/** Images that will go with a message, each with a button that takes it away. field: that of its text. */
function imageList(images, field) {
  const node = el("ul", { className: "images taken", "aria-label": "Images of the message" });
  const list = { node, images, field, add, takeAll };

  function draw() {
    node.replaceChildren(...images.map((each) => el("li", {}, imageNode(each), remover(each))));
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

function imageNode(image) {
  if (!image.blob) return el("p", { className: "soft" }, `${image.name} was not kept, and is not sent any more`);
  const node = el("img", { alt: image.name, title: image.name });
  dataUrl(image.blob).then((url) => (node.src = url), () => {}); // the alternative text stands there otherwise
  return node;
}
