"""Attention that sees no further than its chunk of tokens (Llama 4): sequences taken apart by hand, chunks and guesses across
borders, on emulated kernels, too. Numbers against transformers are in test_models.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import Llama4TextConfig

from emulation.device import EmulatedDevice
from emulation.emulator import needs_emulation
from engines import SMALL, greedy, random_model, run, save
from nanovllm_cli.batch import Batch
from nanovllm_cli.errors import UnsupportedError
from test_cuda_engine import engine_on
from test_lookup import answers, engine_with, few

CHUNK = 64
GENERATOR = torch.Generator().manual_seed(5)


def batch(starts: list[int], counts: list[int]) -> Batch:
    """Of sequences that have so many tokens already, as many more as `counts`, in blocks of 16 numbered from 100 * i on."""
    kv_lens = torch.tensor([start + count for start, count in zip(starts, counts, strict=True)])
    width = -(-int(kv_lens.max()) // 16)
    tables = torch.stack([100 * i + 1 + torch.arange(width) for i in range(len(starts))]).int()
    positions = torch.cat([torch.arange(start, start + count) for start, count in zip(starts, counts, strict=True)])
    owner = torch.repeat_interleave(torch.arange(len(starts)), torch.tensor(counts))
    return Batch(
        token_ids=torch.arange(len(positions)), positions=positions, rope_lens=positions + 1,
        query_starts=torch.tensor([0, *counts]).cumsum(0).int(), kv_lens=kv_lens.int(), known_lens=(kv_lens - 1).int(),
        slots=tables[owner, positions // 16].long() * 16 + positions % 16, block_tables=tables,
        logit_rows=torch.tensor([0]), states=torch.arange(len(starts), dtype=torch.int32),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("starts", "counts"), [([0], [1]), ([63, 64, 65], [1, 1, 1]), ([0, 60, 10], [200, 9, 3]), ([127, 0], [66, 64]), ([5], [300])]
)
def test_each_token_sees_its_chunk_up_to_itself(starts: list[int], counts: list[int]) -> None:
    """What is seen of the cache: (block, place in it), of each token, by going through all of them."""
    whole = batch(starts, counts)
    parts = whole.in_chunks(CHUNK, 16)
    expected = []
    for i, (start, count) in enumerate(zip(starts, counts, strict=True)):
        for position in range(start, start + count):
            seen = range(position // CHUNK * CHUNK, position + 1)
            expected.append([(int(whole.block_tables[i, place // 16]), place % 16) for place in seen])
    found = []
    for i in range(parts.num_seqs):
        first, end, length = int(parts.query_starts[i]), int(parts.query_starts[i + 1]), int(parts.kv_lens[i])
        for row in range(first, end):
            seen = range(length - (end - row) + 1)
            found.append([(int(parts.block_tables[i, place // 16]), place % 16) for place in seen])
    assert found == expected
    assert int(parts.kv_lens.max()) <= CHUNK
    assert parts.block_tables.shape[1] <= CHUNK // 16
    assert torch.equal(parts.slots, whole.slots)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = Llama4TextConfig(
        **SMALL | {"intermediate_size": 33, "vocab_size": 256}, num_local_experts=3, attention_chunk_size=CHUNK, floor_scale=30,
        no_rope_layers=[1, 0, 1],
    )
    return save(random_model(config), tmp_path_factory.mktemp("chunks"))


def test_answers_are_the_same_whoever_is_beside_and_whatever_is_guessed(folder: Path) -> None:
    """Prompts in pieces of 40 that end on either side of a border, and answers across one; a beginning that is found."""
    prompts = [torch.randint(2, 250, (n,), generator=GENERATOR).tolist() for n in (3, 50, 63, 64, 65, 120)]
    asked = [(ids, params) for ids in prompts for params in (greedy(40), few(logprobs=2))]
    together = answers(engine_with(folder, 0, max_num_batched_tokens=40), asked)
    guessing = engine_with(folder, 5, max_num_batched_tokens=40)
    assert answers(guessing, asked) == together
    assert answers(guessing, asked) == together, "by what the first ones left in the cache"
    alone = [answers(engine_with(folder, 0), [each])[0] for each in asked[::3]]
    assert alone == together[::3]


def gpu_model(folder: Path) -> Path:
    config = Llama4TextConfig(
        **SMALL | {"intermediate_size": 32, "num_hidden_layers": 2, "hidden_size": 64}, num_local_experts=2,
        attention_chunk_size=CHUNK, no_rope_layers=[1, 0],
    )
    return save(random_model(config, dtype=torch.bfloat16), folder)


@needs_emulation
def test_a_gpu_has_the_likelihoods_of_the_cpu_and_the_same_bits_whatever_the_steps(tmp_path: Path) -> None:
    """Prompts that end around a border or have several chunks, and answers that cross one, in steps that are recorded."""
    model = gpu_model(tmp_path)
    prompts = [torch.randint(2, SMALL["vocab_size"] - 2, (n,), generator=GENERATOR).tolist() for n in (60, 64, 150)]
    asked = [(ids, greedy(8, logprobs=0)) for ids in prompts]

    def found(device: EmulatedDevice | None, guesses: int = 0, **settings: object) -> list[list[float]]:
        engine = engine_on(model, device, num_speculative_tokens=guesses, max_num_seqs=3, **settings)
        return [[each.logprob for each in answer.outputs[0].logprobs] for answer in run(engine, asked)]

    device = EmulatedDevice()
    for mine, own in zip(found(device), found(None), strict=True):
        assert mine == pytest.approx(own, abs=0.08)
    assert device.graphs
    same = found(EmulatedDevice(), deterministic=True)
    assert found(EmulatedDevice(), deterministic=True, max_num_batched_tokens=37, guesses=4) == same
    with pytest.raises(UnsupportedError, match="in chunks of 64 tokens over a KV cache with blocks of 128"):
        engine_on(model, EmulatedDevice(), block_size=128)
