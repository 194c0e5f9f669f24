"""Which platform a configuration asks for, on this machine."""

from __future__ import annotations

from dataclasses import replace

from nanovllm_cli.config import EngineConfig
from nanovllm_cli.engine.cpu_platform import CpuPlatform
from nanovllm_cli.engine.cuda_platform import CudaPlatform
from nanovllm_cli.engine.platform import Platform
from nanovllm_cli.errors import UnsupportedError
from nanovllm_cli.kernels.cuda_device import CudaDevice
from nanovllm_cli.kernels.launcher import has_driver, why_unavailable
from nanovllm_cli.progress import LoadProgress, NullProgress

OF_GPUS = ("eager", "programmatic_launch", "gpu_memory_utilization", "n_gpu_layers", "n_cpu_moe")
"""Settings."""


def resolved_device(config: EngineConfig) -> str:
    """`config.device`; where several processes compute: cpu, or the first of as many GPUs, cuda:N. UnsupportedError where there
    are GPUs, but fewer than were asked for."""
    size, first = config.tensor_parallel_size, _index(config)
    if size == 1 or config.device == "cpu":
        return config.device
    reasons = [why_unavailable(index) for index in range(first, first + size)]
    if config.device == "auto" and reasons[0] is not None:
        return "cpu"
    for reason in reasons:
        if reason is not None:
            raise UnsupportedError(
                f"{size} processes compute on a GPU each, from cuda:{first} on: {reason.message}",
                "take fewer with --tensor-parallel-size, or all on CPUs with --device cpu",
            )
    return f"cuda:{first}"


def select_platform(config: EngineConfig, progress: LoadProgress | None) -> Platform:
    """The platform behind `config.device`: cpu, cuda, cuda:N, or auto, which is a GPU where one can be used.

    UnsupportedError says why a GPU that was asked for can't be.
    """
    return platform_of(replace(config, device=resolved_device(config)), progress)


def platform_of(config: EngineConfig, progress: LoadProgress | None) -> Platform:
    """The same of one process, whatever others there are."""
    progress = progress or NullProgress()
    if config.device == "cpu":
        return _cpu(config, progress)
    index = _index(config)
    reason = why_unavailable(index)
    if reason is None:
        _tell_unused(config, progress, on_gpu=True)
        return CudaPlatform(config, CudaDevice(index, config.programmatic_launch), progress)
    if config.device != "auto":
        raise reason
    if has_driver():
        progress.note(f"the GPU is not used: {reason.message}" + (f" ({reason.hint})" if reason.hint else ""))
    return _cpu(config, progress)


def _cpu(config: EngineConfig, progress: LoadProgress) -> CpuPlatform:
    _tell_unused(config, progress, on_gpu=False)
    return CpuPlatform(config, progress)


def _tell_unused(config: EngineConfig, progress: LoadProgress, *, on_gpu: bool) -> None:
    """Notes for settings that change nothing here. They may be somebody's defaults for all machines, so nothing is refused."""
    plain = EngineConfig()

    def is_changed(name: str) -> bool:
        return bool(getattr(config, name) != getattr(plain, name))

    others, here = ("CPUs", "GPU") if on_gpu else ("GPUs", "CPU")
    for name in ("threads",) if on_gpu else OF_GPUS:
        if is_changed(name):
            progress.note(f"{name.replace('_', '-')} is for {others}, and changes nothing on a {here}")
    if on_gpu and is_changed("gpu_memory_utilization") and config.kv_cache_bytes is not None:
        progress.note("gpu-memory-utilization changes nothing: the KV cache has a size of its own")
    if is_changed("kv_cache_dtype") and config.cache_type_k is not None and config.cache_type_v is not None:
        progress.note("kv-cache-dtype changes nothing: keys and values have types of their own")
    if is_changed("draft_min_p") and config.draft_model is None and not config.mtp:
        progress.note("draft-min-p changes nothing: no draft model guesses, nor a layer of the model's own (--mtp)")


def _index(config: EngineConfig) -> int:
    """Of the GPU that is named, or the first."""
    return int(config.device.partition(":")[2] or 0)
