"""Images, sounds and texts on the chat page: attached, pasted and dropped, sent, kept, taken back."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import test_server_pages as pages
from nanovllm_cli.server.api_error import ApiError
from nanovllm_cli.server.routes_pages import Page
from server_fakes import Script
from test_server_pages import Open, Opened, Served

browser, opening, served = pages.browser, pages.opening, pages.served

BRINGS = """([place, event, files, texts, andSend]) => {
  const transfer = new DataTransfer();
  for (const [name, type, bytes] of files) {
    transfer.items.add(new File([Uint8Array.from(atob(bytes), (each) => each.charCodeAt(0))], name, { type }));
  }
  for (const [type, text] of texts) transfer.setData(type, text);
  const options = { bubbles: true, cancelable: true };
  const made = event === "paste"
    ? new ClipboardEvent(event, { clipboardData: transfer, ...options })
    : new DragEvent(event, { dataTransfer: transfer, ...options });
  const taken = !document.querySelector(place).dispatchEvent(made);
  if (andSend) document.getElementById("composer").requestSubmit();
  return taken;
}"""
FULL = """
const put = IDBObjectStore.prototype.put;
IDBObjectStore.prototype.put = function (value) {
  if (value.blob) throw new DOMException("The disk is full", "QuotaExceededError");
  return put.call(this, value);
};
"""
KEYS = "store.write((all) => (window.keys = all.getAllKeys())).then(() => window.keys.result)"


def picture(kind: str = "PNG", size: tuple[int, int] = (24, 16), *, noise: bool = False, **more: Any) -> bytes:
    shape = (size[1], size[0], 3)
    pixels = np.random.default_rng(0).integers(0, 256, shape, np.uint8) if noise else np.full(shape, 200, np.uint8)
    file = BytesIO()
    Image.fromarray(pixels).save(file, kind, **more)
    return file.getvalue()


def part(data: bytes, kind: str = "png") -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:image/{kind};base64,{base64.b64encode(data).decode()}"}}


def choose(chat: Opened, *files: tuple[str, bytes]) -> None:
    """Files whose type the browser takes from their names, as it does for a person."""
    before = chat.locator("#composer .images li").count()
    with chat.expect_file_chooser() as chooser:
        chat.click("#attach")
    chooser.value.set_files([{"name": name, "mimeType": "image/png", "buffer": data} for name, data in files])
    chat.wait_for_selector(f"#composer .images li:nth-child({before + len(files)})")


def brings(
    chat: Opened,
    event: str,
    files: Sequence[tuple[str, bytes]],
    *,
    to: str = "#input",
    kind: str = "image/png",
    texts: Sequence[tuple[str, str]] = (),
    and_send: bool = False,
) -> bool:
    """Pastes or drops, and sends before the files can have been read. Whether the page took it."""
    sent = [(name, kind, base64.b64encode(data).decode()) for name, data in files]
    return bool(chat.evaluate(BRINGS, [to, event, sent, texts, and_send]))


def keeps(chat: Opened, num_records: int) -> None:
    """Waits until the browser does."""
    for _ in range(pages.WAIT // 20):
        if len(chat.evaluate(KEYS)) == num_records:
            return
        chat.wait_for_timeout(20)
    raise AssertionError(chat.evaluate(KEYS))


def sent(served: Served) -> Any:
    """What the last message of the last request says."""
    return served.generates.asked[-1].messages[-1]["content"]


def test_images_go_with_the_next_message_ahead_of_its_text(opening: Open, served: Served) -> None:
    served.answers(Script.of("Two pictures"))
    first, second = picture(), picture("JPEG", (20, 30))
    chat = opening()
    choose(chat, ("a <b>first</b>.png", first), ("second.png", second))
    chat.send("What are these?")
    chat.shows(".assistant .content", "Two pictures")
    chat.finished()
    assert sent(served) == [part(first), part(second, "jpeg"), {"type": "text", "text": "What are these?"}]
    shown = chat.eval_on_selector_all(".user img", "all => all.map(({ alt, naturalWidth }) => [alt, naturalWidth])")
    assert shown == [["a <b>first</b>.png", 24], ["second.png", 20]]
    order = chat.eval_on_selector(".user", "node => [...node.children].map(({ className }) => className)")
    assert order == ["images", "text", "actions"]
    assert chat.locator("#composer .images").is_hidden()
    choose(chat, ("third.png", first))
    chat.press("#input", "Enter")  # without a text
    chat.shows(".assistant >> nth=1", "Two pictures")
    chat.finished()
    assert sent(served) == [part(first)]
    assert len(served.generates.asked[-1].messages[0]["content"]) == 3
    chat.is_clean()


def test_images_are_removed_by_the_keyboard(opening: Open, served: Served) -> None:
    served.answers(Script.of("One"))
    chat = opening()
    choose(chat, ("a.png", picture(size=(1, 1))), ("b.png", picture(size=(2, 2))), ("c.png", picture(size=(3, 3))))
    chat.focus("[aria-label='Remove a.png']")
    chat.keyboard.press("Enter")
    assert chat.evaluate("document.activeElement.ariaLabel") == "Remove b.png"
    chat.focus("[aria-label='Remove c.png']")
    chat.keyboard.press("Space")
    assert chat.evaluate("document.activeElement.ariaLabel") == "Remove b.png"
    chat.send("Which?")
    chat.finished()
    assert sent(served) == [part(picture(size=(2, 2))), {"type": "text", "text": "Which?"}]
    choose(chat, ("d.png", picture()))
    chat.press("[aria-label='Remove d.png']", "Enter")
    assert chat.evaluate("document.activeElement.id") == "input"
    assert chat.locator("#composer .images").is_hidden()
    chat.is_clean()


def test_images_are_pasted_and_dropped(opening: Open, served: Served) -> None:
    served.answers(Script.of("Seen"))
    chat = opening()
    both = [("text/plain", "a\tb"), ("text/html", "<td>a<td>b")]
    assert not brings(chat, "paste", [("cells.png", picture())], texts=both)  # a spreadsheet's text, and a picture of it
    assert not brings(chat, "paste", [], texts=both[:1])
    assert not brings(chat, "drop", [], texts=both[:1])
    assert brings(chat, "paste", [("image.png", picture(size=(5, 5)))], texts=both[1:])
    assert brings(chat, "dragover", [("x.png", picture())], to="#messages")
    assert "dropping" in chat.get_attribute("body", "class")
    chat.fill("#input", "At once")
    files = [(f"{side}.png", picture(size=(side, side))) for side in (6, 7)]
    assert brings(chat, "drop", files, to="#messages", and_send=True)
    assert "dropping" not in chat.get_attribute("body", "class")
    chat.shows(".assistant .content", "Seen")
    chat.finished()
    images = [part(picture(size=(side, side))) for side in (5, 6, 7)]
    assert sent(served) == [*images, {"type": "text", "text": "At once"}]
    chat.is_clean()


def test_a_photo_is_made_smaller_and_stands_upright(opening: Open, served: Served) -> None:
    served.answers(Script.of("Large"))
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned
    photo = picture("JPEG", (2200, 400), noise=True, quality=100, exif=exif)
    assert len(photo) > 1 << 20
    chat = opening()
    choose(chat, ("photo.jpg", photo))
    chat.send("Which way up?")
    chat.finished()
    head, data = sent(served)[0]["image_url"]["url"].split(",")
    with Image.open(BytesIO(base64.b64decode(data))) as seen:
        assert (head, seen.format, seen.size) == ("data:image/jpeg;base64", "JPEG", (372, 2048))
        assert seen.getexif().get(0x0112, 1) == 1
    assert len(data) < len(photo)
    chat.is_clean()


def test_a_model_that_reads_no_images_is_sent_none(opening: Open, served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = (("text",), ("text", "image"))
    blind, seeing = (card._replace(modalities=kinds) for card, kinds in zip(served.models.cards(), reads, strict=True))
    monkeypatch.setattr(served.models, "cards", lambda: [blind, seeing])
    served.answers(Script.of("Yes"))
    chat = opening()
    chat.wait_for_selector("#model option[value=fake]", state="attached")
    assert brings(chat, "drop", [("a.png", picture())])
    chat.shows("#notice", "fake reads no images")
    chat.select_option("#model", "other/model")
    choose(chat, ("a.png", picture()))
    chat.select_option("#model", "fake")
    chat.send("What is it?")
    chat.shows("#notice", "remove them, or choose another model")
    assert chat.input_value("#input") == "What is it?"
    assert chat.locator("#composer .images img").count() == 1
    assert served.generates.asked == []
    chat.select_option("#model", "other/model")
    chat.press("#input", "Enter")
    chat.finished()
    assert sent(served)[0] == part(picture())
    chat.is_clean()


SVG = b'<svg xmlns="http://www.w3.org/2000/svg" onload="window.hacked = 1"><script>window.hacked = 2</script></svg>'


def test_what_is_no_image_is_turned_away(opening: Open, served: Served) -> None:
    served.answers(Script.of("Yes"))
    chat = opening()
    chat.wait_for_selector("#attach:visible")
    for name, data, problem in (
        ("<img src=x>.png", SVG, "“<img src=x>.png” is nothing that can be sent: an image"),
        ("page.html", b"<script>window.hacked = 3</script>", "“page.html” is nothing"),
        ("empty.png", b"", "“empty.png” is nothing"),
        ("cut.png", picture()[:20], "“cut.png” is damaged"),
        ("bm.bmp", b"BM" + bytes(100), "“bm.bmp” is damaged"),
    ):
        assert brings(chat, "drop", [(name, data), ("good.png", picture())], and_send=True)
        chat.shows("#notice", problem)
    assert chat.locator("#composer .images li").count() == 5
    assert chat.locator("#composer .images img").evaluate_all("all => all.every(({ alt }) => alt === 'good.png')")
    assert chat.locator("#notice *").count() == 0
    assert chat.evaluate("window.hacked") is None
    assert served.generates.asked == []
    chat.is_clean()


def test_sounds_and_texts_go_with_a_message_too(opening: Open, served: Served, tmp_path: Path) -> None:
    served.answers(Script.of("Heard"))
    sound, page = b"RIFF\x04\0\0\0WAVEfmt ", "<script>window.hacked = 1</script>\n```\nä".encode()
    heard = {"type": "audio_url", "audio_url": {"url": f"data:audio/wav;base64,{base64.b64encode(sound).decode()}"}}
    text = {"type": "text", "text": "page.html:\n````\n<script>window.hacked = 1</script>\n```\nä\n````"}
    chat = opening()
    assert brings(chat, "drop", [("talk.wav", sound)], kind="audio/x-wav")
    assert brings(chat, "paste", [("page.html", page)], kind="text/html")
    chat.wait_for_selector("#composer .images li:nth-child(2)")
    odd = ("a.zip", b"PK\x03\x04\xff", "application/zip"), ("a.mp3", b"words", "audio/mpeg"), ("a.txt", b"a\0", "text/plain")
    for name, data, kind in odd:
        assert brings(chat, "drop", [(name, data)], kind=kind)
        chat.shows("#notice", f"“{name}” is nothing that can be sent")
    assert brings(chat, "drop", [("long.txt", b"x" * (1 << 20) + b"y")], kind="text/plain")
    chat.shows("#notice", "“long.txt” has more than 1 MB of text")
    chat.send("What is said?")
    chat.finished()
    question = {"type": "text", "text": "What is said?"}
    assert sent(served) == [heard, text, question]
    assert chat.locator(".user .images .file").all_inner_texts() == ["talk.wav", "page.html"]
    with chat.expect_download() as download:
        chat.click("#export")
    path = tmp_path / "conversations.json"
    download.value.save_as(path)
    chat.set_input_files("#import-file", path)
    chat.click(".conversation .open >> nth=1")
    chat.reload()
    chat.click("text=Again")
    chat.finished()
    assert sent(served) == [heard, text, question]
    assert chat.evaluate("window.hacked") is None
    chat.is_clean()


def test_a_model_that_hears_nothing_is_sent_no_sound(opening: Open, served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    cards = [card._replace(modalities=("text", "image")) for card in served.models.cards()]
    monkeypatch.setattr(served.models, "cards", lambda: cards)
    served.answers(Script.of("Yes"))
    chat = opening()
    chat.wait_for_selector("#model option[value=fake]", state="attached")
    assert brings(chat, "drop", [("talk.wav", b"RIFF\x04\0\0\0WAVEfmt ")], kind="audio/wav")
    chat.shows("#notice", "fake hears no sounds")
    assert brings(chat, "drop", [("a.py", b"print(1)\n")], kind="text/x-python")
    chat.send("What does it do?")
    chat.finished()
    assert sent(served)[0] == {"type": "text", "text": "a.py:\n```\nprint(1)\n```"}
    chat.is_clean()


def test_images_stay_with_their_message(opening: Open, served: Served, tmp_path: Path) -> None:
    """Over a reload, an answer anew, an edit, an export; and leave the browser with it."""
    served.answers(Script.of("An answer"))
    a, b, c = (picture(size=(side, side)) for side in (5, 6, 7))
    chat = opening()
    choose(chat, ("a.png", a), ("b.png", b))
    chat.press("#input", "Enter")
    chat.finished()
    chat.reload()
    chat.wait_for_selector(".user img")
    assert chat.inner_text("#title") == "a.png"
    chat.click("text=Again")
    chat.finished()
    assert sent(served) == [part(a), part(b)]
    chat.press("#input", "ArrowUp")
    chat.click(".editing [aria-label='Remove a.png']")
    assert brings(chat, "paste", [("c.png", c)], to=".editing textarea")
    chat.fill(".editing textarea", "And now?")
    chat.press(".editing textarea", "Enter")
    chat.wait_for_selector(".editing", state="detached")
    chat.finished()
    assert sent(served) == [part(b), part(c), {"type": "text", "text": "And now?"}]
    assert chat.locator("#composer .images").is_hidden()
    with chat.expect_download() as download:
        chat.click("#export")
    path = tmp_path / "conversations.json"
    download.value.save_as(path)
    (conversation,) = json.loads(path.read_text())["conversations"]
    images = [{"name": name, "url": part(data)["image_url"]["url"]} for name, data in (("b.png", b), ("c.png", c))]
    assert conversation["messages"][0]["images"] == images
    keeps(chat, 3)  # the conversation, b and c
    chat.on("dialog", lambda dialog: dialog.accept())
    chat.hover(".conversation")
    chat.click("[aria-label=Delete]")
    keeps(chat, 0)
    odd = [{"url": "data:image/svg+xml;base64," + base64.b64encode(SVG).decode()}, None, {"name": "<b>x</b>", "url": "https://x.y/z.png"}]
    conversation["messages"][0]["images"] += odd
    path.write_text(json.dumps({"conversations": [conversation]}))
    chat.set_input_files("#import-file", path)
    chat.click(".conversation .open")
    assert chat.locator(".user img").count() == 2
    assert chat.locator(".user .images p").all_inner_texts()[2] == "<b>x</b> was not kept, and is not sent any more"
    chat.reload()
    chat.click("text=Again")
    chat.finished()
    assert sent(served) == [part(b), part(c), {"type": "text", "text": "And now?"}]
    chat.is_clean()


def test_a_refused_message_comes_back_to_be_changed(opening: Open, served: Served) -> None:
    told = "messages[0].content[0]: the model 'fake' reads no images; send texts alone"
    served.answers(Script.of("no", refuses=ApiError(400, told, code="unsupported")))
    chat = opening()
    choose(chat, ("a.png", picture()))
    chat.send("What is it?")
    chat.shows(".assistant .problem", told)
    assert chat.input_value(".editing textarea") == "What is it?"
    assert chat.evaluate("document.activeElement.parentNode.className") == "message user editing"
    chat.click(".editing [aria-label='Remove a.png']")
    served.answers(Script.of("I see"))
    chat.press(".editing textarea", "Enter")
    chat.shows(".assistant .content", "I see")
    chat.finished()
    assert sent(served) == "What is it?"
    assert chat.locator(".message").count() == 2
    assert [line for line in chat.said if "400" not in line] == []  # the browser itself tells of those


def test_images_that_find_no_room_are_told_of(opening: Open, served: Served) -> None:
    served.answers(Script.of("An answer"))
    chat = opening()
    chat.context.add_init_script(FULL)
    chat.reload()
    choose(chat, ("a.png", picture()))
    chat.send("What is it?")
    chat.shows("#notice", "could not keep all that is attached in the conversation: The disk is full")
    chat.finished()
    chat.click("text=Again")
    chat.finished()
    assert sent(served)[0] == part(picture())
    chat.reload()
    chat.shows(".user .images", "a.png was not kept, and is not sent any more")
    chat.shows(".assistant .content", "An answer")
    chat.click("text=Again")
    chat.finished()
    assert sent(served) == "What is it?"
    chat.is_clean()


def test_the_policy_lets_in_no_images_but_the_pages_own_bytes() -> None:
    policy = dict(each.split(" ", 1) for each in Page("chat.html").policy.split("; "))
    hashes = {policy.pop("style-src")[:8], policy.pop("script-src")[:8]}
    assert hashes == {"'sha256-"}
    assert policy == {
        "default-src": "'none'", "connect-src": "'self'", "img-src": "data:", "base-uri": "'none'", "form-action": "'none'",
        "frame-ancestors": "'none'", "require-trusted-types-for": "'script'", "trusted-types": "'none'",
    }  # fmt: skip
