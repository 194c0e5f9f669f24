"""ERNIE 4.5 VL: configs as transformers and Baidu write them, sizes, prompts and answers as transformers has them, experts,
what is refused. Its tower's rows: `test_towers.py`; bits in steps and batches: `test_vision.py`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image as pillow
from transformers import AutoModelForImageTextToText, Ernie4_5_VLMoeConfig, Ernie4_5_VLMoeProcessor
from transformers.models.ernie4_5_vl_moe import image_processing_pil_ernie4_5_vl_moe as theirs

from engines import SMALL, engine_for, greedy, logprobs_of, random_model, run, save, worker_for
from nanovllm_cli import LLM, EngineConfig, SamplingParams, data_url
from nanovllm_cli.engine.cuda_platform import CudaPlatform
from nanovllm_cli.engine.worker import Worker
from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.images.reading import read_image
from nanovllm_cli.images.sizes import fitted
from nanovllm_cli.mlp_spec import MoESpec
from nanovllm_cli.models.config_reader import ConfigReader
from nanovllm_cli.models.families import spec_from_hf
from nanovllm_cli.models.registry import hf_family
from nanovllm_cli.models.towers_ernie import ernie4_5
from nanovllm_cli.planning.facts import facts_of
from nanovllm_cli.vision_spec import Image, TokenIds, VisionSpec
from nanovllm_cli.weights import convert
from nanovllm_cli.weights.checkpoint import open_checkpoint
from quantizing import quantize
from test_images import colours, saved
from test_llm import write_byte_tokenizer

ARCHITECTURE = {"architectures": ["Ernie4_5_VLMoeForConditionalGeneration"]}
PUBLISHED: dict[str, Any] = ARCHITECTURE | {
    "model_type": "ernie4_5_moe_vl", "hidden_size": 2560, "intermediate_size": 12288, "num_hidden_layers": 28,
    "num_attention_heads": 20, "num_key_value_heads": 4, "vocab_size": 103424, "rms_norm_eps": 1e-5, "rope_theta": 500000,
    "rope_3d": True, "freq_allocation": 20, "max_position_embeddings": 131072, "tie_word_embeddings": True, "use_bias": False,
    "moe_num_experts": [64, 64], "moe_intermediate_size": [1536, 512], "moe_layer_start_index": [1, 1],
    "moe_layer_end_index": [29, 28], "moe_layer_interval": 1, "moe_k": 6, "moe_num_shared_experts": 2, "im_patch_id": 100295,
    "spatial_conv_size": 2, "temporal_conv_size": 2, "use_temporal_conv": True,
    "vision_config": {"depth": 32, "embed_dim": 1280, "hidden_size": 1280, "hidden_act": "quick_gelu", "mlp_ratio": 4,
                      "num_heads": 16, "in_channels": 3, "patch_size": 14, "spatial_merge_size": 2,
                      "model_type": "DFNRope_vision_transformer"},
}  # fmt: skip
"""A config by the keys of those that Baidu publishes."""
WORDS = ["<|IMAGE_START|>", "<|IMAGE_PLACEHOLDER|>", "<|IMAGE_END|>", "<|VIDEO_START|>", "<|VIDEO_PLACEHOLDER|>", "<|VIDEO_END|>",
         "<eos>"]  # fmt: skip
FIRST = 256
START, TOKEN, END = range(FIRST, FIRST + 3)
IMAGES: dict[str, Any] = {"patch_size": 4, "merge_size": 2, "size": {"shortest_edge": 64, "longest_edge": 1 << 12}}
TEMPLATE = ("{% for m in messages %}{% for part in m.content %}{{ '<|IMAGE_START|>MARKER<|IMAGE_END|>' if part.type == 'image' "
            "else part.text }}{% endfor %}{% endfor %}: ")  # fmt: skip
MARKERS = "<|IMAGE_PLACEHOLDER|>", "<|image@placeholder|>"


def read(config: dict[str, Any], images: dict[str, Any] | None = None) -> VisionSpec:
    return ernie4_5(ConfigReader(config, "config.json"), ConfigReader(images or {}, "images"))


def spec_of(**own: Any) -> Any:
    config = PUBLISHED | own
    return spec_from_hf(config, hf_family(config))


def test_both_forms_of_a_config_are_the_same_model() -> None:
    nested = json.loads(Ernie4_5_VLMoeConfig(pad_token_id=0).to_json_string()) | ARCHITECTURE
    ours, theirs = read(PUBLISHED), read(nested)
    assert (ours.tower, ours.size, ours.mean) == (theirs.tower, theirs.size, theirs.mean)
    assert (ours.tokens.marker, theirs.tokens.marker) == (MARKERS[1], MARKERS[0])
    made = [spec_from_hf(config, hf_family(config)) for config in (PUBLISHED, nested)]
    assert made[0].blocks[1:] == made[1].blocks[1:]
    mixture, (rope,) = made[0].blocks[1].mlp, made[0].ropes
    assert isinstance(mixture, MoESpec)
    assert mixture.seen is not None
    sizes = mixture.num_experts, mixture.expert.intermediate_size, mixture.seen.expert.intermediate_size, mixture.seen.shared
    assert sizes == (64, 1536, 512, None)
    assert mixture.seen_ids == (100295, 101304, 101305, 101306, 101307, 103367)
    assert rope.axes == (1, 2) * 22 + (0,) * 20
    assert spec_of(moe_layer_end_index=[-1, -1]).blocks == made[0].blocks
    kinds = ["dense", *["sparse"] * 27]
    assert spec_of(mlp_layer_types=kinds, im_patch_id=9).blocks[1].mlp.seen_ids[0] == 9
    numbers = 27 * (64 * 3 * 2560 * (1536 + 512) + 3 * 2560 * 3072 + 2 * 64 * 2561) + 3 * 2560 * 12288  # each expert's matrices
    assert sum(block.mlp.num_weights(2560) for block in made[0].blocks if block.mlp is not None) == numbers


@given(st.integers(1, 6000), st.integers(1, 6000))
@settings(max_examples=150, deadline=None)
def test_sizes_are_those_of_transformers(height: int, width: int) -> None:
    if max(height, width) / min(height, width) <= 200:
        expected = theirs.smart_resize(height, width, 28, 56 * 56, 28 * 28 * 6177)
        assert fitted(read(PUBLISHED).size, height, width).whole == expected


@pytest.mark.parametrize("shape", [(7, 8), (20, 90), (80, 31), (33, 34), (8, 8), (150, 140)])
def test_pixels_are_those_of_transformers(shape: tuple[int, int]) -> None:
    picture = pillow.fromarray(colours(*shape, 3))
    processor = an_image_processor()
    seen = processor(images=[picture], return_tensors="pt")
    spec = read(json.loads(small().to_json_string()) | ARCHITECTURE, IMAGES)
    (found,) = read_image(saved(picture, "PNG"), spec, "it").images
    assert [[1, found.height // 4, found.width // 4]] == seen["image_grid_thw"].tolist()
    mean, std = (torch.tensor(each).view(3, 1) for each in (spec.mean, spec.std))
    values = (seen["pixel_values"].view(-1, 3, 16) * std + mean) * 255
    ours = torch.tensor(list(found.pixels)).view(found.height // 8, 2, 4, found.width // 8, 2, 4, 3)
    assert (ours.permute(0, 3, 1, 4, 6, 2, 5).reshape(values.shape) - values).abs().max() < 1e-3
    text = a_processor(processor).replace_image_token(seen, 0)
    assert text == MARKERS[0] * spec.placed(found, 0).num_tokens


def small() -> Ernie4_5_VLMoeConfig:
    return Ernie4_5_VLMoeConfig(
        text_config={key: value for key, value in SMALL.items() if key not in ("head_dim", "pad_token_id")} | {
            "vocab_size": FIRST + len(WORDS), "num_attention_heads": 3, "num_key_value_heads": 1, "moe_num_experts": 5,
            "moe_k": 2, "moe_num_shared_experts": 1, "moe_intermediate_size": [36, 20], "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [3, 3, 2]},
        },
        vision_config={"depth": 2, "num_heads": 2, "patch_size": 4, "hidden_size": 32, "intermediate_size": 128},
        image_start_token_id=START, image_token_id=TOKEN, image_end_token_id=END, video_start_token_id=FIRST + 3,
        video_token_id=FIRST + 4, video_end_token_id=FIRST + 5,
    )  # fmt: skip


def an_image_processor() -> Any:
    return theirs.Ernie4_5_VLMoeImageProcessorPil(**IMAGES)


def a_processor(images: Any) -> Any:
    processor: Any = Ernie4_5_VLMoeProcessor.__new__(Ernie4_5_VLMoeProcessor)
    processor.image_processor, processor.image_token = images, WORDS[1]
    places = [f"{kind}{place}" for kind in ("image", "video") for place in ("_start_token_id", "_token_id", "_end_token_id")]
    for i, name in enumerate(places):
        setattr(processor, name, FIRST + i)
    return processor


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """Tiny and random, with a tokenizer of bytes."""
    made = random_model(small(), auto=AutoModelForImageTextToText)
    folder = save(made, tmp_path_factory.mktemp("ernie"))
    (folder / "preprocessor_config.json").write_text(json.dumps(IMAGES))
    write_byte_tokenizer(folder, tuple(WORDS), eos_token=WORDS[-1], chat_template=TEMPLATE.replace("MARKER", MARKERS[0]))
    return made, folder


def as_published(folder: Path, other: Path) -> Path:
    """The same with a config in one piece, and the template's other marker."""
    shutil.copytree(folder, other)
    write_byte_tokenizer(other, tuple(WORDS), eos_token=WORDS[-1], chat_template=TEMPLATE.replace("MARKER", MARKERS[1]))
    config = json.loads((folder / "config.json").read_text())
    text = config.pop("text_config")
    for section, keys in ((text, ("mlp_layer_types", "rope_parameters")),
                          (config["vision_config"], ("intermediate_size", "rope_parameters"))):  # fmt: skip
        for key in keys:
            del section[key]
    config["vision_config"]["mlp_ratio"] = 4
    own = {"model_type": "ernie4_5_moe_vl", "moe_num_experts": [5, 5], "moe_layer_start_index": [1, 1],
           "moe_layer_end_index": [4, 3], "rope_theta": 1e4, "freq_allocation": 2, "im_patch_id": TOKEN}  # fmt: skip
    (other / "config.json").write_text(json.dumps(text | config | own | {"architectures": ["Ernie4_5_VLMoEForCausalLM"]}))
    return other


@pytest.mark.parametrize("published", [False, True])
def test_an_answer_about_images_is_transformers(published: bool, model: tuple[Any, Path], tmp_path: Path) -> None:
    """Cut anywhere, so that a step has what is in front of an image alone, or behind it. What stands for images is not written:
    transformers would take it for text there, and for an image's in the next prompt."""
    made, folder = model
    folder = as_published(folder, tmp_path / "published") if published else folder
    pictures = [pillow.fromarray(colours(*shape, 3)) for shape in ((24, 40), (16, 8))]
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": data_url(saved(each, "PNG"))}} for each in pictures]
    said = [{"role": "user", "content": [{"type": "text", "text": "Say: "}, *parts, {"type": "text", "text": "What is it?"}]}]
    own = [*range(FIRST, FIRST + 6)]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logit_bias=dict.fromkeys(own, -100.0))
    answers = []
    for most in (512, 1, 3):
        with LLM(folder, config=EngineConfig(threads=2, dtype="float32", max_num_batched_tokens=most)) as llm:
            prompt = llm.encode_chat(said)
            (output,) = llm.chat(said, params)
            answers.append(list(output.outputs[0].token_ids))
    images = an_image_processor()
    processor, seen = a_processor(images), images(images=pictures, return_tensors="pt")
    counts = [processor.replace_image_token(seen, i).count(WORDS[1]) for i in range(2)]
    ids = [*b"Say: ", *(each for count in counts for each in [START, *[TOKEN] * count, END]), *b"What is it?: "]
    assert list(prompt) == ids
    kinds = torch.tensor([[int(each == TOKEN) for each in ids]])
    of_experts = torch.tensor(processor.create_moe_mm_token_type_ids([ids]))
    assert int(of_experts.sum()) == sum(counts) + 4
    answer = made.generate(torch.tensor([ids]), **seen, mm_token_type_ids=kinds, moe_mm_token_type_ids=of_experts,
                           max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0,
                           suppress_tokens=own)  # fmt: skip
    assert answers == [answer[0, len(ids) :].tolist()] * 3


@pytest.mark.parametrize(("own", "error", "words"), [
    ({"moe_num_experts": [64, 32]}, UnsupportedError, "32 experts for images"),
    ({"moe_layer_start_index": [1, 3]}, UnsupportedError, "for texts alone, or for images alone"),
    ({"moe_layer_end_index": [29, 20]}, UnsupportedError, "for texts alone, or for images alone"),
    ({"moe_intermediate_size": [1536, 0]}, CheckpointError, "moe_intermediate_size"),
    ({"im_patch_id": "a"}, CheckpointError, "'im_patch_id'"),
    ({"rope_scaling": {"mrope_section": [20, 24, 20]}}, UnsupportedError, r"sections of \[20, 24, 20\]"),
])  # fmt: skip
def test_texts_that_are_refused(own: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        spec_of(**own)


@pytest.mark.parametrize(("own", "error", "words"), [
    ({"temporal_conv_size": 3}, UnsupportedError, "temporal_conv_size '3'"),
    ({"spatial_conv_size": 4}, UnsupportedError, "spatial_conv_size '4'"),
    ({"use_temporal_conv": False}, UnsupportedError, "use_temporal_conv 'False'"),
    ({"vision_config": {"num_heads": 7}}, CheckpointError, "7 heads can't share 1280 dimensions"),
    ({"vision_config": {"depth": 1 << 20}}, CheckpointError, "layers"),
    ({"vision_config": {"hidden_act": "relu"}}, UnsupportedError, "activation 'relu'"),
])  # fmt: skip
def test_eyes_that_are_refused(own: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        read(PUBLISHED | own)


def test_what_is_not_done_with_one_is_told(model: tuple[Any, Path], tmp_path: Path) -> None:
    with open_checkpoint(model[1]) as checkpoint:
        with pytest.raises(UnsupportedError, match=r"GGUF has no ERNIE 4\.5 VL"):
            convert.plan(checkpoint, "gguf", "f32")
        spec = facts_of(checkpoint).spec
    with pytest.raises(UnsupportedError, match=r"experts for images alone \(ERNIE 4\.5 VL\) on a GPU are not supported yet"):
        CudaPlatform.__new__(CudaPlatform).backend(spec, torch.bfloat16)
    with pytest.raises(UnsupportedError, match="holds several matrices in one tensor"):
        quantize("int8", tmp_path / "q", model[1])
    with pytest.raises(UnsupportedError, match=r"GGUF has no ERNIE 4\.5 VL"):
        quantize("q8_0", tmp_path / "q.gguf", model[1])
    with pytest.raises(UnsupportedError, match="this model reads no videos"), LLM(model[1]) as llm:
        llm.chat([{"role": "user", "content": [{"type": "video_url", "video_url": {"url": "data:image/gif;base64,"}}]}])


def asked(worker: Worker, behind: list[int]) -> tuple[list[int], list[float]]:
    """What is answered to an image, and tokens behind it."""
    assert worker.sight is not None
    vision = worker.sight.senses.vision
    assert vision is not None
    pixels = np.random.default_rng(0).integers(0, 256, (16, 24, 3), np.uint8).tobytes()
    placed = vision.placed(Image.of(16, 24, pixels), 4)
    prompt = TokenIds([1, 2, 3, START, *[TOKEN] * placed.num_tokens, END, *behind], [placed])
    (output,) = run(engine_for(worker), [(prompt, greedy(6, logprobs=0))])
    return list(output.outputs[0].token_ids), logprobs_of(output)


def test_several_processes_and_rounded_weights(model: tuple[Any, Path]) -> None:
    """Two processes say the same; weights of eight bits nearly so."""
    alone = asked(worker_for(model[1], dtype="float32"), [5, 6])
    together = worker_for(model[1], dtype="float32", tensor_parallel_size=2)
    try:
        found = asked(together, [5, 6])
    finally:
        together.close()
    assert found[0] == alone[0]
    assert found[1] == pytest.approx(alone[1], abs=1e-4)
    rounded = asked(worker_for(model[1], dtype="float32", quant="int8"), [5, 6])
    assert rounded[1][0] != alone[1][0]
    assert rounded[1][0] == pytest.approx(alone[1][0], abs=0.2)


def test_a_prompt_whose_last_token_is_an_images(model: tuple[Any, Path]) -> None:
    """Where a step has nothing else, which for a text would be recorded and done again; behind a found prefix as well."""
    worker = worker_for(model[1], dtype="float32")
    whole = asked(worker, [])
    assert worker.sight is not None
    vision = worker.sight.senses.vision
    assert vision is not None
    pixels = np.random.default_rng(0).integers(0, 256, (16, 24, 3), np.uint8).tobytes()
    placed = vision.placed(Image.of(16, 24, pixels), 4)
    prompt = TokenIds([1, 2, 3, START, *[TOKEN] * placed.num_tokens, END], [placed])
    engine = engine_for(worker, max_num_batched_tokens=1)
    for request in ([*range(20, 30)], prompt, prompt, [7, 8, END], prompt):
        (output,) = run(engine, [(request, greedy(6, logprobs=0))])
        if request is prompt:
            assert (list(output.outputs[0].token_ids), logprobs_of(output)) == whole
