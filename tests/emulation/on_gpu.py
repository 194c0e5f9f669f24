"""The kernels' tests on a real GPU, unchanged: with TEST_NANOVLLM_DEVICE=cuda an `Emulator` launches there.

Tensors stay on the host. A launch takes the memory they lie in to the GPU, whole and with its contents, runs the kernel and
brings it back: views of one memory stay views of one memory. Thread orders are the GPU's own, so there is one order. Skipped,
with the reason: planted bugs, memory of gigabytes, and launches that read addresses from a table; addresses in tasks of experts
become those of the copies.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pytest
import torch

from nanovllm_cli.kernels.kernel import Arg, Kernel, Launcher

if TYPE_CHECKING:
    from emulation.emulator import Emulator

ENABLED = os.environ.get("TEST_NANOVLLM_DEVICE") == "cuda"
MOST_BYTES = 1 << 30
Dims = tuple[int, int, int]


def reads_tasks(kernel: Kernel) -> bool:
    """Whether it finds tensors by addresses in its first argument."""
    return "EXPERTS" in dict(kernel.constants)


def know_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what tasks of experts find by them, to a machine that lets kernels touch nothing else."""
    from emulation.emulator import Emulator
    from nanovllm_cli.kernels import cuda_mixture

    known: list[torch.Tensor] = []
    addresses = cuda_mixture._addresses

    def remembered(matrix: Any) -> list[int]:
        known.extend(tensor for tensor in (*matrix.weight.task_tensors, matrix.bias) if tensor is not None)
        return addresses(matrix)

    monkeypatch.setattr(cuda_mixture, "_addresses", remembered)
    monkeypatch.setattr(Emulator, "by_address", known)


def missing() -> str | None:
    """Why there is no GPU to test on, or None."""
    from nanovllm_cli.kernels.launcher import why_unavailable

    reason = why_unavailable()
    return None if reason is None else reason.message


def launch(
    emulator: Emulator, kernel: Kernel, grid: Dims, block: Dims, args: tuple[Arg, ...], shared_bytes: int
) -> None:
    """In the place of `Emulator.launch`."""
    if emulator.bugs:
        pytest.skip("planted bugs are for the emulation")
    if emulator.only_block is not None:
        pytest.skip("one block of a grid is for the emulation")
    if kernel.stem == "blocks":
        pytest.skip("its table has addresses of host memory")
    if not kernel.min_capability <= (launcher := _launcher()).capability <= kernel.max_capability:
        pytest.skip(f"this GPU is older or newer than {kernel} needs")
    by_address = emulator.by_address if reads_tasks(kernel) else ()
    if reads_tasks(kernel) and not by_address:
        pytest.skip("its tasks have addresses of host memory")
    try:
        launch_there(launcher, kernel, grid, block, args, shared_bytes, by_address)
        torch.cuda.synchronize()
    except RuntimeError as error:
        _give_up_if_lost(kernel, error)
        raise


def _give_up_if_lost(kernel: Kernel, error: RuntimeError) -> None:
    """After an illegal address, say, nothing runs in this process any more."""
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        pytest.exit(f"the GPU is lost after {kernel}: {str(error).splitlines()[0]}", 1)


def launch_there(
    launcher: Launcher,
    kernel: Kernel,
    grid: Dims,
    block: Dims,
    args: tuple[Arg, ...],
    shared_bytes: int,
    by_address: Sequence[torch.Tensor] = (),
) -> None:
    """On a launcher whose memory is another one than that of the tensors in args. by_address: whose addresses are in the first of
    them, which the kernel only reads."""
    moved: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def there(arg: Arg) -> Arg:
        if not isinstance(arg, torch.Tensor):
            return arg
        storage = arg.untyped_storage()
        if storage.nbytes() > MOST_BYTES:
            pytest.skip("memory of gigabytes is for the emulation")
        key = (storage.data_ptr(), storage.nbytes())
        if key not in moved:
            host = torch.empty(0, dtype=torch.uint8).set_(storage)  # type: ignore[call-overload]
            moved[key] = host, torch.empty_like(host, device=launcher.device).copy_(host)
        memory = moved[key][1].untyped_storage()
        view = torch.empty(0, dtype=arg.dtype, device=launcher.device)
        return view.set_(memory, arg.storage_offset(), arg.shape, arg.stride())  # type: ignore[call-overload]

    if by_address:
        tasks, *others = args
        assert isinstance(tasks, torch.Tensor)
        places = {each.data_ptr(): there(each) for each in by_address}
        words = [places[word].data_ptr() if word in places else word for word in tasks.flatten().tolist()]  # type: ignore[union-attr]
        target = torch.tensor(words, dtype=torch.int64).view(tasks.shape).to(launcher.device)
        launcher.launch(kernel, grid, block, (target, *(there(arg) for arg in others)), shared_bytes)
    else:
        launcher.launch(kernel, grid, block, tuple(there(arg) for arg in args), shared_bytes)
    for host, device in moved.values():
        host.copy_(device)


@functools.cache
def _launcher() -> Launcher:
    from nanovllm_cli.kernels.launcher import CudaLauncher

    return CudaLauncher()
