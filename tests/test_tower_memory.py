"""What towers take while they compute, against all that torch holds at once."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hearing import a_sound
from nanovllm_cli.hearing_spec import ConformerSpec, HearingSpec, Transcript
from nanovllm_cli.models import ear_conformer
from nanovllm_cli.models.ear import Ear, ear_dtype, ear_shapes, work_bytes
from nanovllm_cli.vision_spec import ImageTokens


class Held(TorchDispatchMode):
    """most: bytes of all tensors made since it began, when there were most."""

    def __init__(self) -> None:
        super().__init__()
        self.most = self._now = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for each in made if isinstance(made, list | tuple) else [made]:
            if isinstance(each, torch.Tensor) and (memory := each.untyped_storage())._cdata not in self._known:
                self._known.add(memory._cdata)
                self._now += memory.nbytes()
                weakref.finalize(memory, self._gone, memory._cdata, memory.nbytes())
        self.most = max(self.most, self._now)
        return made

    def _gone(self, key: int, num_bytes: int) -> None:
        self._known.remove(key)
        self._now -= num_bytes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("hidden", [40, 800])
def test_what_a_piece_of_a_sound_takes_is_told(hidden: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Most of it at convolutions, or in layers: not less than there is at once, and not much more."""
    monkeypatch.setattr(ear_conformer, "_ROWS_TOGETHER", 8)
    tower = ConformerSpec(34, (36, 5), hidden, 1, 2, 12, 50.0, 5, 0.5, "silu", 20, 48, False, 1e10, 1e-6)
    tensors = {name: torch.ones(shape, dtype=ear_dtype(name, dtype)) for name, shape in ear_shapes(tower).items()}
    hears = HearingSpec(tower, ImageTokens("a", "a"), 700, ("", ""), Transcript())
    ear, sound = Ear(tower, tensors), a_sound(hears, 700)
    with torch.inference_mode(), Held() as held:
        ear(sound)
    assert held.most <= work_bytes(tower, 700, dtype) <= 1.5 * held.most
