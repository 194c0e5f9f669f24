"""The chat page and the status page in a real Chromium, in front of a server whose answers are written down here."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from markdown_it import MarkdownIt
from prometheus_client.parser import text_string_to_metric_families

from live_server import LiveServer, live_server
from nanovllm_cli.engine.outputs import EngineStats
from nanovllm_cli.sampling_params import SamplingParams
from nanovllm_cli.server.api_error import ApiError
from nanovllm_cli.server.app import create_app
from nanovllm_cli.server.context import ServerContext
from nanovllm_cli.server.messages import Output, Piece
from nanovllm_cli.server.metrics import Metrics
from nanovllm_cli.server.ports import EngineState, Reading
from nanovllm_cli.server.settings import ServeSettings
from nanovllm_cli.text.tool_calls import ToolCallDelta as CallDelta
from otlp_collector import Collected, otlp_collector
from server_fakes import FakeEngine, FakeGenerates, FakeModels, FakePool, Script, event

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip
KEY = "a-key-of-this-test"
WAIT = 15_000
"""Milliseconds until a test gives up on what never comes."""


@dataclass
class Served:
    """A server in a thread of its own. held: a script that waits for it stands still until release()."""

    url: str
    loop: asyncio.AbstractEventLoop
    generates: FakeGenerates
    models: FakeModels
    metrics: Metrics
    held: asyncio.Event

    def answers(self, script: Any) -> None:
        self.generates.script = script
        self.generates.asked.clear()
        self.generates.generations.clear()
        self.loop.call_soon_threadsafe(self.held.clear)

    def release(self) -> None:
        self.loop.call_soon_threadsafe(self.held.set)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    models, metrics = FakeModels("fake", "other/model"), Metrics()
    generates = FakeGenerates(models=models)
    context = ServerContext(ServeSettings(api_keys=(KEY,)), models, generates, FakePool(), metrics, metrics)
    server = uvicorn.Server(uvicorn.Config(create_app(context), log_level="error", timeout_graceful_shutdown=1))
    listening = socket.create_server(("127.0.0.1", 0))
    started: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []
    ready = threading.Event()

    async def serve() -> None:
        started.append((asyncio.get_running_loop(), asyncio.Event()))
        ready.set()
        await server.serve([listening])

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    ready.wait()
    loop, held = started[0]
    yield Served(f"http://127.0.0.1:{listening.getsockname()[1]}", loop, generates, models, metrics, held)
    server.should_exit = True
    thread.join()


class Opened:
    """A page in a browser profile of its own, and everything that the browser said or asked for."""

    def __init__(self, browser: Any, url: str, key: str | None, path: str, **context: Any) -> None:
        self.context = browser.new_context(accept_downloads=True, **context)
        if key is not None:
            self.context.add_init_script(f"sessionStorage.setItem('nanovllm.key', {json.dumps(key)})")
        self.page = self.context.new_page()
        self.page.set_default_timeout(WAIT)
        self.server = url
        self.said: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.context.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(url + path)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.page, name)

    def send(self, text: str) -> None:
        self.page.fill("#input", text)
        self.page.press("#input", "Enter")

    def finished(self) -> None:
        """Waits until nothing is being answered."""
        self.page.wait_for_selector("#send:visible")

    def shows(self, selector: str, text: str) -> None:
        """Waits until it is there with that text in it."""
        self.page.locator(selector, has_text=text).first.wait_for()

    def is_clean(self) -> None:
        """It ran without a complaint, and asked nobody but its server."""
        assert self.said == []
        assert {re.match(r"(data:|blob:)?[a-z]*(://[^/]*)?", url).group() for url in self.asked} <= {  # type: ignore[union-attr]
            self.server, "data:image", "blob:" + self.server
        }  # fmt: skip


Open = Callable[..., Opened]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright drives the browser")
    if CHROMIUM is None:
        pytest.skip("no Chromium here")
    with sync_api.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def opening(browser: Any, served: Served) -> Iterator[Open]:
    contexts = []

    def start(path: str = "/", *, key: str | None = KEY, url: str = served.url, **context: Any) -> Opened:
        opened = Opened(browser, url, key, path, **context)
        contexts.append(opened.context)
        return opened

    yield start
    served.release()
    for context in contexts:
        context.close()


def test_an_answer_grows_as_it_comes(opening: Open, served: Served) -> None:
    served.answers(Script.of("The first", " and *the last*", waits=served.held, waits_at=1))
    chat = opening()
    chat.send("Count to two")
    chat.shows(".assistant .content", "The first")
    assert chat.inner_text(".assistant .content") == "The first"
    assert chat.is_visible("#stop")
    served.release()
    chat.finished()
    assert chat.inner_text(".assistant .content") == "The first and the last"
    assert chat.inner_text(".assistant .content em") == "the last"
    assert "tokens" in chat.inner_text(".stats")
    assert chat.inner_text("#title") == "Count to two"
    assert chat.evaluate("document.activeElement.id") == "input"
    (asked,) = served.generates.asked
    assert list(asked.messages) == [{"role": "user", "content": "Count to two"}]
    chat.is_clean()


def test_a_long_prompt_is_seen_to_be_read(opening: Open, served: Served) -> None:
    script = Script([[], *Script.of("Read").steps], reading=Reading(1200, 3.0), waits=served.held, waits_at=1)
    served.answers(script)
    chat = opening()
    chat.send("x" * 5000)
    chat.shows(".assistant .reading", "Reading the prompt: 1,200 of 5,004 tokens")
    served.release()
    chat.finished()
    assert chat.inner_text(".assistant .content") == "Read"
    assert not chat.is_visible(".assistant .reading")
    assert served.generates.asked[0].tells_reading
    chat.is_clean()


SLOW_STORE = """
let opened;
const waiting = new Promise((resolve) => (opened = resolve));
window.storeOpens = async () => (await waiting)();
const open = IDBFactory.prototype.open;
IDBFactory.prototype.open = function (...given) {
  const request = open.apply(this, given);
  return {
    get result() { return request.result; },
    set onupgradeneeded(then) { request.onupgradeneeded = then; },
    set onerror(then) { request.onerror = then; },
    set onsuccess(then) { request.onsuccess = () => opened(then); },
  };
};
"""


@pytest.mark.parametrize("opens", [True, False], ids=["late", "never"])
def test_what_is_sent_before_the_store_is_open_is_answered(opens: bool, opening: Open, served: Served) -> None:
    served.answers(Script.of("An answer"))
    chat = opening()
    chat.context.add_init_script(SLOW_STORE)
    chat.reload()
    chat.send("Already here")
    chat.press("#input", "Enter")
    if opens:
        chat.evaluate("storeOpens()")
    chat.shows(".assistant .content", "An answer")
    chat.shows(".user", "Already here")
    assert chat.is_visible("#notice") is not opens  # that nothing is kept
    assert len(served.generates.asked) == 1
    chat.is_clean()


def test_stop_ends_it_here_and_in_the_server(opening: Open, served: Served) -> None:
    served.answers(Script.of("Once", " more", waits=served.held, waits_at=1))
    chat = opening()
    chat.send("Go on")
    chat.shows(".assistant .content", "Once")
    chat.press("#input", "Escape")
    chat.finished()
    assert chat.inner_text(".stats") == "stopped"
    assert chat.inner_text(".assistant .content") == "Once"
    closed = asyncio.run_coroutine_threadsafe(_closed(served), served.loop)
    assert closed.result(WAIT / 1000)
    chat.is_clean()


async def _closed(served: Served) -> bool:
    while not served.generates.generations[0].closed:
        await asyncio.sleep(0.01)
    return True


def test_conversations_stay_in_the_browser(opening: Open, served: Served) -> None:
    served.answers(Script.of("An answer"))
    chat = opening()
    chat.send("First question")
    chat.finished()
    chat.keyboard.press("Alt+n")
    chat.send("Second question")
    chat.finished()
    chat.reload()
    chat.shows(".user .text", "Second question")
    assert chat.locator(".conversation").all_inner_texts() == ["Second question", "First question"]
    chat.click(".conversation:nth-child(2) .open")
    chat.shows(".user .text", "First question")
    chat.shows(".assistant .content", "An answer")
    chat.hover(".conversation:nth-child(2)")
    chat.click(".conversation:nth-child(2) [aria-label=Rename]")
    chat.fill(".conversation input", "A better <b>name</b>")
    chat.press(".conversation input", "Enter")
    chat.reload()
    chat.shows(".user .text", "First question")
    assert chat.inner_text("#title") == "A better <b>name</b>"
    chat.on("dialog", lambda dialog: dialog.accept())
    chat.hover(".conversation.current")
    chat.click(".conversation.current [aria-label=Delete]")
    chat.shows(".empty", "What would you like to know?")
    chat.reload()
    chat.wait_for_selector(".conversation")
    assert chat.locator(".conversation").all_inner_texts() == ["Second question"]
    chat.is_clean()


def test_an_answer_goes_on_while_another_conversation_is_shown(opening: Open, served: Served) -> None:
    slow = Script.of("Slowly", " but surely", waits=served.held, waits_at=1)
    served.answers(lambda asked: slow if asked.messages[-1]["content"] == "slow" else Script.of("At once"))
    chat = opening()
    chat.send("slow")
    chat.shows(".assistant .content", "Slowly")
    chat.click("#new")
    chat.send("quick")
    chat.shows(".assistant .content", "At once")
    chat.finished()
    assert chat.locator(".running").count() == 1
    served.release()
    chat.wait_for_selector(".running", state="detached")
    assert chat.inner_text(".assistant .content") == "At once"
    chat.click(".conversation .open >> text=slow")
    assert chat.inner_text(".assistant .content") == "Slowly but surely"
    chat.is_clean()


def test_what_came_before_a_reload_is_kept(opening: Open, served: Served) -> None:
    served.answers(Script.of("Half", " and half", waits=served.held, waits_at=1))
    chat = opening()
    chat.send("Both halves")
    chat.shows(".assistant .content", "Half")
    chat.reload()
    chat.shows(".assistant .content", "Half")
    assert not chat.is_visible(".assistant .problem")
    served.answers(Script.of("A whole"))
    chat.click("text=Again")
    chat.shows(".assistant .content", "A whole")
    chat.is_clean()


def test_export_and_import_bring_conversations_along(opening: Open, served: Served, tmp_path: Path) -> None:
    served.answers(Script([[event(reasoning="hm")], [event("It is *so*", finish="stop")]]))
    chat = opening()
    chat.send("Why?")
    chat.finished()
    chat.shows(".conversation .open", "Why?")
    with chat.expect_download() as download:
        chat.click("#export")
    path = tmp_path / "conversations.json"
    download.value.save_as(path)
    (conversation,) = json.loads(path.read_text())["conversations"]
    assert [message["content"] for message in conversation["messages"]] == ["Why?", "It is *so*"]
    other = opening()
    other.set_input_files("#import-file", path)
    other.click(".conversation .open")
    other.shows(".assistant .content em", "so")
    assert other.locator(".thinking .markdown").text_content() == "hm"
    other.is_clean()


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("not json", "not JSON"),
        ('{"conversations": 5}', "no conversations"),
        ("[1]", "no conversations"),
        ('{"conversations": [{"messages": 3}, null]}', "no conversations"),
    ],
)
def test_a_bad_import_says_so(opening: Open, tmp_path: Path, content: str, problem: str) -> None:
    chat = opening()
    path = tmp_path / "bad.json"
    path.write_text(content)
    chat.set_input_files("#import-file", path)
    chat.shows("#notice", problem)
    assert chat.locator(".conversation").count() == 0
    chat.is_clean()


def test_an_import_of_odd_values_is_shown_as_text(opening: Open, tmp_path: Path) -> None:
    odd = {
        "id": {}, "title": 7, "updated": "x", "messages": [
            {"role": "user", "content": ["<img src=x>"]}, {"role": "system", "content": "no"}, 5,
            {"role": "assistant", "content": "<b>x</b>", "calls": [None, {"name": [], "arguments": 3}], "thought": "long"},
        ],
    }  # fmt: skip
    chat = opening()
    path = tmp_path / "odd.json"
    path.write_text(json.dumps({"conversations": [odd]}))
    chat.set_input_files("#import-file", path)
    chat.click(".conversation .open")
    chat.shows(".assistant .content", "<b>x</b>")
    assert chat.locator("#messages img, #messages b").count() == 0
    chat.is_clean()


def test_an_edited_question_is_answered_anew(opening: Open, served: Served) -> None:
    served.answers(lambda asked: Script.of(f"You said: {asked.messages[-1]['content']} ({len(asked.messages)})"))
    chat = opening()
    chat.send("one")
    chat.finished()
    chat.send("two")
    chat.shows(".assistant .content", "You said: two (3)")
    chat.finished()
    chat.press("#input", "ArrowUp")
    assert chat.input_value(".editing textarea") == "two"
    chat.press(".editing textarea", "Escape")
    chat.hover(".user >> nth=0")
    chat.click(".user >> nth=0 >> text=Edit")
    chat.fill(".editing textarea", "uno")
    chat.press(".editing textarea", "Enter")
    chat.shows(".assistant .content", "You said: uno (1)")
    chat.finished()
    assert chat.locator(".message").count() == 2
    chat.click("text=Again")
    chat.shows(".assistant .content", "You said: uno (1)")
    chat.finished()
    assert len(served.generates.asked) == 4
    chat.is_clean()


def test_thinking_folds_when_the_answer_begins(opening: Open, served: Served) -> None:
    steps = [[event(reasoning="Let me *think*")], [event("Here", finish="stop")]]
    served.answers(Script(steps, waits=served.held, waits_at=1))
    chat = opening()
    chat.send("Hm?")
    chat.shows(".thinking .markdown", "Let me think")
    assert chat.inner_text("summary") == "Thinking…"
    served.release()
    chat.finished()
    assert not chat.is_visible(".thinking .markdown")
    assert re.fullmatch(r"Thought for [\d.]+ s", chat.inner_text("summary"))
    chat.click("summary")
    assert chat.inner_text(".thinking em") == "think"
    assert chat.inner_text(".content") == "Here"
    chat.is_clean()


def test_tools_go_out_and_results_come_back(opening: Open, served: Served) -> None:
    calls = [
        [event(calls=[CallDelta(0, "call-1", "weather", '{"city":')])],
        [event(calls=[CallDelta(0, None, None, ' "Köln"}'), CallDelta(1, "call-2", "now", "")])],
        [event(finish="tool_calls")],
    ]
    served.answers(lambda asked: Script.of("Rain at noon") if asked.messages[-1]["role"] == "tool" else Script(calls))
    chat = opening()
    chat.click("#open-settings")
    chat.fill("#tools", '[{"name": "weather"')
    chat.shows("#tools-problem", "Tools:")
    tools = [{"name": "weather", "parameters": {"type": "object"}}, {"type": "function", "function": {"name": "now"}}]
    chat.fill("#tools", json.dumps(tools))
    assert not chat.is_visible("#tools-problem")
    chat.click("#settings >> text=Done")
    chat.send("Weather?")
    chat.finished()
    assert chat.locator(".call h3").all_inner_texts() == ["weather", "now"]
    assert json.loads(chat.inner_text(".call pre >> nth=0")) == {"city": "Köln"}
    assert chat.evaluate("document.activeElement.ariaLabel") == "Result of weather"
    chat.fill(".call textarea >> nth=0", "<rain>")
    chat.fill(".call textarea >> nth=1", "12:00")
    chat.click("text=Send results")
    chat.shows(".assistant .content", "Rain at noon")
    chat.finished()
    assert chat.locator(".call .result").all_inner_texts() == ["<rain>", "12:00"]
    first, second = served.generates.asked
    assert [tool["function"]["name"] for tool in first.tools] == ["weather", "now"]
    answer, *results = second.messages[1:]
    assert [(call["id"], call["function"]["arguments"]) for call in answer["tool_calls"]] == [
        ("call-1", '{"city": "Köln"}'), ("call-2", "{}"),
    ]  # fmt: skip
    assert [(result["tool_call_id"], result["content"]) for result in results] == [("call-1", "<rain>"), ("call-2", "12:00")]
    chat.is_clean()


def test_settings_reach_the_server_and_stay(opening: Open, served: Served) -> None:
    served.answers(Script.of("Yes"))
    chat = opening()
    chat.select_option("#model", "other/model")
    chat.click("#open-settings")
    values = {"system": "Be brief", "temperature": "0.25", "top_p": "0.5", "top_k": "7", "max_tokens": "33", "seed": "9"}
    for name, value in values.items():
        chat.fill(f"#{name}", value)
    chat.fill("#min_p", "4")  # out of its bounds: not sent
    chat.select_option("#thinking", "off")
    chat.select_option("#theme", "dark")
    chat.click("#settings >> text=Done")
    assert chat.evaluate("getComputedStyle(document.body).colorScheme") == "dark"
    chat.reload()
    chat.send("Do you?")
    chat.shows(".assistant .content", "Yes")
    (asked,) = served.generates.asked
    assert list(asked.messages) == [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "Do you?"}]
    params = asked.params
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens, params.seed) == (0.25, 0.5, 7, 33, 9)
    assert params.min_p == 0
    assert asked.thinking is False
    assert served.generates.generations[0].model.id == "other/model"
    chat.click("#open-settings")
    assert chat.input_value("#system") == "Be brief"
    chat.click("#reset")
    assert chat.input_value("#system") == ""
    chat.is_clean()


def test_without_a_key_it_asks_for_one(opening: Open, served: Served) -> None:
    served.answers(Script.of("Welcome"))
    chat = opening(key=None)
    chat.shows("dialog[open] h2", "API key")
    chat.fill("#key-asked", "not-the-right-one")
    chat.press("#key-asked", "Enter")
    chat.shows("dialog[open] .problem", "does not know")
    chat.fill("#key-asked", KEY)
    chat.check("dialog[open] input[type=checkbox]")
    chat.press("#key-asked", "Enter")
    chat.wait_for_selector("#model option[value=fake]", state="attached")
    chat.send("Hello")
    chat.shows(".assistant .content", "Welcome")
    chat.finished()
    chat.reload()
    chat.wait_for_selector("#model option[value=fake]", state="attached")
    assert chat.locator("dialog[open]").count() == 0
    assert [line for line in chat.said if "401" not in line] == []  # the browser itself tells of those


def test_failures_are_told_in_their_place(opening: Open, served: Served) -> None:
    chat = opening()
    served.answers(Script.of("no", refuses=ApiError(429, "too many requests are under way", retry_after=1)))
    chat.send("one")
    chat.shows(".assistant .problem", "too many requests")
    chat.finished()
    served.answers(Script([[event("Half an ans")]], error=ApiError(503, "the engine died")))
    chat.click("text=Again")
    chat.shows(".assistant .problem", "the engine died")
    assert chat.inner_text(".assistant .content") == "Half an ans"
    served.answers(Script.of("Whole"))
    chat.click("text=Again")
    chat.shows(".assistant .content", "Whole")
    assert not chat.is_visible(".assistant .problem")


NASTY = [
    "<img src=x onerror=\"window.hacked = 1\">",
    "</script><script>window.hacked = 2</script>",
    "[click](javascript:window.hacked=3) [data](data:text/html,<script>window.hacked=4</script>)",
    "[a](  JavaScript:window.hacked=5) [b](vbscript:x) <javascript:window.hacked=6> [c](//example.com) [d](file:///etc/passwd)",
    "![picture](http://evil.example/track.png) ![x](javascript:window.hacked=7)",
    "```html\n<script>window.hacked = 8</script>\n```",
    "| <svg onload=\"window.hacked=9\"> | b |\n|---|---|\n| <iframe src=javascript:window.hacked=10> | `<i>` |",
    "- <details open ontoggle=\"window.hacked=11\">\n  > <a href=\"javascript:window.hacked=12\">x</a>",
    "# <style>body{display:none}</style> **<math><mi xlink:href=\"javascript:window.hacked=13\">**",
    "http://example.com/\"onmouseover=\"window.hacked=14 https://ok.example/a_b_c?x=1&y=2.",
    "&lt;b&gt; <base href=http://evil.example> <meta http-equiv=refresh content=\"0;url=http://evil.example\">",
]  # fmt: skip


def test_markup_in_an_answer_is_text(opening: Open, served: Served) -> None:
    text = "\n\n".join(NASTY)
    steps = [[event(reasoning=text)], [event(text)], [event(calls=[CallDelta(0, NASTY[0], NASTY[0], text)], finish="tool_calls")]]
    served.answers(Script(steps))
    chat = opening()
    chat.send(text)
    chat.shows(".call h3", "<img")
    chat.click("summary")
    tags = set(chat.eval_on_selector_all("#messages *, #conversations *", "all => all.map(node => node.localName)"))
    allowed = "a article blockquote br button code del details div em h2 h3 hr li ol p path pre section span strong"
    assert tags <= {*allowed.split(), "summary", "svg", "table", "tbody", "td", "textarea", "th", "thead", "tr", "ul"}
    names = set(chat.eval_on_selector_all("#messages *", "all => all.flatMap(node => node.getAttributeNames())"))
    assert not [name for name in names if name.startswith("on") or name in ("src", "style", "srcset", "xlink:href")]
    links = chat.eval_on_selector_all("#messages a", "all => all.map(node => [node.getAttribute('href'), node.rel, node.target])")
    assert {href.split(":")[0] for href, _, _ in links} <= {"http", "https"}
    assert {tuple(rest) for _, *rest in links} == {("noopener noreferrer nofollow", "_blank")}
    assert "https://ok.example/a_b_c?x=1&y=2" in [href for href, _, _ in links]
    shown = chat.inner_text(".assistant .content")
    for told in ("<img src=x onerror=", "</script><script>", "javascript:window.hacked=3", "<iframe", "&lt;b&gt;"):
        assert told in shown
    assert chat.evaluate("window.hacked") is None
    assert chat.url.endswith("/")
    chat.is_clean()


def test_the_policy_stops_what_gets_past_the_page(opening: Open) -> None:
    chat = opening()
    answer = chat.request.get(chat.url)
    assert "unsafe" not in answer.headers["content-security-policy"]
    with pytest.raises(Exception, match="TrustedHTML"):
        chat.evaluate("document.body.innerHTML = '<b>x</b>'")
    with pytest.raises(Exception, match="fetch"):
        chat.evaluate("fetch('http://127.0.0.1:9/')")
    chat.evaluate("""() => {
      const script = document.createElement('script');
      try { script.append('window.hacked = 1'); document.head.append(script); } catch {}
      try { document.body.setAttribute('onclick', 'window.hacked = 2'); document.body.click(); } catch {}
    }""")
    assert chat.evaluate("window.hacked") is None


SAMPLES = [
    "# One\n## Two *three*\n\ntext\nwith a break",
    "A **bold _nested_ text**, *em*, ***both***, ~~gone~~, snake_case_name and 2 * 3 * 4, `co*d*e`, ``a ` b``",
    "- one\n- two\n  - deeper\n  - more\n    1. deepest\n- three\n\nafter",
    "3. three\n4. four\n\n   more of four\n5. five",
    "* a\n* b\n\n---\n\n> quoted **text**\n> goes on\n>\n> - with a list\n>   - in a list",
    "```python\ndef f(x):\n    return x * 2  # <&>\n\n\nprint(f(1))\n```\n\nthen\n\n~~~\n```\n~~~",
    "1. step\n   ```sh\n   make\n   # not a heading\n   ```\n2. next",
    "| a | b |\n|:--|--:|\n| 1 | *2* |\n| `x` | 3 |",
    "See [the docs](https://example.com/a?b=1) or \\*not em\\*, 5 < 6 & 7 > 2",
    "unclosed **bold and `code and [link](x",
    "```\nan open fence\nhas no end",
    "- [x] done\n- item with **bold:** and *em*\n\n  second paragraph",
    "Title\n***\n+ plus\n+ signs",
    "```print(1)``` in one line\n\n- is no fence",
    "| `a \\| b` | c |\n|---|---|\n| 1 \\| 2 | 3 \\| |",
    "[one](https://example.com/A_(b)), [two](https://example.com/A_(b) \"title\") and ([three](https://example.com/c\\)d))",
]  # fmt: skip
TAG = re.compile(r"<(/?)([a-z0-9]+)([^>]*)>")


def structure(html: str, *, ours: bool) -> str:
    """Tags and text, without what the page adds to them and without white space between blocks."""
    if ours:
        html = re.sub(r'<div class="code-head">.*?</button></div>', "", html)
        html = re.sub(r"</?div[^>]*>", "", html)
        html = re.sub(r"h([2-6])>", lambda found: f"h{int(found[1]) - 1}>", html)
    html = TAG.sub(lambda found: f"<{found[1]}{found[2].replace('del', 's')}>", html)
    html = re.sub(r"<code>(.*?)\n</code>", r"<code>\1</code>", html, flags=re.DOTALL)
    html = html.replace("&quot;", '"')
    html = re.sub(r"\s*(</?(?:p|ul|ol|li|blockquote|pre|hr|h\d|table|thead|tbody|tr|th|td|br)>)\s*", r"\1", html)
    return html.strip()


SHOWN = "text => { const box = document.createElement('div'); showMarkdown(box, text); return box.innerHTML }"


def test_markdown_means_what_commonmark_says(opening: Open) -> None:
    reference = MarkdownIt("commonmark", {"breaks": True, "html": False}).enable(["table", "strikethrough"])
    chat = opening()
    for sample in SAMPLES:
        html = chat.evaluate(SHOWN, sample)
        assert structure(html, ours=True) == structure(reference.render(sample), ours=False), sample


def test_markdown_that_grows_is_what_it_is_at_once(opening: Open) -> None:
    chat = opening()
    text = "\n\n".join(SAMPLES + NASTY)
    grown, whole = chat.evaluate(
        """text => {
          const [grown, whole] = [document.createElement('div'), document.createElement('div')];
          for (let end = 1; end <= text.length; end++) showMarkdown(grown, text.slice(0, end));
          showMarkdown(whole, text);
          return [grown.innerHTML, whole.innerHTML];
        }""",
        text,
    )
    assert grown == whole


LONG = [
    "*a " * 50_000, "[" * 100_000, "[a](" * 50_000, "`" * 100_001, "` " * 50_000, "**" * 50_000, "_a" * 50_000, "> " * 50_000,
    "- " * 50_000, "http://" + "." * 200_000 + "x", " " * 100_000 + "|", "|" * 50_000 + "\n" + "|-" * 50_000,
    "# x" + " " * 100_000 + "x", "`a``" * 40_000, "***a" * 40_000, "\n".join(f"{' ' * (i % 40)}- x" for i in range(3_000)),
    "http://a" * 20_000, "~~a\n" * 30_000, "a*" * 50_000, "![" * 50_000, "[a](" * 50_000 + ")", "[a](b " * 50_000 + ")",
    "[a](" + "()" * 50_000 + " )", "`" * 100_000 + "a`", "|" + "\\|" * 50_000 + "\n|-",
]  # fmt: skip


@pytest.mark.timeout(90)
def test_no_text_holds_the_page_up(opening: Open) -> None:
    """Some seconds for all; where time is not linear in the text, one of these takes minutes."""
    chat = opening()
    for text in LONG:
        chat.evaluate(SHOWN, text)


def test_it_fits_a_phone(opening: Open, served: Served) -> None:
    served.answers(Script.of("```\n" + "x" * 400 + "\n```\n\n| a | b |\n|---|---|\n| " + "y" * 300 + " | z |\n\n" + "w" * 500))
    chat = opening(viewport={"width": 360, "height": 640}, has_touch=True, is_mobile=True)
    chat.send("long " * 60)
    chat.finished()
    assert chat.evaluate("document.documentElement.scrollWidth") == 360
    assert chat.locator("#sidebar").is_hidden()
    chat.click("#open-sidebar")
    chat.click(".conversation .open")
    assert chat.locator("#sidebar").is_hidden()
    box = chat.locator("#input").bounding_box()
    assert box["x"] >= 0
    assert box["y"] + box["height"] <= 640
    chat.is_clean()


def test_the_status_page_shows_the_numbers_of_its_json(opening: Open, served: Served) -> None:
    engine = served.models.served["fake"].engine
    assert isinstance(engine, FakeEngine)
    engine.stats = EngineStats(3, 4, 1000, 20, 1500, 0, 0, 0, 0, 0)
    other = served.models.served["other/model"].engine
    assert isinstance(other, FakeEngine)
    other.stats, other.state = None, EngineState.ASLEEP
    watch = served.metrics.accepted("fake", "chat", 40, SamplingParams(), None)
    watch.output(Output(1, [Piece(0, "x", [1] * 5000, finish_reason="stop")], True, 30, times=(0.002, 0.125, 0.5)))
    watch.end()
    repeats = served.metrics.accepted("fake", "chat", 40, SamplingParams(), None)
    repeats.output(Output(2, [Piece(0, "x", [1], finish_reason="repetition")], True, 0, times=(0.002, 0.125, 0.5)))
    repeats.end()
    page = opening("/status", key=None)
    page.shows("dialog[open] h2", "API key")
    page.fill("#key-asked", KEY)
    page.press("#key-asked", "Enter")
    page.shows(".model:nth-of-type(1) h2", "fake")
    shown = page.request.get(served.url + "/status.json", headers={"authorization": f"Bearer {KEY}"}).json()
    model = shown["models"][0]
    names = ("running", "waiting", "used", "cached", "free")
    assert {name: page.inner_text(f".model >> nth=0 >> [data-figure={name}]") for name in names} == {
        "running": str(model["running"]), "waiting": str(model["waiting"]), "used": str(model["blocks"]["used"]),
        "cached": f"{model['blocks']['cached']:,}", "free": f"{model['blocks']['free']:,}",
    }  # fmt: skip
    tables = page.inner_text(".model >> nth=0 >> table >> nth=0"), page.inner_text(".model >> nth=0 >> table >> nth=1")
    assert "2.0 ms" in tables[0]
    assert f"{model['generation_tokens']:,}" in tables[1]
    assert f"answers finished\t{sum(model['finished'][reason] for reason in ('stop', 'length', 'repetition'))}\n" in tables[1]
    assert "30 (38 %)" in tables[1]
    assert page.inner_text(".model >> nth=1 >> .state") == "asleep"
    assert page.inner_text(".model >> nth=1 >> [data-figure=running]") == "–"
    again = served.metrics.accepted("fake", "chat", 40, SamplingParams(), None)
    again.output(Output(2, [Piece(0, "x", [1] * 70_000)], False, 0))
    page.shows("td", "75,001")
    again.end()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert [line for line in page.said if "401" not in line] == []


@pytest.mark.parametrize("path", ["/", "/status"])
def test_pages_need_no_key_and_hold_none(served: Served, path: str) -> None:
    answer = httpx.get(served.url + path)
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert KEY not in answer.text
    assert not re.search(r"""(?:src|href)=["']?(?!data:|\./|status|")""", answer.text)
    assert httpx.head(served.url + path).status_code == 200
    assert httpx.post(served.url + path).status_code == 401
    assert httpx.get(served.url + "/status.json").status_code == 401
    assert httpx.get(served.url + "/metrics").status_code == 401


@pytest.fixture(scope="module")
def collected() -> Iterator[Collected]:
    with otlp_collector() as collected:
        yield collected


@pytest.fixture(scope="module")
def live(collected: Collected) -> Iterator[LiveServer]:
    often = {"OTEL_BSP_SCHEDULE_DELAY": "50"}
    with live_server("tiny", "--api-key", KEY, "--ctx-size", "512", "--otlp-endpoint", collected.url, env=often) as server:
        yield server


def counted(live: LiveServer) -> dict[tuple[str, ...], float]:
    """By a metric's name and labels."""
    text = httpx.get(live.url + "/metrics", headers={"authorization": f"Bearer {KEY}"}).raise_for_status().text
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {
        (sample.name.removeprefix("nanovllm:"), *(value for _, value in sorted(sample.labels.items()))): sample.value
        for sample in samples
    }


def test_a_person_and_the_bundled_model(opening: Open, live: LiveServer) -> None:
    before = counted(live)
    chat = opening(url=live.url)
    chat.click("#open-settings")
    chat.fill("#max_tokens", "60")
    chat.fill("#temperature", "0")
    chat.click("#settings >> text=Done")
    chat.send("Tell me a story")
    chat.finished()
    told = chat.inner_text(".assistant .content")
    assert len(told) > 60
    chat.hover(".assistant")
    chat.click("text=Again")
    chat.finished()
    assert chat.inner_text(".assistant .content") == told  # greedy
    chat.reload()
    chat.shows(".assistant .content", told[:40])
    chat.is_clean()
    status = opening("/status", url=live.url)
    tokens = ("generation_tokens_total", "tiny")
    status.shows("td", f"{before.get(tokens, 0) + 120:.0f}")
    after = counted(live)
    assert after["engine_state", "tiny", "ready"] == 1
    firsts = ("time_to_first_token_seconds_count", "tiny")
    requests = ("http_requests_total", "/v1/chat/completions", "POST", "200")
    assert [after[each] - before.get(each, 0) for each in (tokens, firsts, requests)] == [120, 2, 2]
    status.is_clean()


def test_a_live_request_is_a_span_of_its_callers_trace(live: LiveServer, collected: Collected) -> None:
    pytest.importorskip("opentelemetry.sdk", reason="the extra otel is not installed")
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    headers = {"authorization": f"Bearer {KEY}", "traceparent": f"00-{trace}-00f067aa0ba902b7-01"}
    body = {"messages": [{"role": "user", "content": "a SECRET"}], "max_tokens": 5, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(live.base_url + "/chat/completions", json=body, headers=headers, timeout=60)
    (span,) = collected.spans(lambda span: span.trace_id.hex() == trace)
    told = {each.key: each.value for each in span.attributes}
    assert told["gen_ai.usage.input_tokens"].int_value == answer.json()["usage"]["prompt_tokens"]
    assert told["gen_ai.usage.output_tokens"].int_value == 5
    assert told["gen_ai.request.id"].string_value == answer.headers["x-request-id"]
    assert told["gen_ai.operation.name"].string_value == "chat"
    assert 0 <= told["gen_ai.latency.time_in_queue"].double_value <= told["gen_ai.response.time_to_first_chunk"].double_value
    assert "SECRET" not in str(span)
