"""llama-bench's tests on our engine: how they are run, timed and written down.

The work is llama-bench's: `pp` reads a prompt of random tokens, of which none is cached; `tg` feeds one token at a time, behind
nothing or behind `depth` tokens; `pg` reads a prompt and then feeds that many tokens more. A repetition is timed from the
moment at which its prompts are handed over until the last answer is there. So, unlike llama-bench's, our times include the whole
engine: scheduling, choosing the likeliest token at each step, and its text.

A first repetition warms up (kernels are compiled, steps recorded) and does not count.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, NamedTuple

from nanovllm_cli.bench.machine import Machine
from nanovllm_cli.bench.record import Record
from nanovllm_cli.bench.roofline import Roofline
from nanovllm_cli.bench.sweep import Setup, Sweep, Trial
from nanovllm_cli.bench.work import ModelWork
from nanovllm_cli.bench.workload import drawn_ids
from nanovllm_cli.config import BLOCK_SIZE
from nanovllm_cli.engine.placement import num_far_mixtures, num_near_layers
from nanovllm_cli.errors import DoesNotFitError, RequestError, UnsupportedError
from nanovllm_cli.progress import LoadProgress, NullProgress
from nanovllm_cli.sampling_params import SamplingParams
from nanovllm_cli.system import peak_memory_bytes
from nanovllm_cli.text.image_tokens import image_token, video_token

if TYPE_CHECKING:
    from nanovllm_cli.engine.outputs import RequestOutput
    from nanovllm_cli.llm import LLM


# What a roofline calls the compute types.
_KINDS = {"torch.float32": "fp32", "torch.bfloat16": "bf16", "torch.float16": "fp16"}


class Procedure(NamedTuple):
    """How often, and in what time. delay: seconds before each trial. Clock: nanoseconds."""

    repetitions: int = 5
    warm_up: bool = True
    delay: float = 0.0
    clock: Callable[[], int] = time.perf_counter_ns
    sleep: Callable[[float], None] = time.sleep


class Loaded(NamedTuple):
    """A model that is ready. roofline: None where it was not asked for."""

    llm: LLM
    roofline: Roofline | None = None


Open = Callable[[Setup, Sequence[Trial]], Loaded]
"""Loads a model as a setup says, with room for all of the trials."""


def run_sweep(
    sweep: Sweep,
    open_model: Open,
    machine: Callable[[], Machine],
    procedure: Procedure | None = None,
    *,
    deterministic: bool = False,
    activations: str = "auto",
    progress: LoadProgress | None = None,
    announce: Callable[[str], None] = lambda line: None,
) -> Iterator[Record]:
    """A record a trial, as soon as it is there. A model is loaded once for each of its setups. announce: told what comes next."""
    procedure, progress = procedure or Procedure(), progress or NullProgress()
    setups, trials = list(sweep.setups()), sweep.trials()
    for number, setup in enumerate(setups):
        loaded = open_model(setup, trials)
        draw = random.Random(0)  # one for all trials: what one has read, the next must not find in the prefix cache
        try:
            if not (sweep.embeds or loaded.llm.spec.has_head):
                raise UnsupportedError(f"{setup.model} has no head to draw tokens from", "-embd 1 measures how fast it embeds")
            if loaded.llm.spec.encoder is not None and any(trial.depth for trial in trials):
                raise UnsupportedError(f"{setup.model} reads each prompt by itself, behind nothing that it knows", "leave -d out")
            for place, trial in enumerate(trials, number * len(trials) + 1):
                announce(f"test {place} of {len(setups) * len(trials)}: {setup.model}, {name_of(trial)}")
                if procedure.delay:
                    procedure.sleep(procedure.delay)
                began = datetime.now(UTC)
                samples = run_trial(loaded.llm, trial, draw, procedure, progress)
                record = _record(setup, trial, loaded, samples, began, machine())
                yield replace(record, deterministic=deterministic, activations=activations)
        finally:
            loaded.llm.close()


def check_room(llm: LLM, trials: Sequence[Trial]) -> None:
    """Raises DoesNotFitError where the KV cache of a model that was just loaded is too small to run the trials' sequences
    together."""
    if llm.spec.reads_both_ways:  # a text goes when its step is done
        return
    most = max(trials, key=lambda trial: trial.num_blocks)
    there = llm.stats().free_blocks
    if there < most.num_blocks:
        wanted = f"{name_of(most)} needs a KV cache of {most.num_blocks * BLOCK_SIZE:,} tokens"
        raise DoesNotFitError(f"{wanted}; there is room for {there * BLOCK_SIZE:,}")


def run_trial(
    llm: LLM, trial: Trial, draw: random.Random, procedure: Procedure, progress: LoadProgress
) -> tuple[int, ...]:
    """Nanoseconds of each repetition. Raises RequestError where the engine did other work than the trial is about."""
    vocab_size, reserved = llm.spec.vocab_size, reserved_tokens(llm)
    samples = []
    total = (trial.num_prompt + trial.num_gen) * trial.num_parallel
    progress.stage(name_of(trial), total * (procedure.repetitions + procedure.warm_up), "tokens")
    for _ in range(procedure.repetitions + procedure.warm_up):
        known = [drawn_ids(draw, trial.depth, vocab_size, reserved) for _ in range(trial.num_parallel)]
        if trial.depth:
            llm.generate(known, greedy(1))
        prompts = [[*before, *drawn_ids(draw, max(trial.num_prompt, 1), vocab_size, reserved)] for before in known]
        params = replace(greedy(trial.num_gen + 1 if trial.num_prompt else trial.num_gen), target_language=_any_language(llm))
        began = procedure.clock()
        outputs = [] if trial.embeds else llm.generate(prompts, params)
        if trial.embeds:
            llm.pooled(prompts, llm.pooling, None)
        samples.append(procedure.clock() - began)
        _check(outputs, trial, params)
        progress.advance(total)
    progress.done()
    return tuple(samples[1:] if procedure.warm_up else samples)


def name_of(trial: Trial) -> str:
    """As the table has it."""
    nothing = Record("", "", 0, 0, trial.num_prompt, trial.num_gen, (1,), n_depth=trial.depth, n_parallel=trial.num_parallel)
    return nothing.test


def greedy(count: int) -> SamplingParams:
    """Exactly so many tokens, the likeliest ones."""
    return SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)


def _any_language(llm: LLM) -> str | None:
    """Of a model that has to be told one."""
    reading = None if llm.senses is None else llm.senses.reading
    if reading is None or reading.languages is None or not reading.needs_target:
        return None
    return reading.languages.tokens[0][0]


def reserved_tokens(llm: LLM) -> set[int]:
    """Which stand for images, sounds or videos, and nothing else: a prompt of made-up tokens is refused with one."""
    if llm.senses is None:
        return set()
    tokens = {image_token(llm.tokenizer, sense) for sense in llm.senses.all} | {video_token(llm.tokenizer, llm.senses.vision)}
    return {token for token in tokens if token is not None}


def _check(outputs: list[RequestOutput], trial: Trial, params: SamplingParams) -> None:
    for output in outputs:
        (answer,) = output.outputs
        if answer.error is not None:
            raise RequestError(f"{name_of(trial)}: {answer.error}")
        cached, preemptions = output.metrics.num_cached_tokens, output.metrics.num_preemptions
        if (len(answer.token_ids), cached, preemptions) != (params.max_tokens, trial.depth, 0):
            raise RequestError(
                f"{name_of(trial)}: {len(answer.token_ids)} tokens behind {cached} cached ones were computed, with {preemptions} "
                f"interruptions; {params.max_tokens} behind {trial.depth} were to be, with none"
            )


def _record(
    setup: Setup,
    trial: Trial,
    loaded: Loaded,
    samples: tuple[int, ...],
    began: datetime,
    machine: Machine,
) -> Record:
    llm, on_cpu = loaded.llm, loaded.llm.threads is not None
    token = ModelWork.of(llm.spec, llm.read_bytes, llm.kv_dtypes, llm.expert_bytes).of_token(trial, setup.step_size)
    kind = "int8" if llm.multiplies_whole else _KINDS[str(llm.dtype)]
    formats = format_names(llm)
    limits = loaded.roofline
    return Record(
        model_filename=str(llm.resolved.path),
        model_type=f"{llm.spec.architecture} {_size_label(llm.num_parameters)} {formats[0]}",
        model_size=llm.weight_bytes,
        model_n_params=llm.num_parameters,
        n_prompt=trial.num_prompt,
        n_gen=trial.num_gen,
        samples_ns=samples,
        build_commit=machine.commit or machine.version,
        build_number=machine.commit_number,
        cpu_info=machine.cpu,
        gpu_info="" if on_cpu else machine.gpu,
        backends="CPU" if on_cpu else "CUDA",
        n_batch=setup.batch_size,
        n_ubatch=setup.step_size,
        n_threads=llm.threads or 1,
        tensor_parallel_size=setup.tensor_parallel_size,
        type_k=_type_name(llm.kv_dtypes[0]),
        type_v=_type_name(llm.kv_dtypes[1]),
        n_gpu_layers=0 if on_cpu else num_near_layers(llm.placement.far, llm.spec.num_layers),
        n_cpu_moe=num_far_mixtures(llm.placement.far, llm.spec),
        flash_attn=1,  # no kernel of ours keeps a matrix of scores
        n_depth=trial.depth,
        test_time=began.strftime("%Y-%m-%dT%H:%M:%SZ"),
        n_parallel=trial.num_parallel,
        dtype=str(llm.dtype).removeprefix("torch."),
        quant=setup.quant or "",
        formats=", ".join(formats),
        bytes_per_token=token.num_bytes,
        flops_per_token=token.flops,
        roofline_gb_s=0.0 if limits is None else limits.read_gb_s,
        roofline_gflops=0.0 if limits is None else limits.gflops[kind],
        peak_memory=peak_memory(on_cpu=on_cpu),
        machine=machine,
    )


def format_names(llm: LLM) -> list[str]:
    """What the matrices are kept in, most of the numbers first: Q4_K, Q6_K; int8; bf16."""
    plain = _type_name(llm.dtype)
    ordered = sorted(llm.formats.items(), key=lambda item: -item[1])
    return list(dict.fromkeys(plain if form is None else form.name for form, _ in ordered))


def peak_memory(*, on_cpu: bool) -> int:
    """Of this process since it began; on a GPU of its tensors there. Bytes."""
    if not on_cpu:
        import torch

        return int(torch.cuda.max_memory_allocated())
    return peak_memory_bytes()


def _type_name(dtype: object) -> str:
    """As llama.cpp writes it."""
    names = {"float32": "f32", "float16": "f16", "bfloat16": "bf16", "int8": "int8", "float8_e4m3fn": "fp8"}
    return names[str(dtype).removeprefix("torch.")]


def _size_label(count: int) -> str:
    """0.6B, 8.2B, 70B; 135M."""
    scale, letter = (1e9, "B") if count >= 2e8 else (1e6, "M")
    return f"{count / scale:.1f}{letter}" if count < 10 * scale else f"{count / scale:.0f}{letter}"
