"""How an image is sent, and which files are one."""

from __future__ import annotations

import re

from nanovllm_cli.sent import Medium

IMAGE = Medium(
    "an image",
    kinds="PNG, JPEG, WebP, GIF or BMP",
    beginnings=re.compile(
        rb"(?P<png>\x89PNG\r\n\x1a\n)|(?P<jpeg>\xff\xd8\xff)|(?P<webp>RIFF.{4}WEBP)|(?P<gif>GIF8[79]a)|(?P<bmp>BM.{12}.\0{3})",
        re.DOTALL,
    ),
    types="image",
    send="send the image itself, as a data URL: data:image/png;base64,…",
)


def data_url(data: bytes, where: str = "the image") -> str:
    """An image's file as a message has it. where: what an error calls it. Raises UsageError for what is no image."""
    return IMAGE.data_url(data, where)
