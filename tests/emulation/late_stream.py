"""The stream of the late device (late.py), and its tensors: what torch is asked to do with them is queued, in its place.

Whose result's shape is known is queued, behind memory for it; views are made at once; the rest waits, as on a GPU.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

Operation = Callable[[], object]
INDICES = itertools.cycle(range(1, 100))  # so many devices at once
TAKES_HOST_INDEX = {"index", "index_put", "index_put_", "_index_put_impl_"}


class Memory:
    """Lives as long as the host has a tensor in it."""


class LateTensor(torch.Tensor):
    """numbers: the ordinary tensor that it wraps. memory: shared with its views."""

    numbers: torch.Tensor
    memory: Memory
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, numbers: torch.Tensor, memory: Memory, stream: Stream) -> LateTensor:
        layout = {"strides": numbers.stride(), "storage_offset": numbers.storage_offset(), "dtype": numbers.dtype}
        with torch.inference_mode(False):  # it may become a view of any other
            self = torch.Tensor._make_wrapper_subclass(cls, numbers.shape, device=stream.device, **layout)
        self.numbers, self.memory, self.stream = numbers, memory, stream
        return self

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{func} outside of its device's `with`")

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(torch.tensor(index) if isinstance(index, list) else index)

    def data_ptr(self) -> int:
        return self.numbers.data_ptr()

    def tolist(self) -> Any:
        self.stream.wait()
        return self.numbers.tolist()


class Stream(TorchDispatchMode):
    """The queue; while it is entered, all of torch's operations on tensors of its device. recording: the graph that is made.

    pool: memory that graphs took. arriving: asynchronous copies to the host that are under way, by where they go.
    """

    def __init__(self) -> None:
        super().__init__()
        self.device = torch.device("meta", next(INDICES))
        self.recording: Graph | None = None
        self.pool: list[LateTensor] = []
        self.pinned: dict[int, torch.Tensor] = {}
        self.arriving: Counter[int] = Counter()
        self.races: list[str] = []
        self.queue: deque[Operation] = deque()
        self.num_run = 0

    def put(self, operation: Operation, *tensors: LateTensor) -> None:
        """tensors: those of the device that it works on."""
        if self.recording is None:
            self.queue.append(operation)
        else:
            self.recording.operations.append(operation)
            self.recording.needs += [weakref.ref(each.memory) for each in tensors]

    def wait(self, count: float = math.inf) -> None:
        """Until so many operations have run since the beginning, or all."""
        self.refuse_in_a_capture("waiting")
        with torch.inference_mode():
            while self.queue and self.num_run < count:
                self.num_run += 1
                self.queue.popleft()()

    def refuse_in_a_capture(self, what: str) -> None:
        if self.recording is not None:
            raise RuntimeError(f"{what} while a graph is recorded")

    def take(self, like: torch.Tensor) -> LateTensor:
        """Memory for a tensor of this shape, type and strides."""
        made = LateTensor(_poison(torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)), Memory(), self)
        if self.recording is not None:
            self.pool.append(made)
        return made

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        there = [each for each in tensors if each.device == self.device]
        if not there and kwargs.get("device") != self.device:
            return func(*args, **kwargs)
        # Where a device's name is meta, torch makes tensors of Python's numbers without the numbers.
        assert all(isinstance(each, LateTensor) for each in there), f"{func} of numbers that were not brought to the device"
        with self:
            found = func.decompose(*args, **kwargs)
        if found is not NotImplemented:
            return found
        name = func.overloadpacket.__name__
        if name in ("copy_", "_to_copy"):
            target, source = (args[0], args[1]) if name == "copy_" else (None, args[0])
            to = (kwargs.get("device") or source.device) if target is None else target.device
            if to != source.device:
                blocks = not (args[2] if len(args) > 2 else kwargs.get("non_blocking"))
                return self._cross(target, source, kwargs.get("dtype") or source.dtype, blocks)
        here = [each for each in tensors if each.device != self.device]
        if any(each.dim() for each in here):
            if name not in TAKES_HOST_INDEX:
                raise RuntimeError(f"torch's {name} of tensors on the host and on the device")
            self.wait()
        return self._compute(func, args, kwargs, there)

    def _cross(self, target: torch.Tensor | None, source: torch.Tensor, dtype: torch.dtype, blocks: bool) -> torch.Tensor:
        """A copy between host and device."""
        if isinstance(source, LateTensor):
            return self._bring_home(source, torch.empty(source.shape, dtype=dtype) if target is None else target, blocks)
        there = self.take(torch.empty_like(source, dtype=dtype)) if target is None else target
        assert isinstance(there, LateTensor)
        before, numbers = source.clone(), there.numbers
        is_pinned = not blocks and source.untyped_storage().data_ptr() in self.pinned
        if not is_pinned:
            self.refuse_in_a_capture("copying memory that is not pinned")
        is_once = self.recording is None  # a replay copies what is there then

        def run() -> None:
            if is_pinned and is_once and not torch.equal(before, source):
                self.races.append(f"host memory {tuple(source.shape)} was written before it was copied to the device")
            numbers.copy_(source if is_pinned else before)

        self.put(run, there)
        if blocks:
            self.wait()
        return there

    def _bring_home(self, source: LateTensor, host: torch.Tensor, blocks: bool) -> torch.Tensor:
        numbers, place = source.numbers, host.data_ptr()

        def run() -> None:
            host.copy_(numbers)
            self.arriving[place] -= 1
            if self.arriving[place] > 0:
                _poison(host)

        self.arriving[place] += 1
        self.put(run, source)
        if blocks:
            self.wait()
            return host
        return _poison(host)

    def _compute(self, func: Any, args: Any, kwargs: Any, there: list[LateTensor]) -> Any:
        """Here where that needs no numbers; else queued, behind what it works on."""
        given, named = tree_map_only(torch.Tensor, _bound, (args, kwargs))
        if "device" in named:
            named["device"] = torch.device("cpu")
        schema = func._schema
        if schema.is_mutable:
            self.put(lambda: func(*given, **named), *there)
            return kwargs.get("out", args[0])
        if schema.returns[0].alias_info is not None:  # a view
            memory = there[0].memory
            return tree_map_only(torch.Tensor, lambda each: LateTensor(each, memory, self), func(*given, **named))
        shapes = _shapes(func, given, named)
        if shapes is None:
            self.wait()
            return tree_map_only(torch.Tensor, lambda each: LateTensor(each, Memory(), self), func(*given, **named))
        made = tree_map_only(torch.Tensor, self.take, shapes)
        targets = [each.numbers for each in tree_leaves(made)]
        if "empty" not in schema.name:
            self.put(lambda: _copy(func(*given, **named), targets), *there, *tree_leaves(made))
        return made


class Graph:
    """needs: the memory that it works on."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self.operations: list[Operation] = []
        self.needs: list[weakref.ref[Memory]] = []

    def replay(self) -> None:
        assert all(each() is not None for each in self.needs), "a graph works on memory that was given back"
        for operation in (lambda: [_poison(each.numbers) for each in self._stream.pool], *self.operations):
            self._stream.put(operation)


def _bound(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.numbers if isinstance(tensor, LateTensor) else tensor.clone()


def _copy(found: Any, targets: list[torch.Tensor]) -> None:
    for target, numbers in zip(targets, tree_leaves(found), strict=True):
        target.copy_(numbers)


def _shapes(func: Any, args: Any, kwargs: Any) -> Any:
    """What comes of it, without numbers; None where that depends on numbers."""
    args, kwargs = tree_map_only(torch.Tensor, lambda each: each.to("meta"), (args, kwargs))
    try:
        found = func(*args, **kwargs | ({"device": torch.device("meta")} if "device" in kwargs else {}))
    except (NotImplementedError, RuntimeError):
        return None
    return found if all(isinstance(each, torch.Tensor) for each in tree_leaves(found)) else None


def _poison(tensor: torch.Tensor) -> torch.Tensor:
    is_number = tensor.dtype != torch.bool
    return tensor.fill_(float("nan") if tensor.is_floating_point() else torch.iinfo(tensor.dtype).max if is_number else 1)
