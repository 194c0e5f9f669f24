"""Moonshine against transformers, by tiny random models: what its decoder makes of an encoder's rows, of which each sound has
others; and that no bit of it depends on steps, neighbours, or what was found again."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from engines import check_that_no_bit_changes, engine_for, logprobs_of, run, worker_for
from moonshines import START, a_wave, heard, moonshine, moonshine_folder, prompt_of
from nanovllm_cli.engine.worker import Worker
from nanovllm_cli.hearing_spec import HearingSpec
from nanovllm_cli.sampling_params import SamplingParams

pytest.importorskip("transformers")


def greedily(count: int, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, **options)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return moonshine_folder(tmp_path_factory.mktemp("moonshine"))


@pytest.fixture(scope="module")
def worker(folder: Path) -> Worker:
    return worker_for(folder, dtype="float32", num_blocks=64)


@pytest.fixture(scope="module")
def spec(worker: Worker) -> HearingSpec:
    assert worker.sight is not None
    assert worker.sight.senses.hearing is not None
    return worker.sight.senses.hearing


@functools.cache
def expected(samples: int, seed: int, text: tuple[int, ...]) -> torch.Tensor:
    """Log-probabilities behind each token of a text."""
    with torch.inference_mode():
        found = moonshine()(input_values=heard(a_wave(samples, seed)), decoder_input_ids=torch.tensor([text]))
    logprobs: torch.Tensor = found.logits[0].log_softmax(-1)
    return logprobs


@pytest.mark.parametrize("samples", [895, 7000, 16_001])
def test_texts_are_what_transformers_writes(samples: int, worker: Worker, spec: HearingSpec) -> None:
    """Of one row, and of such as fill no block."""
    (output,) = run(engine_for(worker), [(prompt_of(spec, a_wave(samples), [START]), greedily(20, logprobs=0))])
    ids = list(output.outputs[0].token_ids)
    logprobs = expected(samples, 0, (START, *ids))[:-1]
    assert ids == logprobs.argmax(-1).tolist()
    torch.testing.assert_close(torch.tensor(logprobs_of(output)), logprobs.max(-1).values, rtol=1e-4, atol=1e-4)
    (other,) = run(engine_for(worker), [(prompt_of(spec, a_wave(samples, 9), [START]), greedily(20, logprobs=0))])
    assert logprobs_of(other) != logprobs_of(output), "it matters what is heard"
