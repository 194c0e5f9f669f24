"""What is written around the images of a video, as each model was trained."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from nanovllm_cli.video_spec import Wording

_ONES = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve", "thirteen",
    "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
)  # fmt: skip
_TENS = "", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"


def texts_of(wording: Wording, times: Sequence[Sequence[float]], seconds: float) -> tuple[str, ...]:
    """In front of each image, and behind the last one. times: of each image's frames, in seconds; seconds: of all of them."""
    pairs = _WORDINGS[wording](times, seconds)
    before, behind = zip(*pairs, strict=True)
    return (before[0], *(first + second for first, second in zip(behind[:-1], before[1:], strict=True)), behind[-1])


Pairs = list[tuple[str, str]]
"""What is in front of each image, and behind it."""


def _plain(times: Sequence[Sequence[float]], seconds: float) -> Pairs:
    """What is around them the template has written."""
    return [("", "") for _ in times]


def _qwen2(times: Sequence[Sequence[float]], seconds: float) -> Pairs:
    """Nothing is between them."""
    pairs = [("", "") for _ in times]
    pairs[0] = "<|vision_start|>", pairs[0][1]
    pairs[-1] = pairs[-1][0], "<|vision_end|>"
    return pairs


def _qwen3(times: Sequence[Sequence[float]], seconds: float) -> Pairs:
    """The time in the middle of an image's frames."""
    return [(f"<{(each[0] + each[-1]) / 2:.1f} seconds><|vision_start|>", "<|vision_end|>") for each in times]


def _glm(times: Sequence[Sequence[float]], seconds: float) -> Pairs:
    return [("<|begin_of_image|>", f"<|end_of_image|>{int(each[0])}") for each in times]


def _glm_4_6(times: Sequence[Sequence[float]], seconds: float) -> Pairs:
    return [("<|begin_of_image|>", f"<|end_of_image|>{each[0]:.1f} seconds") for each in times]


def _internvl(times: Sequence[Sequence[float]], seconds: float) -> Pairs:
    return [(f"Frame{i + 1}: <img>", "</img>" if i == len(times) - 1 else "</img>\n") for i in range(len(times))]


def _gemma4(times: Sequence[Sequence[float]], seconds: float) -> Pairs:
    between = ["<image|> "] * (len(times) - 1)
    return [(f"{_clock(each[0])} <|image>", end) for each, end in zip(times, [*between, "<image|>"], strict=True)]


def _smolvlm(times: Sequence[Sequence[float]], seconds: float) -> Pairs:
    around, whole = "<fake_token_around_image>", int(seconds)
    pairs = [(f"\nFrame from {_clock(each[0])}:{around}<global-img>", around) for each in times]
    lasts = f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"
    told = f"You are provided the following series of {in_words(len(times))} frames from a {lasts} [H:MM:SS] video.\n"
    pairs[0] = told + pairs[0][0], around
    pairs[-1] = pairs[-1][0], f"{around}\n\n"
    return pairs


_WORDINGS: dict[Wording, Callable[[Sequence[Sequence[float]], float], Pairs]] = {
    "plain": _plain, "qwen2": _qwen2, "qwen3": _qwen3, "glm": _glm, "glm4.6": _glm_4_6, "internvl": _internvl,
    "gemma4": _gemma4, "smolvlm": _smolvlm,
}  # fmt: skip


def _clock(seconds: float) -> str:
    return f"{int(seconds // 60):02d}:{int(seconds % 60):02d}"


def in_words(number: int) -> str:
    """Below a thousand, in English."""
    hundreds, rest = divmod(number, 100)
    words = [f"{_ONES[hundreds]} hundred"] if hundreds else []
    if rest or not hundreds:
        tens, ones = divmod(rest, 10)
        small = _ONES[rest] if rest < 20 else _TENS[tens] + (f"-{_ONES[ones]}" if ones else "")
        words.append(small)
    return " and ".join(words)
