"""Platform: everything above the kernels that differs between a CPU and a GPU, in one object that a worker is given."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch

from nanovllm_cli.attention.backend import AttentionBackend
from nanovllm_cli.attention.kv_cache import CacheLayout, KVCache
from nanovllm_cli.batch import ImageRows
from nanovllm_cli.distributed.group import Group, Meeting
from nanovllm_cli.engine.placement import Part, Placement
from nanovllm_cli.engine.plan import Plan, Scheduled, StepOutput
from nanovllm_cli.engine.sampler import Sampler
from nanovllm_cli.kernels.ops import Ops
from nanovllm_cli.layers.kit import Share
from nanovllm_cli.model_spec import ModelSpec
from nanovllm_cli.models.decoder import Decoder
from nanovllm_cli.quant.format import Format
from nanovllm_cli.quant.low_rank import Beside, Chosen
from nanovllm_cli.quant.storage import WeightStorage

KeptRows = tuple[Scheduled, torch.Tensor]
"""A share, and the rows [T, hidden] that it wants behind the last norm."""
See = Callable[[Sequence[Scheduled]], ImageRows | None]
"""What the images of a step become: `Sight.rows`."""


def sees_nothing(scheduled: Sequence[Scheduled]) -> None:
    """What a runner sees of images that nobody has given the means to: requests have none."""
    assert not any(share.images for share in scheduled)


class PlanRunner(Protocol):
    """Carries out plans on one model. sampler: what draws on the host. see: gives images' rows. hidden: rows of the last step's
    shares that keep them."""

    cache: KVCache
    sampler: Sampler
    see: See
    hidden: list[KeptRows]

    def arranged(self, plan: Plan) -> Plan:
        """The plan with its shares in the order in which they are computed, which other processes that compute the model have to
        keep as well."""

    def run(self, plan: Plan, hidden: torch.Tensor | None = None) -> StepOutput:
        """Raises before anything is drawn if the step can't be computed; one bad row is reported in its Drawn instead.
        hidden: see Batch."""


class Platform(Protocol):
    """One device. Made from an EngineConfig, which it refuses with UnsupportedError where it can't do what is asked."""

    @property
    def ops(self) -> Ops: ...

    @property
    def processor(self) -> str:
        """What computes, as far as the bits of a result depend on it."""

    @property
    def kind(self) -> str:
        """What has to be alike of all that compute one model together: they choose the same ways, and the same experts."""

    @property
    def most_drafted(self) -> int:
        """See Executor."""

    @property
    def shares_memory(self) -> bool:
        """Whether processes that compute one model together have the same memory, and not a device's each."""

    def group(self, meeting: Meeting) -> Group:
        """How such processes bring together what each has computed."""

    def resolve_dtype(self, stored: set[str], spec: ModelSpec) -> torch.dtype:
        """The type to compute a model in, given those of the checkpoint's matrices (F32, BF16, …). UnsupportedError if there is
        none."""

    def enter(self) -> None:
        """Called by the thread that is going to use the device, before it does; often."""

    def check(self) -> None:
        """Raises LostDeviceError where the device can't be used any more."""

    def compile(self, dtype: torch.dtype) -> None:
        """What the weights and layers made so far need, with a word about it where it takes a while."""

    def available_bytes(self) -> int:
        """Memory that weights may take now."""

    def place(
        self, spec: ModelSpec, layout: CacheLayout, needed: int, sizes: Callable[[], Mapping[Part, int]], organs: int = 0
    ) -> Placement:
        """Where the weights of a model go, `needed` bytes in all, beside a cache of such a layout. sizes: what may be apart.
        organs: bytes of what sees and hears, which is loaded when it is asked for. DoesNotFitError where there is no room."""

    def make_storage(
        self, form: Format | None, num_rows: int, width: int, dtype: torch.dtype, *, far: bool = False
    ) -> WeightStorage:
        """An empty weight; form None is the compute type. far: as `place` has it. UnsupportedError for formats that this device
        has nothing for."""

    def dense_bytes(self, num_rows: int, width: int, dtype: torch.dtype) -> int:
        """What `make_storage` without a format will take."""

    def stack(self, parts: list[WeightStorage], dtype: torch.dtype) -> WeightStorage:
        """Weights that read the same input, as one with all their rows."""

    def divided(self, own: WeightStorage, share: Share, group: Group, dtype: torch.dtype) -> WeightStorage:
        """A weight of which this process has some rows, and the others the rest."""

    def with_adapters(
        self, weight: WeightStorage, sides: Sequence[Beside], dtype: torch.dtype, chosen: Chosen | None
    ) -> WeightStorage:
        """A weight whose products have up (down x) of each side added to them, or of those that rows choose; see
        `quant/low_rank.py`."""

    def backend(self, spec: ModelSpec, dtype: torch.dtype) -> AttentionBackend: ...

    def cache_budget(self, *models: Decoder) -> int:
        """Memory that the KV caches of these may take at most, once the weights are there."""

    def make_runner(
        self, model: Decoder, cache: KVCache, sampler: Sampler, recordable: bool, *, keeps_rows: bool = False
    ) -> PlanRunner:
        """recordable: whether the weights' formats allow a step to be recorded. keeps_rows: whether shares will ask for that."""
