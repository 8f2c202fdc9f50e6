"""What is made of the results: the difference of two latents, the contact sheet, the table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from PIL import Image, ImageChops, ImageDraw, ImageFont
from safetensors.torch import load_file

LABEL_HEIGHT = 22
GAP = 6
AMPLIFICATION = 8


def read_latent(path: Path) -> torch.Tensor:
    """The latent that ComfyUI's SaveLatent wrote, float32 [1, C, H, W]."""
    return load_file(path)["latent_tensor"].float()


def relative_difference(latent: torch.Tensor, reference: torch.Tensor) -> float:
    """||latent - reference|| / ||reference||."""
    return float((latent - reference).norm() / reference.norm())


def contact_sheet(reference: Path, pictures: Sequence[tuple[str, Path]], to: Path) -> None:
    """One row a picture: the 16-bit one, this one, and the difference of the two, amplified."""
    left = Image.open(reference).convert("RGB")
    width, height = left.size
    row_height = height + LABEL_HEIGHT + GAP
    sheet = Image.new("RGB", (3 * width + 4 * GAP, len(pictures) * row_height + GAP), "white")
    draw = ImageDraw.Draw(sheet)
    font = ImageFont.load_default(14)
    for row, (name, path) in enumerate(pictures):
        picture = Image.open(path).convert("RGB")
        difference = ImageChops.difference(left, picture).point([min(255, AMPLIFICATION * v) for v in range(256)] * 3)
        labels = ("16-bit", name, f"difference x {AMPLIFICATION}")
        for column, (label, cell) in enumerate(zip(labels, (left, picture, difference), strict=True)):
            x, y = GAP + column * (width + GAP), GAP + row * row_height
            draw.text((x, y), label, fill="black", font=font)
            sheet.paste(cell, (x, y + LABEL_HEIGHT))
    sheet.save(to)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Rows as aligned plain text under their header."""
    lines = [header, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    ruler = ["-" * width for width in widths]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in (header, ruler, *rows)
    )
