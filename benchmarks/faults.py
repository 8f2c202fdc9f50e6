"""Damaged and mis-declared checkpoints through the stock loader and ours, on a real ComfyUI server.

    python -I -m quant_loader.benchmarks.faults [--quick] [--json FILE] [--only TEXT]

Every case of `damage.py` is queued twice: with ComfyUI's UNETLoader, and with this pack's loader under strict rules,
for two sampling steps at 64 x 64; the latent is compared with the one of the 16-bit file. A prompt that finishes with a
latent further from it than the format's own error explains, or with numbers that are not finite, is a silent wrong
picture. What the format explains: the difference of the sound file of that format, times the room that
`demo/fixtures.py` leaves between the usual difference and the bound (about 2). The list is the same for `--quick`: it
takes minutes either way.
"""

from __future__ import annotations

import sys
import tempfile
import time
import urllib.error
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import websocket
from quant_loader.benchmarks import common, damage
from quant_loader.benchmarks.common import Cell, Goal, Plot, Result, Table, Wrong, say
from quant_loader.benchmarks.damage import Case
from quant_loader.checkpoint import Fault, Report, check
from quant_loader.demo import fixtures, pictures, quantize, workflows
from quant_loader.demo.client import PromptFailed, PromptRejected, Workflow
from quant_loader.demo.server import ComfyServer

SIZE, STEPS = 64, 2
PROMPT_SECONDS = 60.0
MESSAGE = 300  # characters of a message that are kept
REFERENCE = "reference-bf16.safetensors"

Outcome = Literal["silent", "error", "named", "refused", "crash", "picture"]
OUTCOMES: dict[Outcome, str] = {
    "silent": "silent wrong picture",
    "error": "error without the layer's name",
    "named": "error with the layer's name",
    "refused": "refused before loading",
    "crash": "server crashed or hung",
    "picture": "right picture all the same",
}
GROUPS: dict[str, tuple[damage.Proof, ...]] = {
    "the header proves it": ("header",),
    "only the model shows it": ("model",),
    "no header can prove it": ("deep", "none"),
}
STOCK, OURS = "stock UNETLoader", "Quant Loader, strict"

# The formats that `fixtures.EXPECTATIONS` leaves out, since the stock loader has none of them: the bound of the format
# with the same codes.
MOST_OF_SOUND = 0.3  # of a sound file: 4-bit codes on heavy tails, input layers included, stay well below
AGREEMENT = 2.5  # between two loaders on a sound file, which may run it in different arithmetic
BOUND_OF = {"asym_w4a8": "convrot_w4a4", "quanto_int8": "int8_row"}


@dataclass(frozen=True)
class Attempt:
    """What became of one prompt: in which node it ended, with which message, how far the latent is from 16 bits."""

    outcome: Outcome
    node: str | None = None
    message: str = ""
    difference: float | None = None


@dataclass(frozen=True)
class Known:
    """What the check says of a file, without and with the look at its data."""

    verdict: str
    errors: tuple[str, ...]
    warnings: tuple[str, ...]
    deep_errors: tuple[str, ...]
    deep_warnings: tuple[str, ...]
    complete: bool
    """A refusal that names the layer (where the fault is a layer's), what was found and expected, and the fix."""

    @property
    def by(self) -> str:
        """The least that tells of it."""
        if self.verdict == "refused":
            return "refused by the default check"
        if self.warnings:
            return "warning of the default check"
        if self.deep_errors:
            return "error of --deep only"
        if self.deep_warnings:
            return "warning of --deep only"
        return "nothing"


def workflow(loader: dict[str, Any]) -> Workflow:
    """The demo's text-to-image workflow down to the latent: no autoencoder, no picture."""
    nodes = workflows.text_to_image(loader, prefix="faults/latent", steps=STEPS, size=SIZE)
    return {name: nodes[name] for name in (workflows.LOADER, "conditioning", "canvas", workflows.SAMPLER)} | {
        workflows.LATENT: nodes[workflows.LATENT]
    }


def room(base: str) -> float:
    """How many times the usual difference a format's latent may be off."""
    quantizer = base.removesuffix("+inputs")
    expected = fixtures.EXPECTATIONS[BOUND_OF.get(quantizer, quantizer)]
    return expected.most / expected.measured


def shown(message: str) -> str:
    """The beginning of a message, without the folders of this machine."""
    short = common.scrubbed(message)
    return short if len(short) <= MESSAGE else f"{short[:MESSAGE]} ..."


class Bench:
    """The server, kept alive, and the latent of the 16-bit file."""

    def __init__(self, server: ComfyServer, library: damage.Library) -> None:
        self.server = server
        self.library = library
        self.restarts = 0
        folder = server.models("diffusion_models")
        quantize.save(folder / REFERENCE, library.reference)
        server.start()
        self.reference = self.latent(workflows.stock_loader(REFERENCE))
        self._sound: dict[str, float] = {}

    def sound_difference(self, base: str) -> float:
        """Relative difference of the sound file of a format to the 16-bit one.

        Measured with the stock loader where it knows the format, so that no mistake of ours can widen it, and compared
        with ours, which has to agree. Raises Wrong when either is implausible.
        """
        if base not in self._sound:
            case = Case(f"base-{base.replace('+', '-')}", base, "a sound file", lambda _: None, "sound", None)
            path = self.library.write(case, self.server.models("diffusion_models"))
            loaders = {OURS: workflows.quant_loader(path.name)}
            if base in damage.FORMATS:
                loaders[STOCK] = workflows.stock_loader(path.name)
            found = {
                side: pictures.relative_difference(self.latent(loader), self.reference)
                for side, loader in loaders.items()
            }
            path.unlink()
            say(f"  sound {base}: " + ", ".join(f"{side} {value:.4f}" for side, value in found.items()))
            if not max(found.values()) < MOST_OF_SOUND or max(found.values()) > AGREEMENT * min(found.values()):
                raise Wrong(f"the sound file of {base} differs from 16 bits by {found}")
            self._sound[base] = found.get(STOCK, found[OURS])
        return self._sound[base]

    def latent(self, loader: dict[str, Any]) -> torch.Tensor:
        run = self.server.client.run(workflow(loader), timeout=PROMPT_SECONDS)
        (entry,) = run.files(workflows.LATENT, "latents")
        path = self.server.output() / entry["subfolder"] / entry["filename"]
        latent = pictures.read_latent(path)
        path.unlink()
        return latent

    def attempt(self, loader: dict[str, Any], case: Case) -> Attempt:
        """One prompt; a server that dies of it is started again."""
        try:
            latent = self.latent(loader)
        except PromptRejected as rejected:
            return Attempt("refused", message=shown("\n".join(rejected.details())))
        except PromptFailed as failed:
            error = failed.run.error or {}
            message = str(error.get("exception_message", "")).strip()
            named = case.layer is not None and case.layer in message
            return Attempt("named" if named else "error", error.get("node_type"), shown(message))
        except (TimeoutError, ConnectionError, urllib.error.URLError, websocket.WebSocketException) as lost:
            self.restart()
            return Attempt("crash", message=type(lost).__name__)
        if not torch.isfinite(latent).all():
            return Attempt("silent", difference=float("nan"))
        difference = pictures.relative_difference(latent, self.reference)
        most = room(case.base) * self.sound_difference(case.base)
        return Attempt("picture" if difference <= most else "silent", difference=difference)

    def restart(self) -> None:
        self.restarts += 1
        self.server.stop()
        time.sleep(1.0)
        self.server.start()


def _rules(faults: Sequence[Fault]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(fault.rule for fault in faults))


def is_complete(report: Report, layer: str | None) -> bool:
    """Whether a refusal says all that an artist needs: where, what was expected and found, and what to do.

    A fault of the whole file has no layer, and what was expected of it is a sound file.
    """
    if layer is None:
        return any(fault.found and fault.fix for fault in report.errors)
    return any(fault.layer == layer and fault.expected and fault.found and fault.fix for fault in report.errors)


def known(case: Case, path: Path) -> Known:
    """What the check says. The deep check runs only where the header is not refused."""
    report = check([path])
    of_severity = {s: [f for f in report.faults if f.severity == s] for s in ("error", "warning")}
    deep: list[Fault] = []
    if report.verdict != "refused":
        deep = [fault for fault in check([path], deep=True).faults if fault not in report.faults]
    return Known(
        report.verdict,
        _rules(of_severity["error"]),
        _rules(of_severity["warning"]),
        _rules([fault for fault in deep if fault.severity == "error"]),
        _rules([fault for fault in deep if fault.severity == "warning"]),
        report.verdict == "refused" and is_complete(report, case.layer),
    )


@dataclass(frozen=True)
class Row:
    """A case and what became of it on both sides."""

    case: Case
    known: Known
    stock: Attempt
    ours: Attempt


def try_case(bench: Bench, case: Case) -> Row:
    path = bench.library.write(case, bench.server.models("diffusion_models"))
    try:
        return Row(
            case,
            known(case, path),
            bench.attempt(workflows.stock_loader(path.name), case),
            bench.attempt(workflows.quant_loader(path.name), case),
        )
    finally:
        path.unlink()


def measure(cases: Sequence[Case]) -> tuple[list[Row], int]:
    """Every case in turn, and how often the server had to be started again."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        server = ComfyServer(Path(folder))
        with server.stopped_on_exit():
            bench = Bench(server, damage.Library())
            for number, case in enumerate(cases):
                row = try_case(bench, case)
                rows.append(row)
                say(f"  {number + 1:3}/{len(cases)} {case.name:44} {row.stock.outcome:8} {row.ours.outcome}")
            return rows, bench.restarts


def verify(rows: Sequence[Row]) -> None:
    """The sound files give sound pictures in both loaders, or nothing else here means anything."""
    for row in rows:
        if row.case.name.removeprefix("sound-") in damage.FORMATS:
            for side, attempt in ((STOCK, row.stock), (OURS, row.ours)):
                if attempt.outcome != "picture":
                    raise Wrong(f"{side}, sound file of {row.case.base}: {attempt}")


# --- tables -----------------------------------------------------------------------------------------------------------


def counts(rows: Sequence[Row]) -> list[list[Cell]]:
    """The summary: a line a loader."""
    lines: list[list[Cell]] = []
    for side, attempts in ((STOCK, [r.stock for r in rows]), (OURS, [r.ours for r in rows])):
        found = Counter(attempt.outcome for attempt in attempts)
        lines.append([side, *(found[outcome] for outcome in OUTCOMES)])
    return lines


def summary_table(rows: Sequence[Row]) -> Table:
    lines: list[list[Cell]] = []
    for name, proofs in GROUPS.items():
        part = [row for row in rows if row.case.proof in proofs]
        lines += [[f"{name} ({len(part)})", *line] for line in counts(part)]
    return Table(
        f"{sum(row.case.proof != 'sound' for row in rows)} damaged or mis-declared checkpoints",
        ["fault", "loader", *OUTCOMES.values()],
        lines,
        "Counts, not ratios. Two sampling steps of a tiny Flux on a real server. A picture is wrong when its latent is "
        "further from the 16-bit one than the format's own error allows, or is not finite. The last column counts "
        "files whose damage did not change the picture by more than that.",
    )


def format_table(rows: Sequence[Row]) -> Table:
    damaged = [row for row in rows if row.case.proof != "sound"]
    lines: list[list[Cell]] = []
    for base in damage.FORMATS:
        part = [row for row in damaged if row.case.base == base]
        lines.append(
            [
                base,
                len(part),
                sum(row.stock.outcome == "silent" for row in part),
                sum(row.ours.outcome == "silent" for row in part),
                sum(row.ours.outcome == "silent" and row.case.proof == "header" for row in part),
            ]
        )
    return Table(
        "Silent wrong pictures by format",
        ["format", "damaged files", "stock", "ours", "ours, where the header proves the fault"],
        lines,
    )


def hidden_table(rows: Sequence[Row]) -> Table:
    lines: list[list[Cell]] = [
        [
            row.case.base,
            row.case.what,
            OUTCOMES[row.stock.outcome],
            OUTCOMES[row.ours.outcome],
            ", ".join(row.known.warnings) or "nothing",
            ", ".join(row.known.deep_errors + row.known.deep_warnings) or "nothing",
        ]
        for row in rows
        if row.case.proof in ("deep", "none")
    ]
    return Table(
        "What no header can prove",
        ["format", "damage", "stock", "ours", "default check warns", "`--deep` adds"],
        lines,
        "These load in both: the declaration is whole and consistent, and only the values are not what it says. "
        "`quant-loader check FILE --deep` reads values; its rotation and layout findings are warnings, never proofs.",
    )


def sound_table(rows: Sequence[Row]) -> Table:
    lines: list[list[Cell]] = [
        [
            row.case.base.replace("+", " + "),
            row.case.what,
            OUTCOMES[row.stock.outcome].replace(" all the same", ""),
            OUTCOMES[row.ours.outcome].replace(" all the same", ""),
        ]
        for row in rows
        if row.case.proof == "sound"
    ]
    return Table("Files with nothing wrong", ["format", "file", "stock", "ours"], lines)


def case_table(rows: Sequence[Row], title: str) -> Table:
    lines: list[list[Cell]] = [
        [
            row.case.name,
            row.case.what,
            OUTCOMES[row.stock.outcome] + (f" ({row.stock.node})" if row.stock.node else ""),
            OUTCOMES[row.ours.outcome],
            ", ".join(row.known.errors) or row.known.by,
        ]
        for row in rows
    ]
    return Table(title, ["case", "damage", "stock", "ours", "rules, or what tells of it"], lines, collapsed=True)


def names(rows: Sequence[Row]) -> str:
    """The cases that miss a goal, with what became of each and where."""
    return "; ".join(
        f"{row.case.name} ({OUTCOMES[row.ours.outcome]}{f' in {row.ours.node}' if row.ours.node else ''})"
        for row in rows
    )


def goals(rows: Sequence[Row], further: Sequence[Row]) -> list[Goal]:
    both = [*rows, *further]
    damaged = [row for row in rows if row.case.proof != "sound"]
    provable = [row for row in both if row.case.proof == "header"]
    silent = [row for row in provable if row.ours.outcome in ("silent", "crash")]
    late = [row for row in provable if row.ours.outcome != "refused"]
    incomplete = [row for row in provable if not row.known.complete]
    misfits = [row for row in both if row.case.proof == "model"]
    unnamed = [row for row in misfits if row.ours.outcome not in ("named", "refused")]
    refused_sound = [row for row in both if row.case.proof == "sound" and row.ours.outcome != "picture"]
    shared = [row for row in rows if row.case.proof == "header"]
    stock_provable = sum(row.stock.outcome == "silent" for row in shared)
    stock_silent = sum(row.stock.outcome == "silent" for row in damaged)
    return [
        Goal(
            "silent wrong pictures, where the header proves the fault",
            "0",
            f"{len(silent)} of {len(provable)}; stock: {stock_provable} of {len(shared)}",
            not silent,
            names(silent),
            summary=True,
        ),
        Goal(
            "refused before loading, where the header proves the fault",
            "100 %",
            f"{len(provable) - len(late)} of {len(provable)}",
            not late,
            names(late),
            summary=True,
        ),
        Goal(
            "refusals with layer, expected, found and fix",
            "100 %",
            f"{len(provable) - len(incomplete)} of {len(provable)}",
            not incomplete,
            f"not all four: {names(incomplete)}" if incomplete else "",
        ),
        Goal(
            "files that are not the model: refused, or an error that names the layer",
            "100 %",
            f"{len(misfits) - len(unnamed)} of {len(misfits)}",
            not unnamed,
            names(unnamed),
            summary=True,
        ),
        Goal("sound files refused or wrong", "0", str(len(refused_sound)), not refused_sound, names(refused_sound)),
        Goal(
            "damaged files tried on both loaders",
            "at least 100",
            f"{len(damaged)} (the stock loader makes {stock_silent} silent wrong pictures of them)",
            len(damaged) >= 100,
        ),
    ]


PLOTTED: tuple[Outcome, ...] = ("refused", "named", "picture", "silent", "error", "crash")


def plot(rows: Sequence[Row]) -> Plot:
    damaged = [row for row in rows if row.case.proof != "sound"]
    provable = [row for row in damaged if row.case.proof == "header"]
    other = [row for row in damaged if row.case.proof != "header"]
    bars: dict[str, Counter[Outcome]] = {}
    for name, part in (("provable", provable), ("not provable", other)):
        bars[f"stock\n{name}"] = Counter(row.stock.outcome for row in part)
        bars[f"ours\n{name}"] = Counter(row.ours.outcome for row in part)
    return Plot(
        "faults",
        f"{len(damaged)} damaged checkpoints, by whether the header proves the fault",
        list(bars),
        {OUTCOMES[outcome]: [float(found[outcome]) for found in bars.values()] for outcome in PLOTTED},
        y_label="checkpoints",
        kind="stacked",
    )


def _plain(row: Row) -> dict[str, object]:
    case = row.case
    return {
        "name": case.name,
        "format": case.base,
        "damage": case.what,
        "proof": case.proof,
        "layer": case.layer,
        "told_by": row.known.by,
        "check": asdict(row.known),
        "stock": asdict(row.stock),
        "ours": asdict(row.ours),
    }


def run(quick: bool, only: str = "") -> Result:
    """All cases, whether `quick` or not; `only`: those whose name contains the text."""
    del quick
    shared, further = damage.stock_cases(), damage.further_cases()
    started = time.monotonic()
    chosen = [case for case in (*shared, *further) if only in case.name]
    rows, restarts = measure(chosen)
    verify(rows)
    both = [row for row in rows if row.case in shared]
    ours_only = [row for row in rows if row.case not in shared]
    say(f"  {len(rows)} cases in {time.monotonic() - started:.0f} s, {restarts} restarts of the server")
    extra = Table(
        "Formats that the stock loader of ComfyUI 0.30 does not know",
        ["fault", "loader", *OUTCOMES.values()],
        [
            [f"{name} ({len(part)})", *line]
            for name, part in (
                ("sound files", [row for row in ours_only if row.case.proof == "sound"]),
                *((name, [row for row in ours_only if row.case.proof in proofs]) for name, proofs in GROUPS.items()),
            )
            if part
            for line in counts(part)
        ],
        "W4A8 (asym_w4a8_int8) and Quanto INT8; ComfyUI 0.31 and later know the first.",
    )
    return Result(
        "faults",
        "What becomes of a damaged or mis-declared checkpoint: a wrong picture, an error, or a refusal with a reason?",
        common.machine(),
        [
            summary_table(both),
            format_table(both),
            hidden_table(rows),
            sound_table(both),
            extra,
            case_table(rows, f"All {len(rows)} cases"),
        ],
        {"cases": [_plain(row) for row in rows], "server_restarts": restarts},
        goals(both, ours_only),
        [plot(both)],
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = common.parser(__doc__)
    parser.add_argument("--only", default="", metavar="TEXT", help="only the cases whose name contains this")
    options = parser.parse_args(argv)
    return common.finish(lambda: run(options.quick, options.only), options)


if __name__ == "__main__":
    sys.exit(main())
