"""BART and its kin against transformers, by tiny random models: what a decoder makes of the text that an encoder reads; and that no
bit of it depends on steps, neighbours, or what was found again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from barts import KINDS, a_source, bart_folder, expected
from engines import check_that_no_bit_changes, engine_for, logprobs_of, run, worker_for
from nanovllm_cli.sampling_params import SamplingParams

pytest.importorskip("transformers")


def greedily(count: int, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, **options)


@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_what_transformers_writes(kind: str, tmp_path: Path) -> None:
    """Alone and in one batch: sources of less than a block, of whole ones, and of more than a tile of the kernels."""
    worker = worker_for(bart_folder(tmp_path, kind), dtype="float32", num_blocks=64)
    sources = [a_source(length, length) for length in (1, 5, 16, 17, 150)]
    together = run(engine_for(worker), [(list(source), greedily(30, logprobs=0)) for source in sources])
    for source, output in zip(sources, together, strict=True):
        ids = output.outputs[0].token_ids
        logprobs = expected(kind, source, tuple(ids))[:-1]
        assert list(ids) == logprobs.argmax(-1).tolist()
        torch.testing.assert_close(torch.tensor(logprobs_of(output)), logprobs.max(-1).values, rtol=1e-4, atol=1e-4)
        (alone,) = run(engine_for(worker), [(list(source), greedily(30, logprobs=0))])
        assert logprobs_of(alone) == logprobs_of(output)
        assert output.prompt_token_ids == source
