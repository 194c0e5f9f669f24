"""How a sound is sent, and which files are one."""

from __future__ import annotations

import re

from nanovllm_cli.sent import Medium

SOUND = Medium(
    "a sound",
    kinds="WAV, FLAC, OGG (Vorbis or Opus), MP3, and the sound of MP4 (M4A), MOV, MKV, WebM, AVI, MPEG, FLV or AAC",
    beginnings=re.compile(
        rb"(?P<wav>(?:RIFF|RF64).{4}WAVE)|(?P<flac>fLaC)|(?P<ogg>OggS)|(?P<mp3>ID3|\xff[\xe2\xe3\xf2\xf3\xfa\xfb])"
        rb"|(?P<mp4>.{4}(?:ftyp(?!avi|hei|hev|mif|msf)|moov|mdat|wide|skip|free|pnot))|(?P<matroska>\x1a\x45\xdf\xa3)"
        rb"|(?P<avi>RIFF.{4}AVI )|(?P<flv>FLV\x01)|(?P<mpeg>\x00\x00\x01[\xba\xb3])|(?P<mpegts>G.{187}G.{187}G)"
        rb"|(?P<aac>\xff[\xf1\xf9])",
        re.DOTALL,
    ),
    types="audio|video|application",
    send='send the sound itself: {"type": "input_audio", "input_audio": {"data": "…base64…", "format": "wav"}}',
)
CONTAINERS = {
    "mp4": "mov", "matroska": "matroska", "avi": "avi", "flv": "flv", "mpeg": "mpeg", "mpegts": "mpegts", "aac": "aac",
}  # fmt: skip
"""FFmpeg's demuxers, by kinds that it decodes (`container.py`): none of these reads anything but the file itself."""
