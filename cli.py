"""The ``quant-loader`` command. Every subcommand is a pair of functions in ``COMMANDS``: one adds its arguments, one
runs it.

Exit codes: 0 ok or not quantised, 1 refused, 2 the request itself is wrong (no such file, not a checkpoint).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from .automation import commands
from .checkpoint import Report
from .checkpoint.summary import group_text
from .checkpoint.words import clean, listing

OK, REFUSED, BAD_REQUEST = 0, 1, 2


class Command(NamedTuple):
    """A subcommand: its one-line help, what adds its arguments, what runs it."""

    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code. Never a traceback for anything a file contains."""
    parser = argparse.ArgumentParser(
        prog="quant-loader", description="Check, mend and explain quantised diffusion checkpoints."
    )
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        sub = subparsers.add_parser(name, help=command.help, description=command.help)
        command.add_arguments(sub)
        sub.set_defaults(run=command.run)
    try:
        arguments = parser.parse_args(argv)
    except SystemExit as stop:  # argparse: 0 after --help, 2 after a bad argument
        return stop.code if isinstance(stop.code, int) else BAD_REQUEST
    run: Callable[[argparse.Namespace], int] = arguments.run
    try:
        return run(arguments)
    except BrokenPipeError:
        sys.stderr.close()  # the reader of a pipe left; Python would complain at exit otherwise
        return OK
    except KeyboardInterrupt:
        return 130


# -- check -----------------------------------------------------------------------------------------------------------


def _check_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "files",
        nargs="*",
        metavar="FILE",
        help="a .safetensors file, any shard of a model, its .index.json, an http(s):// or hf://owner/repo/path "
        "address, or - for a list on standard input",
    )
    parser.add_argument("--rules", choices=("strict", "compatible"), help="which rule set decides (default: strict)")
    parser.add_argument("--json", action="store_true", help="print the report as JSON (one object per file)")
    parser.add_argument(
        "--one", action="store_true", help="the files are parts of one checkpoint, not checkpoints of their own"
    )
    commands.check_arguments(parser)
    parser.add_argument(
        "--deep",
        action="store_true",
        help="also read block scales, biases and samples of the weights (about 10 ms of processor time a layer)",
    )


def _check(arguments: argparse.Namespace) -> int:
    answer = commands.check_elsewhere(arguments, _table)
    if answer is not None:
        return answer
    requests = list(_requests(arguments))
    if not requests:
        print("quant-loader check: no files given", file=sys.stderr)
        return BAD_REQUEST
    worst = OK
    reports: list[Report] = []
    for number, paths in enumerate(requests, start=1):
        if len(requests) > 1 and not arguments.json and sys.stderr.isatty():
            room = shutil.get_terminal_size((100, 24)).columns - 16
            name = _printable(clean(os.path.basename(commands.shown(paths)[0]), max(room, 16)))
            print(f"\r\033[K[{number}/{len(requests)}] {name}", end="", file=sys.stderr, flush=True)
        report = commands.report_on(paths, arguments.rules or "strict", arguments.deep)
        if sys.stderr.isatty() and len(requests) > 1 and not arguments.json:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
        worst = max(worst, exit_code(report))
        if arguments.json:
            reports.append(report)
        else:
            print(_table(report, commands.shown(paths)))
            if number < len(requests):
                print()
    if arguments.json:
        documents = [report.to_dict() for report in reports]
        print(json.dumps(documents[0] if len(documents) == 1 else documents, indent=2))
    return worst


def _requests(arguments: argparse.Namespace) -> Iterator[list[str]]:
    """One list of paths per checkpoint. Shards of one set given together are one checkpoint."""
    paths: list[str] = []
    for given in arguments.files:
        if given == "-":
            paths.extend(line for line in (raw.rstrip("\r\n") for raw in sys.stdin) if line.strip())
        else:
            paths.append(given)
    if arguments.one:
        if paths:
            yield paths
        return
    sets: dict[str, list[str]] = {}
    for path in dict.fromkeys(paths):
        stem, dash, rest = path.rpartition("-of-")
        key = f"{stem.rpartition('-')[0]}-of-{rest}" if dash and rest[:5].isdigit() else path
        sets.setdefault(key, []).append(path)
    yield from sets.values()


def exit_code(report: Report) -> int:
    """The design's exit code of one report."""
    if report.verdict != "refused":
        return OK
    if all(fault.rule in commands.WRONG_REQUEST for fault in report.errors):
        return BAD_REQUEST
    return REFUSED


def _table(report: Report, paths: list[str]) -> str:
    """A readable table: the verdict, the formats, every group of faults with its fix."""
    width = max(min(shutil.get_terminal_size((100, 24)).columns, 120), 40)
    colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    mark = {"ok": "32", "unquantized": "33", "refused": "31"}[report.verdict]
    summary = "\n".join(_wrapped(report.summary, width, ""))
    lines = _wrapped(listing([os.path.basename(path) for path in paths]), width, "")
    lines.append(f"\033[{mark}m{summary}\033[0m" if colour else summary)
    lines.extend(_formats(report, width))
    for group in report.groups:
        lines.append(f"  {group.severity} {group.rule}" + (f" x{group.count}" if group.count > 1 else ""))
        lines.extend(_wrapped(group_text(group, names=2), width, "    "))
        lines.extend(_wrapped(f"-> {group.fix}", width, "    ", "       "))
    return _printable("\n".join(lines), keep="\n\033")


def _formats(report: Report, width: int) -> list[str]:
    """One row for each kind of layer, its description wrapped to what is left of the line."""
    rows: dict[tuple[str, str], tuple[int, int]] = {}
    for layer in report.layers:
        key = (layer.format, _kind(layer.annotations))
        count, size = rows.get(key, (0, 0))
        rows[key] = (count + 1, size + layer.bytes)
    if not rows:
        return []
    name_width = max(len("format"), *(len(name) for name, _ in rows))
    longest = max(len("kind"), *(len(kind) for _, kind in rows))
    kind_width = min(longest, max(width - name_width - len(f"    {'':>6} {'':>10}"), len("pre_quant_scale")))
    lines = [f"  {'format':<{name_width}} {'kind':<{kind_width}} {'layers':>6} {'size':>10}"]
    for (name, kind), (count, size) in rows.items():
        first, *others = textwrap.wrap(kind, kind_width) or [""]
        lines.append(f"  {name:<{name_width}} {first:<{kind_width}} {count:>6} {_size(size):>10}")
        lines.extend(f"  {'':<{name_width}} {other}" for other in others)
    return lines


def _wrapped(text: str, width: int, indent: str, further: str | None = None) -> list[str]:
    """A paragraph as lines. A name that no line can hold is cut in its middle: both its ends tell something."""
    further = indent if further is None else further
    room = width - len(further)
    words = " ".join(clean(word, room) for word in text.split())
    return textwrap.wrap(
        words, width, initial_indent=indent, subsequent_indent=further, break_long_words=False, break_on_hyphens=False
    )


def _kind(annotations: object) -> str:
    """What tells layers of one format apart, in a few words."""
    if not isinstance(annotations, dict):
        return ""
    words = []
    if annotations.get("is_rowwise"):
        words.append("row scales")
    if annotations.get("is_tensorwise_scalar"):
        words.append("one scale")
    if annotations.get("convrot") or "linear_dtype" in annotations or "has_codebook" in annotations:
        words.append(f"ConvRot {annotations.get('convrot_groupsize')}")
    if annotations.get("has_pre_quant_scale"):
        words.append("pre_quant_scale")
    if annotations.get("activation_scheme"):
        words.append(str(annotations["activation_scheme"]))
    if annotations.get("full_precision_matrix_mult"):
        words.append("full precision product")
    return ", ".join(words)


def _size(count: int) -> str:
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def _printable(text: str, keep: str = "") -> str:
    """Text that any terminal and encoding can show: names come from hostile files."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    shown = "".join(char if char.isprintable() or char in keep else "?" for char in text)
    return shown.encode(encoding, "replace").decode(encoding)


COMMANDS: dict[str, Command] = {
    "check": Command(
        "Check files and say what is wrong with them.", _check_arguments, commands.answered("check", _check)
    ),
    **{name: Command(*row) for name, row in commands.COMMANDS.items()},
}
"""Subcommands by name."""

__all__ = ["BAD_REQUEST", "COMMANDS", "OK", "REFUSED", "Command", "exit_code", "main"]

if __name__ == "__main__":
    sys.exit(main())
