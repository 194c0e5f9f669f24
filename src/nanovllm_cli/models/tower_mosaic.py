"""Rows of a mosaic's squares, put together as a decoder reads them (LLaVA-NeXT's "spatial_unpad", Liu et al. 2024; Ovis2)."""

from __future__ import annotations

import torch
from torch.nn import functional

from nanovllm_cli.mosaic import Mosaic


def laid_apart(rows: torch.Tensor, mosaic: Mosaic, side: int, marks: torch.Tensor) -> torch.Tensor:
    """rows: as of `laid_out`. marks [kinds, width]: what is between squares and around them."""
    placed = mosaic.marks(side)
    out = torch.empty(len(rows) + len(placed), rows.shape[1], dtype=rows.dtype, device=rows.device)
    is_row = torch.ones(len(out), dtype=torch.bool, device=rows.device)
    for mark in placed:
        out[mark.place], is_row[mark.place] = marks[mark.kind], False
    out[is_row] = rows
    return out


def laid_out(rows: torch.Tensor, mosaic: Mosaic, side: int, most_squares: int, line_end: torch.Tensor) -> torch.Tensor:
    """rows [squares * side^2, width], line by line in each square -> those of the first one, and those of the others that show a
    part of the image, line by line, behind each of these line_end [width]."""
    first, others = rows[: side**2], rows[side**2 :]
    if not mosaic.rows:
        return torch.cat([first, line_end[None]])
    width, seen = rows.shape[1], mosaic.seen(side, most_squares)
    plane = others.view(mosaic.rows, mosaic.columns, side, side, width).transpose(1, 2)
    plane = plane.reshape(mosaic.rows * side, mosaic.columns * side, width)
    plane = plane[seen.top : seen.top + seen.lines, seen.left : seen.left + seen.columns]
    shown = seen.shown_lines, seen.shown_columns
    if shown != (seen.lines, seen.columns):
        square = plane.permute(2, 0, 1)[None].to(torch.float32)
        plane = functional.interpolate(square, shown, mode="bilinear", align_corners=False)[0].permute(1, 2, 0).to(rows.dtype)
    ends = line_end.expand(shown[0], 1, width)
    return torch.cat([first, torch.cat([plane, ends], dim=1).reshape(-1, width)])
