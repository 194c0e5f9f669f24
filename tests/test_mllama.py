"""Llama 3.2 that sees against transformers, by a tiny random model whose gates are open: pixels, the tower, which images a token
sees, and what is written; and that no bit of it depends on steps, neighbours, or what was found again.

transformers lets a token that sees no image attend to all of them all the same, and leaves out only what its MLP makes of that.
Meta's code and vLLM's leave out both, and so a text is what it is whatever comes behind it: as ours does. Where a prompt begins
with an image nobody is such a token, and transformers is compared with as it is; elsewhere a hook leaves out the rest.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from PIL import Image as pillow
from safetensors.torch import load_file, save_file

from engines import (
    SMALL,
    check_that_no_bit_changes,
    engine_for,
    greedy,
    logprobs_of,
    random_model,
    run,
    save,
    worker_for,
)
from nanovllm_cli import LLM, EngineConfig, SamplingParams, data_url
from nanovllm_cli.config import LoraModule
from nanovllm_cli.engine.checked_images import Seeing, checked_images
from nanovllm_cli.engine.worker import Worker
from nanovllm_cli.errors import CheckpointError, NanovllmError, UnsupportedError, UsageError
from nanovllm_cli.images.reading import read_image
from nanovllm_cli.images.sizes import MAX_ASPECT, fitted, most_rows, most_tokens
from nanovllm_cli.leading import lead_in, led
from nanovllm_cli.models.config_reader import ConfigReader
from nanovllm_cli.models.families import spec_from_hf
from nanovllm_cli.models.registry import hf_family
from nanovllm_cli.models.tower import Tower, tower_dtype, tower_of, work_bytes
from nanovllm_cli.models.tower_attention import TorchAttention, Windows, attention
from nanovllm_cli.models.tower_shapes import tower_shapes
from nanovllm_cli.models.towers import tower_family
from nanovllm_cli.tiles_spec import TilesSpec
from nanovllm_cli.vision_spec import Image, PlacedImage, TokenIds, VisionSpec
from nanovllm_cli.weights.checkpoint import open_checkpoint
from nanovllm_cli.weights.vision import load_tower
from test_bad_checkpoints import Doors
from test_bad_checkpoints import doors as doors
from test_images import colours, saved
from test_llm import write_byte_tokenizer
from test_tower_memory import Held

pytest.importorskip("transformers")
WORDS = ["<|end|>", "<|begin|>", "<|image|>"]
END, BEGIN, IMAGE = range(256, 259)
SIDE, TILES = 16, 4
ROWS = (SIDE // 4) ** 2 + 1
"""Of a tile."""
GRIDS = [(1, 1), (1, 2), (1, 3), (1, 4), (2, 1), (2, 2), (3, 1), (4, 1)]
TEMPLATE = """{{ bos_token }}{% for message in messages %}{{ message.role }}:{% if message.content is string %}\
{{ message.content }}{% else %}{% for part in message.content %}{% if part.type == 'image' %}<|image|>{% else %}{{ part.text }}\
{% endif %}{% endfor %}{% endif %}<|end|>
{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"""
TEXT: dict[str, Any] = {
    "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64, "num_hidden_layers": 5,
    "cross_attention_layers": [1, 4], "vocab_size": IMAGE, "max_position_embeddings": 2048, "pad_token_id": 0,
    "bos_token_id": BEGIN, "eos_token_id": END, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}  # fmt: skip
VISION: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4, "num_global_layers": 2, "attention_heads": 2,
    "image_size": SIDE, "patch_size": 4, "intermediate_layers_indices": [0, 2], "vision_output_dim": 48,
}  # fmt: skip
AS_PUBLISHED: dict[str, Any] = {
    "architectures": ["MllamaForConditionalGeneration"], "model_type": "mllama", "image_token_index": 128256,
    "text_config": {
        "model_type": "mllama_text_model", "cross_attention_layers": [3, 8, 13, 18, 23, 28, 33, 38], "hidden_act": "silu",
        "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 131072, "num_attention_heads": 32,
        "num_hidden_layers": 40, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "vocab_size": 128256,
        "rope_scaling": {"factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "rope_type": "llama3",
                         "original_max_position_embeddings": 8192},
        "tie_word_embeddings": False,
    },
    "vision_config": {
        "model_type": "mllama_vision_model", "attention_heads": 16, "hidden_act": "gelu", "hidden_size": 1280, "image_size": 560,
        "intermediate_layers_indices": [3, 7, 15, 23, 30], "intermediate_size": 5120, "max_num_tiles": 4, "norm_eps": 1e-5,
        "num_channels": 3, "num_global_layers": 8, "num_hidden_layers": 32, "patch_size": 14, "vision_output_dim": 7680,
        "supported_aspect_ratios": [list(grid) for grid in GRIDS],
    },
}  # fmt: skip
IMAGES: dict[str, Any] = {
    "do_convert_rgb": True, "do_normalize": True, "do_pad": True, "do_rescale": True, "do_resize": True, "max_image_tiles": 4,
    "image_mean": [0.5, 0.4, 0.3], "image_std": [0.25, 0.5, 0.75], "resample": 2, "rescale_factor": 1 / 255,
    "size": {"height": SIDE, "width": SIDE},
}  # fmt: skip


Requests = list[tuple[list[int], SamplingParams]]


def mllama() -> Any:
    from transformers import AutoModelForImageTextToText, MllamaConfig

    rest = {key: value for key, value in SMALL.items() if key not in ("head_dim", "tie_word_embeddings")}
    model = random_model(
        MllamaConfig(text_config=rest | TEXT, vision_config=VISION, image_token_index=IMAGE), auto=AutoModelForImageTextToText
    )
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "gate" in name and parameter.numel() == 1:
            parameter.data = 0.3 + 0.5 * torch.rand(1, generator=generator)
    return model


class Made:
    """A tiny model: transformers', and its folder."""

    def __init__(self, folder: Path) -> None:
        self.model, self.folder = mllama(), folder
        save(self.model, folder)
        write_byte_tokenizer(folder, tuple(WORDS), eos_token=WORDS[0], bos_token=WORDS[1], chat_template=TEMPLATE)
        (folder / "preprocessor_config.json").write_text(json.dumps(IMAGES))
        config = json.loads((folder / "config.json").read_text())
        self.vision: VisionSpec = read(config, IMAGES)

    def prompt(self, ids: list[int], images: list[Image]) -> TokenIds:
        placed = led([self.vision.placed(image, 0) for image in images], ids, IMAGE)
        return TokenIds([*[IMAGE] * (placed[-1].end if placed else 0), *ids], placed)

    def logprobs(self, ids: list[int], images: list[Image], *, as_it_is: bool = False) -> torch.Tensor:
        """Behind each token of a text, by transformers."""
        from transformers.models.mllama.modeling_mllama import MllamaTextCrossAttention
        from transformers.models.mllama.processing_mllama import (
            convert_sparse_cross_attention_mask_to_dense,
            get_cross_attention_token_mask,
        )

        inputs: dict[str, Any] = {}
        hooks = []
        if images:
            tiles = [image.height * image.width // SIDE**2 for image in images]
            ranges = get_cross_attention_token_mask(ids, IMAGE)
            seen = convert_sparse_cross_attention_mask_to_dense([ranges], [tiles], TILES, len(ids))
            inputs = {
                "pixel_values": torch.stack([self.pixels(image) for image in images])[None],
                "aspect_ratio_ids": torch.tensor([[1 + GRIDS.index(grid_of(image)) for image in images]]),
                "aspect_ratio_mask": torch.tensor([[[int(i < count) for i in range(TILES)] for count in tiles]]),
                "cross_attention_mask": torch.tensor(seen),
            }
            sees = torch.tensor(seen.any(axis=(2, 3)))[0, :, None]
            if not as_it_is:
                hooks = [part.register_forward_hook(lambda m, a, found: (found[0] * sees, *found[1:]))
                         for part in self.model.modules() if isinstance(part, MllamaTextCrossAttention)]  # fmt: skip
        try:
            with torch.inference_mode():
                found: torch.Tensor = self.model(input_ids=torch.tensor([ids]), **inputs).logits[0].log_softmax(-1)
        finally:
            for hook in hooks:
                hook.remove()
        return found

    def pixels(self, image: Image) -> torch.Tensor:
        """[tiles, 3, side, side], zeros behind those that there are."""
        lines, columns = grid_of(image)
        values = np.frombuffer(image.pixels, np.uint8).reshape(lines, SIDE, columns, SIDE, 3).transpose(0, 2, 4, 1, 3)
        mean, std = (np.array(IMAGES[f"image_{key}"])[:, None, None] for key in ("mean", "std"))
        there = torch.tensor((values.reshape(-1, 3, SIDE, SIDE) / 255 - mean) / std, dtype=torch.float32)
        return torch.cat([there, torch.zeros(TILES - len(there), 3, SIDE, SIDE)])

    def check(self, prompt: TokenIds, output: Any, **how: bool) -> None:
        """That a greedy answer is transformers', and as likely."""
        ids, images = list(prompt)[prompt.images[-1].end if prompt.images else 0 :], [each.image for each in prompt.images]
        answer = output.outputs[0]
        expected = self.logprobs([*ids, *answer.token_ids], images, **how)[len(ids) - 1 : -1]  # type: ignore[arg-type]
        assert list(answer.token_ids) == expected.argmax(-1).tolist()
        torch.testing.assert_close(torch.tensor(logprobs_of(output)), expected.max(-1).values, rtol=0, atol=1e-4)


def read(config: dict[str, Any], images: dict[str, Any]) -> VisionSpec:
    family = tower_family(config)
    assert family is not None
    return family.read(ConfigReader(config, "config.json"), ConfigReader(images, "preprocessor_config.json"))


def grid_of(image: Image) -> tuple[int, int]:
    return image.height // SIDE, image.width // SIDE


def an_image(lines: int, columns: int, seed: int = 0) -> Image:
    numbers = np.random.default_rng((lines, columns, seed))
    return Image.of(lines * SIDE, columns * SIDE, numbers.bytes(3 * lines * columns * SIDE**2))


@pytest.fixture(autouse=True)
def no_step_fails(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """An engine computes the halves of one that does, and nobody would see it."""
    yield
    assert not [each.message for each in caplog.get_records("call") if each.name.endswith("stepper")]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(tmp_path_factory.mktemp("mllama"))


@pytest.fixture(scope="module")
def worker(made: Made) -> Worker:
    return worker_for(made.folder, dtype="float32", num_blocks=128)


ONE, WIDE, SQUARE, TALL = an_image(1, 1), an_image(1, 2), an_image(2, 2), an_image(3, 1)
ASKED: list[tuple[list[int], list[Image]]] = [
    ([5, 6, 7], []), ([3, 4, IMAGE, 5, 6, 7], [ONE]), ([3, 4, IMAGE, 5, 6, 7], [TALL]),
    ([3, *range(5, 60), IMAGE], [WIDE]), ([3, IMAGE, 4, IMAGE, IMAGE, 5, 6, IMAGE], [ONE, SQUARE, WIDE, TALL]), ([9] * 40, []),
]  # fmt: skip


# ---- what it is made of ----


def test_it_is_as_published() -> None:
    """Numbers of parameters are those that the hub counts in the publisher's files."""
    for own, count in (
        ({}, 10_670_220_835),
        ({"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_hidden_layers": 100,
          "cross_attention_layers": list(range(3, 100, 5))}, 88_593_355_323),
    ):  # fmt: skip
        config = AS_PUBLISHED | {"text_config": AS_PUBLISHED["text_config"] | own}
        model, vision = spec_from_hf(config, hf_family(config)), read(config, {"max_image_tiles": 4})
        looks = {i: block.looks.keeper for i, block in enumerate(model.blocks) if block.looks is not None}
        assert (model.num_drawn, model.vocab_size, model.max_position) == (128256, 128264, 131072)
        assert list(looks) == config["text_config"]["cross_attention_layers"]
        assert all(layer - 1 == keeper for layer, keeper in looks.items())
        text = sum(block.num_weights(model.hidden_size) for block in model.blocks) + model.hidden_size * (128264 + 128256)
        norms = (2 * len(model.blocks) + 1) * model.hidden_size + len(looks) * (2 * 128 + 2)
        assert text + norms + sum(map(math.prod, tower_shapes(vision.tower).values())) == count
    assert (vision.tower.num_layers, vision.tower.num_stages, vision.least_tokens) == (40, 40, 1601)
    assert (vision.size.tile, vision.size.resample, most_rows(vision), most_tokens(vision)) == (560, "bilinear", 6404, 6404)
    assert [vision.limited(most).size.most_tiles for most in (1, 1601, 3201, 3202, 6403, 6404)] == [1, 1, 1, 2, 3, 4]
    assert (vision.limited(3202).tower, most_tokens(vision.limited(3202))) == (vision.tower, 3202)
    usual = EngineConfig().image_max_tokens
    assert vision.limited(vision.asked(usual, usual)) == vision, "its tokens are no part of a text"
    assert vision.limited(vision.asked(usual - 1, usual)).size.most_tiles == 2
    less = {key: value for key, value in AS_PUBLISHED["text_config"].items() if key != "cross_attention_layers"}
    model = spec_from_hf(AS_PUBLISHED | {"text_config": less}, hf_family(AS_PUBLISHED))
    assert [i for i, block in enumerate(model.blocks) if block.looks] == AS_PUBLISHED["text_config"]["cross_attention_layers"]


def test_a_key_that_is_left_out_changes_nothing() -> None:
    """Of a tower's config that has transformers' defaults."""
    from transformers import MllamaConfig

    config = MllamaConfig().to_dict() | {"architectures": AS_PUBLISHED["architectures"]}
    expected = read(config, {"size": {"height": 448, "width": 448}})
    assert (expected.size.tile, expected.tower.hidden_size, expected.tower.positions) == (448, 1280, 1024)
    for key in config["vision_config"]:
        less = {name: value for name, value in config["vision_config"].items() if name != key}
        assert read(config | {"vision_config": less}, {}) == expected, key


@given(st.integers(1, 5000), st.integers(1, 5000), st.integers(1, 9))
@example(560, 1120, 4)
@example(1120, 560, 4)
@example(300, 300, 4)
@settings(max_examples=200, deadline=None)
def test_an_image_is_laid_out_as_transformers_does_it(height: int, width: int, most: int) -> None:
    from transformers.models.mllama import image_processing_pil_mllama as theirs

    assume(max(height, width) <= MAX_ASPECT * min(height, width))
    rule = dataclasses.replace(read(AS_PUBLISHED, {}).size, most_tiles=most)
    canvas = theirs.get_optimal_tiled_canvas(height, width, most, 560)
    found = fitted(rule, height, width)
    assert (found.whole, found.pieces) == (tuple(map(int, canvas)), None)
    assert found.first == theirs.get_image_size_fit_to_canvas(height, width, *canvas, 560)


@pytest.mark.parametrize(("height", "width"), [(7, 5), (16, 16), (33, 90), (200, 11), (50, 47), (31, 3)])
def test_pixels_are_those_of_transformers(height: int, width: int, made: Made) -> None:
    from transformers.models.mllama.image_processing_pil_mllama import MllamaImageProcessorPil

    picture = pillow.fromarray(colours(height, width, 3))
    (image,) = read_image(saved(picture, "PNG"), made.vision, "it").images
    found = MllamaImageProcessorPil(**IMAGES)([picture], return_tensors="pt")
    assert GRIDS[int(found["aspect_ratio_ids"]) - 1] == grid_of(image)
    assert int(found["aspect_ratio_mask"].sum()) == math.prod(grid_of(image)) == found["num_tiles"][0][0]
    torch.testing.assert_close(made.pixels(image), found["pixel_values"][0, 0], rtol=0, atol=1e-6)


def test_rows_are_those_of_transformers(made: Made) -> None:
    with open_checkpoint(made.folder) as checkpoint:
        tower = load_tower(checkpoint, made.vision, torch.float32)
    for grid in GRIDS:
        image = an_image(*grid)
        with torch.inference_mode():
            seen = made.model.model.vision_model(
                made.pixels(image)[None, None], torch.tensor([[1 + GRIDS.index(grid)]]),
                torch.tensor([[[int(i < math.prod(grid)) for i in range(TILES)]]]),
            ).last_hidden_state  # fmt: skip
            expected = made.model.model.multi_modal_projector(seen)[0, 0, : math.prod(grid)].flatten(0, 1)
            torch.testing.assert_close(tower(image).rows, expected, rtol=1e-4, atol=1e-4)
    assert not isinstance(tower, Tower)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_an_image_takes_is_told(dtype: torch.dtype) -> None:
    """Not less memory than there is at once, and not much more; and multiplications: there are always as many rows."""
    spec = read(AS_PUBLISHED, {})
    small = {"hidden_size": 160, "intermediate_size": 640, "num_heads": 4, "positions": 64, "out_size": 480, "num_layers": 8}
    tower = dataclasses.replace(spec.tower, **small, tiles=TilesSpec(4, 2, (0, 1, 2, 3, 4)))
    tensors = {name: torch.full(shape, 0.01, dtype=tower_dtype(name, dtype)) for name, shape in tower_shapes(tower).items()}
    sees, image = tower_of(tower, tensors, (spec.mean, spec.std)), Image.of(224, 224, bytes(3 * 224**2))
    with torch.inference_mode(), Held() as held:
        sees(image)
    assert held.most <= work_bytes(tower, 0, dtype) <= 1.5 * held.most
    rows = 4 * 72
    assert tower.layer_work(image) == rows * 160 * (4 * 160 + 2 * 640) + 2 * rows**2 * 160


def test_what_does_not_see_itself_is_alike_elsewhere() -> None:
    """On a device of which attention is torch's, and by a mask."""
    qkv = torch.randn(50, 3 * 2 * 8, generator=torch.Generator().manual_seed(0))
    none = torch.empty(50, 0)
    windows = Windows(((1, 50),), (none, none), 13)
    q, k, v = (each.transpose(0, 1) for each in qkv.view(50, 6, 8).split(2, dim=1))
    mask = torch.ones(50, 50, dtype=torch.bool)
    mask[37:, 37:] = False
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask).transpose(0, 1).flatten(1)
    for attend in (attention(windows, 2, 8, qkv), TorchAttention(windows, 2, 8, 2)):
        torch.testing.assert_close(attend(qkv, None), expected, rtol=1e-5, atol=1e-5)


# ---- which images a token sees ----


@given(st.lists(st.booleans(), min_size=1, max_size=14), st.randoms())
@settings(max_examples=200, deadline=None)
def test_a_token_sees_what_transformers_shows_it(are_images: list[bool], random: Any) -> None:
    """Each of an image's rows stands for itself in this; between images that lie together there is nothing."""
    from transformers.models.mllama.processing_mllama import get_cross_attention_token_mask

    ids = [IMAGE if each else 7 for each in are_images]
    images = [PlacedImage(ONE, 0, 1, random.choice([5, 16, 20, 32]), leads=True) for _ in range(sum(are_images))]
    placed = led(images, ids, IMAGE)
    lead = lead_in(placed)
    assert (lead is None) == (not images)
    rows = {place: i for i, each in enumerate(placed) for place in range(each.start, each.end - each.behind)}
    total = placed[-1].end if placed else 0
    assert total % 16 == 0
    for place in range(len(ids)):
        glances = [each for each in (lead.glances if lead else ()) if each.start <= total + place]
        seen = [rows[at] for at in range(glances[-1].first, glances[-1].first + glances[-1].num_rows)] if glances else []
        assert not glances or glances[-1].first % 16 == 0
        ranges = get_cross_attention_token_mask(ids, IMAGE)
        theirs = [i for i, (start, end) in enumerate(ranges) if start <= place < (len(ids) if end == -1 else end)]
        assert seen == [i for i in theirs for _ in range(placed[i].num_rows)]


@pytest.mark.parametrize(("ids", "images"), [
    ([IMAGE, 5, 6, 7], [SQUARE]), ([IMAGE, IMAGE, 5, 6, 7], [ONE, TALL]), ([IMAGE, 5, *range(9, 40), IMAGE, 8], [WIDE, SQUARE]),
    ([IMAGE, 5, 6, IMAGE, IMAGE], [an_image(1, 4), ONE, WIDE]), ([5, 6, 7], []),
])  # fmt: skip
def test_texts_are_what_transformers_writes(ids: list[int], images: list[Image], made: Made, worker: Worker) -> None:
    prompt = made.prompt(ids, images)
    (output,) = run(engine_for(worker), [(prompt, greedy(12, logprobs=0))])
    made.check(prompt, output, as_it_is=True)
    if images:
        others = [an_image(*grid_of(image), 9) for image in images]
        (other,) = run(engine_for(worker), [(made.prompt(ids, others), greedy(12, logprobs=0))])
        assert logprobs_of(other) != logprobs_of(output), "it matters what is seen"


def test_neither_steps_nor_neighbours_change_a_bit(made: Made, worker: Worker) -> None:
    """Alone, cut anywhere, beside others who see something or nothing, recorded or not, behind a found prefix, and computed again
    after a preemption; and so it is what transformers writes."""
    requests: Requests = [(made.prompt(*asked), greedy(12, logprobs=0)) for asked in ASKED]
    num_blocks = sum(-(-len(prompt) // 16) for prompt, _ in requests) + 2
    alone = check_that_no_bit_changes(worker, requests, num_blocks)
    for (prompt, _), output in zip(requests, alone, strict=True):
        made.check(TokenIds(prompt, getattr(prompt, "images", ())), output)
    assert worker.runner.graphs._graphs, "what all see, or nobody, is recorded"  # type: ignore[attr-defined]
    worker.runner.graphs._recordable = False  # type: ignore[attr-defined]
    try:
        for first, again in zip(alone, run(engine_for(worker, enable_prefix_caching=False), requests), strict=True):
            assert logprobs_of(again) == logprobs_of(first)
    finally:
        worker.runner.graphs._recordable = True  # type: ignore[attr-defined]


def test_what_is_cached_is_of_that_image(made: Made, worker: Worker) -> None:
    sight, engine = worker.sight, engine_for(worker)
    assert sight is not None
    before, image = sight.num_computed, an_image(2, 1, 7)
    lead = made.prompt([IMAGE], [image]).images[0].end
    for ids in ([BEGIN, IMAGE, 5], [BEGIN, IMAGE, 6], [BEGIN, 5, IMAGE]):
        run(engine, [(made.prompt(ids, [image]), greedy(2))])
    assert (sight.num_computed - before, engine.stats().prefix_hit_tokens) == (1, 2 * lead)
    run(engine, [(made.prompt([BEGIN, IMAGE, 5], [an_image(2, 1, 8)]), greedy(2))])
    assert (sight.num_computed - before, engine.stats().prefix_hit_tokens) == (2, 2 * lead)
    run(engine, [(made.prompt([BEGIN, IMAGE, 5, IMAGE], [image, an_image(2, 1, 8)]), greedy(2))])
    assert engine.stats().prefix_hit_tokens == 3 * lead, "in the next turn the first image is found, too"


def test_several_answers_share_an_image(made: Made, worker: Worker) -> None:
    params = SamplingParams(temperature=1.0, seed=3, n=3, max_tokens=12, ignore_eos=True)
    prompt = made.prompt([BEGIN, 5, IMAGE, 7], [SQUARE])
    (output,) = run(engine_for(worker), [(prompt, params)])
    assert len({each.token_ids for each in output.outputs}) > 1
    (first,) = run(engine_for(worker), [(prompt, dataclasses.replace(params, n=1))])
    assert first.outputs[0].token_ids == output.outputs[0].token_ids


@pytest.mark.parametrize("how", [
    {"dtype": "bfloat16"}, {"kv_cache_dtype": "int8"}, {"quant": "int8"}, {"quant": "int4:group=32"},
], ids=str)  # fmt: skip
def test_fewer_bits_are_near(how: dict[str, Any], made: Made) -> None:
    worker = worker_for(made.folder, **{"dtype": "float32", "num_blocks": 32} | how)
    ids = [BEGIN, 5, IMAGE, *range(60, 70)]
    (output,) = run(engine_for(worker), [(made.prompt(ids, [SQUARE]), greedy(1, logprobs=20))])
    top = dict(output.outputs[0].logprobs[0].top)  # type: ignore[index]
    truth = made.logprobs(ids, [SQUARE])[-1]
    assert max(abs(truth[token].item() - logprob) for token, logprob in top.items()) < (1.2 if "int4" in str(how) else 0.3)


def test_guesses_change_no_token(made: Made, worker: Worker) -> None:
    requests: Requests = [(made.prompt(*asked), greedy(24)) for asked in ASKED[:3]]
    plain = run(engine_for(worker), requests)
    guessing = worker_for(made.folder, dtype="float32", num_blocks=64, num_speculative_tokens=3)
    found = run(engine_for(guessing, num_speculative_tokens=3), requests)
    assert [each.outputs[0].token_ids for each in found] == [each.outputs[0].token_ids for each in plain]
    assert sum(each.metrics.num_held_tokens for each in found) > 0


def test_two_processes_write_the_same(made: Made, worker: Worker) -> None:
    requests: Requests = [(made.prompt(*asked), greedy(6, logprobs=0)) for asked in ASKED[1:5]]
    divided = worker_for(made.folder, dtype="float32", num_blocks=64, tensor_parallel_size=2, threads=1)
    try:
        found = run(engine_for(divided), requests)
    finally:
        divided.close()
    for one, other in zip(found, run(engine_for(worker), requests), strict=True):
        assert logprobs_of(one) == pytest.approx(logprobs_of(other), abs=1e-5)


def test_requests_choose_adapters_of_layers_that_look(made: Made, tmp_path: Path) -> None:
    """Beside others who choose none, and what is kept of an image is by the adapter, too."""
    generator = torch.Generator().manual_seed(0)
    sides: dict[str, torch.Tensor] = {}
    merged = {name: tensor.clone() for name, tensor in made.model.state_dict().items()}
    for part in ("cross_attn.q_proj", "cross_attn.k_proj", "cross_attn.v_proj", "mlp.down_proj"):
        name = f"model.language_model.layers.1.{part}"
        rows, width = merged[f"{name}.weight"].shape
        a, b = torch.randn(2, width, generator=generator), 0.3 * torch.randn(rows, 2, generator=generator)
        sides |= {f"base_model.model.{name}.lora_A.weight": a, f"base_model.model.{name}.lora_B.weight": b}
        merged[f"{name}.weight"] += b @ a
    (tmp_path / "own").mkdir()
    save_file(sides, tmp_path / "own" / "adapter_model.safetensors")
    (tmp_path / "own" / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 2}))
    worker = worker_for(made.folder, dtype="float32", num_blocks=64, lora_modules=(LoraModule("own", str(tmp_path / "own")),))
    engine = engine_for(worker, lora_modules=(LoraModule("own", str(tmp_path / "own")),))
    prompt = made.prompt([BEGIN, 5, IMAGE, 7], [WIDE])
    chosen = greedy(8, logprobs=0, lora=(("own", 1.0),))
    found = run(engine, [([5, 6], greedy(8, logprobs=0)), (prompt, greedy(8, logprobs=0)), (prompt, chosen)])
    made.check(TokenIds([5, 6]), found[0])
    made.check(prompt, found[1])
    kept = {name: tensor.clone() for name, tensor in made.model.state_dict().items()}
    made.model.load_state_dict(merged)
    try:
        made.check(prompt, found[2])
    finally:
        made.model.load_state_dict(kept)
    assert logprobs_of(found[2]) != logprobs_of(found[1])


# ---- at the doors ----


def said(*parts: str | bytes, role: str = "user") -> dict[str, Any]:
    """A message of texts and images' files."""
    content = [{"type": "text", "text": part} if isinstance(part, str) else
               {"type": "image_url", "image_url": {"url": data_url(part)}} for part in parts]  # fmt: skip
    return {"role": role, "content": content}


def in_bytes(text: str) -> list[int]:
    for i, word in enumerate(WORDS):
        text = text.replace(word, chr(0xE000 + i))
    return [256 + ord(each) - 0xE000 if ord(each) >= 0xE000 else ord(each) for each in text]


def test_a_chat_of_several_turns_is_what_transformers_writes(made: Made) -> None:
    files = [saved(pillow.fromarray(colours(*sides, 3, i)), "PNG") for i, sides in enumerate([(50, 31), (9, 80), (12, 12)])]
    (one,), (two,), (three,) = (read_image(file, made.vision, "it").images for file in files)
    assert (grid_of(one), grid_of(two), grid_of(three)) == ((2, 2), (1, 4), (1, 1))
    turns = [said("Hello"), said("Hi", role="assistant"), said(files[0], "What?"), said("A", role="assistant"),
             said(files[1], files[2], "And these?")]  # fmt: skip
    texts = ["<|begin|>user:Hello<|end|>\nassistant:", "<|begin|>user:Hello<|end|>\nassistant:Hi<|end|>\nuser:<|image|>What?"]
    texts[1] += "<|end|>\nassistant:"
    texts.append(f"{texts[1]}A<|end|>\nuser:<|image|><|image|>And these?<|end|>\nassistant:")
    asked = [(1, texts[0], []), (3, texts[1], [one]), (5, texts[2], [one, two, three])]
    with LLM(made.folder, config=EngineConfig(threads=2, dtype="float32", max_num_batched_tokens=24)) as llm:
        for count, text, images in asked:
            prompt = llm.encode_chat(turns[:count])
            assert list(prompt) == list(made.prompt(in_bytes(text), images))
            assert prompt.images == made.prompt(in_bytes(text), images).images
            (output,) = llm.chat(turns[:count], greedy(8, logprobs=0))
            made.check(prompt, output)


def test_commands_see(made: Made, doors: Doors, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, sides in (("a", (30, 40)), ("b", (9, 80))):
        (tmp_path / f"{name}.png").write_bytes(saved(pillow.fromarray(colours(*sides, 3)), "PNG"))
    answers = []
    for words in (("--image", "a.png"), ("--image", "b.png"), ("--image", "a.png", "--image", "b.png"), ()):
        code, out, err = doors.command("run", str(made.folder), *words, "What?", "-t", "2", "-n", "8", "--temp", "0", "-q")
        assert code == 0, err
        answers.append(out)
    assert len(set(answers)) == 4
    code, out, err = doors.command("models", "show", str(made.folder))
    assert (code, "68 tokens at most for each" in out) == (0, True), out + err
    code, out, err = doors.command("plan", str(made.folder))
    assert (code, "images are read by a part that takes more" in out) == (0, True), out + err
    code, out, err = doors.command("convert", str(made.folder), "-o", str(tmp_path / "it.gguf"))
    assert (out, "GGUF has no Llama that sees" in err) == ("", True)
    assert not (tmp_path / "it.gguf").exists()
    code, _, err = doors.command("quantize", str(made.folder), "--to", "int8", "--algorithm", "gptq", "-o", str(tmp_path / "8"))
    assert (code != 0, "texts alone pass some layers by" in err) == (True, True), err


def test_a_folder_of_fewer_bits_sees(made: Made, doors: Doors, tmp_path: Path) -> None:
    code, _, err = doors.command("quantize", str(made.folder), "--to", "int8", "-o", str(tmp_path / "8"), "--no-verify")
    assert code == 0, err
    tensors = load_file(tmp_path / "8" / "model.safetensors")
    place = "language_model.model.layers.1.cross_attn"
    assert {tensors[f"{place}.{part}_proj.weight"].dtype for part in "qkvo"} == {torch.int8}
    worker = worker_for(tmp_path / "8", dtype="float32", num_blocks=32)
    ids = [BEGIN, 5, IMAGE, 9]
    (output,) = run(engine_for(worker), [(made.prompt(ids, [TALL]), greedy(1, logprobs=20))])
    truth = made.logprobs(ids, [TALL])[-1]
    for token, logprob in output.outputs[0].logprobs[0].top:  # type: ignore[index]
        assert abs(truth[token].item() - logprob) < 0.3


@pytest.mark.parametrize("form", ["as published", "nested", "MLX's"])
def test_names_are_read_as_published_and_as_saved_since(form: str, made: Made, tmp_path: Path) -> None:
    """Under two beginnings, and as mlx-vlm writes them."""
    tensors = load_file(made.folder / "model.safetensors")
    plain = {name.replace("model.language_model.", "language_model.model.").removeprefix("model."): tensor
             for name, tensor in tensors.items()}  # fmt: skip
    plain = {name.replace("lm_head", "language_model.lm_head") if name == "lm_head.weight" else name: each
             for name, each in plain.items()}  # fmt: skip
    if form == "nested":
        moved = {"language_model.model.": "model.language_model.", "language_model.lm_head": "lm_head",
                 "vision_model.": "model.vision_model.", "multi_modal": "model.multi_modal"}  # fmt: skip
        plain = {next((new + name.removeprefix(old) for old, new in moved.items() if name.startswith(old)), name): each
                 for name, each in plain.items()}  # fmt: skip
    if form == "MLX's":
        plain = {name.replace("vision_model.", "vision_tower."): each for name, each in plain.items()}
        plain["vision_tower.patch_embedding.weight"] = plain["vision_tower.patch_embedding.weight"].movedim(1, -1).contiguous()
    for file in made.folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    save_file(plain, tmp_path / "model.safetensors")
    prompt = made.prompt([BEGIN, IMAGE, 5], [ONE])
    (output,) = run(engine_for(worker_for(tmp_path, dtype="float32", num_blocks=16)), [(prompt, greedy(3, logprobs=0))])
    made.check(prompt, output)


# ---- what is refused ----


def changed(part: str, **own: Any) -> dict[str, Any]:
    return AS_PUBLISHED | {part: {key: each for key, each in (AS_PUBLISHED[part] | own).items() if each is not ...}}


@pytest.mark.parametrize(("config", "images", "words"), [
    (changed("vision_config", hidden_act="relu"), {}, "activation 'relu'"),
    (changed("vision_config", model_type="clip_vision_model"), {}, "a tower of the kind 'clip_vision_model'"),
    (changed("vision_config", num_channels=1), {}, "three colours"),
    (changed("vision_config", supported_aspect_ratios=[[1, 1], [1, 2]]), {}, "supported_aspect_ratios"),
    (changed("vision_config", intermediate_layers_indices=[7, 3, 15, 23, 30]), {}, "not in order"),
    (AS_PUBLISHED, {"do_pad": False}, "do_pad false"),
    (AS_PUBLISHED, {"do_resize": False}, "do_resize false"),
    (AS_PUBLISHED, {"resample": 0}, "resample 0"),
])  # fmt: skip
def test_what_no_tower_here_can_be(config: dict[str, Any], images: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        read(config, images)


@pytest.mark.parametrize(("config", "images", "words"), [
    (changed("vision_config", vision_output_dim=1280), {}, "'vision_output_dim' is 1280, where 6 layers of 1280"),
    (changed("vision_config", image_size=561), {}, "don't divide into patches of 14"),
    (changed("vision_config", attention_heads=7), {}, "7 heads can't share 1280"),
    (changed("vision_config", num_global_layers=1 << 20), {}, "1048576 layers"),
    (changed("vision_config", num_global_layers=-1), {}, "num_global_layers"),
    (changed("vision_config", max_num_tiles=65, supported_aspect_ratios=...), {}, "65 tiles of 560 x 560"),
    (changed("vision_config", max_num_tiles=3, supported_aspect_ratios=...), {"max_image_tiles": 4}, "'max_image_tiles' is 4"),
    (changed("vision_config", intermediate_layers_indices=[3, 32]), {}, "a list of layers, of 32"),
    (changed("vision_config", intermediate_layers_indices=[True]), {}, "a list of layers, of 32"),
    (changed("vision_config", intermediate_layers_indices="all"), {}, "a list of layers, of 32"),
    (AS_PUBLISHED, {"size": {"height": 448, "width": 448}}, "pieces of 560 x 560 pixels, not"),
    (AS_PUBLISHED, {"image_std": [0.5, 0.5, 0.0]}, "image_std"),
])  # fmt: skip
def test_what_contradicts_itself(config: dict[str, Any], images: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        read(config, images)


def test_each_layer_that_looks_has_a_cache_of_its_own() -> None:
    """Another layer's; so up to half of them can."""
    for layers in ([0], [0, 1, 2], [38, 39], [7, 5, 6], list(range(20)), list(range(20, 40)), []):
        config = changed("text_config", cross_attention_layers=layers)
        model = spec_from_hf(config, hf_family(config))
        looks = {i: block.looks.keeper for i, block in enumerate(model.blocks) if block.looks is not None}
        assert sorted(looks) == sorted(layers)
        assert len(set(looks.values()) - set(layers)) == len(layers)
        assert all((block.mixer is None) == (i in looks) for i, block in enumerate(model.blocks))


@pytest.mark.parametrize(("layers", "words"), [
    ([3, 40], "a list of layers, of 40"), ([3, 3], "names a layer twice"), ([-1], "a list of layers"), ("3", "a list of layers"),
    ([3.0], "a list of layers"), (list(range(21)), "21 of 40 layers look at images"), (list(range(40)), "40 of 40 layers"),
])  # fmt: skip
def test_layers_that_can_not_look(layers: Any, words: str) -> None:
    config = changed("text_config", cross_attention_layers=layers)
    with pytest.raises((CheckpointError, UnsupportedError), match=words):
        spec_from_hf(config, hf_family(config))


def test_images_lie_in_front_of_a_prompt(made: Made, worker: Worker) -> None:
    assert worker.sight is not None
    seeing = Seeing(worker.sight.senses, IMAGE, None, 1)
    good = made.prompt([3, IMAGE, 4, IMAGE, IMAGE], [ONE, WIDE, ONE])
    first, second, third = good.images
    assert checked_images(seeing, good, tuple(good), None) == good.images
    salted = checked_images(seeing, good, tuple(good), "somebody")
    assert [each.shown for each in salted] == [each.shown for each in good.images]
    assert {each.image.digest for each in salted}.isdisjoint(each.image.digest for each in good.images)
    square, tall = Image.of(8, 8, bytes(192)), made.vision.placed(an_image(3, 3), 0)
    for prompt, told in (
        (TokenIds([IMAGE, 5]), "1 tokens of the prompt stand for images, which it has for 0"),
        (TokenIds([*good, IMAGE], good.images), "lie in front of it"),
        (TokenIds(list(good)[1:], good.images), "lie in front of it"),
        (TokenIds([5, *list(good)[1:]], good.images), "lie in front of it"),
        (TokenIds(good, (first, third, second)), "lie in front of it"),
        (TokenIds(good, good.images[:2]), "lie in front of it"),
        (TokenIds(good, (first, second, third._replace(shown=None))), "lie in front of it"),
        (TokenIds(good, (first._replace(behind=0), second, third)), "lie in front of it"),
        (TokenIds(good, (first, second._replace(columns=ROWS), third)), "lie in front of it"),
        (made.prompt([IMAGE], [square]), "of a size that the model's vision gives"),
        (TokenIds([*[IMAGE] * 160, IMAGE], led([tall], [IMAGE], IMAGE)), "of a size that the model's vision gives"),
    ):  # fmt: skip
        with pytest.raises(UsageError, match=told):
            checked_images(seeing, prompt, tuple(prompt), None)
    with pytest.raises(UnsupportedError, match="prompt_logprobs"):
        engine_for(worker).add("1", good, greedy(3, prompt_logprobs=1))


def test_an_image_has_no_more_tiles_than_it_may(made: Made) -> None:
    data = saved(pillow.fromarray(colours(60, 60, 3)), "PNG")
    for most, grid in ((4096, (2, 2)), (2 * ROWS, (1, 1)), (ROWS - 1, (1, 1))):
        worker = worker_for(made.folder, dtype="float32", num_blocks=16, image_max_tokens=most)
        assert worker.sight is not None
        vision = worker.sight.senses.vision
        assert vision is not None
        (image,) = read_image(data, vision, "it").images
        assert grid_of(image) == grid
        prompt, seeing = made.prompt([IMAGE], [SQUARE]), Seeing(worker.sight.senses, IMAGE, None, 1)
        if most == 4096:
            assert checked_images(seeing, prompt, tuple(prompt), None) == prompt.images
            continue
        with pytest.raises(UsageError, match="of a size that the model's vision gives"):
            checked_images(seeing, prompt, tuple(prompt), None)


def test_what_the_rest_is_refused_with(made: Made) -> None:
    with pytest.raises(UnsupportedError, match="a draft model beside one whose layers attend"):
        worker_for(made.folder, dtype="float32", draft_model=str(made.folder))


@pytest.mark.parametrize(("name", "how", "words"), [
    ("language_model.layers.1.cross_attn_attn_gate", None, "cross_attn_attn_gate"),
    ("language_model.layers.4.cross_attn.k_norm.weight", None, "cross_attn.k_norm"),
    ("language_model.layers.1.cross_attn.q_proj.weight", lambda each: each[:-1], "cross_attn.q_proj"),
])  # fmt: skip
def test_a_broken_text_model(
    name: str, how: Callable[[torch.Tensor], torch.Tensor] | None, words: str, made: Made, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=words):
        worker_for(broken(made, tmp_path, name, how), dtype="float32", num_blocks=16)


@pytest.mark.parametrize(("name", "how"), [
    ("vision_model.gated_positional_embedding.gate", None), ("vision_model.global_transformer.layers.1.gate_ffn", None),
    ("vision_model.gated_positional_embedding.tile_embedding.weight", lambda each: each[1:]),
    ("multi_modal_projector.weight", lambda each: each[:, 1:]), ("vision_model.class_embedding", lambda each: each[None]),
])  # fmt: skip
def test_with_a_broken_tower_it_reads_texts(
    name: str, how: Callable[[torch.Tensor], torch.Tensor] | None, made: Made, tmp_path: Path
) -> None:
    worker = worker_for(broken(made, tmp_path, name, how), dtype="float32", num_blocks=16)
    assert worker.sight is None
    (output,) = run(engine_for(worker), [([5, 6, 7], greedy(4, logprobs=0))])
    made.check(TokenIds([5, 6, 7]), output)
    with pytest.raises(NanovllmError, match="reads no images"):
        engine_for(worker).add("1", made.prompt([IMAGE], [ONE]), greedy(3))


def broken(made: Made, folder: Path, name: str, how: Callable[[torch.Tensor], torch.Tensor] | None) -> Path:
    tensors = load_file(made.folder / "model.safetensors")
    (there,) = [each for each in tensors if each.endswith(name) or each.replace("model.layers", "layers").endswith(name)]
    tensor = tensors.pop(there)
    if how is not None:
        tensors[there] = how(tensor).contiguous()
    (folder / "config.json").write_bytes((made.folder / "config.json").read_bytes())
    (folder / "preprocessor_config.json").write_text(json.dumps(IMAGES))
    save_file(tensors, folder / "model.safetensors")
    return folder
