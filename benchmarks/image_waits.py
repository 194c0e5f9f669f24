"""How long a stream of text waits for the image of another request: with the image's layers divided among steps, and in one step.

    pip install transformers
    python benchmarks/image_waits.py --output benchmarks/results/image_waits.json

Random weights of Qwen3-VL-2B's shape, a text that is being written, and a request with an image of --height x --width pixels
beside it. Reported: the longest wait between two tokens of the text, and seconds from the request to its first token, medians
over rounds in which both ways take turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from common import save
from images import VOCABULARY, WORDS, picture, save_with_tokenizer

AT_ONCE = 10**15
"""Multiplications for a token of a prompt, beside which an image costs nothing."""


def make(folder: Path) -> None:
    import torch
    from transformers import AutoModelForImageTextToText, Qwen3VLConfig

    names = ("vision_start_token_id", "image_token_id", "vision_end_token_id", "video_token_id")
    config = Qwen3VLConfig(
        text_config={"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16,
                     "num_key_value_heads": 8, "head_dim": 128, "vocab_size": VOCABULARY + len(WORDS), "bos_token_id": 0,
                     "eos_token_id": 1},
        vision_config={"depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "num_heads": 16, "out_hidden_size": 2048,
                       "deepstack_visual_indexes": [5, 11, 17]},
        **{name: VOCABULARY + place for place, name in enumerate(names)},
    )  # fmt: skip
    torch.manual_seed(0)
    save_with_tokenizer(AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16), folder)


def measure(llm: Any, height: int, width: int, seed: int, *, divided: bool) -> dict[str, float]:
    from nanovllm_cli import SamplingParams
    from nanovllm_cli.engine.looking import Looking
    from nanovllm_cli.images.reading import read_image
    from nanovllm_cli.vision_spec import TokenIds

    engine = llm.engine
    work = llm.spec.prompt_work if divided else AT_ONCE
    engine._scheduler._looking = Looking(llm.vision.tower, work)
    (image,) = read_image(picture(height, width, seed), llm.vision, "it").images
    placed = llm.vision.placed(image, 1)
    ids = TokenIds([VOCABULARY, *[VOCABULARY + 1] * placed.num_tokens, VOCABULARY + 2, 9, 10], [placed])
    endless = SamplingParams(temperature=0, ignore_eos=True, max_tokens=4000)
    engine.add("text", [5, 6, 7, seed + 8], endless)
    for _ in range(4):
        engine.step()
    engine.add("image", ids, SamplingParams(temperature=0, ignore_eos=True, max_tokens=2))
    begin = last = time.perf_counter()
    longest = first = 0.0
    while not first:
        for output in engine.step():
            now = time.perf_counter()
            if output.request_id == "text":
                longest, last = max(longest, now - last), now
            elif output.outputs[0].token_ids:
                first = now - begin
    for name in ("text", "image"):
        engine.abort(name)
    return {"longest wait of the text": longest, "image to first token": first, "tokens": placed.num_tokens}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--height", type=int, default=2048)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--keep", type=Path, help="the folder of the model that is made")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    from nanovllm_cli import LLM, EngineConfig

    with tempfile.TemporaryDirectory() as place:
        folder = args.keep or Path(place) / "model"
        if not folder.exists():
            make(folder)
        llm = LLM(folder, config=EngineConfig(threads=args.threads, max_model_len=6000, max_num_seqs=4, device="cpu"))
        llm.sight.tower()
        found: dict[str, list[dict[str, float]]] = {"divided among steps": [], "in one step": []}
        for number in range(args.rounds):
            for way, each in found.items():
                seed = 2 * number + (way == "in one step")  # another image each time: none is found again
                each.append(measure(llm, args.height, args.width, seed, divided=way == "divided among steps"))
                llm.sight._kept.clear()
                print(way, each[-1], flush=True)
    results = {way: {name: round(statistics.median(each[name] for each in rounds), 2) for name in rounds[0]}
               for way, rounds in found.items()}  # fmt: skip
    print(json.dumps(results, indent=2))
    save(args.output, results)


if __name__ == "__main__":
    main()
