"""How fast towers make rows of an image on the CPU: nanovllm and transformers on the same random weights, sides taking turns.

    pip install transformers
    python benchmarks/images.py --output benchmarks/results/images.json      # with llama-cpp-python --llama-cpp, too

Towers as published models have them, of --layers layers (0: all), an image of --height x --width pixels, made as large as the
model has it; each side in a process of its own, the best of three. Reported: the median over rounds of seconds an image, and
ratios. With --llama-cpp, of Qwen3-VL's in bfloat16: the same image and weights through llama.cpp's mtmd, from the files that
`nanovllm convert` makes of the folder.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import said_by, save

BUNDLED = Path(__file__).resolve().parents[1] / "src/nanovllm_cli/assets/tiny"
WORDS = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>")  # behind the bundled model's vocabulary
VOCABULARY = 4096
LLAMA_CPP = "qwen3-vl-4b", "bfloat16"
SHAPES = ("qwen3-vl-4b", "qwen2.5-vl-7b", "gemma-3-4b", "mistral-small-24b")
DTYPES = ("bfloat16", "float32")
REPEATS = 3


def config_of(shape: str, layers: int) -> Any:
    """A decoder of one small layer behind the tower."""
    from transformers import Gemma3Config, Mistral3Config, Qwen2_5_VLConfig, Qwen3VLConfig

    def text(width: int, **more: Any) -> dict[str, Any]:
        small = {"num_hidden_layers": 1, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128,
                 "vocab_size": VOCABULARY + len(WORDS), "bos_token_id": 0, "eos_token_id": 1}  # fmt: skip
        return {"hidden_size": width, "intermediate_size": 1024, **small, **more}

    names = ("vision_start_token_id", "image_token_id", "vision_end_token_id", "video_token_id")
    ids = {name: VOCABULARY + place for place, name in enumerate(names)}
    if shape == "qwen3-vl-4b":
        depth = layers or 24
        deep = [place for place in (5, 11, 17) if place < depth]
        vision = {"depth": depth, "hidden_size": 1024, "intermediate_size": 4096, "num_heads": 16, "out_hidden_size": 2560,
                  "deepstack_visual_indexes": deep}  # fmt: skip
        return Qwen3VLConfig(text_config=text(2560), vision_config=vision, **ids)
    if shape == "qwen2.5-vl-7b":
        vision = {"depth": layers or 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "out_hidden_size": 3584}
        rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}
        return Qwen2_5_VLConfig(text_config=text(3584, rope_parameters=rope), vision_config=vision, **ids)
    if shape == "gemma-3-4b":
        vision = {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": layers or 27, "num_attention_heads": 16,
                  "image_size": 896, "patch_size": 14}  # fmt: skip
        ids = {"image_token_index": VOCABULARY + 1}
        return Gemma3Config(text_config=text(2560), vision_config=vision, mm_tokens_per_image=256, **ids)
    vision = {"model_type": "pixtral", "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": layers or 24,
              "num_attention_heads": 16, "head_dim": 64, "image_size": 1540, "patch_size": 14}  # fmt: skip
    return Mistral3Config(text_config=text(5120), vision_config=vision, image_token_index=VOCABULARY + 1)


def make(shape: str, layers: int, folder: Path) -> None:
    import torch
    from transformers import AutoModelForImageTextToText

    torch.manual_seed(0)
    save_with_tokenizer(AutoModelForImageTextToText.from_config(config_of(shape, layers)).to(torch.bfloat16), folder)


def save_with_tokenizer(model: Any, folder: Path) -> None:
    """The bundled model's, with WORDS behind its vocabulary."""
    model.save_pretrained(folder)
    tokenizer = json.loads((BUNDLED / "tokenizer.json").read_text())
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    for place, word in enumerate(WORDS):
        tokenizer["added_tokens"].append({"id": VOCABULARY + place, "content": word, "special": True, **flags})
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    shutil.copy(BUNDLED / "tokenizer_config.json", folder)


def picture(height: int, width: int, seed: int = 0) -> bytes:
    import io

    import numpy as np
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)).save(file, "PNG")
    return file.getvalue()


def best(run: Callable[[], Any]) -> float:
    run()
    seconds = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - begin)
    return min(seconds)


def measure_ours(folder: Path, dtype: str, args: argparse.Namespace) -> float:
    import torch

    from nanovllm_cli.images.reading import read_image
    from nanovllm_cli.kernels import cpu
    from nanovllm_cli.weights.checkpoint import open_checkpoint
    from nanovllm_cli.weights.vision import load_tower, read_vision

    torch.set_num_threads(args.threads)
    cpu.set_num_threads(args.threads)
    with open_checkpoint(folder) as checkpoint:
        vision = read_vision(checkpoint)
        assert vision is not None
        tower = load_tower(checkpoint, vision, getattr(torch, dtype))
    (image,) = read_image(picture(args.height, args.width), vision, "it").images
    with torch.inference_mode():
        return best(lambda: tower(image))


def measure_transformers(folder: Path, dtype: str, args: argparse.Namespace) -> float:
    import torch
    from transformers import AutoModelForImageTextToText

    from nanovllm_cli.images.reading import read_image
    from nanovllm_cli.weights.checkpoint import open_checkpoint
    from nanovllm_cli.weights.vision import read_vision

    torch.set_num_threads(args.threads)
    with open_checkpoint(folder) as checkpoint:
        vision = read_vision(checkpoint)
        assert vision is not None
    (image,) = read_image(picture(args.height, args.width), vision, "it").images
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=getattr(torch, dtype)).model
    lines, columns = image.height // vision.tower.patch_size, image.width // vision.tower.patch_size
    if model.config.model_type.startswith("qwen"):
        patches = torch.zeros(lines * columns, 3 * 2 * vision.tower.patch_size**2, dtype=getattr(torch, dtype))
        inputs: dict[str, Any] = {"pixel_values": patches, "image_grid_thw": torch.tensor([[1, lines, columns]])}
    else:
        inputs = {"pixel_values": torch.zeros(1, 3, image.height, image.width, dtype=getattr(torch, dtype))}
        if model.config.model_type == "mistral3":
            inputs["image_sizes"] = torch.tensor([[image.height, image.width]])
    with torch.inference_mode():
        return best(lambda: model.get_image_features(**inputs))


def measure_llama_cpp(folder: Path, dtype: str, args: argparse.Namespace) -> float:
    """Encoding alone is timed, as ours is."""
    import ctypes

    import llama_cpp as lib
    from llama_cpp import mtmd_cpp as mtmd

    written = folder / "text.gguf"
    if not written.exists():
        subprocess.run([sys.executable, "-m", "nanovllm_cli", "convert", folder, "--to", "gguf", "-o", written, "-q"], check=True)
    text, mmproj = (str(path).encode() for path in (written, next(folder.glob("mmproj-*.gguf"))))
    quiet = lib.llama_log_callback(lambda level, words, data: None)
    lib.llama_log_set(quiet, None)
    model = lib.llama_model_load_from_file(text, lib.llama_model_default_params())
    settings = mtmd.mtmd_context_params_default()
    settings.n_threads, settings.print_timings, settings.use_gpu = args.threads, False, False
    context = mtmd.mtmd_init_from_file(mmproj, model, settings)
    assert context, "llama.cpp takes these files"
    data = picture(args.height, args.width)
    bytes_of = (ctypes.c_uint8 * len(data)).from_buffer_copy(data)
    bitmap = mtmd.mtmd_helper_bitmap_init_from_buf(context, bytes_of, len(data), False)
    said = mtmd.mtmd_input_text(marker := mtmd.mtmd_default_marker(), len(marker), True, True)
    chunks = mtmd.mtmd_input_chunks_init()
    bitmaps = (mtmd.mtmd_bitmap_p_ctypes * 1)(bitmap)
    assert mtmd.mtmd_tokenize(context, chunks, ctypes.byref(said), bitmaps, 1) == 0
    every = [mtmd.mtmd_input_chunks_get(chunks, i) for i in range(mtmd.mtmd_input_chunks_size(chunks))]
    (image,) = (each for each in every if mtmd.mtmd_input_chunk_get_type(each) == mtmd.MTMD_INPUT_CHUNK_TYPE_IMAGE)
    return best(lambda: mtmd.mtmd_encode_chunk(context, image))


SIDES = {"ours": measure_ours, "transformers": measure_transformers, "llama.cpp": measure_llama_cpp}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, action="append")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--height", type=int, default=768)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--keep", type=Path, help="the folder of the models that are made")
    parser.add_argument("--llama-cpp", action="store_true")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--side", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side is not None:
        side, folder, dtype = args.side
        print(json.dumps(SIDES[side](Path(folder), dtype, args)))
        return
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as place:
        for shape in args.shape or SHAPES:
            folder = (args.keep or Path(place)) / f"{shape}-{args.layers}"
            if not folder.exists():
                make(shape, args.layers, folder)
            for dtype in DTYPES:
                sides = [side for side in SIDES if side != "llama.cpp" or (args.llama_cpp and (shape, dtype) == LLAMA_CPP)]
                seconds: dict[str, list[float]] = {side: [] for side in sides}
                for _ in range(args.rounds):
                    for side in sides:
                        seconds[side].append(said_by(__file__, *sys.argv[1:], "--side", side, folder, dtype))
                found = {side: statistics.median(each) for side, each in seconds.items()}
                ratios = {side: round(each / found["ours"], 2) for side, each in found.items() if side != "ours"}
                results[f"{shape}, {args.layers or 'all'} layers, {dtype}"] = {"seconds": found, "times ours": ratios}
                told = ", ".join(f"{side} {each:.2f} s" for side, each in found.items())
                print(f"{shape:18} {dtype:9} {told}; {ratios}", flush=True)
    save(args.output, results)


if __name__ == "__main__":
    main()
