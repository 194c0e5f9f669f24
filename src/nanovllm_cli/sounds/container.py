"""A program: a file with a sound in it on standard input, such as a video's, and on standard output what `decoder.py` writes of a
sound: a line of JSON (its codec, rate and number of channels; or a text, why there is none), then its samples, float32, the
channels of each frame behind each other.

It reads a line of JSON first: FFmpeg's name of the container. FFmpeg finds neither another container nor another file. Status 3:
there is no PyAV here. In a process of its own, as `decoder.py` is, and like that it imports nothing of the package.
"""

import contextlib
import json
import sys
from io import BytesIO
from typing import Any

SECONDS, BYTES = 600, 6 << 30
"""Of a processor, and of memory; see `limited.py`."""
NO_LIBRARY = 3
NO_SOUND = "no sound"
"""Why there is none; else it is the name of a codec."""
CODECS = (
    "aac", "mp3", "mp2", "mp1", "opus", "vorbis", "flac", "alac", "ac3", "eac3", "amrnb", "amrwb", "wmav1", "wmav2", "dts",
    "truehd", "adpcm_ima_qt", "adpcm_ima_wav", "adpcm_ms", "adpcm_swf", "nellymoser", "speex", "gsm", "gsm_ms", "qdm2", "mlp",
)  # fmt: skip
"""And all whose names begin with pcm_."""


def main() -> int:
    try:
        import av
    except ImportError:
        return NO_LIBRARY
    container = json.loads(sys.stdin.buffer.readline(200))
    data, out = BytesIO(sys.stdin.buffer.read()), sys.stdout.buffer
    with av.open(data, format=container, io_open=_nothing_else, metadata_errors="replace") as file:
        stream = next(iter(file.streams.audio), None)
        if stream is None or stream.codec_context is None:
            return _say(NO_SOUND)
        if not ((name := stream.codec_context.codec.canonical_name) in CODECS or name.startswith("pcm_")):
            return _say(name[:40])
        plain: _Plain | None = None
        for packet in file.demux(stream):
            for frame in _decoded(av, packet):
                if plain is None:
                    _say([name, frame.sample_rate, frame.layout.nb_channels])
                    plain = _Plain(av, frame)
                plain.write(out, frame)
        if plain is None:
            return _say(NO_SOUND)
        plain.write(out, None)
    return 0


def _decoded(av: Any, packet: Any) -> Any:
    """Of what is damaged nothing, as players have it."""
    with contextlib.suppress(av.error.InvalidDataError):
        return packet.decode()
    return ()


class _Plain:
    """Makes frames what is written, at the rate and of the channels of the first, whatever comes behind it: a broadcast has two
    channels in one programme and six in the next."""

    def __init__(self, av: Any, first: Any) -> None:
        self._av = av
        self._made = {"format": "flt", "layout": first.layout.name, "rate": first.sample_rate}
        self._kind: Any = None
        self._resampler: Any = None

    def write(self, out: Any, frame: Any) -> None:
        """None: behind the last."""
        kind = None if frame is None else (frame.format.name, frame.layout.name, frame.sample_rate)
        if kind != self._kind:
            if self._resampler is not None:
                self._put(out, self._resampler.resample(None))
            self._kind, self._resampler = kind, self._av.AudioResampler(**self._made)
        if frame is not None:
            self._put(out, self._resampler.resample(frame))

    def _put(self, out: Any, frames: Any) -> None:
        for each in frames:
            out.write(memoryview(each.planes[0])[: 4 * each.samples * each.layout.nb_channels])


def _nothing_else(*_: Any) -> Any:
    raise OSError("a sound is one file")


def _say(told: Any) -> int:
    sys.stdout.buffer.write(json.dumps(told).encode() + b"\n")
    sys.stdout.buffer.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
