"""A model that both sees and hears: what was sent goes to the sense that it is for, in its order in a prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nanovllm_cli import LLM, EngineConfig, data_url
from nanovllm_cli.engine.checked_images import Seeing, checked_images
from nanovllm_cli.engine.looking import Looking
from nanovllm_cli.engine.plan import Look, Scheduled
from nanovllm_cli.engine.sequence import Request, Sequence
from nanovllm_cli.engine.sight import KEPT_BYTES, Organ, Sight
from nanovllm_cli.errors import CheckpointError, TemplateError, UnsupportedError, UsageError
from nanovllm_cli.hearing_spec import EarSpec, HearingSpec, Senses, Transcript
from nanovllm_cli.models.tower_layers import TowerRows
from nanovllm_cli.sampling_params import SamplingParams
from nanovllm_cli.senses import kinds_of, read_parts
from nanovllm_cli.size_spec import SizeRule
from nanovllm_cli.text.chat_template import ChatTemplate, prepare_chat
from nanovllm_cli.text.content_parts import IMAGES, SOUNDS, ImagePart
from nanovllm_cli.text.messages import template_messages
from nanovllm_cli.vision_spec import Clip, Image, ImageTokens, Picture, Sound, TokenIds, TowerSpec, VisionSpec
from perceiving import perceiving_model
from seeing import png
from sounding import in_base64, noise, wav
from test_image_tokens import message, tokenizers

VISION = VisionSpec(
    TowerSpec(
        patch_size=4, merge=2, hidden_size=8, num_layers=3, num_heads=1, intermediate_size=8, out_size=8, activation="silu",
        norm="rms", eps=1e-6, projector="merger", projector_eps=1e-6,
    ),
    SizeRule("square", 8, longest_side=16),
    ImageTokens("<image>", "<image>", "<boi>", "<eoi>", line=""), (0.5,) * 3, (0.5,) * 3,
)  # fmt: skip
HEARING = HearingSpec(
    EarSpec(8, "line", 100, 16, 2, 1, 16, 8, "gelu", "one"), ImageTokens("<sound>", "<sound>"), 100, ("<boa>", "<eoa>"),
    Transcript(),
)
BOTH = Senses(VISION, HEARING)
WORDS = ("<s>", "</s>", "<image>", "<boi>", "<eoi>", "<sound>", "<boa>", "<eoa>")
KNOWS = """{% for m in messages %}{% for part in m.content %}{% if part.type == 'image' %}<image>{% elif part.type == 'audio' %}\
<sound>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endfor %}"""
IGNORES = "{% for m in messages %}{{ m.content }}{% endfor %}"


def an_image(seed: int = 0) -> Image:
    return Image.of(16, 16, bytes([seed]) * 768)


def a_sound(heard: int, seed: int = 0) -> Sound:
    return Sound.of(np.full((heard, 8), seed, np.float32).tobytes(), heard, heard, 8)


SENT = [Clip((a_sound(9), a_sound(4, 1)), 1.0), Picture((an_image(),)), Clip((a_sound(3, 2),), 1.0)]


def asked(*kinds: str) -> list[dict[str, Any]]:
    parts = [{"type": "text", "text": kind} if len(kind) == 1 else {"type": kind, kind: ""} for kind in kinds]
    return [{"role": "user", "content": parts}]


@pytest.mark.parametrize("source", [KNOWS, IGNORES], ids=["knows", "ignores"])
def test_images_and_sounds_of_one_message_stand_in_their_order(source: str, tmp_path: Any) -> None:
    tokenizer, _ = tokenizers(tmp_path, WORDS)
    talk = asked("a", "audio", "b", "image", "c", "audio")
    made = prepare_chat(tokenizer, ChatTemplate(source), talk, images=SENT, senses=BOTH)
    around = ("", "", "<boi>", "<eoi>") if source == KNOWS else ("<boa>", "<eoa>", "<boi>", "<eoi>")
    boa, eoa, boi, eoi = around
    text = f"a{boa}{'<sound>' * 7}{eoa}b{boi}{'<image>' * 4}{eoi}c{boa}{'<sound>' * 2}{eoa}"
    assert list(made.ids) == tokenizer.encode(text, add_special_tokens=False)
    assert [placed.image for placed in made.ids.images] == [a_sound(9), a_sound(4, 1), an_image(), a_sound(3, 2)]
    assert BOTH.fits(made.ids.images, len(made.ids))
    assert sum(map(BOTH.num_tokens, SENT)) == sum(placed.num_tokens for placed in made.ids.images)


def test_a_template_that_writes_too_few_of_one_kind_is_refused(tmp_path: Any) -> None:
    tokenizer, _ = tokenizers(tmp_path, WORDS)
    deaf = ChatTemplate(KNOWS.replace("<sound>", ""))
    with pytest.raises(TemplateError, match=r"writes 0 places \(<sound>\) for 2 sounds"):
        prepare_chat(tokenizer, deaf, asked("audio", "image", "audio"), images=SENT, senses=BOTH)
    without, _ = tokenizers(tmp_path, WORDS[:5])
    with pytest.raises(CheckpointError, match="no control token <sound>"):
        prepare_chat(without, ChatTemplate(KNOWS), asked("audio", "image", "audio"), images=SENT, senses=BOTH)


def test_a_prompt_has_what_its_tokens_stand_for() -> None:
    image, sound = VISION.placed(an_image(), 1), HEARING.placed(a_sound(9), 6)
    ids = TokenIds([7, *[2] * 4, 8, *[5] * 5, 9], [image, sound])
    seeing = Seeing(BOTH, 2, 5, 1)
    assert checked_images(seeing, ids, tuple(ids), None) == (image, sound)
    salted = checked_images(seeing, ids, tuple(ids), "salt")
    assert all(one.image.digest != other.image.digest for one, other in zip(salted, (image, sound), strict=True))
    bad = {
        "4 tokens of the prompt stand for images, which it has for 0": TokenIds(ids, [sound]),
        "5 tokens of the prompt stand for sounds, which it has for 0": TokenIds(ids, [image]),
        "stand in it in their order": TokenIds(ids, [sound, image]),
        "of a size": TokenIds(ids, [image, sound._replace(start=4)]),
    }
    for said, given in bad.items():
        with pytest.raises(UsageError, match=said):
            checked_images(seeing, given, tuple(given), None)
    for senses in (Senses(VISION), Senses(hearing=HEARING)):
        with pytest.raises(UsageError, match="in their order"):
            checked_images(Seeing(senses, None, None, 1), ids, tuple(ids), None)


def test_parts_go_to_their_senses_and_others_are_refused() -> None:
    parts: list[ImagePart] = []
    talk = [message("look", png(5, 5)), {"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "x"}}]}]
    assert kinds_of(BOTH) == [IMAGES, SOUNDS]
    assert (kinds_of(None), kinds_of(Senses(VISION)), kinds_of(Senses(hearing=HEARING))) == ([], [IMAGES], [SOUNDS])
    shaped = template_messages(talk, ChatTemplate(KNOWS), parts, kinds_of(BOTH))
    assert [part.kind for part in parts] == [IMAGES, SOUNDS]
    assert [part["type"] for each in shaped for part in each["content"]] == ["text", "image", "audio"]
    assert isinstance(read_parts(parts[:1], BOTH)[0], Picture)
    with pytest.raises(UnsupportedError, match=r"^this model hears no audio \(messages\[1\].content\[0\] is of"):
        template_messages(talk, ChatTemplate(KNOWS), [], kinds_of(Senses(VISION)))
    with pytest.raises(UnsupportedError, match=r"^this model reads no images \(messages\[0\].content\[1\] is of"):
        template_messages(talk, ChatTemplate(KNOWS), [], kinds_of(Senses(hearing=HEARING)))


class FakeTower:
    """Rows that tell who made them, and of what."""

    def __init__(self, number: int, layers: int, rows: Any) -> None:
        self.number, self.layers, self.rows = number, layers, rows

    def stages(self, image: Any) -> Any:
        for _ in range(self.layers - 1):
            yield None
        return TowerRows(torch.full((self.rows(image), 8), float(self.number)))


def test_each_tower_is_loaded_with_the_first_of_its_kind() -> None:
    loaded: list[str] = []

    def load(name: str, tower: FakeTower) -> Any:
        return lambda: loaded.append(name) or tower

    eyes = Organ(VISION, load("eyes", FakeTower(1, 3, lambda _: 4)), 10)
    ears = Organ(HEARING, load("ears", FakeTower(2, 2, lambda sound: HEARING.tower.num_made(sound.heard))), 20)
    sight = Sight(eyes, ears)
    assert (sight.senses, sight.num_bytes) == (BOTH, 30 + KEPT_BYTES)
    image, sound = VISION.placed(an_image(), 1), HEARING.placed(a_sound(9), 6)

    def share(start: int, count: int) -> Scheduled:
        return Scheduled(0, [0] * count, start, [0], (), images=(image, sound))

    first = sight.rows([share(6, 3)])
    assert first is not None
    assert (first.rows.tolist(), first.values[:, 0].tolist(), loaded) == ([0, 1, 2], [2.0] * 3, ["ears"])
    both = sight.rows([share(0, 5), share(5, 7)])
    assert both is not None
    assert (both.rows.tolist(), both.values[:, 0].tolist()) == ([1, 2, 3, 4, 6, 7, 8, 9, 10], [1.0] * 4 + [2.0] * 5)
    assert (loaded, sight.num_computed) == (["ears", "eyes"], 2)
    assert sight.look(Look(0, a_sound(5, 7), 1)) == 1
    assert sight.look(Look(0, an_image(7), 1)) == 2


def test_a_piece_of_a_sound_takes_its_own_towers_work() -> None:
    image, sound = VISION.placed(an_image(), 1), HEARING.placed(a_sound(90), 6)
    seen, heard = VISION.tower.layer_work(image.image), HEARING.tower.layer_work(sound.image)
    request = Request("it", tuple(range(60)), SamplingParams(), 64, (), 0.0, images=(image, sound))
    sequence = Sequence(1, request, 0, 0, list(range(60)))
    for start, budget, room in ((0, 1 + 2 * seen, (1, 2 * seen)), (6, heard, (0, heard))):
        sequence.num_computed = start
        looking = Looking(BOTH, 1)
        assert looking.room(sequence, 20, budget) == room
        look = looking.take()
        assert look is not None
        assert look[1].num_stages == room[1] // (seen if start == 0 else heard)


def test_a_conversation_with_both_is_answered(tmp_path: Path) -> None:
    """By LLM.chat, and the same where its prompt is made first; what is missing is told."""
    content = [
        {"type": "text", "text": "a"},
        {"type": "input_audio", "input_audio": {"data": in_base64(wav(noise(4000))), "format": "wav"}},
        {"type": "image_url", "image_url": {"url": data_url(png(40, 25))}}, {"type": "text", "text": "b"},
    ]  # fmt: skip
    with LLM(perceiving_model(tmp_path), config=EngineConfig(threads=2, num_blocks=64)) as llm:
        assert llm.vision is not None
        assert llm.hearing is not None
        params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
        ids = llm.encode_chat([{"role": "user", "content": content}])
        sound, image = ids.images
        assert (sound.num_tokens, isinstance(sound.image, Sound), isinstance(image.image, Image)) == (6, True, True)
        words = llm.tokenizer.decode(list(ids), skip_special_tokens=False)
        seen, heard = "<|image|>" * image.num_tokens, "<|audio|>" * 6
        assert words.startswith(f"<bos><|turn>user\na<|audio>{heard}<audio|><|image>{seen}<image|>b<turn|>")
        (one,) = llm.chat([[{"role": "user", "content": content}]], params)
        (other,) = llm.generate([ids], params)
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        with pytest.raises(UsageError, match=r"6 tokens of the prompt stand for sounds, which it has for 0"):
            llm.generate([TokenIds(ids, [image])], params)
