"""What a draft model gives and costs: decoding with guesses of a small model against decoding without.

    python benchmarks/draft.py --model random:qwen3-4b --quant int4 --draft random:qwen3-0.6b --draft-quant int8

    python benchmarks/draft.py --model random:qwen3.5-4b --quant int4 --mtp

With --mtp a layer of the model's own guesses, made up as the rest; with --assistant four small layers that read the cache of a
Gemma 4 (`--model random:gemma-4-e2b`): rows of 256, MLPs of 2,048; with --eagle a layer of the model's width that reads what
three of its layers do, and guesses among 32,000 tokens, as published drafters have it.

The weights are random: after each forward one logit is raised, of the large model that of the next token of a made-up answer, of
what guesses the same token as often as `--right` says, and else another. So how often a guess holds is given, while every step of
both is computed whole. Settings take turns in one run; decoding only, without prompts.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from common import save
from nanovllm_cli.config import EngineConfig
from nanovllm_cli.engine.assistant import AssistantDraft
from nanovllm_cli.engine.draft import Draft
from nanovllm_cli.engine.eagle import EagleDraft
from nanovllm_cli.engine.engine import Engine
from nanovllm_cli.engine.mtp import MTPDraft
from nanovllm_cli.engine.plan import Plan
from nanovllm_cli.engine.strategy import Drafted, Standard
from nanovllm_cli.llm import LLM
from nanovllm_cli.models.mtp import num_guessed
from nanovllm_cli.weights.shapes import shape_config
from speculation import ANSWER, decode, follow

PROMPT_LEN = 400
BATCHES = (1, 4)
EAGLES_TOKENS = 32_000


def draft_follows(draft: Draft | MTPDraft | EagleDraft | AssistantDraft, answer: list[int], right: float) -> None:
    """From now on the draft model's likeliest token is the answer's next one, so often."""
    runner, rng = draft._runner, random.Random(1)
    kind = type(runner)
    places: dict[int, int] = {}

    def run(plan: Plan, *hidden: torch.Tensor) -> Any:
        for share in plan.scheduled:  # an assistant's guesses all stand in front of the first one's place
            ahead = 1 + share.num_drawn if isinstance(draft, AssistantDraft) else 0
            places[share.seq_id] = share.start + len(share.token_ids) + ahead - PROMPT_LEN
        return kind.run(runner, plan, *hidden)

    def sample(seq_ids: Any, logits: torch.Tensor, rows: Any = None) -> Any:
        for seq_id, row in zip(seq_ids, range(len(seq_ids)) if rows is None else rows, strict=True):
            place = places[seq_id]
            token = answer[place] if 0 <= place < len(answer) else 1
            logits[row, token if rng.random() < right else token - 1] = 1e4
        return type(runner.sampler).sample(runner.sampler, seq_ids, logits, rows)

    runner.run = run  # type: ignore[method-assign]
    runner.sampler.sample = sample  # type: ignore[attr-defined]


def with_mtp(model: str) -> str:
    """The same of random weights with a layer that predicts further tokens, which the published ones have."""
    config = shape_config(model.removeprefix("random:")) | {"mtp_num_hidden_layers": 1}
    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps(config))
    return f"random:{folder / 'config.json'}"


def assistant_for(model: str) -> str:
    """A folder of random weights."""
    target = {"num_kv_shared_layers": 0} | dict(shape_config(model.removeprefix("random:")))
    layers, hidden, inner, heads = 4, 256, 2048, 4
    types = ["sliding_attention"] * (layers - 1) + ["full_attention"]
    text = target | {
        "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": heads,
        "layer_types": types, "hidden_size_per_layer_input": 0, "enable_moe_block": False, "use_double_wide_mlp": False,
        "num_kv_shared_layers": layers,
    }  # fmt: skip
    shapes = {"model.embed_tokens": (target["vocab_size"], hidden), "pre_projection": (hidden, 2 * target["hidden_size"]),
              "post_projection": (target["hidden_size"], hidden), "model.norm": (hidden,)}  # fmt: skip
    for i, kind in enumerate(types):
        at, dim = f"model.layers.{i}", 512 if kind == "full_attention" else 256
        shapes |= {f"{at}.self_attn.q_proj": (heads * dim, hidden), f"{at}.self_attn.o_proj": (hidden, heads * dim),
                   f"{at}.self_attn.q_norm": (dim,), f"{at}.mlp.gate_proj": (inner, hidden), f"{at}.mlp.up_proj": (inner, hidden),
                   f"{at}.mlp.down_proj": (hidden, inner)}  # fmt: skip
        norms = ("input", "post_attention", "pre_feedforward", "post_feedforward")
        shapes |= {f"{at}.{name}_layernorm": (hidden,) for name in norms}
    tensors = {f"{name}.weight": torch.randn(shape).mul_(0.02).bfloat16() for name, shape in shapes.items()}
    tensors |= {f"model.layers.{i}.layer_scalar": torch.ones(1) for i in range(layers)}
    folder = Path(tempfile.mkdtemp())
    config = {"architectures": ["Gemma4AssistantForCausalLM"], "text_config": text, "backbone_hidden_size": target["hidden_size"]}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return str(folder)


def eagle_for(model: str) -> str:
    """The same, of which the first tokens are guessed."""
    target = shape_config(model.removeprefix("random:"))
    sizes = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    width, inner, heads, keys = (target[name] for name in sizes)
    dim = target.get("head_dim", width // heads)
    config = {
        "architectures": ["LlamaForCausalLMEagle3"], "hidden_size": width, "intermediate_size": inner, "num_hidden_layers": 1,
        "num_attention_heads": heads, "num_key_value_heads": keys, "head_dim": dim, "vocab_size": target["vocab_size"],
        "draft_vocab_size": EAGLES_TOKENS,
    }  # fmt: skip
    at, projected = "midlayer.", {"q": heads * dim, "k": keys * dim, "v": keys * dim}
    shapes = {
        "fc": (width, 3 * width), "norm": (width,), "lm_head": (EAGLES_TOKENS, width),
        **{f"{at}self_attn.{part}_proj": (count, 2 * width) for part, count in projected.items()},
        **{f"{at}{name}": (width,) for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm")},
        **{f"{at}mlp.{part}_proj": (inner, width) for part in ("gate", "up")},
        f"{at}self_attn.o_proj": (width, heads * dim), f"{at}mlp.down_proj": (width, inner),
    }  # fmt: skip
    tensors = {f"{name}.weight": torch.randn(shape).mul_(0.02).bfloat16() for name, shape in shapes.items()}
    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors | {"d2t": torch.zeros(EAGLES_TOKENS, dtype=torch.int64)}, folder / "model.safetensors")
    return str(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="random:qwen3-4b")
    parser.add_argument("--quant", default="int4", help="empty for none")
    parser.add_argument("--draft", default="random:qwen3-0.6b")
    parser.add_argument("--draft-quant", default="int8")
    parser.add_argument("--right", type=float, nargs="*", default=[0.95, 0.8, 0.6, 0.0])
    parser.add_argument("--guesses", type=int, nargs="*", default=[4, 8])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--mtp", action="store_true", help="instead of a draft model")
    parser.add_argument("--assistant", action="store_true", help="the same")
    parser.add_argument("--eagle", action="store_true", help="the same")
    options = parser.parse_args()
    drafted: dict[str, Any] = {"draft_model": options.draft, "draft_quant": options.draft_quant or None}
    model = options.model
    if options.mtp:
        model, drafted = with_mtp(model), {"mtp": True}
    if options.assistant:
        drafted = {"draft_model": assistant_for(model), "draft_quant": options.draft_quant or None}
    if options.eagle:
        drafted = {"draft_model": eagle_for(model), "draft_quant": options.draft_quant or None}
    config = EngineConfig(
        device="cpu", quant=options.quant or None, draft_min_p=0.0, threads=options.threads, max_model_len=1024, max_num_seqs=8,
        **drafted,
    )  # fmt: skip
    llm = LLM(model, config=config)
    rng = random.Random(0)
    tokens = num_guessed(llm.spec.vocab_size) if options.mtp else EAGLES_TOKENS if options.eagle else llm.spec.vocab_size
    prompt, answer = ([rng.randrange(tokens) for _ in range(count)] for count in (PROMPT_LEN, ANSWER))
    follow(llm, dict.fromkeys(range(16), answer))
    draft = llm._worker._draft
    assert draft is not None
    taps = llm._worker.model.taps

    def measured(batch: int, guesses: int) -> tuple[float, float]:
        """Tokens a second, and the share of guesses that held."""
        llm._worker._draft, llm._worker.model.taps = (draft, taps) if guesses else (None, None)
        strategy = Drafted(guesses, llm._worker.most_drafted) if guesses else Standard()
        sizes = {"vocab_size": llm.spec.vocab_size, "max_model_len": llm.max_model_len, "num_blocks": llm._worker.num_blocks}
        engine = Engine(llm._worker, config, strategy=strategy, **sizes)
        seconds, tokens, guessed, held = decode(engine, prompt, batch, range(16))
        return tokens / seconds, held / guessed if guessed else 0.0

    found: dict[str, Any] = {}
    for batch in BATCHES:
        measured(batch, 0)
        for right in options.right:
            draft_follows(draft, answer, right)
            runs = [[measured(batch, count) for count in (0, *options.guesses)] for _ in range(options.rounds)]
            plain = statistics.median(each[0][0] for each in runs)
            found[f"right {right}, {batch}"] = {"tokens_per_second": round(plain, 1)} | {
                f"guesses_{count}": {
                    "ratio": round(statistics.median(each[i + 1][0] / each[0][0] for each in runs), 3),
                    "held": round(runs[0][i + 1][1], 3),
                }
                for i, count in enumerate(options.guesses)
            }  # fmt: skip
            print(f"right {right}, {batch}", json.dumps(found[f"right {right}, {batch}"]), flush=True)
    kind = next((name for name in ("mtp", "assistant", "eagle") if getattr(options, name)), "draft")
    names = ("model", "quant", kind) if options.mtp else ("model", "quant", kind, "draft_quant")
    save(options.output, {name: getattr(options, name) for name in names} | {"decoding": found})


if __name__ == "__main__":
    main()
