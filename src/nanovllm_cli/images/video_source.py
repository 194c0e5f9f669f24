"""How a video is sent, and which files are one."""

from __future__ import annotations

import re

from nanovllm_cli.sent import Medium

VIDEO = Medium(
    "a video",
    kinds="MP4, MOV, MKV, WebM, AVI, MPEG, OGV or FLV, and GIF, WebP or PNG that move",
    beginnings=re.compile(
        rb"(?P<mp4>.{4}(?:ftyp(?!avi|hei|hev|mif|msf)|moov|mdat|wide|skip|free|pnot))|(?P<matroska>\x1a\x45\xdf\xa3)"
        rb"|(?P<avi>RIFF.{4}AVI )|(?P<ogg>OggS)|(?P<flv>FLV\x01)|(?P<mpeg>\x00\x00\x01[\xba\xb3])"
        rb"|(?P<mpegts>G.{187}G.{187}G)|(?P<gif>GIF8[79]a)|(?P<webp>RIFF.{4}WEBP)|(?P<png>\x89PNG\r\n\x1a\n)",
        re.DOTALL,
    ),
    types="video|image|application",
    send="send the video itself, as a data URL: data:video/mp4;base64,…",
)
MOVING = "gif", "webp", "png"
"""Images of several frames, which Pillow reads."""
DEMUXERS = {"mp4": "mov", "matroska": "matroska", "avi": "avi", "ogg": "ogg", "flv": "flv", "mpeg": "mpeg", "mpegts": "mpegts"}
"""FFmpeg's, by kind: none of these reads anything but the file itself."""
