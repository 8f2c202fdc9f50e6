"""LoRAs on quantised layers: what applying, changing and removing one costs, and what is left of its effect.

    python -I -m quant_loader.benchmarks.lora [--quick] [--json FILE] [--device auto] [--hidden 1024]

Random LoRAs with kohya's names on every packed layer of a random Flux go through ComfyUI's own `load_lora_for_models`,
as its LoRA nodes do after reading the file, on a model loaded by the stock loader (which dequantises, adds and
quantises again) and on one loaded by ours (which adds the low-rank product beside the weight). A process a side.

- *apply*, *change strength*, *remove*: from the call until the model is loaded and ready to run, in seconds by the wall
  clock, the median of as many rounds as fit into a second (at least one, and seven at most);
- *effect error*: each layer gets the same random input with and without the LoRAs; the difference of its outputs is
  compared with ``x (strength alpha / r B A)^T`` in float64. The mean over layers of the relative L2 distance. 1 means
  that the rounding is as large as the effect;
- *changed bytes*: codes that differ from the file's while the LoRA is on, in percent. Afterwards none may differ, else
  the benchmark fails;
- *step added*: a model call with the LoRAs over one without, medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from quant_loader.benchmarks import children, common, in_process
from quant_loader.benchmarks.common import Cell, Plot, Result, Table, Wrong, say
from quant_loader.benchmarks.in_process import Size, Tensors

MODULE = "quant_loader.benchmarks.lora"
SIDES = ("stock", "ours")
QUICK = Size(512, 1, 1, 256, 64)
# A CPU without VNNI takes a minute for a step of stock's int8 in this width.
QUICK_VNNI = Size(1024, 1, 1, 256, 64)
FULL = Size(1024, 1, 1, 512, 64)
FORMATS = ("int8_convrot", "fp8", "nvfp4", "convrot_w4a4")
QUICK_STACKS = ((4, 1), (16, 1), (16, 4), (64, 1), (128, 1))
FULL_STACKS = tuple((rank, count) for rank in (4, 16, 64, 128) for count in (1, 4))
STRENGTHS = (0.8, 0.5)

#: Rows of the input on which the effect is measured.
PROBE_TOKENS = 16

#: Most rounds of applying, changing and removing.
ROUNDS = 7

#: Seconds: a step that takes longer is not repeated.
SLOW = 1.0

#: ||B A|| / ||W|| of one LoRA: what trained LoRAs have (KERNELS.md, section 6).
EFFECT = 0.03

#: Largest effect error of ours: the products of the LoRA are float32 ones here, and 16-bit ones on a GPU.
OURS_WRONG = 0.02


def kohya_lora(size: Size, rank: int, seed: int) -> Tensors:
    """A LoRA on every packed layer, with kohya's names; ``||B A||`` is `EFFECT` of the weight's norm."""
    generator = torch.Generator().manual_seed(seed)
    out: Tensors = {}
    for name, (N, K), _ in in_process.quantised_linears(size):
        key = f"lora_unet_{name.replace('.', '_')}"
        # Weights have variance 1 / K; an entry of B A has rank / K * spread^2, and alpha / rank is a half.
        spread = 2.0 * EFFECT / rank**0.5
        out[f"{key}.lora_down.weight"] = torch.randn(rank, K, generator=generator) / K**0.5
        out[f"{key}.lora_up.weight"] = torch.randn(N, rank, generator=generator) * spread
        out[f"{key}.alpha"] = torch.tensor(rank / 2)
    return out


def loras_of(size: Size, rank: int, count: int) -> list[Tensors]:
    return [kohya_lora(size, rank, seed=100 * rank + i) for i in range(count)]


# --- one side, in a process of its own --------------------------------------------------------------------------------


def linears(patcher: Any, size: Size) -> dict[str, Any]:
    """name -> module of every packed linear."""
    return {
        name: patcher.model.diffusion_model.get_submodule(name) for name, _, _ in in_process.quantised_linears(size)
    }


def codes(patcher: Any, size: Size) -> dict[str, torch.Tensor]:
    """A copy of every layer's codes, as bytes."""
    return {
        name: module.weight._qdata.detach().cpu().contiguous().view(torch.uint8).clone()
        for name, module in linears(patcher, size).items()
    }


def outputs(patcher: Any, size: Size, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What each loaded layer makes of its input."""
    with torch.inference_mode():
        return {
            name: module(inputs[name].to(patcher.load_device)).double().cpu()
            for name, module in linears(patcher, size).items()
        }


def ready(patcher: Any) -> None:
    """The model on its device with its patches, as at the start of a sampler."""
    import comfy.model_management

    comfy.model_management.load_models_gpu([patcher])
    patcher.pre_run()
    in_process.synchronise()


def with_loras(patcher: Any, loras: Sequence[Tensors], strength: float) -> Any:
    import comfy.sd

    for lora in loras:
        patcher = comfy.sd.load_lora_for_models(patcher, None, lora, strength, 0.0)[0]
    return patcher


def effects(
    loras: Sequence[Tensors], inputs: dict[str, torch.Tensor], strength: float
) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, what the LoRAs together add to the output, float64 [tokens, N]) of each layer."""
    for name, x in inputs.items():
        key = f"lora_unet_{name.replace('.', '_')}"
        total: torch.Tensor | float = 0.0
        for lora in loras:
            up, down = lora[f"{key}.lora_up.weight"].double(), lora[f"{key}.lora_down.weight"].double()
            total = total + strength * float(lora[f"{key}.alpha"]) / down.shape[0] * (x.double() @ down.T @ up.T)
        yield name, torch.as_tensor(total)


def step_seconds(patcher: Any, size: Size, repeats: int) -> float:
    """Seconds of a model call in a sampler: the median of `repeats` after one that counts only where it is slow."""
    (first,) = in_process.sample(patcher, size, 1).wall
    return first if first >= SLOW else statistics.median(in_process.sample(patcher, size, repeats).wall)


def one_stack(base: Any, size: Size, rank: int, count: int) -> dict[str, Any]:
    """Everything about `count` LoRAs of one rank on a loaded model but the time of a step."""
    loras = loras_of(size, rank, count)
    inputs = {
        name: torch.randn(PROBE_TOKENS, K, generator=torch.Generator().manual_seed(3))
        for name, (_, K), _ in in_process.quantised_linears(size)
    }
    ready(base)
    stored, before = codes(base, size), outputs(base, size, inputs)
    now: Tensors = {}
    after: Tensors = {}
    spent: dict[str, list[float]] = {"apply": [], "change": [], "remove": []}

    def timed(what: str, act: Callable[[], Any]) -> Any:
        started = time.perf_counter()
        done = act()
        ready(done)
        spent[what].append(time.perf_counter() - started)
        return done

    while not spent["apply"] or (len(spent["apply"]) < ROUNDS and sum(map(sum, spent.values())) < 1.0):
        patched = timed("apply", lambda: with_loras(base, loras, STRENGTHS[0]))
        patched = timed("change", lambda: with_loras(base, loras, STRENGTHS[1]))
        if not after:
            now, after = codes(patched, size), outputs(patched, size, inputs)
        timed("remove", lambda: base)
    left = codes(base, size)
    if any(not torch.equal(left[name], stored[name]) for name in stored):
        raise Wrong("codes differ from the file's after the LoRA was removed")
    errors = [
        in_process.relative(after[name] - before[name], effect) for name, effect in effects(loras, inputs, STRENGTHS[1])
    ]
    different = sum(int((now[name] != stored[name]).sum()) for name in stored)
    return {
        **{what: statistics.median(times) for what, times in spent.items()},
        "error": sum(errors) / len(errors),
        "worst_error": max(errors),
        "changed_percent": 100.0 * different / sum(one.numel() for one in stored.values()),
    }


def one_side(
    side: str,
    folder: Path,
    size: Size,
    formats: Sequence[str],
    stacks: Sequence[Sequence[int]],
    repeats: int,
    device: str,
) -> dict[str, Any]:
    """format -> "rank x count" -> figures."""
    in_process.prepare(device)
    found: dict[str, Any] = {}
    for fmt in formats:
        base = in_process.load(side, in_process.file_of(folder, fmt))
        without = step_seconds(base, size, repeats)
        merged: float | None = None
        found[fmt] = {}
        for rank, count in stacks:
            figures = one_stack(base, size, rank, count)
            loras = loras_of(size, rank, count)
            # Stock's step does not depend on the LoRA, which is in the weight by then: a slow one is measured once.
            step = merged or step_seconds(with_loras(base, loras, STRENGTHS[1]), size, repeats)
            merged = step if side == "stock" and step >= SLOW else None
            found[fmt][f"{rank} x {count}"] = {**figures, "step": step, "step_without": without}
        del base
        in_process.unload()
    return found


# --- both sides -------------------------------------------------------------------------------------------------------


def measure(
    size: Size, formats: Sequence[str], stacks: Sequence[Sequence[int]], repeats: int, device: str
) -> dict[str, dict[str, Any]]:
    """side -> format -> "rank x count" -> figures; raises Wrong where the effect of ours is off."""
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="lora-") as name, children.host() as in_child:
        folder = Path(name)
        in_process.write_models(folder, in_process.flux_state_dict(size), tuple(formats))
        for side in SIDES:
            order = {
                "side": side,
                "size": vars(size),
                "formats": list(formats),
                "stacks": list(stacks),
                "repeats": repeats,
                "device": device,
            }
            found[side] = in_child(MODULE, "--one", json.dumps(order), "--folder", name, timeout=3600)
            say(f"  {side}: {', '.join(found[side])}")
    for fmt, one in found["ours"].items():
        for stack, figures in one.items():
            if figures["changed_percent"] != 0.0:
                raise Wrong(f"{fmt}, rank {stack}: {figures['changed_percent']:.2g} % of our codes changed")
            if not figures["worst_error"] <= OURS_WRONG:
                raise Wrong(f"{fmt}, rank {stack}: the effect of our LoRA is off by {figures['worst_error']:.2g}")
    return found


def table(found: dict[str, dict[str, Any]], size: Size) -> Table:
    rows: list[list[Cell]] = []
    for fmt, one in found["ours"].items():
        for stack, ours in one.items():
            stock = found["stock"][fmt][stack]
            row: list[Cell] = [fmt, stack]
            for what in ("apply", "change", "remove"):
                row += [ours[what], ours[what] / stock[what]]
            row += [ours["error"], stock["error"], stock["changed_percent"]]
            row += [ours["step"] / ours["step_without"], stock["step"] / stock["step_without"]]
            rows.append([*row, ours["step"] / stock["step"]])
    columns = ["format", "rank x LoRAs", "apply, s", "ours / stock", "change, s", "ours / stock", "remove, s"]
    columns += ["ours / stock", "effect error, ours", "effect error, stock", "stock's changed codes, %"]
    columns += ["step with / without, ours", "step with / without, stock", "step with, ours / stock"]
    note = (
        f"A Flux of {size}, LoRAs on every packed layer, ||BA|| / ||W|| = {EFFECT} each. Times are medians by the "
        "wall clock; removing takes some 10 ms, and stock, whose rounds are long, gets only one or two, so single "
        "ratios there scatter. Ratios are ours / stock, or with / without: at most 1 is good. Our codes never "
        "change (checked); stock's are restored on removal. Effect error: 1 means that the rounding is as large as the "
        "LoRA's effect."
    )
    return Table("LoRAs", columns, rows, note)


def size_of(quick: bool) -> Size:
    """The model that this machine runs."""
    return (QUICK_VNNI if common.machine()["vnni"] else QUICK) if quick else FULL


def run(quick: bool, size: Size | None = None, device: str = "auto", formats: Sequence[str] = FORMATS) -> Result:
    """`quick`: 512 channels (1024 on a CPU with VNNI), five stacks; else 1024 channels, ranks 4 to 128, 1 and 4 LoRAs
    each.
    """
    size = size or size_of(quick)
    stacks = QUICK_STACKS if quick else FULL_STACKS
    found = measure(size, formats, stacks, 3 if quick else 11, device)
    pairs = [(ours, found["stock"][fmt][stack]) for fmt, one in found["ours"].items() for stack, ours in one.items()]

    def worst(key: str) -> float:
        return max(float(ours[key]) / float(stock[key]) for ours, stock in pairs)

    slowest = worst("step")
    goals = [
        common.at_most(
            "error of a LoRA's own effect, ours, worst layer",
            0.01,
            max(ours["worst_error"] for ours, _ in pairs),
            "The products beside the weight are 16-bit ones on this device.",
            summary=True,
        ),
        common.at_most("time to apply a LoRA, ours / stock, worst", 1.0, round(worst("apply"), 3), summary=True),
        common.at_most("time to change its strength, ours / stock, worst", 1.0, round(worst("change"), 3)),
        common.at_most(
            "time to remove it, ours / stock, median of the table",
            1.0,
            round(statistics.median(float(ours["remove"]) / float(stock["remove"]) for ours, stock in pairs), 3),
        ),
        common.at_most(
            "a step with LoRAs, ours / stock, worst",
            1.0,
            round(slowest, 3),
            "Stock has merged the LoRA into the weight, with the error above; ours multiplies by it in every step, "
            "which for 4 LoRAs or rank 128 on so few channels is a good part of the layer itself.",
        ),
    ]
    names = [f"{fmt}, {stack}" for fmt, one in found["ours"].items() for stack in one]
    return Result(
        "lora",
        "What does a LoRA on a quantised model cost, and what is left of it?",
        common.machine(),
        [table(found, size)],
        {"size": vars(size), "sides": found},
        goals,
        [
            Plot(
                "lora",
                "Error of the LoRA's own effect (format, rank x LoRAs)",
                names,
                {"ours": [a["error"] for a, _ in pairs], "stock": [b["error"] for _, b in pairs]},
                y_label="relative L2",
                log_y=True,
                line={1.0: "effect lost"},
            )
        ],
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = common.parser(__doc__)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--hidden", type=int, default=0, help="channels, a multiple of 256")
    parser.add_argument("--formats", type=lambda text: text.split(","), default=FORMATS, help=", ".join(FORMATS))
    parser.add_argument("--one", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.one:
        order = options.one
        size = Size(**order.pop("size"))
        print(json.dumps(one_side(folder=options.folder, size=size, **order)))
        return 0
    base = size_of(options.quick)
    size = Size(options.hidden or base.hidden, base.double, base.single, base.image_tokens, base.text_tokens)
    return common.finish(lambda: run(options.quick, size, options.device, options.formats), options)


if __name__ == "__main__":
    sys.exit(main())
