"""What the images, or sounds, of a step become: rows in the place of tokens' embeddings, and rotary positions.

A tower is loaded when the first image comes, so that who sends none neither waits nor gives memory for it. It computes one image
at a time, whatever step that is part of, and a large one a few layers a step (`looking.py`); what it made of the last images is
kept, for the next part of a prompt, its next turn, and whoever comes back.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from nanovllm_cli.batch import ImageRows
from nanovllm_cli.config import EngineConfig
from nanovllm_cli.engine.plan import Look, Scheduled
from nanovllm_cli.errors import DoesNotFitError, NanovllmError, UnsupportedError
from nanovllm_cli.hearing_spec import RATE, Sense, Senses
from nanovllm_cli.images.sizes import most_rows
from nanovllm_cli.model_spec import ModelSpec
from nanovllm_cli.models import ear
from nanovllm_cli.models.tower import work_bytes
from nanovllm_cli.models.tower_layers import Stages, TowerRows, next_stage
from nanovllm_cli.reading_spec import ReadingSpec
from nanovllm_cli.vision_spec import Image, PlacedImage, Sound
from nanovllm_cli.weights.checkpoint import Checkpoint, open_checkpoint
from nanovllm_cli.weights.hearing import ear_parts, hearing_bytes, load_ear, read_hearing
from nanovllm_cli.weights.mmproj import checked_mmproj, load_ear_gguf, load_mmproj, open_mmproj
from nanovllm_cli.weights.vision import check_tower, load_tower, read_vision, vision_bytes

logger = logging.getLogger(__name__)

KEPT_BYTES = 256 << 20
MOST_BEGUN = 2
"""Images of which some layers are computed: one that somebody more urgent came before waits, a third begins anew."""


@dataclass(slots=True)
class _Begun:
    """An image that is being computed. left: stages. seconds: that it took so far."""

    stages: Stages
    left: int
    seconds: float = 0.0


class AnyTower(Protocol):
    """A `Tower` or an `Ear`, of what it is for."""

    @property
    def stages(self) -> Callable[[Any], Stages]: ...


@dataclass(slots=True, eq=False)
class Organ:
    """What a model sees by, or hears by, or reads by. load: gives the tower. num_bytes: what it takes at the most, with an image
    of the largest size in it."""

    sense: Sense | ReadingSpec
    load: Callable[[], AnyTower]
    num_bytes: int
    _tower: AnyTower | None = None
    _failure: NanovllmError | None = None

    def tower(self) -> AnyTower:
        """Loaded, where it is not yet. A failure is told again without another try: files are large, and others wait."""
        if self._failure is not None:
            raise self._failure
        if self._tower is None:
            try:
                self._tower = self.load()
            except NanovllmError as failure:
                self._failure = failure
                raise
        return self._tower


class Sight:
    """Of a model that sees, or hears, or both. num_bytes: of its organs, and what is kept. num_computed: images so far, and
    sounds, and texts. told: called before each layer of one, as that may take seconds."""

    def __init__(self, *organs: Organ) -> None:
        self.senses = Senses.of(*(organ.sense for organ in organs))
        self.num_bytes = sum(organ.num_bytes for organ in organs) + KEPT_BYTES
        self._organs = organs
        self.told: Callable[[], object] = lambda: None
        self.num_computed = 0
        self._kept: OrderedDict[bytes, TowerRows] = OrderedDict()
        self._begun: OrderedDict[bytes, _Begun] = OrderedDict()

    def rows(self, scheduled: Sequence[Scheduled]) -> ImageRows | None:
        """Of a step's tokens; None where none stands for an image."""
        if not any(share.images for share in scheduled):
            return None
        first = 0
        places: list[np.ndarray] = []
        found: list[list[torch.Tensor]] = []
        for share in scheduled:
            for placed in share.images:
                place, index = _rows_of(placed, share)
                if len(index):
                    made, taken = self._made(placed.image), torch.from_numpy(index)
                    places.append(first + place)
                    found.append([each[taken.to(each.device)] for each in (made.rows, *made.deep)])
            first += len(share.token_ids)
        if not places:
            return None
        most = max(map(len, found))
        for each in found:  # of what is heard nothing is added behind layers
            each += [torch.zeros_like(each[0])] * (most - len(each))
        values, *deep = (torch.cat(each) for each in zip(*found, strict=True))
        vision = self.senses.vision
        behind = () if vision is None or not deep else vision.tower.deep_behind
        added = vision is not None and vision.added
        return ImageRows(torch.from_numpy(np.concatenate(places)).to(values.device), values, tuple(deep), behind, added)

    def look(self, look: Look) -> int:
        """Computes stages of an image for later steps; how many are left."""
        return 0 if self._rows_after(look.image, look.num_stages) is not None else self._begun[look.image.digest].left

    def _made(self, image: Image | Sound) -> TowerRows:
        made = self._rows_after(image, self.senses.layers_of(image))
        assert made is not None
        return made

    def _rows_after(self, image: Image | Sound, num_stages: int) -> TowerRows | None:
        """None where some are left then. What is broken off begins anew."""
        made = self._kept.get(image.digest)
        if made is not None:
            self._kept.move_to_end(image.digest)
            return made
        begun = self._begun.pop(image.digest, None)
        if begun is None:
            (tower,) = (organ.tower() for organ in self._organs if organ.sense is self.senses.of_tower(image))
            begun = _Begun(tower.stages(image), self.senses.layers_of(image))
        while len(self._begun) >= MOST_BEGUN:
            self._begun.popitem(last=False)
        made = self._computed(image, begun, num_stages)
        if made is None:
            self._begun[image.digest] = begun
            return None
        self._kept[image.digest] = made
        while len(self._kept) > 1 and sum(map(_num_bytes, self._kept.values())) > KEPT_BYTES:
            self._kept.popitem(last=False)
        return made

    def _computed(self, image: Image | Sound, begun: _Begun, num_stages: int) -> TowerRows | None:
        start, made = time.monotonic(), None
        for _ in range(min(num_stages, begun.left)):
            self.told()
            try:
                made = next_stage(begun.stages)
            except torch.OutOfMemoryError:
                told = f"{_told(image, self.senses)} does not fit the GPU beside weights and cache"
                hint = "--kv-cache SIZE makes the cache smaller, --image-max-tokens N images"
                raise DoesNotFitError(told, hint) from None
            begun.left -= 1
        begun.seconds += time.monotonic() - start
        if made is not None:
            self.num_computed += 1
            logger.info("%s: %d tokens in %.2f s", _told(image, self.senses), len(made.rows), begun.seconds)
        return made


def _told(image: Image | Sound, senses: Senses) -> str:
    if isinstance(image, Sound) and image.is_text:
        return f"a text of {image.frames} tokens"
    if isinstance(image, Sound):
        assert senses.hearing is not None, "it is heard"
        return f"a sound of {image.heard * senses.hearing.hop / RATE:.1f} seconds"
    what = "an image" if image.frames == 1 else f"{image.frames} frames"
    return f"{what} of {image.width} x {image.height} pixels"


class Place(NamedTuple):
    """Where towers come from and compute. mmproj: the file that they are in, if that is one of its own."""

    checkpoint: Checkpoint
    mmproj: str | None
    dtype: torch.dtype
    device: torch.device


class Limits(NamedTuple):
    """most_tokens: of an image, or of a video's frame. fps, most_frames: of a video; see `VideoSpec.limited`."""

    most_tokens: int
    fps: float | None
    most_frames: int


def eyes_of(place: Place, model: ModelSpec, limits: Limits) -> Organ | None:
    """Of a checkpoint whose model reads images, and perhaps videos; None where it does not. Raises CheckpointError and
    UnsupportedError for a tower that nothing can be made of, UsageError for another model's file."""
    checkpoint, mmproj, dtype, device = place
    if mmproj is not None:
        vision = checked_mmproj(mmproj, checkpoint, model.hidden_size).vision
    elif (vision := read_vision(checkpoint)) is not None:
        check_tower(checkpoint, vision)
    if vision is None:
        return None
    windows = [attention.window for attention in model.attentions if attention.window is not None]
    asked = vision.asked(limits.most_tokens, EngineConfig().image_max_tokens)
    most_tokens = min([asked, *windows] if vision.whole else [asked])
    spec = vision.limited(most_tokens, limits.fps, limits.most_frames)
    if spec.whole and (most := most_rows(spec)) > min(windows, default=most):  # attention is bounded on either side
        raise UnsupportedError(f"images of {most} tokens that see each other in layers with windows of {min(windows)}")

    if spec.prefix:
        spec = replace(spec, prefix=min([spec.prefix, *windows]))

    def load() -> AnyTower:
        if mmproj is None:
            with open_checkpoint(checkpoint.path) as again:
                return load_tower(again, spec, dtype, device)
        with open_mmproj(mmproj) as file:
            return load_mmproj(file, spec, dtype, device)

    num_axes = 4 if spec.tower.projector == "lined" else 3 if spec.has_grid else 0
    if num_axes and any(len(rope.axes) != rope.dim // 2 or len(rope.sections) != num_axes for rope in model.ropes):
        raise UnsupportedError("the files don't say how rotary positions are divided among time, rows and columns")
    sizes = [spec] if spec.video is None else [spec, replace(spec, size=spec.video.size)]
    work = work_bytes(spec.tower, max(map(most_rows, sizes)) * spec.tower.cell**2, dtype)
    waiting = (MOST_BEGUN - 1) * work // 4  # of the 17 rows of a patch, its own and its keys and values
    return Organ(spec, load, vision_bytes(spec, dtype) + work + waiting)


def ears_of(place: Place, model: ModelSpec) -> Organ | None:
    """The same of one that hears."""
    checkpoint, mmproj, dtype, device = place
    if mmproj is not None:
        hearing = checked_mmproj(mmproj, checkpoint, model.hidden_size).hearing
    elif (hearing := read_hearing(checkpoint)) is not None:
        ear_parts(checkpoint, hearing)
    if hearing is None:
        return None
    spec = hearing

    def load() -> ear.Ear:
        if mmproj is None:
            with open_checkpoint(checkpoint.path) as again:
                return load_ear(again, spec, dtype, device)
        with open_mmproj(mmproj) as file:
            return load_ear_gguf(file, spec, dtype, device)

    work = MOST_BEGUN * ear.work_bytes(spec.tower, spec.piece, dtype)
    return Organ(spec, load, hearing_bytes(spec, dtype) + work)


def _num_bytes(made: TowerRows) -> int:
    return sum(each.nbytes for each in (made.rows, *made.deep))


def _rows_of(placed: PlacedImage, share: Scheduled) -> tuple[np.ndarray, np.ndarray]:
    """Places among the share's tokens of those that stand for a part of the image, and which row of the tower's that is."""
    first, behind = max(placed.start, share.start), min(placed.end - placed.behind, share.start + len(share.token_ids))
    begin = placed.start + (placed.canvas is not None)
    line, column = np.divmod(np.arange(first, behind) - begin, placed.columns + placed.ends_lines)
    is_part = (column < placed.columns) & (line >= 0)
    if placed.canvas is not None:
        is_part &= line < placed.rows
    return np.arange(first, behind)[is_part] - share.start, (line * placed.columns + column)[is_part]


def rotary_positions(scheduled: Sequence[Scheduled], places: np.ndarray) -> np.ndarray:
    """[T] int64, or [3, T] where tokens stand for images with a grid, [4, T] where for framed ones: see `Batch`. Those of what
    leads a text are below 0. places [T]: theirs in their sequences."""
    if any(placed.framed for share in scheduled for placed in share.images):
        return _positions_in_frames(scheduled, places)
    shifts = [share.shift for share in scheduled]
    if any(shifts):
        places = places + np.repeat(np.array(shifts, np.int64), [len(share.token_ids) for share in scheduled])
    if any(placed.leads for share in scheduled for placed in share.images):
        # A share in front of whose tokens all of it is has that in its shift.
        leads = [sum(placed.num_tokens for placed in share.images if placed.leads) for share in scheduled]
        return places - np.repeat(np.array(leads, np.int64), [len(share.token_ids) for share in scheduled])
    if not any(placed.has_grid for share in scheduled for placed in share.images):
        return places
    positions = np.repeat(places[None], 3, axis=0)
    first = 0
    for share in scheduled:
        behind = first + len(share.token_ids)
        shift = share.shift
        for placed in share.images:
            if not placed.has_grid:
                continue
            begin, end = (min(max(at - share.start, 0), len(share.token_ids)) + first for at in (placed.start, placed.end))
            own = np.arange(begin, end) - first + share.start - placed.start
            positions[:, begin:end] = np.maximum(placed.start + shift + _grid_of(placed)[:, own], 0)
            positions[:, end:behind] += placed.extent - placed.num_tokens
            shift += placed.extent - placed.num_tokens
        first = behind
    return positions


def _grid_of(placed: PlacedImage) -> np.ndarray:
    """[3, tokens] int64: what a grid adds to the position of its beginning."""
    rows, columns, canvas = placed.rows, placed.columns, placed.canvas
    if canvas is None:
        grid = _crossed(np.arange(rows), np.arange(columns))
        grid[0] += 0 if placed.moment is None else placed.moment.time
        return grid
    if canvas.is_whole:
        before, behind = (-1, -1), (canvas.tall, canvas.wide)
        inside = _crossed(_stretched(rows, canvas.tall), _stretched(columns, canvas.wide))
    else:
        before, behind = (canvas.top, canvas.left), (canvas.top + rows - 1, canvas.left + columns - 1)
        inside = _crossed(canvas.top + np.arange(rows), canvas.left + np.arange(columns))
    further = (0, 0) if canvas.is_last else (canvas.top + rows - 1, canvas.wide)  # what ends a line of pieces is at its right
    beside = np.array([before, behind, *[further] * (canvas.num_behind - 1)], np.int64).T
    beside = np.concatenate([np.zeros_like(beside[:1]), beside])
    return np.concatenate([beside[:, :1], inside, beside[:, 1:]], axis=1)


def _crossed(lines: np.ndarray, columns: np.ndarray) -> np.ndarray:
    line, column = np.repeat(lines, len(columns)), np.tile(columns, len(lines))
    return np.stack([np.zeros_like(line), line, column])


def _stretched(count: int, over: int) -> np.ndarray:
    """So many places over a longer side, from end to end, with torch's rounding, as models were trained with."""
    return torch.linspace(0, over - 1, count).round().to(torch.int64).numpy()


def _positions_in_frames(scheduled: Sequence[Scheduled], places: np.ndarray) -> np.ndarray:
    positions = np.repeat(places[None], 4, axis=0)
    first = 0
    for share in scheduled:
        for placed in share.images:
            begin, end = (min(max(at - share.start, 0), len(share.token_ids)) for at in (placed.start + 1, placed.end - 1))
            line, column = np.divmod(np.arange(begin, end) + share.start - placed.start - 1, placed.columns)
            positions[1:, first + begin : first + end] = column, line, np.full_like(line, placed.ordinal)
        first += len(share.token_ids)
    return positions
