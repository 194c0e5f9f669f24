"""The HTML report: opened in Chromium, looked at through its own document, and read as text."""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from bench_results import MACHINE, record, run, sweep
from nanovllm_cli.bench.axes import number, round_step, scale
from nanovllm_cli.bench.charts import Axis, charts_of
from nanovllm_cli.bench.compare import compare
from nanovllm_cli.bench.html import page, write_comparison, write_report
from nanovllm_cli.bench.record import Summary
from nanovllm_cli.errors import OutputError

CHROMIUM = shutil.which("chromium")
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
HOSTILE = (
    "</script><script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\">\"'&\x00\x1b[31m"
)


class Opened:
    """A report in a browser, and everything that the browser said or asked for while it was open."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.said: list[str] = []
        self.asked: list[str] = []
        page.on("console", lambda message: self.said.append(message.text))
        page.on("pageerror", lambda error: self.said.append(str(error)))
        page.on("request", lambda request: self.asked.append(request.url))

    def count(self, selector: str) -> int:
        return int(self.page.locator(selector).count())


@pytest.fixture(scope="module")
def open_report() -> Iterator[Callable[..., Opened]]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright drives the browser")
    if CHROMIUM is None:
        pytest.skip("no Chromium here")
    with sync_api.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)

        def start(path: Path, **context: Any) -> Opened:
            opened = Opened(browser.new_context(**context).new_page())
            opened.page.goto(path.as_uri())
            return opened

        yield start
        browser.close()


def test_charts_are_drawn_and_nothing_else_is_asked_for(open_report: Callable[..., Opened], tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    write_report(path, [*sweep(), run(1.0), run(4.0)], MACHINE)
    opened = open_report(path)
    assert opened.said == []
    assert opened.asked == [path.as_uri()]
    titles = opened.page.locator("figure h2").all_inner_texts()
    marks = {title: opened.count(f"figure:nth-of-type({i}) .mark") for i, title in enumerate(titles, 1)}
    assert marks == {
        "Prompt speed against depth": 6,
        "Generation speed against depth": 6,
        "Throughput against concurrency": 2 * 3 + 2,
        "Time to first token under load": 2 * 2,
        "Time to first token": 2 * 3,  # median, p90 and p99 of each run
        "Time between tokens": 2 * 3,
        "Time to the whole answer": 2 * 3,
        "Memory": 2 * 2,
        "Roofline": 6,
        "Memory read for each token": 6,
    }
    assert opened.count(".limit") == 4  # a line and its legend, in each of two charts
    for chart in opened.page.locator("svg.chart").all():
        box = chart.bounding_box()
        assert box["width"] > 400
        assert chart.locator("title").first.text_content()
        assert chart.locator("desc").text_content()


def test_places_on_a_chart_follow_the_numbers(open_report: Callable[..., Opened], tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    write_report(
        path, [record(speed, n_depth=depth) for depth, speed in ((0, 40.0), (500, 30.0), (1000, 10.0))], MACHINE
    )
    opened = open_report(path)
    boxes = [mark.bounding_box() for mark in opened.page.locator("figure:first-of-type .shape:not(.legend *)").all()]
    x, y = ([box[side] + box[length] / 2 for box in boxes] for side, length in (("x", "width"), ("y", "height")))
    assert x[1] - x[0] == pytest.approx(x[2] - x[1], abs=0.5)
    assert (y[2] - y[1]) / (y[1] - y[0]) == pytest.approx(2.0, rel=0.02)  # 30 to 10 is twice as far as 40 to 30
    assert opened.page.locator(".mark").first.get_attribute("aria-label") == "tg128, 0 tokens, 40 t/s"


def test_a_tooltip_shows_under_the_pointer_and_the_focus(open_report: Callable[..., Opened], tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    write_report(path, [record(20.0, 22.0, prompt=0), record(300.0, prompt=512, gen=0)], MACHINE)
    opened = open_report(path)
    tip = opened.page.locator("#tip")
    assert not tip.is_visible()
    opened.page.hover(".mark >> nth=1")
    assert tip.is_visible()
    assert tip.inner_text() == "speed, tg128: 21 ± 1.41 t/s"
    opened.page.mouse.move(0, 0)
    assert not tip.is_visible()
    opened.page.locator(".mark >> nth=0").focus()
    assert tip.inner_text() == "speed, pp512: 300 t/s"
    opened.page.keyboard.press("Escape")
    assert not tip.is_visible()
    opened.page.keyboard.press("ArrowRight")  # there is no other in this chart
    opened.page.keyboard.press("Tab")  # the numbers of the first chart
    opened.page.keyboard.press("Tab")
    assert tip.inner_text() == "speed, tg128: 21 ± 1.41 t/s"


def test_arrow_keys_go_from_mark_to_mark(open_report: Callable[..., Opened], tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    write_report(
        path, [record(speed, n_depth=depth) for depth, speed in ((0, 40.0), (500, 30.0), (1000, 10.0))], MACHINE
    )
    opened = open_report(path)
    opened.page.keyboard.press("Tab")
    seen = []
    for key in ("ArrowRight", "ArrowRight", "ArrowRight", "ArrowLeft"):
        opened.page.keyboard.press(key)
        seen.append(opened.page.locator("#tip").inner_text())
    assert seen == [
        f"tg128, {text}" for text in ("500 tokens, 30 t/s", *2 * ["1,000 tokens, 10 t/s"], "500 tokens, 30 t/s")
    ]
    assert opened.said == []


def test_names_are_text_whatever_they_hold(open_report: Callable[..., Opened], tmp_path: Path) -> None:
    machine = replace(MACHINE, cpu=HOSTILE, command=HOSTILE)
    hostile = [
        record(20.0, model_type=HOSTILE, formats=HOSTILE), record(21.0, model_type="other", quant=HOSTILE), run(model=HOSTILE),
    ]  # fmt: skip
    path = tmp_path / "report.html"
    write_comparison(path, {HOSTILE: hostile, "b": hostile}, compare({HOSTILE: hostile, "b": hostile}))
    opened = open_report(path)
    write_report(path, hostile, machine)
    for each in (opened, open_report(path)):
        assert each.said == []
        assert each.asked == [path.as_uri()]
        assert each.page.title().startswith("nanovllm bench")
        assert each.count("script") == 1
        assert each.count("img") == 0
    content = path.read_text()
    assert "\x1b" not in content
    assert "\x00" not in content


def test_both_colour_schemes_differ_and_have_contrast(open_report: Callable[..., Opened], tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    write_report(path, sweep(), MACHINE)
    seen = {}
    for scheme in ("light", "dark"):
        opened = open_report(path, color_scheme=scheme)
        script = "([selector, name]) => getComputedStyle(document.querySelector(selector))[name]"
        paper, ink = (
            brightness(opened.page.evaluate(script, pair))
            for pair in (["body", "background-color"], ["svg.chart .axis", "fill"])
        )
        seen[scheme] = paper
        assert (max(paper, ink) + 0.05) / (min(paper, ink) + 0.05) > 7
        for color in range(2):
            bar = brightness(opened.page.evaluate(script, [f"svg.chart .line.s{color}", "stroke"]))
            assert (max(paper, bar) + 0.05) / (min(paper, bar) + 0.05) > 3
    assert seen["light"] > 0.8
    assert seen["dark"] < 0.05


def brightness(color: str) -> float:
    """The relative luminance of WCAG 2."""
    parts = [int(part) / 255 for part in re.findall(r"\d+", color)[:3]]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


class Tables(HTMLParser):
    """The cells of every table, by rows, and a check that what opens also closes."""

    VOID = ("meta", "link", "br")

    def __init__(self, document: str) -> None:
        super().__init__()
        self.tables: list[list[list[str]]] = []
        self.open: list[str] = []
        self.feed(document)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag not in self.VOID:
            self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("td", "th"):
            self.tables[-1][-1][-1] += data


def test_each_chart_has_its_numbers_as_a_table_and_all_tests_are_in_one() -> None:
    results = sweep()
    tables = Tables(page("t", {"": [*results, run()]}, [MACHINE])).tables
    assert tables[0][0] == ["series", "depth (tokens in the context)", "tokens a second", "±"]
    assert tables[0][1] == ["pp512, q8_0", "0", "305", "7.07"]
    tests = next(table for table in tables if table[0][0] == "model")
    assert len(tests) == 1 + len(results)
    assert tests[2][:4] == ["qwen3 0.6B Q8_0", "q8_0", "4", "tg128"] or "tg128" in tests[2]
    runs = next(table for table in tables if table[0][0] == "metric")
    assert ["request_throughput", "1"] in runs


def test_a_comparison_shows_ratios_and_marks_what_fails(tmp_path: Path) -> None:
    sources = {"before": [record(20.0, 22.0)], "after": [record(10.0, 11.0), record(30.0, gen=64)]}
    write_comparison(tmp_path / "c.html", sources, compare(sources, fail_under=0.9))
    document = (tmp_path / "c.html").read_text()
    tables = Tables(document).tables
    assert tables[0] == [
        ["test", "metric", "before", "after", "ratio", "±"],
        ["tg128", "t/s", "21", "10.5", "0.500", "0.034"],
    ]
    assert tables[1] == [["file", "tests"], ["after", "tg64"]]
    assert document.count('<tr class="bad">') == 1


def test_a_report_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(OutputError):
        write_report(tmp_path / "no" / "folder.html", [record(1.0)], MACHINE)
    with pytest.raises(OutputError):
        write_report(tmp_path, [record(1.0)], MACHINE)


@pytest.mark.parametrize("count", [1, 2, 100, 5000])
def test_a_distribution_marks_the_smallest_samples_that_so_many_do_not_exceed(count: int) -> None:
    samples = [float(value) for value in range(count, 0, -1)]
    [chart] = charts_of({"": [Summary("serve", "m", {}, {}, {"ttft_ms": samples})]})
    points = chart.series[0].points
    marked = {point.note: point.x for point in points if point.note}
    for name, share in (("median", 0.5), ("p90", 0.9), ("p99", 0.99)):
        if name in marked:  # of two samples, p90 and p99 are the same one
            assert marked[name] == pytest.approx(math.ceil(share * count), abs=count / 200)
    assert set(marked) >= ({"median", "p90", "p99"} if count >= 100 else {"median"})
    assert (points[-1].x, points[-1].y) == (count, 100.0)
    assert len(points) <= 200


def test_results_without_anything_to_draw() -> None:
    assert charts_of({"": []}) == []
    tables = Tables(page("t", {"": []}, [])).tables
    assert tables == []
    few = charts_of({"": [record(5.0, peak_memory=0, model_size=0)]})
    assert [chart.title for chart in few] == ["Generation speed"]


@pytest.mark.parametrize("most", [0.0, 0.003, 0.9, 1.0, 7.0, 99.0, 100.0, 101.0, 4096.0, 1e9])
def test_an_axis_has_round_ticks_that_hold_all_values(most: float) -> None:
    straight = scale([most / 3, most], Axis("x"), 10.0, 110.0)
    assert 2 <= len(straight.ticks) <= 7
    assert straight.ticks[-1] >= most
    assert straight.place(0.0) == 10.0
    assert straight.place(straight.ticks[-1]) == pytest.approx(110.0)
    loose = scale([most], Axis("x"), 10.0, 110.0, to_a_tick=False)
    assert loose.place(max(most, loose.ticks[-1])) <= 110.0
    if most:
        logarithmic = scale([most, most * 50], Axis("x", log=10), 0.0, 100.0)
        assert -1e-9 <= logarithmic.place(most) < logarithmic.place(most * 50) <= 100.0 + 1e-9


def test_numbers_are_short() -> None:
    expected = {
        0.0: "0",
        12345.6: "12,346",
        123.4: "123",
        12.34: "12.3",
        1.2345: "1.23",
        0.01234: "0.0123",
        2.0: "2",
        100.0: "100",
    }
    assert {value: number(value) for value in expected} == expected
    assert [round_step(least) for least in (0.0, 1.0, 1.1, 2.1, 3.0, 7.0, 0.011)] == pytest.approx(
        [1, 1, 2, 2.5, 5, 10, 0.02]
    )


def test_runs_of_different_files_are_different_lines_and_one_run_alone_is_none() -> None:
    [chart] = [each for each in charts_of({"a": [run(1.0), run(2.0)], "b": [run(1.0)]}) if "concurrency" in each.title]
    assert {series.name: len(series.points) for series in chart.series} == {"a, qwen3": 2, "b, qwen3": 1}
    assert not [each for each in charts_of({"": [run(1.0)]}) if "concurrency" in each.title or "load" in each.title]
