"""The gated short convolution on a CPU: the kernel against the formula in float64, and engines whose past it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Lfm2Config

from convolutions import CASES, Case, Paged, check_step
from engines import SMALL, engine_for, greedy, random_model, run, save, worker_for
from nanovllm_cli.attention.kv_cache import kept_inputs
from nanovllm_cli.kernels import conv, cpu
from nanovllm_cli.sampling_params import SamplingParams

BF16, FP32 = torch.bfloat16, torch.float32
LAYERS = ["conv", "full_attention", "conv", "conv"]


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("index", [i for i, case in enumerate(CASES) if case.block_size == cpu.BLOCK])
def test_equal_to_the_formula(index: int, dtype: torch.dtype, threads: int) -> None:
    cpu.set_num_threads(threads)
    paged = Paged(CASES[index], dtype)
    for counts in CASES[index].steps:
        args, expected = paged.step(counts)
        check_step(conv.gated_conv(**args), expected)
    paged.check_cache()


def test_a_token_has_the_same_bits_whatever_it_is_computed_with() -> None:
    args, _ = Paged(Case(600, 3, 4, [[53]], bias=True), BF16).step([53])
    whole = conv.gated_conv(**args)
    for size in (1, 7, 16, 30):
        args["cache"].fill_(torch.nan)
        for start in range(0, 53, size):
            end = min(53, start + size)
            own = {"projected": args["projected"][start:end].clone(), "kv_lens": torch.tensor([end]).int(),
                   "query_starts": torch.tensor([0, end - start]).int()}  # fmt: skip
            assert torch.equal(conv.gated_conv(**(args | own)), whole[start:end])


def test_no_more_is_kept_than_is_read() -> None:
    """Two rows before the token's own, its own, and a place that a token too far may take."""
    assert [kept_inputs(width, 16, goes_back=False) for width in (1, 2, 3, 4, 5, 17, 40)] == [1, 2, 4, 4, 8, 16, 16]
    assert kept_inputs(3, 16, goes_back=True) == 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = Lfm2Config(**SMALL | {"num_hidden_layers": 4}, layer_types=LAYERS)
    return save(random_model(config, dtype=BF16), tmp_path_factory.mktemp("lfm2"))


PROMPTS = [[7, 8, 9, 10], list(range(40)), list(range(20)), [*range(33), 2, 4], [5], list(range(100, 190))]


def answers(folder: Path, params: SamplingParams, prompts: list[list[int]] = PROMPTS, **settings: Any) -> list[list[list[int]]]:
    worker = worker_for(folder, **{name: value for name, value in settings.items() if name == "num_speculative_tokens"})
    outputs = run(engine_for(worker, **settings), [(ids, params) for ids in prompts])
    return [[list(each.token_ids) for each in output.outputs] for output in outputs]


@pytest.fixture(scope="module")
def alone(folder: Path) -> list[list[list[int]]]:
    """Each by itself, without a cache of prefixes."""
    return [answers(folder, greedy(40), [ids], enable_prefix_caching=False)[0] for ids in PROMPTS]


SETTINGS: dict[str, dict[str, Any]] = {
    "together": {},
    "in chunks": {"max_num_batched_tokens": 7},
    "under pressure": {"num_blocks": 9, "max_num_batched_tokens": 24},
    "two at a time": {"max_num_seqs": 2},
    "with guesses": {"num_speculative_tokens": 6},
    "with guesses under pressure": {"num_speculative_tokens": 6, "num_blocks": 9, "max_num_batched_tokens": 24},
}


@pytest.mark.parametrize("case", SETTINGS)
def test_answers_do_not_depend_on_what_else_runs(case: str, folder: Path, alone: list[list[list[int]]]) -> None:
    assert answers(folder, greedy(40), **SETTINGS[case]) == alone


def test_prefixes_are_found(folder: Path, alone: list[list[list[int]]]) -> None:
    """The second time, all whole blocks but a prompt's last token."""
    engine = engine_for(worker_for(folder))
    for _ in range(2):
        outputs = run(engine, [(ids, greedy(40)) for ids in PROMPTS])
        assert [[list(each.token_ids) for each in output.outputs] for output in outputs] == alone
    found = [output.metrics.num_cached_tokens for output in outputs]
    assert found == [(len(ids) - 1) // 16 * 16 for ids in PROMPTS]


@pytest.mark.parametrize("settings", [{}, {"num_speculative_tokens": 4}, {"num_blocks": 24, "max_num_batched_tokens": 20}])
def test_forks_draw_what_each_would_draw_alone(settings: dict[str, Any], folder: Path) -> None:
    """Three answers to a prompt begin in one block, of which each writes on in a copy."""
    params = SamplingParams(temperature=1.0, n=3, seed=11, max_tokens=24, ignore_eos=True)
    expected = [answers(folder, params, [ids], enable_prefix_caching=False)[0] for ids in PROMPTS[:4]]
    assert answers(folder, params, PROMPTS[:4], **settings) == expected
    assert len({tuple(each) for each in expected[0]}) == 3
