"""How a sound is sent, and which files are one."""

from __future__ import annotations

import re

from nanovllm_cli.sent import Medium

SOUND = Medium(
    "a sound",
    kinds="WAV, FLAC, OGG (Vorbis or Opus) or MP3",
    beginnings=re.compile(
        rb"(?P<wav>(?:RIFF|RF64).{4}WAVE)|(?P<flac>fLaC)|(?P<ogg>OggS)|(?P<mp3>ID3|\xff[\xe2\xe3\xf2\xf3\xfa\xfb])", re.DOTALL
    ),
    types="audio|video|application",
    send='send the sound itself: {"type": "input_audio", "input_audio": {"data": "…base64…", "format": "wav"}}',
)
