"""Draws the `Plot`s of a result as small PNG files on white, legible on a light page and on a dark one."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib.figure import Figure
from PIL import Image
from quant_loader.benchmarks.common import Plot, Result

# The palette of Okabe and Ito, which colour-blind readers can tell apart; ours comes first in most plots.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7", "#7F7F7F", "#000000")
INK = "#222222"
WIDTH, HEIGHT, DPI = 7.2, 3.6, 110  # inches, dots per inch
PALETTE = 48  # colours of the PNG: flat areas and text need no more, and the file stays at a few kilobytes


def draw(plot: Plot) -> bytes:
    """The plot as a PNG."""
    figure = Figure(figsize=(WIDTH, HEIGHT), dpi=DPI, facecolor="white", layout="constrained")
    axes = figure.add_subplot(facecolor="white")
    {"bars": _bars, "stacked": _stacked, "lines": _lines}[plot.kind](axes, plot)
    axes.set_title(plot.title, fontsize=11, color=INK, loc="left")
    axes.set_xlabel(plot.x_label, color=INK)
    axes.set_ylabel(plot.y_label, color=INK)
    if plot.log_y:
        axes.set_yscale("log")
    else:
        axes.margins(y=0.06)
        axes.set_ylim(bottom=0)
    for value, label in plot.line.items():
        axes.axhline(value, color=INK, linewidth=1, linestyle="--")
        axes.annotate(label, (0.995, value), xycoords=("axes fraction", "data"), ha="right", va="bottom", fontsize=8)
    axes.grid(axis="y", color="#DDDDDD", linewidth=0.7)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.tick_params(colors=INK, labelsize=9)
    if len(plot.series) > 1:
        axes.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})
    small = io.BytesIO()
    Image.open(buffer).convert("RGB").quantize(PALETTE).save(small, format="PNG", optimize=True)
    return small.getvalue()


def _numbers(values: list[float | None]) -> list[float]:
    return [float("nan") if value is None else value for value in values]


def _positions(axes: Any, plot: Plot) -> range:
    places = range(len(plot.x))
    longest = max(len(line) for label in plot.x for line in str(label).splitlines())
    tilted = longest * len(plot.x) > 90
    axes.set_xticks(
        places, [str(label) for label in plot.x], rotation=25 if tilted else 0, ha="right" if tilted else "center"
    )
    return places


def _bars(axes: Any, plot: Plot) -> None:
    width = 0.8 / len(plot.series)
    for number, (label, values) in enumerate(plot.series.items()):
        shift = (number - (len(plot.series) - 1) / 2) * width
        at = [place + shift for place in _positions(axes, plot)]
        axes.bar(at, _numbers(values), width * 0.94, label=label, color=COLOURS[number % len(COLOURS)])


def _stacked(axes: Any, plot: Plot) -> None:
    floor = [0.0] * len(plot.x)
    most = max(sum(values[at] or 0.0 for values in plot.series.values()) for at in range(len(plot.x)))
    for number, (label, values) in enumerate(plot.series.items()):
        heights = [value or 0.0 for value in values]
        bars = axes.bar(_positions(axes, plot), heights, 0.55, floor, label=label, color=COLOURS[number % len(COLOURS)])
        shown = [f"{height:g}" if height > most / 25 else "" for height in heights]  # others have no room for it
        axes.bar_label(bars, shown, label_type="center", fontsize=8, color="white")
        floor = [low + height for low, height in zip(floor, heights, strict=True)]


def _lines(axes: Any, plot: Plot) -> None:
    for number, (label, values) in enumerate(plot.series.items()):
        axes.plot(plot.x, _numbers(values), marker="o", markersize=4, label=label, color=COLOURS[number % len(COLOURS)])
    if plot.log_x:
        axes.set_xscale("log")


def write(result: Result, folder: Path) -> list[Path]:
    """Every plot of a result into the folder; returns the files in the result's order."""
    folder.mkdir(exist_ok=True)
    written = []
    for plot in result.plots:
        path = folder / result.plot_file(plot)
        path.write_bytes(draw(plot))
        written.append(path)
    return written
