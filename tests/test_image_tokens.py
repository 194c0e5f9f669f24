"""Prompts with images: tokens as transformers' tokenizer makes them of texts in which images are written as its processors write
them, and what is no place of an image."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from nanovllm_cli import LLM, EngineConfig, SamplingParams, data_url
from nanovllm_cli.errors import NanovllmError, TemplateError, UnsupportedError, UsageError
from nanovllm_cli.hearing_spec import Senses
from nanovllm_cli.images.reading import read_image
from nanovllm_cli.senses import read_parts
from nanovllm_cli.size_spec import SizeRule
from nanovllm_cli.text.chat_template import ChatTemplate, encode_chat
from nanovllm_cli.text.content_parts import ImagePart
from nanovllm_cli.text.messages import template_messages
from nanovllm_cli.text.tokenizer import Tokenizer
from nanovllm_cli.vision_spec import ImageTokens, TokenIds, TowerSpec, VisionSpec
from seeing import TEMPLATE, png, seeing_model
from test_llm import write_byte_tokenizer

HALVES = (0.5, 0.5, 0.5)
TOWER = {
    "hidden_size": 8, "num_layers": 1, "num_heads": 1, "intermediate_size": 8, "out_size": 8, "activation": "silu", "norm": "rms",
    "eps": 1e-6, "projector_eps": 1e-6,
}  # fmt: skip
MISTRAL = VisionSpec(
    TowerSpec(patch_size=4, merge=2, projector="patch_merger", **TOWER),  # type: ignore[arg-type]
    SizeRule("longest", 8, longest_side=64),
    ImageTokens("[IMG]", "[IMG]", line_end="[IMG_BREAK]", last_end="[IMG_END]"), HALVES, HALVES,
)  # fmt: skip
GEMMA = VisionSpec(
    TowerSpec(patch_size=4, merge=4, projector="pooled", **TOWER),  # type: ignore[arg-type]
    SizeRule("square", 16, longest_side=64, resample="bilinear"),
    ImageTokens("<start_of_image>", "<image_soft_token>", "\n\n<start_of_image>", "<end_of_image>\n\n"), HALVES, HALVES,
)  # fmt: skip
MISTRAL_WORDS = ("<s>", "</s>", "[INST]", "[/INST]", "[IMG]", "[IMG_BREAK]", "[IMG_END]")
GEMMA_WORDS = ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>", "<start_of_image>", "<image_soft_token>", "<end_of_image>")
MISTRAL_TEMPLATE = """{% for message in messages %}[INST]{% if message.content is string %}{{ message.content }}{% else %}\
{% for part in message.content %}{% if part.type == 'image' %}[IMG]{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}\
[/INST]{% endfor %}"""
GEMMA_TEMPLATE = """{% for message in messages %}<start_of_turn>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}\
{% if part.type == 'image' %}<start_of_image>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<end_of_turn>
{% endfor %}"""


def tokenizers(folder: Path, words: tuple[str, ...], merges: list[tuple[str, str]] | None = None) -> tuple[Tokenizer, Any]:
    """Ours, and transformers' of the same file. merges: of the characters that bytes are written as."""
    write_byte_tokenizer(folder, words)
    file = folder / "tokenizer.json"
    told = json.loads(file.read_text())
    for first, second in merges or ():
        told["model"]["vocab"][first + second] = 256 + len(words)
        told["model"]["merges"].append([first, second])
    file.write_text(json.dumps(told))
    return Tokenizer.from_folder(folder), PreTrainedTokenizerFast(tokenizer_file=str(file))


def message(*parts: str | bytes) -> dict[str, Any]:
    content = [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": "image_url", "image_url": {"url": data_url(part)}}
        for part in parts
    ]
    return {"role": "user", "content": content}


def encoded(tokenizer: Tokenizer, template: str, vision: VisionSpec, *messages: dict[str, Any]) -> TokenIds:
    chat = ChatTemplate(template)
    parts: list[ImagePart] = []
    shaped = template_messages(list(messages), chat, parts)
    return encode_chat(tokenizer, chat, shaped, images=read_parts(parts, Senses(vision)), senses=Senses(vision))


def test_of_a_mistral(tmp_path: Path) -> None:
    """Lines of different lengths in an image's own shape, each with an end."""
    ours, theirs = tokenizers(tmp_path, MISTRAL_WORDS)
    images = [png(40, 17), png(100, 60, seed=1)]
    prompt = encoded(ours, MISTRAL_TEMPLATE, MISTRAL, message("a", images[0], "\nb", images[1], "c"))
    small, large = ("[IMG_BREAK]".join(["[IMG]" * columns] * rows) + "[IMG_END]" for rows, columns in ((3, 5), (5, 8)))
    expected = theirs(f"[INST]a{small}\nb{large}c[/INST]", add_special_tokens=False).input_ids
    assert list(prompt) == expected
    assert [(each.rows, each.columns) for each in prompt.images] == [(3, 5), (5, 8)]


def test_of_a_gemma(tmp_path: Path) -> None:
    """Line ends around an image are a part of the text before they are tokens: here two of them in a row are one token."""
    ours, theirs = tokenizers(tmp_path, GEMMA_WORDS, merges=[("\u010a", "\u010a")])
    prompt = encoded(ours, GEMMA_TEMPLATE, GEMMA, message(png(), "\nwhat?", png(seed=1)), message("and?"))
    image = "\n\n<start_of_image>" + "<image_soft_token>" * 16 + "<end_of_image>\n\n"
    turns = (f"{image}\nwhat?{image}", "and?")
    text = "".join(f"<start_of_turn>user\n{turn}<end_of_turn>\n" for turn in turns)
    assert list(prompt) == theirs(text, add_special_tokens=False).input_ids
    assert len(prompt.images) == 2


def test_of_a_qwen_the_model_gets_what_was_sent(tmp_path: Path) -> None:
    with LLM(seeing_model(tmp_path), config=EngineConfig(threads=2)) as llm:
        assert llm.vision is not None
        images = [png(40, 17), png(10, 60, seed=1)]
        messages = [message(images[0], "?"), {"role": "assistant", "content": "a"}, message("b", images[1])]
        prompt = llm.encode_chat(messages)
        for placed, data in zip(prompt.images, images, strict=True):
            assert (placed.image,) == read_image(data, llm.vision, "it").images
            assert set(prompt[placed.start : placed.end]) == {llm.tokenizer.control_tokens["<|image_pad|>"]}
            assert [prompt[at] for at in (placed.start - 1, placed.end)] == [258, 260]  # <|vision_start|>, <|vision_end|>
        assert sum(each.num_tokens for each in prompt.images) == list(prompt).count(259)
        greedy = SamplingParams(temperature=0, max_tokens=8)
        (output,) = llm.chat(messages, greedy)
        assert output.outputs[0].token_ids == llm.generate(prompt, greedy)[0].outputs[0].token_ids


def test_what_a_text_says_is_no_place_of_an_image(tmp_path: Path) -> None:
    """Nor do the places move that its control tokens are plain at."""
    ours, _ = tokenizers(tmp_path, GEMMA_WORDS)
    plain = "<start_of_image> <image_soft_token> <end_of_turn>"
    prompt = encoded(ours, GEMMA_TEMPLATE, GEMMA, message(plain, png(), plain), message(plain))
    (placed,) = prompt.images
    assert [prompt[at] for at in range(placed.start, placed.end)] == [261] * 16
    controls = [token for token in prompt if token >= 256]
    assert controls == [258, 260, *[261] * 16, 262, 259, 258, 259]
    assert ours.decode(prompt, skip_special_tokens=True).count(plain) == 3


def test_behind_several_images_texts_are_texts_still(tmp_path: Path) -> None:
    """Places move on by all the images before them."""
    ours, _ = tokenizers(tmp_path, GEMMA_WORDS)
    plain = "<end_of_turn>"
    prompt = encoded(ours, GEMMA_TEMPLATE, GEMMA, message(plain, png(), plain, png(seed=1), plain, png(seed=2), plain))
    image = [260, *[261] * 16, 262]
    assert [token for token in prompt if token >= 256] == [258, *image, *image, *image, 259]
    assert ours.decode(prompt, skip_special_tokens=True).count(plain) == 4


def test_a_template_that_leaves_an_image_out_is_told_of(tmp_path: Path) -> None:
    ours, _ = tokenizers(tmp_path, GEMMA_WORDS)
    for template in ("{{ messages[0].role }}", "<start_of_image><start_of_image>", "<start_of_image><image_soft_token>"):
        with pytest.raises(TemplateError, match="for 1 images"):
            encoded(ours, template, GEMMA, message("a", png()))


def test_a_tokenizer_without_an_images_token_is_told_of(tmp_path: Path) -> None:
    ours, _ = tokenizers(tmp_path, GEMMA_WORDS[:5])
    with pytest.raises(NanovllmError, match="<image_soft_token>"):
        encoded(ours, GEMMA_TEMPLATE, GEMMA, message("a", png()))


@pytest.mark.parametrize(
    ("part", "error"),
    [
        ({"type": "image_url"}, "has no image"),
        ({"type": "image_url", "image_url": {"url": 5}}, "has no image"),
        ({"type": "image_url", "image_url": {"url": "http://localhost/a.png"}}, "none is opened"),
        ({"type": "image_url", "image_url": "file:///etc/passwd"}, "none is opened"),
        ({"type": "image", "image": "/etc/passwd"}, "neither a data URL nor an image"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}, "is no image"),
        ({"type": "input_audio", "input_audio": {}}, "no audio"),
        ({"type": []}, "is no part of a message"),
    ],
)
def test_parts_that_are_no_images(part: dict[str, Any], error: str, tmp_path: Path) -> None:
    ours, _ = tokenizers(tmp_path, GEMMA_WORDS)
    with pytest.raises((UsageError, UnsupportedError), match=error) as caught:
        encoded(ours, GEMMA_TEMPLATE, GEMMA, {"role": "user", "content": [{"type": "text", "text": "a"}, part]})
    assert "messages[0].content[1]" in caught.value.message


def test_messages_of_one_role_in_a_row_keep_their_images_and_their_order() -> None:
    """Of a template that refuses two of them, and one that wants results of calls in the order of the calls."""
    strict = ChatTemplate(
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('turns') }}{% endif %}"
        "{{ m.content }}{% endfor %}"
    )
    parts: list[ImagePart] = []
    first, second = message("a", png(seed=1)), message(png(seed=2), "b")
    (joined,) = template_messages([first, {"role": "user", "content": "and"}, second], strict, parts)
    kinds = [part.get("text", part["type"]) for part in joined["content"]]
    assert kinds == ["a", "image", "and", "image", "b"]
    assert [part.where for part in parts] == ["messages[0].content[1]", "messages[2].content[0]"]
    assert json.dumps(joined)  # a template sees plain values


def test_without_images_content_is_a_text_as_ever() -> None:
    template, images = ChatTemplate(TEMPLATE), []
    (plain,) = template_messages([message("a", "b")], template, images)
    assert (plain["content"], images) == ("a\nb", [])
    with pytest.raises(UnsupportedError, match="this model reads no images"):
        template_messages([message("a", png())], template)


def test_images_of_results_stay_where_a_template_has_a_place_for_them() -> None:
    """One that wants results within the message of their calls, where it reads texts alone."""
    within = ChatTemplate(
        "{% for m in messages %}{{ m.role }}{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}"
        "{{ c.function.arguments }}{% endfor %}{% for r in m.tool_responses or [] %}<{{ r.name }}{{ r.response }}>{% endfor %}"
        "{% endfor %}"
    )
    call = {"id": "abcdefgh0", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    asked = [{"role": "user", "content": "look"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    images: list[ImagePart] = []
    result = {"role": "tool", "tool_call_id": "abcdefgh0", "content": [*message("seen", png())["content"]]}
    shaped = template_messages([*asked, result], within, images)
    assert [each.where for each in images] == ["messages[2].content[1]"]
    assert "base64" not in within.render(shaped)
    (_, calling) = template_messages([*asked, {**result, "content": "seen"}], within, [])
    assert calling["tool_responses"] == [{"name": "look", "response": "seen"}]
