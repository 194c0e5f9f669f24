"""GOT-OCR 2 and PP-Chart2Table: configs as published, prompts and pixels as transformers' processor makes them, answers about
one page and about two, what is refused. Rows, steps: test_towers.py, test_vision.py."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from PIL import Image as pillow
from transformers import AutoModelForImageTextToText
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.got_ocr2.processing_got_ocr2 import GotOcr2Processor

from engines import random_model, save, worker_for
from nanovllm_cli import LLM, EngineConfig, SamplingParams, data_url
from nanovllm_cli.errors import CheckpointError, TemplateError, UnsupportedError
from nanovllm_cli.images.reading import read_image
from nanovllm_cli.images.sizes import most_rows, most_tokens
from nanovllm_cli.models.families import spec_from_hf
from nanovllm_cli.models.registry import hf_family
from nanovllm_cli.models.tower import tower_dtype, tower_of, tower_shapes, work_bytes
from nanovllm_cli.text.builtin_templates import BUILTIN_TEMPLATES
from nanovllm_cli.vision_spec import Image, TokenIds
from test_bad_checkpoints import Doors
from test_bad_checkpoints import doors as doors
from test_image_pieces import read
from test_images import colours, saved
from test_llm import write_byte_tokenizer
from test_mmproj import check_sees_by_no_file, with_merges
from test_quant_engine import difference, logits_of
from test_tower_memory import Held
from test_vision import MODELS

GOT: dict[str, Any] = {
    "architectures": ["GotOcr2ForConditionalGeneration"], "image_seq_length": 576, "image_token_index": 151859,
    "model_type": "got_ocr2",
    "text_config": {
        "hidden_size": 1024, "intermediate_size": 2816, "max_position_embeddings": 32768, "model_type": "qwen2",
        "num_attention_heads": 16, "num_hidden_layers": 24, "num_key_value_heads": 16, "rope_theta": 1e6,
        "tie_word_embeddings": True, "vocab_size": 151860,
    },
    "vision_config": {
        "global_attn_indexes": [2, 5, 8, 11], "hidden_act": "gelu", "hidden_size": 768, "image_size": 1024,
        "layer_norm_eps": 1e-6, "mlp_dim": 3072, "model_type": "got_ocr2_vision", "num_attention_heads": 12, "num_channels": 3,
        "num_hidden_layers": 12, "output_channels": 256, "patch_size": 16, "qkv_bias": True,
        "use_abs_pos": True, "use_rel_pos": True, "window_size": 14,
    },
}  # fmt: skip
"""config.json of stepfun-ai/GOT-OCR-2.0-hf, in so far as it is read."""
IMAGES: dict[str, Any] = {
    "crop_to_patches": False, "do_convert_rgb": True, "do_normalize": True, "do_rescale": True, "do_resize": True,
    "image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711],
    "image_processor_type": "GotOcr2ImageProcessor", "max_patches": 12, "min_patches": 1, "resample": 3,
    "size": {"height": 1024, "width": 1024},
}  # fmt: skip
WORDS = ["<imgpad>", "<|im_start|>", "<|im_end|>", "<img>", "</img>"]


def changed(vision: dict[str, Any], **own: Any) -> dict[str, Any]:
    return GOT | own | {"vision_config": GOT["vision_config"] | vision}


@pytest.mark.parametrize("kind", ["got_ocr2", "pp_chart2table"])
def test_it_is_as_published(kind: str) -> None:
    spec = read(changed({"model_type": f"{kind}_vision"}, model_type=kind), IMAGES)
    tower, sam = spec.tower, spec.tower.sam
    assert sam is not None
    assert (sam.hidden_size, sam.num_layers, sam.num_heads, sam.intermediate_size, sam.window) == (768, 12, 12, 3072, 14)
    assert (sam.full, sam.positions, sam.neck, sam.middle, sam.queries) == ((2, 5, 8, 11), 64 * 64, 256, 512, None)
    assert (tower.num_stages, tower.cell, tower.out_size, tower.hidden_size) == (12, 64, 1024, 1024)
    assert (spec.size.kind, spec.size.longest_side, spec.size.resample) == ("square", 1024, "bicubic")
    assert spec.least_tokens == most_rows(spec) == most_tokens(spec) == 256
    assert read(GOT) == spec == read(GOT, {"crop_to_patches": None})  # what the settings of images leave out
    text = spec_from_hf(GOT, hf_family(GOT))
    assert (text.num_layers, text.attention.num_kv_heads, text.tied_head) == (24, 16, True)


@pytest.mark.parametrize("shape", [(61, 97), (300, 31), (64, 64)])
def test_pixels_are_those_of_transformers(shape: tuple[int, int]) -> None:
    picture = pillow.fromarray(colours(*shape, 3))
    theirs: Any = GotOcr2ImageProcessorPil(size={"height": 64, "width": 64}, do_rescale=False, do_normalize=False)
    (expected,) = theirs(images=[picture])["pixel_values"]
    small = changed({"image_size": 64, "patch_size": 4})
    (found,) = read_image(saved(picture, "PNG"), read(small, {"size": {"height": 64, "width": 64}}), "it").images
    assert found.pixels == expected.astype(np.uint8).transpose(1, 2, 0).tobytes()


def their_prompt(pages: list[Any], **asked: Any) -> str:
    """As transformers' processor writes it, which has no chat template."""
    processor: Any = GotOcr2Processor.__new__(GotOcr2Processor)
    processor.message_start_token, processor.message_end_token = "<|im_start|>", "<|im_end|>"
    processor.img_start_token, processor.img_end_token, processor.image_token = "<img>", "</img>", "<imgpad>"
    processor.system_query = "system\nYou should follow the instructions carefully and explain your answers in detail."
    processor.image_processor = GotOcr2ImageProcessorPil(size={"height": 16, "width": 16})
    given = {"format": False, "images_kwargs": {}, "multi_page": len(pages) > 1} | asked
    images = [pages] if len(pages) > 1 else pages
    _, (text,), *_ = processor.prepare_inputs_layout(images=images, **given)
    _, (rows,) = processor._process_images(images, multi_page=len(pages) > 1, num_image_tokens=16)
    return str(text.replace("<imgpad>", rows))  # of several pages, too, it writes one


@pytest.fixture(scope="module")
def got(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """Tiny and random, with a tokenizer of bytes."""
    folder = tmp_path_factory.mktemp("model")
    config = type(MODELS["got-ocr2"]).from_dict(MODELS["got-ocr2"].to_dict())
    config.text_config.max_position_embeddings, config.image_token_index = 1024, 256
    model = random_model(config, auto=AutoModelForImageTextToText)
    save(model, folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(IMAGES | {"size": {"height": 16, "width": 16}}))
    write_byte_tokenizer(folder, tuple(WORDS), eos_token=WORDS[2], chat_template=BUILTIN_TEMPLATES["got-ocr"])
    return model, folder


def test_what_is_shown_of_it(got: tuple[Any, Path], doors: Doors) -> None:
    """Its layers are SAM's, and its head is one, whatever is in front of its name."""
    config, folder = got[0].config, str(got[1])
    _, out, _ = doors.command("models", "show", folder)
    layers, width = config.vision_config.num_hidden_layers, config.vision_config.hidden_size
    assert f"of 4 x 4 pixels; read by {layers} layers of {width}, " in out
    classes = {each["class"]: each for each in json.loads(doors.command("models", "show", folder, "--json")[1])["tensors"]}
    assert classes["head"]["numbers"] == config.text_config.vocab_size * config.text_config.hidden_size
    assert "other" not in classes


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # what PEFT asks transformers
@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`:UserWarning")
def test_adapters_of_its_text_alone_are_taken(got: tuple[Any, Path], tmp_path: Path) -> None:
    """Against PEFT; one of what images are read by is refused by name."""
    model, folder = got
    ids = [5, 80, 17, 200, 33]
    for name, modules in (("text", r".*language_model.*(q_proj|down_proj)"), ("all", "all-linear")):
        torch.manual_seed(1)
        own = LoraConfig(r=3, target_modules=modules, init_lora_weights=False)
        trained: Any = get_peft_model(copy.deepcopy(model), own)
        trained.save_pretrained(tmp_path / name)
        if name == "text":
            with torch.no_grad():
                wanted = trained(input_ids=torch.tensor([ids])).logits[0]
    assert difference(logits_of(worker_for(folder, lora=[(str(tmp_path / "text"), 1.0)]), [ids]), wanted) < 1e-5
    refusal = r"an adapter of what images are read by \(model\.multi_modal_projector\."
    with pytest.raises(UnsupportedError, match=refusal) as caught:
        worker_for(folder, lora=[(str(tmp_path / "all"), 1.0)])
    assert "merge" in str(caught.value.hint)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("side", [256, 640])
def test_what_it_takes_is_told(side: int, dtype: torch.dtype) -> None:
    """However narrow the rows are that a decoder reads."""
    config = changed({"num_hidden_layers": 2, "global_attn_indexes": [1], "image_size": side, "mlp_dim": 64})
    spec = read(config | {"text_config": {"model_type": "qwen2", "hidden_size": 32}}).tower
    tensors = {name: torch.ones(shape, dtype=tower_dtype(name, dtype)) for name, shape in tower_shapes(spec).items()}
    tower, image = tower_of(spec, tensors, ((0, 0, 0), (1, 1, 1))), Image.of(side, side, bytes(3 * side * side))
    with torch.inference_mode(), Held() as held:
        tower(image)
    assert held.most <= work_bytes(spec, side * side, dtype) <= 1.6 * held.most


CHART = (
    "{% for m in messages %}<|im_start|>{{ m.role }}{% for part in m.content %}{% if part.type == 'image' %}"
    "<img>{{ '<imgpad>' * 16 }}</img>{% else %}{{ part.text }}{% endif %}{% endfor %}<|im_end|>{% endfor %}"
)


@pytest.mark.parametrize("num_images", [1, 2])
def test_a_template_may_write_all_that_stands_for_an_image(num_images: int, got: tuple[Any, Path]) -> None:
    """As PP-Chart2Table's does, whose processor in transformers knows nothing of tokens; a message's own are texts."""
    url: dict[str, Any] = {"type": "image_url", "image_url": {"url": data_url(saved(pillow.new("RGB", (9, 9)), "PNG"))}}
    said = [{"role": "user", "content": [*[url] * num_images, {"type": "text", "text": "Chart <imgpad> to table"}]}]

    def written(template: str) -> TokenIds:
        with LLM(got[1], config=EngineConfig(threads=2, dtype="float32"), chat_template=template) as llm:
            return llm.encode_chat(said)

    prompt = written(CHART)
    for other in (CHART.replace("* 16", "* 15"), CHART.replace("'<imgpad>' * 16", "'<imgpad> ' * 16")):
        with pytest.raises(TemplateError, match=r"writes \d+ places \(<imgpad>\)"):
            written(other)
    image = [259, *[256] * 16, 260]
    assert list(prompt) == [257, *b"user", *image * num_images, *b"Chart <imgpad> to table", 258]
    assert [placed.num_tokens for placed in prompt.images] == [16] * num_images


def ids_of(text: str) -> list[int]:
    for place, word in enumerate(WORDS):
        text = text.replace(word, chr(0xE000 + place))
    return [256 + ord(each) - 0xE000 if each >= "\ue000" else ord(each) for each in text]


@pytest.mark.parametrize(("num_pages", "words", "asked"), [
    (1, "", {}), (2, "", {}), (1, " OCR with format: ", {"format": True}), (1, "[red]  OCR: ", {"color": "red"}),
])  # fmt: skip
def test_answers_about_pages_are_transformers(num_pages: int, words: str, asked: dict[str, Any], got: tuple[Any, Path]) -> None:
    model, folder = got
    pages = [pillow.fromarray(colours(*sides, 3)) for sides in ((40, 90), (33, 17))[:num_pages]]
    urls = [{"type": "image_url", "image_url": {"url": data_url(saved(page, "PNG"))}} for page in pages]
    said = [{"role": "user", "content": [*urls, *([{"type": "text", "text": words}] if words else [])]}]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with LLM(folder, config=EngineConfig(threads=2, dtype="float32", max_num_batched_tokens=40)) as llm:
        prompt = llm.encode_chat(said)
        (output,) = llm.chat(said, params)
    ids = ids_of(their_prompt(pages, **asked))
    assert list(prompt) == ids
    assert ids.count(256) == 16 * num_pages
    seen = GotOcr2ImageProcessorPil(size={"height": 16, "width": 16})(images=pages, return_tensors="pt")["pixel_values"]
    answer = model.generate(
        torch.tensor([ids]), pixel_values=seen, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    assert list(output.outputs[0].token_ids) == answer[0, len(ids) :].tolist()


def test_a_file_is_made_of_what_writes_alone(got: tuple[Any, Path], tmp_path: Path) -> None:
    folder = with_merges(save(got[0], tmp_path), WORDS)
    check_sees_by_no_file(folder)
    spec = read(json.loads((folder / "config.json").read_text()))
    for sides, fits in (((16, 16), True), ((16, 32), False)):
        image = Image.of(*sides, bytes(3 * sides[0] * sides[1]))
        assert spec.fits([spec.placed(image, 2)], 99) is fits


@pytest.mark.parametrize(("config", "images", "error", "words"), [
    (changed({"use_rel_pos": False}), {}, UnsupportedError, "use_rel_pos 'False'"),
    (changed({"use_abs_pos": False}), {}, UnsupportedError, "use_abs_pos 'False'"),
    (changed({"qkv_bias": False}), {}, UnsupportedError, "qkv_bias 'False'"),
    (changed({"hidden_act": "relu"}), {}, UnsupportedError, "hidden_act 'relu'"),
    (changed({"num_channels": 1}), {}, UnsupportedError, "other than three colours"),
    (changed({"model_type": "sam"}), {}, UnsupportedError, "a tower of the kind 'sam'"),
    (changed({"image_size": [1024, 512]}), {}, UnsupportedError, "'image_size' other than of a square"),
    (GOT, {"crop_to_patches": True}, UnsupportedError, "crop_to_patches true"),
    (GOT, {"do_resize": False}, UnsupportedError, "do_resize false"),
    (GOT, {"resample": 0}, UnsupportedError, "resample 0"),
    (GOT | {"text_config": {"model_type": "mamba", "hidden_size": 8}}, {}, UnsupportedError, "unknown architecture 'mamba'"),
    (changed({"image_size": 1000}), {}, CheckpointError, "1000 x 1000 pixels don't divide into tokens of 4 x 4 patches of 16"),
    (changed({"image_size": 1 << 20}), {}, CheckpointError, "don't divide into"),
    (changed({"num_attention_heads": 7}), {}, CheckpointError, "7 heads can't share 768"),
    (changed({"num_hidden_layers": 1 << 20}), {}, CheckpointError, "asks for 1048576 layers"),
    (changed({"global_attn_indexes": "all"}), {}, CheckpointError, "'global_attn_indexes' must be a list"),
    (changed({"window_size": 0}), {}, CheckpointError, "'window_size' must be a whole number"),
    (GOT, {"size": {"height": 384, "width": 384}}, CheckpointError, r"images of 1024 x 1024 pixels, not \[384\]"),
    (GOT, {"size": {"shortest_edge": 384}}, CheckpointError, r"images of 1024 x 1024 pixels, not \[384\]"),
])  # fmt: skip
def test_what_is_refused(config: dict[str, Any], images: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        read(config, images)
