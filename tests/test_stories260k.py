"""A real trained Llama: greedy text and likelihood as published, from its GGUF and from the original checkpoint's bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engines import engine_for, greedy, run
from nanovllm_cli.config import EngineConfig
from nanovllm_cli.engine.worker import Worker
from nanovllm_cli.sampling_params import SamplingParams
from nanovllm_cli.text.tokenizer import Tokenizer
from nanovllm_cli.weights.checkpoint import Checkpoint, TensorInfo, open_checkpoint

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
MODEL = DATA / "stories260K" / "stories260K.gguf"
LEGACY = DATA / "stories260K" / "checkpoint_legacy.bin"
STORIES = DATA / "text" / "tinystories_sample.2M.txt"
PUBLISHED_NLL = 1.5645
pytestmark = pytest.mark.skipif(not MODEL.exists(), reason="the stories260K checkpoint is not beside this project")


class LegacyCheckpoint(Checkpoint):
    """llama2.c's first format, in memory: seven ints, then the matrices of all layers kind by kind. Under GGUF's names."""

    format = "gguf"
    path = LEGACY
    generation_config: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self, data: bytes) -> None:
        dim, inner, layers, heads, kv_heads, vocab, length = np.frombuffer(data, "<i4", 7).tolist()
        floats = torch.frombuffer(bytearray(data[28:]), dtype=torch.float32)
        kv = dim // heads * kv_heads
        self.config = {
            "general.architecture": "llama", "llama.embedding_length": dim, "llama.feed_forward_length": inner,
            "llama.block_count": layers, "llama.attention.head_count": heads, "llama.attention.head_count_kv": kv_heads,
            "llama.context_length": length, "llama.attention.layer_norm_rms_epsilon": 1e-5,
        }  # fmt: skip
        self.tensors: dict[str, torch.Tensor] = {}
        at = 0

        def take(name: str, *shape: int) -> None:
            nonlocal at
            size = torch.Size(shape).numel()
            self.tensors[name] = floats[at : at + size].reshape(shape)
            at += size

        def take_layers(name: str, *shape: int) -> None:
            for i in range(layers):
                take(f"blk.{i}.{name}.weight", *shape)

        take("token_embd.weight", vocab, dim)
        take_layers("attn_norm", dim)
        for name, rows in (("attn_q", dim), ("attn_k", kv), ("attn_v", kv), ("attn_output", dim)):
            take_layers(name, rows, dim)
        take_layers("ffn_norm", dim)
        take_layers("ffn_gate", inner, dim)
        take_layers("ffn_down", dim, inner)
        take_layers("ffn_up", inner, dim)
        take("output_norm.weight", dim)

    def names(self) -> list[str]:
        return list(self.tensors)

    def info(self, name: str) -> TensorInfo:
        return TensorInfo(name, tuple(self.tensors[name].shape), "F32", self.tensors[name].nbytes)

    def tensor(self, name: str, rows: tuple[int, int] | None = None) -> torch.Tensor:
        return self.tensors[name] if rows is None else self.tensors[name][rows[0] : rows[1]]

    def raw(self, name: str) -> torch.Tensor:
        return self.tensors[name].view(torch.uint8).reshape(len(self.tensors[name]), -1)


@pytest.fixture(scope="module", params=["gguf", "legacy"])
def worker(request: pytest.FixtureRequest) -> Worker:
    checkpoint = open_checkpoint(MODEL) if request.param == "gguf" else LegacyCheckpoint(LEGACY.read_bytes())
    return Worker(checkpoint, EngineConfig(num_blocks=400, threads=2, max_model_len=512))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_gguf(open_checkpoint(MODEL).config)


def test_greedy_text_is_the_published_one(worker: Worker, tokenizer: Tokenizer) -> None:
    goldens = json.loads((DATA / "stories260K" / "greedy_goldens.json").read_text())
    ids = goldens["greedy_ids"]
    [output] = run(engine_for(worker), [(ids[:1], greedy(len(ids) - 1))])
    assert list(output.outputs[0].token_ids) == ids[1:]
    assert tokenizer.decode(output.outputs[0].token_ids) == goldens["published_text_500"]


def test_likelihood_is_the_published_one(worker: Worker, tokenizer: Tokenizer) -> None:
    stories = [s.strip("\n") for s in STORIES.read_text(encoding="utf-8").split("<|endoftext|>")][100:160]
    prompts = [tokenizer.encode(story)[:512] for story in stories]
    assert all(ids[0] == tokenizer.bos_id for ids in prompts)
    worker.max_model_len = 513
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    outputs = run(engine_for(worker), [(ids, params) for ids in prompts])
    logprobs = [entry.logprob for output in outputs for entry in (output.prompt_logprobs or ()) if entry is not None]
    assert len(logprobs) == sum(len(ids) - 1 for ids in prompts)
    assert -float(np.mean(logprobs)) == pytest.approx(PUBLISHED_NLL, abs=5e-4)
