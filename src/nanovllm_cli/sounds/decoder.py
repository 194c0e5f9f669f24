"""A program: a compressed sound on standard input, and on standard output one line of JSON (its format, rate and number of
channels), then its samples, float32, the channels of each frame behind each other. Status 3: there is no libsndfile here.

In a process of its own, so that a file which breaks a decoder breaks nothing else, what decoders write to standard error goes
nowhere, and whoever waits can end it. Imports nothing of the package: it starts with every sound.
"""

import json
import sys
from io import BytesIO

SECONDS, BYTES = 600, 2 << 30
"""Of a processor, and of memory; see `limited.py`."""
NO_LIBRARY = 3
_FRAMES = 1 << 16


def main() -> int:
    data = sys.stdin.buffer.read()
    try:
        import soundfile
    except (ImportError, OSError):  # the second where libsndfile itself is missing
        return NO_LIBRARY
    out = sys.stdout.buffer
    with soundfile.SoundFile(BytesIO(data)) as file:
        out.write(json.dumps([file.format, file.samplerate, file.channels]).encode() + b"\n")
        out.flush()
        block = bytearray(4 * _FRAMES * file.channels)
        while found := file.buffer_read_into(block, dtype="float32"):  # `frames` of an MP3 may be a guess, or of more than came
            out.write(memoryview(block)[: 4 * found * file.channels])
    return 0


if __name__ == "__main__":
    sys.exit(main())
