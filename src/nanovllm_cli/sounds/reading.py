"""A sound's bytes, made into the spectrograms that a tower takes: at 16 kHz, of one channel, in pieces.

Anybody may have sent them: what libsndfile raises becomes a typed error here, and what would take long or much memory is found
before, or while it is decoded. WAV files are read here (`wav.py`); libsndfile decodes the compressed kinds that are named in
`source.SOUND`, and none of the others that it knows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from io import BytesIO

import numpy as np

from nanovllm_cli.errors import UnsupportedError, UsageError
from nanovllm_cli.hearing_spec import HOP, RATE, HearingSpec
from nanovllm_cli.sent import Recent
from nanovllm_cli.sounds.resampling import resampled
from nanovllm_cli.sounds.source import SOUND
from nanovllm_cli.sounds.spectrogram import log_mel
from nanovllm_cli.sounds.wav import MAX_CHANNELS, read_wave
from nanovllm_cli.vision_spec import Clip, Sound

MAX_SECONDS = 45 * 60
"""Of a sound: each takes 64 KB at 16 kHz, and 50 KB of a spectrogram."""
MIN_SECONDS = 0.1
MIN_RATE, MAX_RATE = 1_000, 192_000
_BLOCK = 1 << 18


def read_sounds(sent: Iterable[tuple[str, str]], spec: HearingSpec) -> list[Clip]:
    """What a model hears of sounds as clients sent them, each with what an error calls it; see `Medium.bytes_of`."""
    return [read_sent(text, spec, where) for text, where in sent]


def read_sent(sent: str, spec: HearingSpec, where: str, salt: str | None = None) -> Clip:
    """What a model hears of a sound as a client sent it; see `Medium.bytes_of`. salt: who has another one can't tell by the
    time it takes whether the sound was read before."""
    return _recent.get(sent, (spec, salt), lambda: read_sound(SOUND.bytes_of(sent, where), spec, where))


_recent: Recent[Clip] = Recent(lambda clip: sum(sound.num_bytes for sound in clip.images))


def read_sound(data: bytes, spec: HearingSpec, where: str) -> Clip:
    """What a model hears of a file. where: what an error calls it.

    Raises UsageError for what is no sound, is damaged, too short or too long, UnsupportedError for a kind that is not read.
    """
    samples = samples_of(data, where)
    pieces = cut(samples, spec)
    if spec.most and len(pieces) > spec.most:
        longest = spec.most * spec.piece * HOP / RATE
        told = f"{where} is {len(samples) / RATE:.1f} seconds long, and the model hears {longest:g}"
        raise UsageError(told, "cut it into pieces")
    return Clip(pieces, len(samples) / RATE)


def samples_of(data: bytes, where: str) -> np.ndarray:
    """[n] float32 at 16 kHz, the mean of all channels. Raises as `read_sound`."""
    kind = SOUND.known(data, where)
    if kind == "wav":
        wave = read_wave(data, where)
        rate, blocks = wave.rate, wave.mono()
    else:
        rate, blocks = _decoded(data, kind, where)
    if not MIN_RATE <= rate <= MAX_RATE:
        raise UsageError(f"{where} has {rate} samples a second; what is heard is {MIN_RATE} to {MAX_RATE}", "save it at 16 kHz")
    samples = np.concatenate([np.empty(0, np.float32), *resampled(_checked(blocks, rate, where), rate, RATE)])
    if len(samples) < MIN_SECONDS * RATE:
        raise UsageError(f"{where} is shorter than {MIN_SECONDS} seconds", "there is nothing in it to be heard")
    return samples


def _checked(blocks: Iterable[np.ndarray], rate: int, where: str) -> Iterator[np.ndarray]:
    """Numbers that are none, and a sound without end, are found as they come."""
    count = 0
    for block in blocks:
        count += len(block)
        if count > MAX_SECONDS * rate:
            raise UsageError(f"{where} is longer than {MAX_SECONDS // 60} minutes", "cut it into pieces")
        if not np.isfinite(block).all():
            raise UsageError(f"{where} is damaged: it has samples that are no numbers", "save or send it again")
        yield np.clip(block, -8, 8)  # nothing is 18 dB louder than the loudest; a spectrogram's squares stay finite


def cut(samples: np.ndarray, spec: HearingSpec) -> tuple[Sound, ...]:
    """The pieces of samples at 16 kHz."""
    bins, heard = spec.tower.num_bins, len(samples)
    padded = max(heard, spec.least)
    if spec.padded:
        padded = -(-padded // (spec.piece * HOP)) * spec.piece * HOP
    values = log_mel(np.concatenate([samples, np.zeros(padded - heard, np.float32)]), bins)
    counted = -(-heard // HOP) if spec.framed else len(values)
    return tuple([
        Sound.of(piece.astype("<f4").tobytes(), len(piece), min(counted - first, len(piece)), bins)
        for first in range(0, counted, spec.piece)
        if len(piece := values[first : first + spec.piece])
    ])  # fmt: skip


def _decoded(data: bytes, kind: str, where: str) -> tuple[int, Iterator[np.ndarray]]:
    """The rate, and the mean of all channels, block by block. `kind` alone is tried."""
    try:
        import soundfile
    except (ImportError, OSError):  # the second where libsndfile itself is missing
        told = f"{where} is {kind.upper()}, and soundfile is not installed"
        raise UnsupportedError(told, "pip install soundfile, or send a WAV") from None
    try:
        file = soundfile.SoundFile(BytesIO(data))
        found, rate, channels = file.format, file.samplerate, file.channels
    except Exception as failure:  # any: which ones a damaged file leads to is not written down anywhere
        raise _damaged(where, kind) from failure
    if found != {"flac": "FLAC", "ogg": "OGG", "mp3": "MP3"}.get(kind) or not 1 <= channels <= MAX_CHANNELS:
        raise _damaged(where, kind)

    def blocks() -> Iterator[np.ndarray]:
        with file:
            while True:
                try:
                    block = file.read(max(1, _BLOCK // channels), dtype="float32", always_2d=True)
                except Exception as failure:
                    raise _damaged(where, kind) from failure
                if not len(block):
                    return
                yield block.mean(axis=1, dtype=np.float32)

    return rate, blocks()


def _damaged(where: str, kind: str) -> UsageError:
    return UsageError(f"{where} is damaged: it can't be decoded as {kind.upper()}", "save or send it again")
