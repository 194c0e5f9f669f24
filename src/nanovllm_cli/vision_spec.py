"""How a model sees, as plain values: what an image is made into before a tower (`tower_spec.py`) reads it, and which tokens of a
prompt stand for it.

Frozen values without tensors, which cross to other processes as they are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

from nanovllm_cli.canvas_spec import Canvas, Lying, Markers, are_canvases
from nanovllm_cli.mosaic import Mosaic
from nanovllm_cli.pictures import Clip as Clip
from nanovllm_cli.pictures import Image as Image
from nanovllm_cli.pictures import Picture as Picture
from nanovllm_cli.pictures import Sound as Sound
from nanovllm_cli.pictures import Video as Video
from nanovllm_cli.size_spec import SizeRule
from nanovllm_cli.tokens_spec import ImageTokens as ImageTokens
from nanovllm_cli.tower_spec import Query as Query
from nanovllm_cli.tower_spec import Stored as Stored
from nanovllm_cli.tower_spec import Stretch as Stretch
from nanovllm_cli.tower_spec import TowerSpec as TowerSpec
from nanovllm_cli.video_spec import Filmed, Moment, VideoSpec, are_moments


class PlacedImage(NamedTuple):
    """An image in a prompt, or a piece of a sound, or the text that an encoder reads, which are one line: from token `start` on,
    `rows` lines of `columns` tokens each stand for what a tower makes of it.

    ends_lines: behind each line is a token more, which is read as any other. has_grid: as a rotary position each has that of the
    image's beginning, its row and its column, and what follows begins behind the largest of them (M-RoPE, Wang et al. 2024).
    whole: its tokens see all of it, those behind them, too, so that one step has them all; in_windows: only in layers with a
    window. framed: in front of its lines is a token more that stands for it, and one behind them; and as rotary positions each
    but those two has its own, its column, its row, and that of the image among all, `ordinal`, from 0 on (XD-RoPE, HunYuan).
    behind: so many tokens behind those that stand for it belong to what is whole (PaliGemma's prompt), or fill up its blocks.
    leads: it is in front of a prompt and no part of the text, which begins behind it; see `CrossSpec`. shown: and which token of
    the prompt is the first that sees it, as it stands for it in the text; see `leading.py`.
    canvas: with a grid that it shares with others; `start` is then a token in front of its lines, which is read as any other, as
    are those behind. moment: of an image of a video.
    """

    image: Image | Sound
    start: int
    rows: int
    columns: int
    ends_lines: bool = False
    has_grid: bool = False
    whole: bool = False
    in_windows: bool = False
    framed: bool = False
    ordinal: int = 0
    canvas: Canvas | None = None
    behind: int = 0
    leads: bool = False
    shown: int | None = None
    moment: Moment | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens that stand for it, with those beside them that have positions of its grid, and those that belong to it."""
        beside = self.behind if self.canvas is None else self.behind + 1 + self.canvas.num_behind
        return self.rows * (self.columns + self.ends_lines) + 2 * self.framed + beside

    @property
    def num_rows(self) -> int:
        """Of what a tower makes of it."""
        return self.rows * self.columns + 2 * self.framed

    @property
    def num_alike(self) -> int:
        """Of its rows, those that the same token stands for; with what else has that token."""
        if self.shown is not None:
            return self.num_tokens + 1
        mosaic = self.image.mosaic if isinstance(self.image, Image) else None
        return self.num_rows - (0 if mosaic is None else mosaic.num_marks)

    def salted(self, salt: str) -> PlacedImage:
        """The same under a digest that nobody has without the salt."""
        own = hashlib.blake2b(salt.encode("utf-8", "surrogatepass") + self.image.digest, digest_size=16).digest()
        image = self.image
        return self._replace(image=replace(image, digest=own) if isinstance(image, Sound) else image._replace(digest=own))

    @property
    def end(self) -> int:
        return self.start + self.num_tokens

    @property
    def extent(self) -> int:
        """Rotary positions that it takes."""
        if self.leads:
            return 0
        if self.moment is not None:
            return self.moment.extent
        if self.canvas is not None:
            return self.canvas.extent
        return max(self.rows, self.columns) if self.has_grid else self.num_tokens


class TokenIds(list[int]):
    """A prompt's tokens, and the images, or pieces of sounds, that some of them stand for, in their order."""

    def __init__(self, ids: Iterable[int] = (), images: Iterable[PlacedImage] = ()) -> None:
        super().__init__(ids)
        self.images = tuple(images)

    def __add__(self, behind: list[int]) -> TokenIds:  # type: ignore[override]
        """With tokens behind these; their images stay where they are."""
        assert not isinstance(behind, TokenIds) or not behind.images
        return TokenIds([*self, *behind], self.images)


@dataclass(frozen=True, slots=True)
class VisionSpec:
    """All that a model needs to see. mean, std: of the three colours, from 0 to 1, which are taken off and divided by. has_grid:
    see `PlacedImage`. whole: tokens of an image see all of it, also what is behind them; whole_in_windows: only in
    layers with a window. markers: of pieces that share a canvas; see `PlacedImage`. prefix: a prompt is an image and a text
    behind it, so many tokens at most, all of which see each other; 0: it is anything. video: how it sees one, if it does. added:
    what a tower makes is added to the embedding of the token that stands for it. most_images: of a prompt; 0: any number."""

    tower: TowerSpec
    size: SizeRule
    tokens: ImageTokens
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    has_grid: bool = False
    whole: bool = False
    whole_in_windows: bool = False
    markers: Markers | None = None
    prefix: int = 0
    video: VideoSpec | None = None
    added: bool = False
    most_images: int = 0

    def limited(self, most: int, fps: float | None = None, most_frames: int = 768) -> VisionSpec:
        """The same for images of at most so many tokens, with those at the ends of lines, where their size is not fixed, and for
        videos of frames that are no larger; see `VideoSpec.limited`."""
        tower = self.tower
        each = 0 if tower.resampler is None else tower.resampler.queries
        size = self.size.limited(most, tower.cell, ends=self._ends, framed=self._framed, squares=tower.squares, each=each)
        video = None if self.video is None else self.video.limited(most, tower.cell, fps, most_frames)
        return replace(self, size=size, video=video)

    @property
    def leads(self) -> bool:
        """Whether images lie in front of a prompt; see `leading.py`."""
        return self.tower.tiles is not None

    def asked(self, most: int, usual: int) -> int:
        """So many tokens of an image at the most, `usual` being what nobody has asked for: those in front of a text are no part
        of it, and are fewer only where somebody wants fewer."""
        return 1 << 31 if self.leads and most >= usual else most

    @property
    def least_tokens(self) -> int:
        """Of an image, however small."""
        rule = self.size
        if rule.margin:
            side = rule.tile // rule.multiple
            return Mosaic(1, 1, side, side, rule.margin, int(rule.ends)).num_rows(side, 0)
        if self.tower.resampler is not None:
            return self.tower.resampler.queries * rule.num_shown
        is_tile = rule.kind not in ("area", "grid", "padded") and (rule.kind != "slices" or rule.grows == "always")
        side = rule.longest_side if rule.kind in ("square", "framed", "pages") else rule.tile if is_tile else 0
        side = (side or self.tower.cell) // self.tower.cell
        beside = 3 if rule.apart else self.leads or rule.kind in ("mosaic", "pages")
        return (1 + rule.always_cut) * (side * (side + self._ends) + 2 * self._framed + beside)

    def num_tokens(self, picture: Picture | Clip | Video) -> int:
        """That stand for it, beside what is around them."""
        assert isinstance(picture, Picture | Video)
        return sum(self.placed(image, 0).num_tokens for image in picture.images)

    def fits(self, images: Iterable[PlacedImage], num_tokens: int) -> bool:
        """Whether images are as `placed` gives them, and in their order in a prompt of so many tokens."""
        end, images = 0, list(images)
        filmed = [Filmed(each.start, each.end, *each[2:4], each._replace(moment=None).extent, each.moment) for each in images]
        if not are_moments(filmed) or (self.video is None and any(each.moment for each in filmed)):
            return False
        if self.markers is not None and not are_canvases(Lying(each.start, each.end, *each[2:4], each.canvas) for each in images):
            return False
        for ordinal, placed in enumerate(images):
            if not isinstance(placed.image, Image):
                return False
            height, width, pixels, _, mosaic, frames = placed.image
            if frames != 1 and (placed.moment is None or not self.tower.films or frames != self.tower.frames):
                return False
            if mosaic is None and self.size.kind == "mosaic" and placed.moment is None:
                return False
            if self.tower.sam is not None and height != width and self.size.kind != "pages":
                return False
            if self.size.kind == "pages" and not self.size.is_page(height, width):
                return False
            size, cell = self.size, self.tower.cell
            if mosaic is not None and not mosaic.fits(height, width, size.tile // cell, size.grids, size.laid):
                return False
            if self.prefix and (placed.start or ordinal or not 0 <= placed.behind <= num_tokens or placed.end > self.prefix):
                return False
            plain = placed._replace(moment=None) if self.markers is None else placed._replace(canvas=None)
            plain = plain._replace(behind=0) if self.prefix or self.leads else plain
            plain = plain._replace(shown=None) if self.leads else plain
            if self.leads and (height // size.tile) * (width // size.tile) > size.most_tiles:
                return False
            if plain != self.placed(placed.image, placed.start, ordinal) or not 0 < 3 * frames * height * width == len(pixels):
                return False
            unit = size.tile if self.leads else self.tower.cell
            if height % unit or width % unit or placed.start < end:
                return False
            end = placed.end
        return end <= num_tokens

    @property
    def _framed(self) -> bool:
        """See `PlacedImage`."""
        return self.tower.projector == "lined"

    @property
    def _ends(self) -> int:
        """Tokens behind each line of an image, or rows of a tower's."""
        return int(self._framed or bool(self.tokens.line_end) or self.size.in_lines)

    def placed(self, image: Image | Sound, start: int, ordinal: int = 0) -> PlacedImage:
        """An image where its first token is the prompt's `start`, with so many images before it."""
        assert isinstance(image, Image)
        if image.mosaic is not None:
            columns = image.mosaic.num_rows(image.width // self.tower.cell, self.tower.squares)
            return PlacedImage(image, start, 1, columns, whole=self.whole)
        cell, framed = self.tower.cell, self._framed
        if self.leads:
            count = image.height * image.width // self.size.tile**2
            return PlacedImage(image, start, 1, count * (self.tower.positions + 1), leads=True)
        if self.tower.resampler is not None:
            return PlacedImage(image, start, 1, self.tower.resampler.queries)
        if self.tower.sam is not None:
            return PlacedImage(image, start, 1, self.tower.sam.num_rows(image.height // cell, image.width // cell))
        return PlacedImage(
            image, start, image.height // cell, image.width // cell + framed, bool(self.tokens.line_end), self.has_grid,
            self.whole, self.whole_in_windows, framed, ordinal if framed else 0,
        )  # fmt: skip

    def filmed(self, video: Video, number: int, start: int) -> PlacedImage:
        """The image of a video with that number, from 0 on, where its first token is the prompt's `start`."""
        placed = self.placed(video.images[number], start)
        if not video.times:
            return placed._replace(moment=Moment(0, placed.extent))
        time, is_last = video.times[number], number == len(video.images) - 1
        extent = max(time + 1, placed.rows, placed.columns) if is_last else 0
        return placed._replace(moment=Moment(time, extent))
