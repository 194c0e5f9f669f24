"""Engines on random weights, whole: scheduler, model, sampling, and text at the end of each token."""

from __future__ import annotations

import functools
import gc
import json
import mmap
import os
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from gpu import sections
from gpu.shapes import HasConfig, RandomCheckpoint
from gpu.workload import Request, prompt
from nanovllm_cli.collector import keep_loaded
from nanovllm_cli.config import EngineConfig
from nanovllm_cli.engine.answer import detokenizers_of
from nanovllm_cli.engine.cuda_platform import CudaPlatform
from nanovllm_cli.engine.engine import Engine
from nanovllm_cli.engine.outputs import RequestOutput
from nanovllm_cli.engine.worker import Worker
from nanovllm_cli.kernels.device import Device, Event, Graph, HostPages, Memory
from nanovllm_cli.kernels.kernel import Launcher
from nanovllm_cli.sampling_params import SamplingParams
from nanovllm_cli.text.tokenizer import Tokenizer

T = TypeVar("T")
ALL_LAYERS = 1000
"""None stays in the machine's memory: a model that the GPU has no room for is an error here."""
WARM_STEPS = 16
"""Decode steps before the measured ones: the first runs launch by launch, the second is recorded."""
SPARE_STEPS = 16
"""After the measured ones, so that the sequences whose prompts came first do not end among them."""


class CountingDevice:
    """A Device that knows how long the host has waited for it."""

    def __init__(self, inner: Device) -> None:
        self._inner = inner
        self.waited = 0.0

    @property
    def launcher(self) -> Launcher:
        return self._inner.launcher

    def enter(self) -> None:
        self._inner.enter()

    def check(self) -> None:
        self._inner.check()

    def host_pages(self, num_bytes: int) -> HostPages:
        return self._inner.host_pages(num_bytes)

    def shared_pages(self, memory: mmap.mmap) -> torch.Tensor:
        return self._inner.shared_pages(memory)

    def host_buffer(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return self._inner.host_buffer(numel, dtype)

    def event(self) -> Event:
        return _CountedEvent(self._inner.event(), self)

    def capture(self, step: Callable[[], T]) -> tuple[Graph, T]:
        return self._inner.capture(step)

    def memory(self) -> Memory:
        return self._inner.memory()

    def forget_peak(self) -> None:
        self._inner.forget_peak()


class _CountedEvent:
    def __init__(self, inner: Event, device: CountingDevice) -> None:
        self._inner = inner
        self._device = device

    def record(self) -> None:
        self._inner.record()

    def synchronize(self) -> None:
        begin = time.perf_counter()
        self._inner.synchronize()
        self._device.waited += time.perf_counter() - begin


class Loaded(NamedTuple):
    """device: None on a CPU."""

    engine: Engine
    worker: Worker
    device: CountingDevice | None
    vocab: int


def gpu(programmatic_launch: bool | None = None) -> Device:
    """None: as this run launches kernels, see `overlaps`."""
    from nanovllm_cli.kernels.cuda_device import CudaDevice

    return CudaDevice(0, overlaps() if programmatic_launch is None else programmatic_launch)


def overlaps() -> bool:
    """Whether kernels may start before the one ahead of them ends: until a section has found that they had better not."""
    return sections.ONE_BY_ONE not in os.environ


def load(shape: HasConfig, device: Device | None, **settings: Any) -> Loaded:
    """An engine on a GPU, or on the CPU where device is None. settings: of EngineConfig. What is loaded is kept out of the
    collector's rounds, as the command line keeps it, until `release`."""
    defaults = {"enable_prefix_caching": False, "max_model_len": 4096, "dtype": "bfloat16", "n_gpu_layers": ALL_LAYERS}
    config = EngineConfig(**defaults | settings | ({"device": "cpu"} if device is None else {}))
    counting = None if device is None else CountingDevice(device)
    platform = None if counting is None else CudaPlatform(config, counting)
    where = torch.device("cpu") if counting is None else counting.launcher.device
    worker = Worker(RandomCheckpoint(shape, where), config, platform=platform)
    engine = Engine(
        worker, config, vocab_size=worker.spec.vocab_size, max_model_len=worker.max_model_len,
        num_blocks=worker.num_blocks, ahead=worker.ahead,
        detokenizer_factory=detokenizers_of(tokenizer(worker.spec.vocab_size)),
    )  # fmt: skip
    keep_loaded()
    return Loaded(engine, worker, counting, worker.spec.vocab_size)


def release() -> None:
    """After the last reference to an engine is gone: its memory too."""
    gc.unfreeze()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@functools.cache
def tokenizer(vocab: int) -> Tokenizer:
    """Made-up words, one for each id."""
    words = {f"t{i}": i for i in range(vocab)}
    model = {"type": "BPE", "vocab": words, "merges": []}
    decoder = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    empty = {"truncation": None, "padding": None, "added_tokens": [], "normalizer": None, "post_processor": None}
    content = {"version": "1.0", **empty, "pre_tokenizer": decoder, "decoder": decoder, "model": model}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "tokenizer.json").write_text(json.dumps(content))
        return Tokenizer.from_folder(folder)


class Decoded(NamedTuple):
    """seconds: of `steps` steps after the warm ones; waited: the part of it in which the host waited for the device."""

    steps: int
    tokens: int
    seconds: float
    waited: float
    outputs: list[RequestOutput]


def decode(
    loaded: Loaded,
    batch: int,
    prompt_len: int,
    steps: int,
    salt: int = 0,
    around: AbstractContextManager[object] | None = None,
) -> Decoded:
    """Steps of `batch` greedy sequences that started together. around: entered for the measured steps alone."""
    engine = loaded.engine
    params = SamplingParams(temperature=0.0, max_tokens=1 + WARM_STEPS + steps + SPARE_STEPS, ignore_eos=True)
    before = engine.stats().generated_tokens
    for i in range(batch):
        engine.add(f"{salt}-{i}", prompt(prompt_len, salt * batch + i, loaded.vocab), params)
    done: dict[str, RequestOutput] = {}

    def step() -> None:
        done.update(finished(loaded))

    while engine.stats().generated_tokens - before < batch * (1 + WARM_STEPS):
        step()
    with around or nullcontext():
        first, waited, begin = engine.stats().generated_tokens, _waited(loaded), time.perf_counter()
        taken = 0
        while taken < steps and engine.has_unfinished():  # guesses that hold may leave nothing for the last steps
            step()
            taken += 1
        seconds = time.perf_counter() - begin
        waited, tokens = _waited(loaded) - waited, engine.stats().generated_tokens - first
    while engine.has_unfinished():
        step()
    return Decoded(taken, tokens, seconds, waited, [done[f"{salt}-{i}"] for i in range(batch)])


def serve(
    loaded: Loaded, requests: list[Request], temperature: float, seed: int | None = None
) -> tuple[float, list[RequestOutput]]:
    """All requests at once: seconds until the last token, and the outputs."""
    done: dict[str, RequestOutput] = {}
    begin = time.perf_counter()
    for i, request in enumerate(requests):
        params = SamplingParams(temperature=temperature, max_tokens=request.answer_len, ignore_eos=True, seed=seed)
        loaded.engine.add(str(i), [token % loaded.vocab for token in request.prompt], params)
    while loaded.engine.has_unfinished():
        done.update(finished(loaded))
    return time.perf_counter() - begin, [done[str(i)] for i in range(len(requests))]


def finished(loaded: Loaded) -> dict[str, RequestOutput]:
    """A step, and the requests that ended in it, by id. RuntimeError where one failed: the engine goes on without it, and would
    be measured at doing nothing."""
    loaded.engine.advance()
    done = {each: loaded.engine.take(each) for each, is_last in loaded.engine.moved.items() if is_last}
    for name, output in done.items():
        for answer in output.outputs:
            if answer.finish_reason == "error":
                raise RuntimeError(f"request {name} failed: {answer.error}")
    return done


def _waited(loaded: Loaded) -> float:
    return 0.0 if loaded.device is None else loaded.device.waited
