"""A sound's bytes, made into the spectrograms that a tower takes: at 16 kHz, of one channel, in pieces.

Anybody may have sent them: what would take long or much memory is found before, or while it is decoded. WAV files are read here
(`wav.py`); libsndfile decodes the compressed kinds that are named in `source.SOUND`, and none of the others that it knows, in a
process of its own (`decoding.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing

import numpy as np

from nanovllm_cli.errors import UsageError
from nanovllm_cli.hearing_spec import HOP, RATE, WINDOW, HearingSpec
from nanovllm_cli.sent import Recent
from nanovllm_cli.sounds.decoding import decoded
from nanovllm_cli.sounds.resampling import resampled
from nanovllm_cli.sounds.source import SOUND
from nanovllm_cli.sounds.spectrogram import Streamed, log_mel, paired_log_mel, streamed_log_mel, universal_log_mel
from nanovllm_cli.sounds.wav import read_wave
from nanovllm_cli.vision_spec import Clip, Sound

MAX_SECONDS = 45 * 60
"""Of a sound: each takes 64 KB at 16 kHz, and 50 KB of a spectrogram."""
MAX_DICTATED_SECONDS = 4 * 60 * 60
"""Of one that is gone through window by window: of these there is a spectrogram alone, or
samples and nothing made of them."""
MIN_SECONDS = 0.1
MIN_RATE, MAX_RATE = 1_000, 192_000
SAMPLES_A_SECOND = 2 * 48_000
"""Of all channels, of the longest sound: in stereo at 48 kHz. A few bytes of a compressed one may stand for very many."""


def read_sent(sent: str, spec: HearingSpec, where: str, salt: str | None = None) -> Clip:
    """What a model hears of a sound as a client sent it; see `Medium.bytes_of`. salt: who has another one can't tell by the
    time it takes whether the sound was read before."""
    return _recent.get(sent, (spec, salt), lambda: read_sound(SOUND.bytes_of(sent, where), spec, where))


_recent: Recent[Clip] = Recent(lambda clip: sum(sound.num_bytes for sound in clip.images))


def read_sound(data: bytes, spec: HearingSpec, where: str) -> Clip:
    """What a model hears of a file. where: what an error calls it.

    Raises UsageError for what is no sound, is damaged, too short or too long, UnsupportedError for a kind that is not read.
    """
    if spec.leads:
        return _dictated(_heard(data, where, None, MAX_DICTATED_SECONDS), spec, where)
    longest = spec.most * spec.piece * HOP / RATE if spec.most else None
    samples = samples_of(data, where, longest)
    pieces = cut(samples, spec)
    if longest is not None and len(pieces) > spec.most:
        raise _too_long(where, longest)
    return Clip(pieces, len(samples) / RATE)


def read_while_wanted(
    data: bytes, spec: HearingSpec, where: str, wanted: Callable[[], bool], *, if_short: bool = False
) -> Clip | None:
    """The same of a model that goes through a sound window by window (`leads`), which may take minutes: where it is no longer
    wanted, UsageError is raised soon. if_short: None where it is longer than MAX_SECONDS, and may be read: for who can have few
    of these at once."""
    most = MAX_SECONDS if if_short else MAX_DICTATED_SECONDS
    try:
        return _dictated(_heard(data, where, None, most, wanted), spec, where)
    except _LongerError:
        if if_short:
            return None
        raise


class _LongerError(UsageError):
    """Than what was said."""


def _dictated(heard: Generator[np.ndarray, None, None], spec: HearingSpec, where: str) -> Clip:
    if spec.hop == 1:
        with closing(heard) as blocks:
            samples = np.concatenate([each.astype("<f4", copy=False) for each in _long_enough(blocks, where)])
        return Clip((Sound.of(samples.tobytes(), len(samples), len(samples), 1),), len(samples) / RATE)
    with closing(heard) as blocks:
        made = streamed_log_mel(_long_enough(blocks, where), spec.tower.num_bins, spec.piece * HOP)
    return Clip((_whole(made),), made.num_heard / RATE)


def samples_of(data: bytes, where: str, longest: float | None = None) -> np.ndarray:
    """[n] float32 at 16 kHz, the mean of all channels. longest: seconds that a model hears, if it hears no more. Raises as
    `read_sound`."""
    with closing(_heard(data, where, longest, MAX_SECONDS)) as blocks:
        return np.concatenate([np.empty(0, np.float32), *_long_enough(blocks, where)])


def _long_enough(blocks: Iterable[np.ndarray], where: str) -> Iterator[np.ndarray]:
    count = 0
    for block in blocks:
        count += len(block)
        yield block
    if count < MIN_SECONDS * RATE:
        raise UsageError(f"{where} is shorter than {MIN_SECONDS} seconds", "there is nothing in it to be heard")


def _heard(
    data: bytes, where: str, longest: float | None, most: int, wanted: Callable[[], bool] = lambda: True
) -> Generator[np.ndarray, None, None]:
    """Samples at 16 kHz, as they are decoded. most: seconds that there may be. wanted: whether they still are."""
    kind = SOUND.known(data, where)
    if kind == "wav":
        wave = read_wave(data, where)
        rate, channels, blocks = wave.rate, wave.channels, wave.mono()
    else:
        rate, channels, blocks = decoded(data, kind, where)
    with closing(blocks):
        if not MIN_RATE <= rate <= MAX_RATE:
            told = f"{where} has {rate} samples a second; what is heard is {MIN_RATE} to {MAX_RATE}"
            raise UsageError(told, "save it at 16 kHz")
        for block in resampled(_checked(blocks, rate, channels, longest, most, where), rate, RATE):
            if not wanted():
                raise UsageError(f"{where} is no longer wanted")
            yield block


def _checked(
    blocks: Iterable[np.ndarray], rate: int, channels: int, longest: float | None, most: int, where: str
) -> Iterator[np.ndarray]:
    """Numbers that are none, and a sound without end, are found as they come."""
    count = 0
    for block in blocks:
        count += len(block)
        if longest is not None and count > (longest + 1) * rate:
            raise _too_long(where, longest)
        if count > most * rate:
            raise _LongerError(f"{where} is longer than {most // 60} minutes", "cut it into pieces")
        if count * channels > most * SAMPLES_A_SECOND:
            told = f"{where} has more than {most * SAMPLES_A_SECOND // 10**6} million samples, in {channels} channels"
            raise _LongerError(told, "one channel at 16 kHz is what is heard")
        if not np.isfinite(block).all():
            raise UsageError(f"{where} is damaged: it has samples that are no numbers", "save or send it again")
        yield np.clip(block, -8, 8)  # nothing is 18 dB louder than the loudest; a spectrogram's squares stay finite


def _too_long(where: str, longest: float) -> UsageError:
    return UsageError(f"{where} is longer than the {longest:g} seconds that the model hears", "cut it into pieces")


def cut(samples: np.ndarray, spec: HearingSpec) -> tuple[Sound, ...]:
    """The pieces of samples at 16 kHz."""
    if spec.spectrogram == "universal":
        length = (spec.piece + 1) * HOP
        alone = [universal_log_mel(part, spec.tower.num_bins) for part in _parts(samples, length)]
        pieces = [_sound(values, len(values)) for values in alone]
    elif spec.spectrogram == "pairs":
        values = paired_log_mel(samples, spec.tower.num_bins)
        pieces = [_sound(part, len(part)) for part in _parts(values, spec.piece)]
    elif spec.spectrogram == "apart":
        pieces = [piece for part in _parts(samples, spec.piece * HOP) for piece in _whisper(part, spec)]
    else:
        pieces = _whisper(samples, spec)
    pieces = [piece for piece in pieces if spec.tower.num_made(piece.heard)]
    return tuple(map(_numbered, pieces, range(len(pieces)))) if spec.timed else tuple(pieces)


def _parts(samples: np.ndarray, length: int) -> list[np.ndarray]:
    return [samples[first : first + length] for first in range(0, len(samples), length)]


def _whisper(samples: np.ndarray, spec: HearingSpec) -> list[Sound]:
    heard = len(samples)
    padded = max(heard, spec.least)
    counted = -(-heard // HOP)
    if spec.padded:
        padded = -(-padded // (spec.piece * HOP)) * spec.piece * HOP
    elif spec.framed:  # the last frames reach into silence
        padded = counted * HOP + WINDOW
    values = log_mel(np.concatenate([samples, np.zeros(padded - heard, np.float32)]), spec.tower.num_bins)
    if not spec.framed:
        counted = len(values)
    elif not spec.padded:
        values = values[:counted]
    pieces = [(first, values[first : first + spec.piece]) for first in range(0, counted, spec.piece)]
    return [_sound(piece, min(counted - first, len(piece))) for first, piece in pieces]


def _whole(made: Streamed) -> Sound:
    """Of a sound that is not cut: which of it is heard at once follows from what is said in it."""
    values = b"".join([part.astype("<f4", copy=False).data for part in made.parts])
    return Sound.of(values, sum(map(len, made.parts)), made.num_heard // HOP, made.parts[0].shape[1])


def _numbered(piece: Sound, ordinal: int) -> Sound:
    return Sound.of(piece.values, piece.frames, piece.heard, piece.bins, ordinal)


def _sound(values: np.ndarray, heard: int) -> Sound:
    return Sound.of(values.astype("<f4").tobytes(), len(values), heard, values.shape[1])
