"""What quantisation costs in accuracy: of one layer, and of a picture.

    python -I -m quant_loader.benchmarks.quality [--quick] [--json FILE] [--device auto]

*Layers*: a weight of K inputs is quantised in every format and multiplied in every execution mode; the error is the
relative L2 distance of the product from the float64 product of what was quantised. Data: Gaussian; 1 % of the channels
times 20; Student's t (3 degrees of freedom for activations, 5 for weights). Each figure has to stay under the bound of
its arithmetic, else the benchmark fails.

*Pictures*: the tiny Flux of the demo, sampled and decoded in a ComfyUI process a side: relative L2 of the latent and
PSNR of the picture against those of the 16-bit model.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from quant_loader import kernels
from quant_loader.benchmarks import children, common, cpu, in_process, sample
from quant_loader.benchmarks.common import Cell, Plot, Result, Table, Wrong, say
from quant_loader.benchmarks.in_process import DENSE, MODES, Size
from quant_loader.checkpoint import LayerSpec
from quant_loader.demo import models, quantize

MODULE = "quant_loader.benchmarks.quality"
KINDS = ("Gaussian", "outlier channels", "heavy tails")
ROWS = 256
STEPS = 4
TINY = Size(models.HIDDEN, 1, 1, 256, 77)

#: Largest error by the arithmetic that ran: KERNELS.md, section 4. One number, or one a kind of data (None: the
#: arithmetic has no bound there, because nothing spreads the outliers).
Bound = float | tuple[float | None, float | None, float | None]
BOUNDS: dict[tuple[str, str], Bound] = {
    ("int8 row", "native"): (0.015, None, None),
    ("int8 row", "exact"): 0.03,
    ("int8 ConvRot", "native"): 0.016,
    ("int8 ConvRot", "exact"): 0.016,
    ("convrot_w4a4", "native"): 0.28,
    ("convrot_w4a4", "int8"): 0.18,
    ("convrot_w4a4", "exact"): 0.18,
    ("float8_e4m3fn", "native"): 0.04,
    ("float8_e4m3fn", "int8"): 0.033,
    ("float8_e4m3fn", "exact"): 0.029,
    ("mxfp8", "native"): 0.04,
    ("mxfp8", "int8"): 0.033,
    ("mxfp8", "exact"): 0.029,
    ("nvfp4", "native"): 0.14,
    ("nvfp4", "int8"): 0.101,
    ("nvfp4", "exact"): 0.1,
    ("quanto_int8", "native"): 0.03,
    ("quanto_int8", "int8"): (0.03, None, None),
    ("quanto_int8", "exact"): 0.03,
}


# --- layers -----------------------------------------------------------------------------------------------------------


def data(kind: str, rows: int, K: int, seed: int, *, activation: bool) -> torch.Tensor:
    """float32 [rows, K]: activations of about unit size, or weights of variance 1 / K."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, K, generator=generator)
    if kind == "heavy tails":
        freedom = 3 if activation else 5
        chi2 = sum(torch.randn(rows, K, generator=generator).square() for _ in range(freedom))
        values = values / torch.as_tensor(chi2 / freedom).sqrt()
    if kind == "outlier channels" and activation:
        values[:, torch.randperm(K, generator=generator)[: max(1, K // 100)]] *= 20.0
    return values if activation else values / math.sqrt(K)


Layer = tuple[str, LayerSpec, dict[str, torch.Tensor], Callable[..., torch.Tensor] | None]


def layers(w: torch.Tensor) -> Iterator[Layer]:
    """(label, declaration, tensors, stock linear or None) of every format."""
    yield from cpu.layers(w)
    w4a8 = quantize.asym_w4a8(w)
    assert w4a8.marker is not None
    annotations = {key: value for key, value in w4a8.marker.items() if key != "format"}
    yield "asym_w4a8_int8", LayerSpec("layer", "asym_w4a8_int8", _shape(w), annotations=annotations), w4a8.tensors, None
    quanto = quantize.quanto_int8(w).tensors
    tensors = {"weight": quanto["weight._data"], "weight_scale": quanto["weight._scale"]}
    yield "quanto_int8", LayerSpec("layer", "quanto_int8", _shape(w)), tensors, None


def _shape(w: torch.Tensor) -> tuple[int, int]:
    return w.shape[0], w.shape[1]


def bound_of(label: str, execution: str, kind: str) -> float | None:
    bound = BOUNDS.get((label, execution))
    return bound[KINDS.index(kind)] if isinstance(bound, tuple) else bound


def layer_errors(K: int, rows: int = ROWS) -> dict[tuple[str, str], dict[str, Any]]:
    """(format, path) -> {"execution", "operator", kind: error, ...}; path is a mode, or "stock".

    Raises Wrong where one of ours is above the bound of its arithmetic.
    """
    found: dict[tuple[str, str], dict[str, Any]] = {}
    facts = kernels.device_facts("cpu")
    for kind in KINDS:
        x, w = data(kind, rows, K, 1, activation=True), data(kind, rows, K, 2, activation=False)
        truth = x.double() @ w.double().t()
        for label, spec, tensors, stock in layers(w):
            for mode in MODES:
                operation = kernels.prepare(spec, facts, mode)
                error = in_process.relative(operation(x, tensors, None), truth)
                execution = operation.plan.execution
                bound = bound_of(label, execution, kind)
                if bound is not None and not error <= bound:
                    raise Wrong(f"{label}, {mode}, {kind}, K = {K}: error {error:.3g}, expected {bound} at most")
                entry = found.setdefault(
                    (label, mode), {"execution": execution, "operator": operation.plan.operator, "bounds": {}}
                )
                entry[kind] = error
                entry["bounds"][kind] = bound
            if stock is not None:
                found.setdefault((label, "stock"), {"execution": "", "operator": "", "bounds": {}})[kind] = (
                    in_process.relative(stock(x, None), truth)
                )
    return found


def layer_table(found: dict[tuple[str, str], dict[str, Any]], K: int) -> Table:
    rows: list[list[Cell]] = [
        [
            label,
            path,
            f"{one['execution']}: {one['operator']}" if one["operator"] else "comfy-kitchen, eager",
            *(one[kind] for kind in KINDS),
            one["bounds"].get(KINDS[0]),
        ]
        for (label, path), one in sorted(found.items(), key=lambda item: [k[0] for k in found].index(item[0][0]))
    ]
    return Table(
        f"Error of one layer, K = {K}",
        ["format", "mode", "what ran", *KINDS, "bound (Gaussian)"],
        rows,
        f"Relative L2 of the output against the float64 product of the unquantised operands, M = N = {ROWS}, float32 "
        "activations. Every figure of ours is under the bound of its arithmetic.",
    )


# --- pictures ---------------------------------------------------------------------------------------------------------


def one_side(side: str, folder: Path, device: str, cases: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Samples and decodes every case of one side; the 16-bit model's results stay in `folder` to be compared with."""
    in_process.prepare(device)
    import comfy.sd
    from safetensors.torch import load_file, save_file

    vae = comfy.sd.VAE(sd=models.taesd_state_dict())
    truth_file = folder / "truth.safetensors"
    answers: dict[str, Any] = {}
    for fmt, mode in cases:
        key = sample.label(fmt, mode)
        try:
            patcher = in_process.load(side, in_process.file_of(folder, fmt), mode or "auto")
            latent = in_process.sample(patcher, TINY, STEPS).latent
        except in_process.STOCK_ERRORS as error:
            if side != "stock":
                raise
            answers[key] = {"failed": f"{type(error).__name__}: {error}"[:200]}
            continue
        picture = vae.decode(latent.nan_to_num()).detach().float().cpu().contiguous()
        if fmt == DENSE:
            save_file({"latent": latent, "picture": picture}, truth_file)
        truth = load_file(truth_file)
        answers[key] = {
            "latent": in_process.relative(latent, truth["latent"]),
            "psnr": psnr(picture, truth["picture"]),
            "spread": float(picture.std()),
        }
        del patcher
        in_process.unload()
    return answers


def psnr(a: torch.Tensor, b: torch.Tensor) -> float:
    """Decibels between two pictures with values 0 to 1, ``-10 log10(mean (a - b)^2)``; infinite where equal."""
    mean = float((a.double() - b.double()).square().mean())
    return math.inf if mean == 0 else -10.0 * math.log10(mean)


def pictures(formats: Sequence[str], device: str) -> dict[str, dict[str, Any]]:
    """side -> label -> {"latent", "psnr"} or {"failed"}."""
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="quality-") as name, children.host() as in_child:
        folder = Path(name)
        in_process.write_models(folder, models.flux_state_dict(), tuple(formats))
        for side in sample.SIDES:
            order = {"side": side, "device": device, "cases": sample.cases_of(side, formats)}
            found[side] = in_child(MODULE, "--one", json.dumps(order), "--folder", str(folder))
            say(f"  {side}: {len(found[side])} pictures")
    if not found["stock"][DENSE]["spread"] > 0.02:
        raise Wrong("the 16-bit model's picture is flat, so a difference to it says nothing")
    for key, one in found["ours"].items():
        most = sample.MOST[key.split()[0]]
        if not one["latent"] <= most:
            raise Wrong(f"{key}: latent {one['latent']:.3g} away from the 16-bit model's, expected {most} at most")
    return found


def picture_table(found: dict[str, dict[str, Any]]) -> Table:
    rows: list[list[Cell]] = []
    for key, ours in found["ours"].items():
        fmt, mode = key.split()
        stock = found["stock"][fmt]
        failed = stock.get("failed") or (None if stock["latent"] <= sample.MOST[fmt] else "wrong picture")
        rows.append(
            [
                fmt,
                mode,
                ours["latent"],
                failed or stock["latent"],
                None if failed else ours["latent"] / stock["latent"],
                ours["psnr"],
                None if failed else stock["psnr"],
            ]
        )
    return Table(
        "Difference to the 16-bit model's picture",
        ["format", "mode", "latent, ours", "latent, stock", "ours / stock", "PSNR, ours, dB", "PSNR, stock, dB"],
        rows,
        f"Tiny Flux, {STEPS} Euler steps, decoded by a TAESD. Latent: relative L2, ratios ours / stock, at most 1 is "
        "good; PSNR: more is better.",
    )


def run(quick: bool, device: str = "auto") -> Result:
    """`quick`: K = 3072; else 15360 inputs as well. The pictures are the same."""
    found = {K: layer_errors(K) for K in ((3072,) if quick else (3072, 15360))}
    drawn = pictures(tuple(sample.MOST), device)
    picture = picture_table(drawn)
    margin = max(
        one[kind] / bound
        for errors in found.values()
        for one in errors.values()
        for kind, bound in one["bounds"].items()
        if bound is not None
    )
    ratios = {str(row[0]): row[4] for row in picture.rows if row[1] == "auto" and isinstance(row[4], float)}
    worst = max(ratios, key=lambda fmt: ratios[fmt])
    goals = [
        common.at_most("largest layer error / its bound", 1.0, round(margin, 3), summary=True),
        # INT8 activations on FP8 weights may cost 0.033 / 0.029 of the decoded weight's error.
        common.at_most(
            f"latent difference in the default mode, ours / stock, worst format ({worst})",
            1.15,
            round(ratios[worst], 3),
            summary=True,
        ),
    ]
    first = found[3072]
    labels = list(dict.fromkeys(label for label, _ in first))
    return Result(
        "quality",
        "How far from the unquantised result are a layer and a picture?",
        common.machine(),
        [*(layer_table(errors, K) for K, errors in found.items()), picture],
        {
            "layers": {str(K): {f"{a}, {b}": one for (a, b), one in errors.items()} for K, errors in found.items()},
            "pictures": drawn,
        },
        goals,
        [
            Plot(
                "quality",
                "Error of one layer with outlier channels, K = 3072",
                labels,
                {
                    path: [
                        first[label, path]["outlier channels"] if (label, path) in first else None for label in labels
                    ]
                    for path in (*MODES[1:], "stock")
                },
                y_label="relative L2",
                log_y=True,
            )
        ],
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = common.parser(__doc__)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="of the pictures")
    parser.add_argument("--one", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.one:
        order = options.one
        print(json.dumps(one_side(order["side"], options.folder, order["device"], order["cases"])))
        return 0
    return common.finish(lambda: run(options.quick, options.device), options)


if __name__ == "__main__":
    sys.exit(main())
