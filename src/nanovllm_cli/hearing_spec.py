"""How a model hears, as plain values: what a sound is made into before a tower reads it, what the tower is, and which tokens of a
prompt stand for it. What takes an image's place among what `vision_spec.py` has, so that an engine treats both alike.

Frozen values without tensors, which cross to other processes as they are.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from nanovllm_cli.cross_spec import lead_of
from nanovllm_cli.reading_spec import ReadingSpec
from nanovllm_cli.vision_spec import (
    Clip,
    Image,
    ImageTokens,
    Picture,
    PlacedImage,
    Sound,
    TowerSpec,
    Video,
    VisionSpec,
)

RATE = 16_000
"""Samples a second of all that is heard here."""
HOP, WINDOW = 160, 400
"""Samples from one frame of a spectrogram to the next, and in each of them (Whisper, Radford et al. 2022)."""
WAVE = (127, 64), (7, 3), (3, 2)
"""Places that three convolutions over samples see, and from one of these to the next (Moonshine, Jeffries et al. 2024)."""


class ShawSpec(NamedTuple):
    """What makes an EarSpec's layers a conformer's (Gulati et al. 2020) that see blocks of so many rows, with distances up to
    `farthest` (Shaw et al. 2018), and its projector queries. kernel: of the convolutions along time, over channels `widened`.
    classes: what rows are read as halfway up. kept: layers whose rows count beside the last one's, 0: what they begin with. Of
    each window of so many rows so many queries make as many, of query_size, in query_layers (Li et al. 2023)."""

    block: int
    farthest: int
    kernel: int
    widened: int
    classes: int
    kept: tuple[int, ...]
    window: int
    queries: int
    query_size: int
    query_layers: int
    query_heads: int
    query_inner: int
    query_eps: float


@dataclass(frozen=True, slots=True)
class EarSpec:
    """A transformer that reads spectrograms of num_bins bands (Whisper's encoder, Radford et al. 2022).

    front: what makes rows of frames. "line": two convolutions along time, the second of which halves it; "plane": frames in
    chunks of `chunk`, each an image with three convolutions of `channels`, which halve both sides, and a matrix (Qwen3-Omni);
    "pairs": a matrix over two frames; "wave": frames are samples, and three convolutions (`WAVE`) of so many channels, twice as
    many and so many make rows of them, with a norm of all numbers of a piece behind the first. shaw: what layers and projector
    are where front is "pairs", "queries".
    positions: learned ones that are added to so many rows; 0: sines and cosines are, from each chunk's beginning on, or, where
    there is `turned`, nothing: so many dimensions of each head turn by the position then, the first by 1 radian, the last by
    about 1 / theta (Su et al. 2021). timed: in front of the projector so many numbers of a row turn by the time at which it is in
    its sound and by which of the pieces it is in, and as many more by that and its place there, scaled by theta (Music Flamingo).
    sees_silence: also what only fills up a piece is seen by its layers. activation: of an MLP,
    down(act(up(x))). key_bias: whether keys have one. bare: norms, and matrices of attention, have none; and what turns of a head
    lies in pairs beside each other. pooled: of so many rows behind each other the mean is what counts.
    joined: so many rows are one to the projector. projector: "two" layers with an activation between them, projector_size rows,
    or "one", or "none": the last norm gives what is read; projector_bias: of theirs.
    """

    num_bins: int
    front: Literal["line", "plane", "pairs", "wave"]
    positions: int
    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    out_size: int
    activation: Literal["silu", "gelu", "gelu_tanh", "quick_gelu"]
    projector: Literal["one", "two", "queries", "none"]
    projector_size: int = 0
    projector_bias: bool = False
    projector_activation: Literal["silu", "gelu", "gelu_tanh", "quick_gelu"] = "gelu"
    chunk: int = 0
    channels: int = 0
    key_bias: bool = False
    pooled: int = 1
    joined: int = 1
    eps: float = 1e-5
    turned: int = 0
    theta: float = 1e4
    timed: int = 0
    sees_silence: bool = False
    shaw: ShawSpec | None = None
    bare: bool = False

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def gated(self) -> bool:
        return False

    @property
    def qk_norm(self) -> bool:
        return False

    @property
    def normed(self) -> bool:
        return False

    def num_rows(self, frames: int) -> int:
        """That its layers read."""
        if self.front == "pairs":
            return frames // 2
        if self.front == "line":
            return -(-frames // 2)
        if self.front == "wave":
            return samples_in_rows(frames)
        whole, rest = divmod(frames, self.chunk)
        return whole * _thrice_halved(self.chunk) + _thrice_halved(rest)

    def num_made(self, frames: int) -> int:
        """Rows of its output, each of which a token stands for."""
        if self.shaw is not None:
            return -(-self.num_rows(frames) // self.shaw.window) * self.shaw.queries
        return self.num_rows(frames) // (self.pooled * self.joined)

    def layer_work(self, sound: Image | Sound) -> int:
        """Multiplications of one layer."""
        assert isinstance(sound, Sound)
        rows = self.num_rows(sound.frames if self.sees_silence else sound.heard)
        if self.shaw is not None:
            own = 4 * self.hidden_size + 4 * self.intermediate_size + 3 * self.shaw.widened + 4 * self.shaw.block
            return rows * self.hidden_size * own
        return rows * self.hidden_size * (4 * self.hidden_size + 2 * self.intermediate_size + 2 * rows)


class ConformerSpec(NamedTuple):
    """A tower of attention to what was shortly before and of convolutions (Gulati et al. 2020), as the Universal Speech Model
    (Zhang et al. 2023) and Gemma 4 have it, which reads spectrograms of num_bins bands.

    channels: of two convolutions that halve both sides of a spectrogram. Each layer is an MLP, attention, a convolution along
    time and another MLP; what the MLPs give counts `share` times. window: rows that a row sees, itself the last one; scores
    reach up to softcap. kernel: of the convolution, whose last place is the row itself. activation: of MLPs, and behind the
    convolution. clipped: bounds of what each of the layers' matrices reads and gives. limit: what numbers are cut off at where
    norms read them. made_size: of rows behind the layers, of which a norm without a gain and a matrix make those of out_size.
    eps: of norms in front, at convolutions and in the end.

    A tuple, by which whoever decodes a HearingSpec tells it from an EarSpec.
    """

    num_bins: int
    channels: tuple[int, int]
    hidden_size: int
    num_layers: int
    num_heads: int
    window: int
    softcap: float
    kernel: int
    share: float
    activation: Literal["silu", "gelu", "gelu_tanh", "quick_gelu"]
    made_size: int
    out_size: int
    clipped: bool
    limit: float
    eps: float

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def intermediate_size(self) -> int:
        return 4 * self.hidden_size

    @property
    def front(self) -> Literal["plane"]:
        return "plane"

    @property
    def positions(self) -> int:
        return 0

    @property
    def key_bias(self) -> bool:
        return False

    @property
    def halved_bins(self) -> int:
        """Bands that the second convolution leaves."""
        return -(-self.num_bins // 4)

    def num_rows(self, frames: int) -> int:
        """That its layers read."""
        return -(-frames // 4)

    def num_made(self, frames: int) -> int:
        """Rows of its output, each of which a token stands for."""
        return self.num_rows(frames)

    def layer_work(self, sound: Image | Sound) -> int:
        """Multiplications of one layer."""
        assert isinstance(sound, Sound)
        rows = self.num_rows(sound.heard)
        return rows * self.hidden_size * (7 * self.hidden_size + 4 * self.intermediate_size + self.kernel + 4 * self.window)


AnyEar = EarSpec | ConformerSpec


@dataclass(frozen=True, slots=True)
class Transcript:
    """How a model is asked for what is said in a sound. question: behind the sound; question_in: where the language is known, its
    {name} in it.
    own: what a client's own words are: "subject": what it is about, for a system's message; "question": they take ours' place.
    begins: what the answer is given to begin with; begins_in: where the language is known, its {name} or ISO 639 {code}."""

    question: str = ""
    question_in: str = ""
    own: Literal["subject", "question", "nothing"] = "nothing"
    begins: str = ""
    begins_in: str = ""


@dataclass(frozen=True, slots=True)
class HearingSpec:
    """All that a model needs to hear. tokens: `token` as often as there are rows of the tower's output. piece: frames that a
    tower reads at once; the rest of a longer sound are further pieces. padded: the last one is as long, by silence; framed: what
    is heard of it is not longer for that. least: samples that a sound is padded to by silence. most: pieces of a sound; 0: any
    number. around: what stands in front of a sound's tokens and behind them, where a chat template knows nothing of sounds and
    does not write it. transcript: how it is asked for one. spectrogram: "whisper" of all of a sound, which is cut into pieces
    then; "apart": the same of each piece by itself; "universal": of each piece, of whose frames none reaches beyond its
    samples; "pairs": an even number of frames, as torchaudio makes them. leads: the decoder attends to one piece beside its text,
    which begins behind its tokens (`CrossSpec`), and writes down what is said and nothing else; a sound is not cut beforehand, as
    the next piece begins where what is said in one has ended, or, of one whose pieces are not padded, where it is quiet
    (`text/plain_dictation.py`). decoder: layers and heads of such a decoder; text_len: tokens that one knows whose pieces are not
    padded, for the longest."""

    tower: AnyEar
    tokens: ImageTokens
    piece: int
    around: tuple[str, str]
    transcript: Transcript
    padded: bool = False
    framed: bool = False
    least: int = 0
    most: int = 0
    spectrogram: Literal["whisper", "apart", "universal", "pairs"] = "whisper"
    leads: bool = False
    decoder: tuple[int, int] = (0, 0)
    text_len: int = 0

    @property
    def hop(self) -> int:
        """Samples from one frame to the next."""
        return 1 if self.tower.front == "wave" else HOP

    @property
    def has_grid(self) -> bool:
        """See `PlacedImage`."""
        return False

    @property
    def whole(self) -> bool:
        """See `VisionSpec`."""
        return False

    @property
    def plain(self) -> bool:
        """Whether it leads, and has as many rows as it is long: nothing is told beside what is said (Moonshine)."""
        return self.leads and not self.padded

    @property
    def timed(self) -> bool:
        """Whether it matters which of its sound's pieces one is."""
        return isinstance(self.tower, EarSpec) and self.tower.timed > 0

    @property
    def least_tokens(self) -> int:
        """Of a sound, however short."""
        return self.tower.num_made(self.piece) if self.padded and not self.framed else 1

    def num_tokens(self, clip: Picture | Clip | Video) -> int:
        """That stand for it, beside what is around them."""
        assert isinstance(clip, Clip)
        return sum(self.tower.num_made(sound.heard) for sound in clip.images)

    def fits(self, sounds: Iterable[PlacedImage], num_tokens: int) -> bool:
        """Whether pieces are as `placed` gives them, and in their order in a prompt of so many tokens."""
        end = 0
        for placed in sounds:
            sound = placed.image
            if not isinstance(sound, Sound) or sound.bins != self.tower.num_bins or placed.start < end:
                return False
            if sound.ordinal and not (self.timed and 0 < sound.ordinal < self.most):
                return False
            if not 0 < sound.heard <= sound.frames <= self.piece or len(sound.values) != 4 * sound.frames * sound.bins:
                return False
            if placed != self.placed(sound, placed.start) or not placed.num_tokens:
                return False
            if self.leads and (placed.start or (self.padded and sound.heard != self.piece)):
                return False
            end = placed.end
        return end <= num_tokens

    def window(self, sound: Sound, first: int) -> Sound:
        """A piece of a sound that is not cut (`leads`), from frame `first` on. Where the sound has no more, it is zeros, as in
        transformers and OpenAI's own code."""
        row = 4 * sound.bins
        values = sound.values[first * row : (first + self.piece) * row]
        return Sound.of(values + bytes(self.piece * row - len(values)), self.piece, self.piece, sound.bins)

    def part(self, sound: Sound, first: int, end: int) -> Sound:
        """The same of one whose pieces are as long as they are: from frame `first` to `end`."""
        row = 4 * sound.bins
        return Sound.of(sound.values[first * row : end * row], end - first, end - first, sound.bins)

    def placed(self, sound: Image | Sound, start: int, ordinal: int = 0) -> PlacedImage:
        """A piece where its first token is the prompt's `start`."""
        assert isinstance(sound, Sound)
        rows = self.tower.num_made(sound.heard)
        lead = lead_of(rows) if self.leads else rows
        shown = lead if self.plain else None  # of pieces of one length, all rows are always seen
        return PlacedImage(sound, start, 1, rows, behind=lead - rows, leads=self.leads, shown=shown)


Sense = VisionSpec | HearingSpec


class Senses(NamedTuple):
    """What an engine's model perceives by, beside its texts: one of the first two at least; or how an encoder reads its texts."""

    vision: VisionSpec | None = None
    hearing: HearingSpec | None = None
    reading: ReadingSpec | None = None

    @classmethod
    def of(cls, *senses: Sense | ReadingSpec) -> Senses:
        """Of each kind the last."""
        found = cls()
        for sense in senses:
            match sense:
                case HearingSpec():
                    found = found._replace(hearing=sense)
                case ReadingSpec():
                    found = found._replace(reading=sense)
                case _:
                    found = found._replace(vision=sense)
        return found

    @property
    def all(self) -> list[Sense]:
        """By which it perceives what messages have."""
        return [sense for sense in (self.vision, self.hearing) if sense is not None]

    def by(self, sent: Image | Sound | Picture | Clip | Video) -> Sense:
        """Which it is perceived by; by one of these it is."""
        sense = self.hearing if isinstance(sent, Sound | Clip) else self.vision
        assert sense is not None
        return sense

    def of_tower(self, image: Image | Sound) -> Sense | ReadingSpec:
        """The same of what a tower takes, or an encoder."""
        if not isinstance(image, Sound) or not image.is_text:
            return self.by(image)
        assert self.reading is not None
        return self.reading

    def num_tokens(self, sent: Picture | Clip | Video) -> int:
        """That stand for it, beside what is around them."""
        return self.by(sent).num_tokens(sent)

    def layers_of(self, image: Image | Sound) -> int:
        """Of the tower that is for it, or what else it is computed in."""
        tower = self.of_tower(image).tower
        return tower.num_stages if isinstance(tower, TowerSpec) else tower.num_layers

    def layer_work(self, image: Image | Sound) -> int:
        """Multiplications of one of them."""
        return self.of_tower(image).tower.layer_work(image)

    def fits(self, images: Sequence[PlacedImage], num_tokens: int) -> bool:
        """Whether they are as `placed` gives them, and in their order in a prompt of so many tokens."""
        if any(placed.start < before.end for before, placed in itertools.pairwise(images)):
            return False
        for sense in (self.vision, self.hearing):
            own = [each for each in images if isinstance(each.image, Sound) == (sense is self.hearing)]
            if own and (sense is None or not sense.fits(own, num_tokens)):
                return False
        return True


def samples_in_rows(samples: int) -> int:
    """Rows that convolutions over samples make (`WAVE`)."""
    for places, step in WAVE:
        samples = max(0, (samples - places) // step + 1)
    return samples


def _thrice_halved(length: int) -> int:
    for _ in range(3):
        length = -(-length // 2)
    return length
