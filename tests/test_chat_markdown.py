"""Markdown as it streams: what it looks like, that no cut of the text changes it, and that nothing gets through but text."""

from __future__ import annotations

import random
import re
from collections import Counter

import pytest
import wcwidth
from hypothesis import example, given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from pygments.lexers import get_lexer_by_name

from nanovllm_cli.chat.highlight import Highlighter, _style
from nanovllm_cli.chat.inline import Inline, Theme, inline_pieces
from nanovllm_cli.chat.markdown import MarkdownStream
from nanovllm_cli.chat.tables import fit, wrap

SGR = re.compile(r"\x1b\[[0-9;]*m")
FRAGMENTS = [
    "word",
    "two words ",
    "a_b_c",
    " ",
    "  ",
    "\n",
    "\n\n",
    "\n    ",
    "\t",
    "*",
    "**",
    "***",
    "_",
    "__",
    "~~",
    "`",
    "``",
    "```",
    "\n```python\n",
    "\n```\n",
    "\n~~~~\n",
    "def f(x): return 'x' # y",
    "/* open",
    "*/",
    "\n- ",
    "\n* ",
    "\n  - ",
    "\n1. ",
    "\n10) ",
    "\n- [x] ",
    "[ ] ",
    "\n> ",
    "\n> > ",
    ">",
    "\n# ",
    "\n###### ",
    "#",
    "\n---\n",
    "\n***",
    "\n===\n",
    "\n| a | b |",
    "\n|---|:-:|",
    "\n| 漢字 | `x|y` |",
    "|",
    "\\|",
    "[text](https://example.org/a_(b))",
    "![alt](",
    "[",
    "](",
    ")",
    "<br>",
    "<br />",
    "<https://a.b/c_d>",
    "<",
    "&amp;",
    "&#27;",
    "&",
    "$",
    "$$",
    "\n$$\n",
    "$x_1$",
    "\\(a_b\\)",
    "\\[",
    "\\*",
    "\\",
    "漢字仮名",
    "é",
    "👩‍👩‍👧",
    "❤️",
    "averyveryverylongwordthatfitsnowhere" * 3,
    "\x1b[31m",
    "\x1b]0;title\x07",
    "\x1b",
    "\x9b2J",
    "\r\n",
    "\x00",
    "\u202e",
]
TEXTS = st.lists(st.sampled_from(FRAGMENTS), max_size=30).map("".join) | st.text(max_size=60)


def render(text: str, width: int = 80, pieces: list[str] | None = None, color: bool = True) -> str:
    out: list[str] = []
    stream = MarkdownStream(out.append, lambda: width, color=color)
    for piece in pieces if pieces is not None else [text]:
        stream.feed(piece)
    stream.finish()
    return "".join(out)


def marked(text: str) -> str:
    """Output with styles as <1;35>, and </> for the terminal's own."""
    text = re.sub(r"\x1b\[0;([0-9;]*)m", r"<\1>", text.replace("\x1b[0m", "</>"))
    assert "\x1b" not in text
    return text


# ---- for all texts ----


@given(TEXTS, st.integers(1, 90), st.randoms(use_true_random=False), st.booleans())
@settings(max_examples=300, deadline=None)
@example("**bold** and `code` " * 30, 40, random.Random(1), True)
@example("*" * 401 + "a" + "*" * 99 + " b", 40, random.Random(1), True)
@example("-" * 250 + "x", 40, random.Random(1), True)
def test_no_cut_of_a_text_changes_what_is_shown(text: str, width: int, chance: random.Random, color: bool) -> None:
    cuts = sorted(chance.choices(range(len(text) + 1), k=chance.randrange(8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = render(text, width, color=color)
    assert render(text, width, pieces, color) == whole
    assert render(text, width, list(text), color) == whole


@given(TEXTS | st.text(st.characters(), max_size=80), st.integers(1, 90))
@settings(max_examples=300, deadline=None)
def test_nothing_but_text_and_our_own_styles_comes_out(text: str, width: int) -> None:
    shown = render(text, width)
    plain = SGR.sub("", shown)
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", plain)
    assert not shown or shown.endswith("\n")
    styles = SGR.findall(shown)
    assert not styles or styles[-1] == "\x1b[0m"
    assert all(re.fullmatch(r"\x1b\[0(;\d+)*m", style) for style in styles)
    for line in shown.split("\n"):  # each line begins and ends in the terminal's own style
        assert not SGR.findall(line) or SGR.findall(line)[-1] == "\x1b[0m"


@given(st.lists(st.sampled_from([each for each in FRAGMENTS if not re.search(r"[\x00\x1b\x9b]|br|&|x\]", each)])))
@settings(max_examples=200, deadline=None)
def test_nothing_that_was_said_is_lost(fragments: list[str]) -> None:
    text = "".join(fragments)
    shown = SGR.sub("", render(text, 1000))
    assert Counter(filter(str.isalnum, shown)) == Counter(filter(str.isalnum, text))


@given(
    st.lists(
        st.sampled_from(
            ["word ", "漢字", "**bold** ", "`code` ", "\n- ", "\n> ", "\n# ", "\n\n", "\n| a | b |", "\n|-|-|"]
        )
    ),
    st.integers(20, 60),
)
@settings(max_examples=200, deadline=None)
def test_no_line_is_wider_than_the_terminal(fragments: list[str], width: int) -> None:
    for line in SGR.sub("", render("".join(fragments), width)).split("\n"):
        assert wcwidth.wcswidth(line) <= width


# ---- inline ----


def commonmark(text: str) -> list[tuple[str, set[str]]]:
    """Characters and their styles by markdown-it."""
    names = {"strong": "1", "em": "3", "s": "9"}
    characters: list[tuple[str, set[str]]] = []
    styles: list[str] = []
    for token in MarkdownIt("commonmark").enable("strikethrough").parseInline(text)[0].children or []:
        name, _, edge = token.type.rpartition("_")
        if name in names and edge == "open":
            styles.append(names[name])
        elif name in names:
            styles.pop()
        else:
            code = {"36"} if token.type == "code_inline" else set()
            characters += [(character, {*styles, *code}) for character in token.content]
    return characters


def test_emphasis_is_that_of_commonmark() -> None:
    chance = random.Random(7)
    parts = ["a", "b", " ", ".", "*", "**", "_", "`", "__", "a ", "a~~", "~~b", "(", "é"]
    texts = ["".join(chance.choices(parts, k=chance.randrange(1, 14))).strip() for _ in range(4000)]
    for text in ["*word***word**", "**a*b**c*", *texts]:
        if "~~~" in text:
            continue  # GFM: three or more are no delimiter; markdown-it takes them in pairs
        stream = Inline(Theme())
        for pieces in (inline_pieces(text, Theme()), [*(p for c in text for p in stream.feed(c)), *stream.finish()]):
            ours = [(character, set(piece.style.split(";")) - {""}) for piece in pieces for character in piece.text]
            assert ours == commonmark(text), text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a **b** c", "a <1>b</> c"),
        ("***both***", "<3;1>both</>"),
        ("**bold *and italic* text**", "<1>bold <1;3>and italic<1> text</>"),
        ("~~gone~~ ~stays~", "<9>gone</> ~stays~"),
        ("snake_case_name and 2 * 3 * 4", "snake_case_name and 2 * 3 * 4"),
        ("`a*b*c` ``a`b``", "<36>a*b*c</> <36>a`b</>"),
        ("\\*no\\* \\\\ \\q", "*no* \\\\ \\q"),
        ("[text](https://a.b/c)", "<4>text<2> (https://a.b/c)</>"),
        ("[**b**](x) ![pic](y.png)", "<4;1>b<2> (x)</> <4>pic<2> (y.png)</>"),
        ("[https://a.b](https://a.b)", "<4>https://a.b</>"),
        ("[](u) [x] [y](", "<2>u</> [x] [y]("),
        ("<https://a.b/c_d_> <me@example.org> a < b <b>", "<4>https://a.b/c_d_</> <4>me@example.org</> a < b <b>"),
        ("one<br>two<BR />three", "one\ntwo\nthree"),
        ("AT&amp;T &lt;b&gt; &copy; &nope; R&D", "AT&T <b> © &nope; R&D"),
        ("&#27;[31m &#x202e; &#0;", "&#27;[31m &#x202e; �"),
        ("$a_1 * b_2 * c$ costs $5 and *more* than $4", "$a_1 * b_2 * c$ costs $5 and <3>more</> than $4"),
        ("\\(x_1*y\\) \\[z*_1\\] $$a*b*c$$", "\\(x_1*y\\) \\[z*_1\\] $$a*b*c$$"),
        ("**open", "**open"),
        ("a `tick", "a `tick"),
    ],
)
def test_inline_markup(text: str, shown: str) -> None:
    assert marked(render(text)) == shown + "\n"


def test_what_has_no_end_is_held_no_longer_than_its_limit() -> None:
    for opener in (
        "**",
        "`",
        "[",
        "$x",
        "\\(",
        "![a](",
        "*a **b _c ",
        "&",
        "<a",
        "~~",
        "|",
        "```",
        "#",
        "- ",
        "> ",
        "[" * 50,
    ):
        out: list[str] = []
        stream = MarkdownStream(out.append, lambda: 80)
        for _ in range(100):
            stream.feed(opener + "x" * 100)
        assert len("".join(out)) > 100 * (len(opener) + 100) - 6000, opener


def test_text_is_seen_as_it_comes() -> None:
    out: list[str] = []
    stream = MarkdownStream(out.append, lambda: 80)
    for token, seen in (
        ("The", ""),
        (" quick", "The"),
        (" **br", "The quick"),
        ("own**", "The quick"),
        (" fox", "The quick brown"),
        (".\n", "The quick brown fox.\n"),
        ("-", "The quick brown fox.\n"),
        (" o", "The quick brown fox.\n• "),
        ("ne\n", "The quick brown fox.\n• one\n"),
    ):
        stream.feed(token)
        assert SGR.sub("", "".join(out)) == seen


# ---- blocks ----


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("# One\n## Two *it*\n#hash\n####### seven", "<1;35;4>One</>\n<1;35>Two <1;35;3>it</>\n#hash\n####### seven"),
        ("- a\n  - b\n    - c\n      - d\n- e", "• a\n  ◦ b\n    ▪ c\n      ▪ d\n• e"),
        ("* a\n+ b\n1. c\n10) d", "• a\n• b\n1. c\n10) d"),
        ("1. one\n   - two\n\n   still one\n\nout", "1. one\n   ◦ two\n\n   still one\n\nout"),
        ("- [ ] open\n- [x] done\n- [y] none", "• ☐ open\n• ☑ done\n• [y] none"),
        ("- [", "• ["),
        ("- [ ]", "• [ ]"),
        ("- - twice\n- # head", "• ◦ twice\n• <1;35;4>head</>"),
        ("-\n- x", "• \n• x"),
        ("> a\n> > b\n>\n> - c\nd", "<2>│ </>a\n<2>│ │ </>b\n<2>│ </>\n<2>│ </>• c\nd"),
        ("- > in a list\n  > more", "• <2>│ </>in a list\n  <2>│ </>more"),
        ("a\n\n\n\nb\n\n", "a\n\nb"),
        ("\n\na", "a"),
        ("a\n***\n* * *\n--", "a\n<2>──────────</>\n<2>──────────</>\n--"),
        ("title\n===\n= no", "title\n<2>──────────</>\n= no"),
        ("```\na  *b*\n\n  c\n```\nd", "<2>```</>\na  *b*\n\n  c\n<2>```</>\nd"),
        ("~~~ text\n```\n~~~~", "<2>~~~ text</>\n```\n<2>~~~~</>"),
        ("- x\n  ```\n  code\n    more\n  ```", "• x\n  <2>```</>\n  code\n    more\n  <2>```</>"),
        ("> ```\n> a\nb", "<2>│ ```</>\n<2>│ </>a\nb"),
        ("```not``` code", "<36>not</> code"),
        ("    indented *code*\ntext", "    indented *code*\ntext"),
        ("$$\na_1 * b_2 * c\n$$\n*x*", "$$\na_1 * b_2 * c\n$$\n<3>x</>"),
        ("\\[\nx\n\n*y*", "\\[\nx\n\n<3>y</>"),
        ("1986. A year\n3.14 is pi\n-5 degrees", "1986. A year\n3.14 is pi\n-5 degrees"),
        ("| no table\nx", "| no table\nx"),
        ("> | a |\n> |--|\n> | b |\n| c |", "<2>│ <1>a</>\n<2>│ ─</>\n<2>│ </>b\n| c |"),
        ("-" * 250 + "x", "-" * 250 + "x"),
    ],
)
def test_blocks(text: str, shown: str) -> None:
    assert marked(render(text, 10 if "──" in shown else 80)) == shown + "\n"


def test_words_are_wrapped_behind_what_begins_their_line() -> None:
    assert marked(render("> - some **bold words** here", 16)) == (
        "<2>│ </>• some <1>bold\n".replace("\n", "</>\n") + "<2>│ </>  <1>words</> here\n"
    )
    assert marked(render("漢字仮名交じり文", 7)) == "漢字仮\n名交じ\nり文\n"
    url = "https://example.org/longer"
    assert marked(render(f"go to {url} now", 12)) == f"go to\n{url} now\n"


def test_a_resize_takes_effect_at_the_next_line() -> None:
    out: list[str] = []
    width = 20
    stream = MarkdownStream(out.append, lambda: width)
    stream.feed("one two three four five ")
    width = 9
    stream.feed("six seven eight\nnine ten eleven")
    stream.finish()
    assert "".join(out) == "one two three four\nfive six seven eight\nnine ten\neleven\n"


def test_without_colour_attributes_remain() -> None:
    shown = render("# T\n**b** `c` [l](u)\n```python\ndef f(): 1\n```\n", color=False)
    assert marked(shown) == "<1;4>T</>\n<1>b</> `c` <4>l<2> (u)</>\n<2>```python</>\ndef f(): 1\n<2>```</>\n"


# ---- tables ----


def test_columns_are_aligned() -> None:
    text = "| Name | n | mid |\n|:--|--:|:-:|\n| a | 1 | x |\n| 漢字 | 100 | `c` |\n| short |\n| 1 | 2 | 3 | 4 |\n"
    assert SGR.sub("", render(text)) == (
        "Name  │   n │ mid\n──────┼─────┼────\na     │   1 │  x\n漢字  │ 100 │  c\nshort │     │\n1     │   2 │ 3 4\n"
    )


def test_wide_cells_are_wrapped_and_narrow_terminals_get_lists() -> None:
    text = "| key | words |\n|--|--|\n| a | one two three |\n| b | supercalifragilistic |\n"
    assert SGR.sub("", render(text, 16)) == (
        "key │ words\n────┼───────────\na   │ one two\n    │ three\nb   │ supercalif\n    │ ragilistic\n"
    )
    assert SGR.sub("", render(text, 8)) == (
        "key: a\nwords:\none two\nthree\n\nkey: b\nwords:\nsupercalifragilistic\n\n"
    )


def test_a_long_table_is_shown_before_it_ends() -> None:
    out: list[str] = []
    stream = MarkdownStream(out.append, lambda: 80)
    stream.feed("| a | b |\n|---|---|\n")
    assert out == []
    for i in range(12):
        stream.feed(f"| {i} | x |\n")
    assert "11 │ x\n" in SGR.sub("", "".join(out))
    stream.feed("| 12 | a cell with more room than its column |\n")
    assert "".join(out).endswith("\n")
    stream.finish()
    lines = SGR.sub("", "".join(out)).split("\n")
    assert all(line[3:4] in ("│", "┼", "") for line in lines)
    assert "".join(line[4:].strip() for line in lines[14:]) == "acellwithmoreroomthanitscolumn"


@given(st.lists(st.integers(1, 60), min_size=1, max_size=12), st.integers(1, 120))
def test_columns_share_the_room(natural: list[int], room: int) -> None:
    widths = fit(natural, room)
    if not widths:
        assert sum(min(width, 4) for width in natural) > room
        return
    assert sum(widths) == min(sum(natural), room)
    assert all(1 <= width <= wanted for width, wanted in zip(widths, natural, strict=True))
    squeezed = [width for width, wanted in zip(widths, natural, strict=True) if width < wanted]
    assert all(width <= min(squeezed) + 1 or width <= 4 for width in squeezed)


@given(st.text("ab 漢\n", max_size=40), st.integers(2, 12))
def test_cells_keep_their_words_and_their_width(text: str, width: int) -> None:
    lines = wrap(inline_pieces(text.replace("\n", "<br>"), Theme()), width)
    shown = ["".join(piece.text for piece in line) for line in lines]
    assert "".join("".join(shown).split()) == "".join(text.split())
    assert all(wcwidth.wcswidth(line.rstrip()) <= width for line in shown)


# ---- code ----

CODE = {
    "python": '"""Doc\nstring."""\nimport os\n\n@wraps\ndef f(x: int = 3) -> str:\n    # why\n'
    '    return f"{x!r}" + """a\n\n  b"""\n',
    "c": "/* a\n * b\n */\n#include <stdio.h>\nint main(void) { return 0x1f; } // end\n",
    "javascript": "const f = async (x) => `a${x}\nb`;\n/* c\n d */ let y = /re/g;\n",
    "rust": 'fn main() { let s = "a\nb"; /* x /* y */\n z */ println!("{}", s); }\n',
    "bash": "for i in 1 2; do\n  echo \"$i\" 'a\nb' # c\ndone\n",
    "html": "<!-- a\nb --><p class='x'>t</p>\n<script>\nlet a = 1;\n</script>\n",
    "go": "package main\n\nfunc f() string { return `a\nb` }\n",
    "sql": "select a, 'b\nc' from t -- x\nwhere 1 = 2;\n",
    "json": '{"a": [1, true],\n "b": "c"}\n',
    "diff": "--- a\n+++ b\n@@ -1 +1 @@\n-x\n+y\n",
    "yaml": "a: 1\nb:\n  - c # d\n",
}


@pytest.mark.parametrize("language", CODE)
def test_code_has_the_colours_that_pygments_gives_the_whole(language: str) -> None:
    code = CODE[language]
    expected: list[tuple[str, str]] = []
    for _, kind, text in get_lexer_by_name(language).get_tokens_unprocessed(code):
        expected += [
            (character, _style(str(kind).removeprefix("Token."))) for character in text if not character.isspace()
        ]
    highlighter = Highlighter(language)
    ours: list[tuple[str, str]] = []
    for line in code.removesuffix("\n").split("\n"):
        pieces = highlighter.line(line)
        assert "".join(piece.text for piece in pieces) == line
        ours += [(character, style) for text, style in pieces for character in text if not character.isspace()]
    assert ours == expected


@pytest.mark.parametrize("language", ["", "nosuchlanguage", "python, title=x", "c++", "PYTHON", "text"])
def test_any_language_name(language: str) -> None:
    assert "".join(piece.text for piece in Highlighter(language).line("int x = 1;")) == "int x = 1;"


@pytest.mark.parametrize("info", [" python\n", 'python title="a b"', "Python,ignore", "python:a.py", "{python}", "{.python .x}"])
def test_the_language_is_the_first_word_behind_a_fence(info: str) -> None:
    assert Highlighter(info).line("def f(): pass")[0] == ("def", "35")


@given(st.lists(st.text(max_size=30).filter(lambda line: "\n" not in line), max_size=8), st.sampled_from(sorted(CODE)))
@settings(max_examples=150, deadline=None)
def test_code_is_kept_whatever_it_is(lines: list[str], language: str) -> None:
    highlighter = Highlighter(language)
    for line in lines:
        assert "".join(piece.text for piece in highlighter.line(line)) == line
