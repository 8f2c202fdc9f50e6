"""The subcommands and options that this room adds to ``quant-loader``. Exit codes: 0 done, 1 refused, 2 the request
is wrong.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Callable
from types import FrameType

from ..checkpoint import Report, check, verdict_text
from ..checkpoint.report import Rules
from ..checkpoint.words import clean
from . import console
from .errors import Refused, RequestError

OK, REFUSED, BAD_REQUEST = 0, 1, 2
WRONG_REQUEST = frozenset(
    {"extra.file.not_found", "extra.file.special", "extra.file.not_checkpoint", "extra.file.unreadable"}
)
"""Faults that mean there is nothing to judge."""
Table = Callable[[Report, list[str]], str]


def answered(name: str, run: Callable[[argparse.Namespace], int]) -> Callable[[argparse.Namespace], int]:
    """``run`` with our two kinds of failure, and those of the system below, turned into a sentence and an exit code."""

    def wrapped(arguments: argparse.Namespace) -> int:
        if console.is_closed():
            console.complain(name, "standard output is closed; there is nowhere to write the answer.")
            return BAD_REQUEST
        try:
            code = run(arguments)
            sys.stdout.flush()
            return code
        except BrokenPipeError:
            raise
        except OSError as error:  # every file that is read or written has its own answer: this is standard output
            console.abandon()
            console.complain(name, f"the answer could not be written: {error.strerror or error}.")
            return BAD_REQUEST
        except RequestError as error:
            console.complain(name, str(error))
            return BAD_REQUEST
        except Refused as error:
            console.complain(name, str(error))
            for reason in error.reasons:
                console.say(f"  {reason}")
            return REFUSED

    return wrapped


# -- check: workflows, installations, addresses ------------------------------------------------------------------------


def check_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that this room adds to ``check``."""
    parser.add_argument(
        "--workflow",
        action="append",
        metavar="WORKFLOW",
        help="check every model file that a workflow names: its JSON (API or editor format) or a PNG made by ComfyUI",
    )
    parser.add_argument("--all", metavar="MODELS_DIR", help="check every checkpoint below ComfyUI's models folder")
    _folder_arguments(parser)


def _folder_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--models",
        metavar="DIR",
        help="the models folder to find names in (default: the ComfyUI around this pack, or COMFYUI_PATH)",
    )
    parser.add_argument(
        "--extra-model-paths",
        action="append",
        default=[],
        metavar="FILE",
        help="ComfyUI's extra_model_paths.yaml; may be given several times",
    )


def check_elsewhere(arguments: argparse.Namespace, table: Table) -> int | None:
    """Run ``check --workflow`` or ``check --all``; None when neither was asked for."""
    if not arguments.workflow and not arguments.all:
        if not arguments.files:
            console.complain("check", "give files to check, or --workflow, or --all.")
            return BAD_REQUEST
        return None
    if arguments.files or (arguments.workflow and arguments.all):
        console.complain("check", "give files, --workflow or --all, one of the three.")
        return BAD_REQUEST
    if arguments.all:
        return answered("check", _check_all)(arguments)
    return answered("check", lambda a: _check_workflows(a, table))(arguments)


def shown(paths: list[str]) -> list[str]:
    """What may be printed of the given paths: addresses without what can hold a token."""
    from . import addresses

    return [addresses.public(path) if addresses.is_address(path) else path for path in paths]


def report_on(paths: list[str], rules: Rules, deep: bool) -> Report:
    """The report on local files or on an address. Raises RequestError when an address cannot be read."""
    from . import addresses

    foreign = next((scheme for scheme in map(addresses.foreign_scheme, paths) if scheme), None)
    if foreign is not None:
        raise RequestError(f"{clean(foreign)}:// addresses are not read; give an https:// or hf:// one, or a file.")
    if any(addresses.is_address(path) for path in paths):
        from .remote import check_address

        if len(paths) > 1:
            raise RequestError("Give one address at a time: a file, or the index of a shard set.")
        if deep:
            raise RequestError("--deep reads weights, which an address check does not; download the file first.")
        return check_address(paths[0], rules)
    return check(paths, rules=rules, deep=deep)


def _check_workflows(arguments: argparse.Namespace, table: Table) -> int:
    from .model_folders import model_folders
    from .workflow_check import STOCK_RULES, check_workflow
    from .workflows import read_workflow

    documents = [read_workflow(path) for path in arguments.workflow]
    folders = model_folders(arguments.models, arguments.extra_model_paths)
    stock: Rules = STOCK_RULES if arguments.rules is None else arguments.rules
    progress = console.Progress()
    reports = [check_workflow(document, folders, stock_rules=stock, progress=progress.show) for document in documents]
    progress.clear()
    if arguments.json:
        answers = [report.to_dict() for report in reports]
        console.say(json.dumps(answers[0] if len(answers) == 1 else answers, indent=2))
    else:
        for report in reports:
            console.say(f"{report.source}: {report.summary}")
            for model in report.models:
                reference = model.reference
                console.say(
                    f"\n{clean(reference.name, 200)}  [node {reference.node_id}, {reference.node_type}, "
                    f"{reference.folder}, {model.rules or 'not checked'}]"
                )
                if model.report is not None and model.path is not None:
                    console.say("\n".join(table(model.report, [model.path]).splitlines()[1:]))
                else:
                    console.say(model.summary)
            for unknown in report.unknown:
                console.say(
                    f"\nNode {unknown.node_id} ({unknown.node_type}) names {clean(unknown.name)}; this node type is "
                    f"not known here, so it was not checked."
                )
            for note in report.notes:
                console.say(f"\n{note}")
    return REFUSED if any(report.verdict == "refused" for report in reports) else OK


def _check_all(arguments: argparse.Namespace) -> int:
    from .installation import Tally, check_all, find_checkpoints
    from .model_folders import model_folders

    folders = model_folders(arguments.all, arguments.extra_model_paths)
    progress = console.Progress()
    progress.show("looking for checkpoints")
    present = [root for root in folders.roots() if root.is_dir()]
    inventory = find_checkpoints(present)
    tally = Tally(notes=inventory.notes)
    tally.notes.extend(f"{clean(str(root), 200)} is no folder." for root in folders.roots() if root not in present)
    rules: Rules = arguments.rules or "strict"
    total = len(inventory.checkpoints)
    progress.show(f"[1/{total}]")
    for number, (path, report) in enumerate(check_all(inventory, rules), start=1):
        tally.add(report)
        progress.clear()
        if arguments.json:
            console.say(json.dumps({"path": str(path), **report.to_dict()}))
        else:
            words = {"ok": "sound", "unquantized": "not quantised", "refused": "REFUSED"}[report.verdict]
            console.say(f"{words:<14} {clean(str(path), 300)}")
            if report.verdict == "refused":
                console.say("\n".join(f"{'':<15}{line}" for line in verdict_text(report).splitlines()))
        progress.show(f"[{min(number + 1, total)}/{total}]")
    progress.clear()
    if arguments.json:
        console.say(json.dumps(tally.to_dict()))
    else:
        for note in tally.notes:
            console.say(note)
        console.say(tally.summary)
    return REFUSED if tally.verdicts["refused"] else OK


# -- repair ------------------------------------------------------------------------------------------------------------


def repair_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source", metavar="IN", help="the file to mend, any shard of a set, or the index; opened for reading only"
    )
    parser.add_argument("target", metavar="OUT", help="the new file; for a set a folder, or the new index's name")
    parser.add_argument(
        "--declare",
        action="append",
        default=[],
        metavar="FORMAT",
        help="say how layers without a usable declaration are quantised: FORMAT, FORMAT,key=value,... "
        "or LAYER=FORMAT (wildcards allowed)",
    )
    parser.add_argument(
        "--keep",
        choices=("marker", "header"),
        help="which declaration is right where a layer's marker and the header's metadata contradict each other",
    )
    parser.add_argument("--dry-run", action="store_true", help="say what would be changed; write nothing")
    parser.add_argument("--overwrite", action="store_true", help="replace what has OUT's name, or the names in it")


def _repair(arguments: argparse.Namespace) -> int:
    from .declare import parse_declaration
    from .repair import repair

    declared = [parse_declaration(text) for text in arguments.declare]
    progress = console.Progress()
    previous = signal.signal(signal.SIGTERM, _terminated)
    try:
        outcome = repair(
            arguments.source,
            arguments.target,
            declared,
            keep=arguments.keep,
            dry_run=arguments.dry_run,
            overwrite=arguments.overwrite,
            progress=lambda done, total: progress.show(f"writing {100 * done // max(total, 1)} %"),
        )
    except KeyboardInterrupt:
        progress.clear()
        console.complain("repair", "interrupted; nothing was kept.")
        raise
    finally:
        progress.clear()
        signal.signal(signal.SIGTERM, previous)
    for change in outcome.changes:
        console.say(f"  {change.text}")
    count = len(outcome.changes)
    verb = "written" if outcome.written else "would be written"
    console.say(
        f"{clean(arguments.target, 300)} {verb} ({count} {'change' if count == 1 else 'changes'}). "
        f"{outcome.report.summary}"
    )
    return OK


def _terminated(number: int, frame: FrameType | None) -> None:
    """A request to stop ends like Ctrl-C: what was begun is cleared away."""
    del number, frame
    raise KeyboardInterrupt


# -- convert-workflow --------------------------------------------------------------------------------------------------


def convert_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source", metavar="IN", help="a workflow: JSON in API or editor format, or a PNG made by ComfyUI"
    )
    parser.add_argument(
        "target", metavar="OUT", nargs="?", default="-", help="the new JSON file (default: standard output)"
    )
    parser.add_argument(
        "--rules", choices=("strict", "compatible"), default="strict", help="the rules setting of the new nodes"
    )
    parser.add_argument(
        "--execution",
        choices=("auto", "native", "int8", "exact"),
        default="auto",
        help="the execution setting of the new nodes",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace OUT if it exists, even if it is IN")


def _convert(arguments: argparse.Namespace) -> int:
    from .convert import convert_workflow
    from .documents import write_text
    from .workflows import read_workflow

    result = convert_workflow(read_workflow(arguments.source), rules=arguments.rules, execution=arguments.execution)
    text = json.dumps(result.content, indent=2)
    if arguments.target == "-":
        console.say(text)
    else:
        write_text(arguments.target, text + "\n", overwrite=arguments.overwrite)
        for change in result.changes:
            console.say(change)
    for warning in result.warnings:
        console.complain("convert-workflow", warning)
    if not result.changes:
        console.complain("convert-workflow", "no stock loader was found; the workflow was copied as it is.")
    return OK


# -- plan and doctor ---------------------------------------------------------------------------------------------------


def plan_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "file", metavar="FILE", help="a checkpoint: a .safetensors file, a shard, an index or an address"
    )
    parser.add_argument(
        "--device",
        action="append",
        default=[],
        metavar="NAME",
        help="plan for a named card instead of this machine: sm_86, rtx4090, gfx1100, mps, cpu, ...; "
        "may be given several times",
    )
    parser.add_argument(
        "--execution",
        choices=("auto", "native", "int8", "exact"),
        default="auto",
        help="the node's setting (default: auto)",
    )
    parser.add_argument("--rules", choices=("strict", "compatible"), default="strict", help="which rule set decides")
    parser.add_argument("--json", action="store_true", help="print the answer as JSON")


def _plan(arguments: argparse.Namespace) -> int:
    from .outlook import devices, outlook

    report = report_on([arguments.file], arguments.rules, deep=False)
    places = devices(arguments.device)
    if report.verdict == "refused":
        if all(fault.rule in WRONG_REQUEST for fault in report.errors):
            raise RequestError(report.errors[0].message)
        raise Refused(
            f"{shown([arguments.file])[0]} is refused, so nothing of it would run.",
            tuple(verdict_text(report).splitlines()),
        )
    answers = [(name, facts, outlook(report.layers, facts, arguments.execution)) for name, facts in places]
    if arguments.json:
        found = [{"device": n, "name": f.name, "groups": [g.to_dict() for g in groups]} for n, f, groups in answers]
        document = {
            "file": shown([arguments.file])[0],
            "summary": report.summary,
            "execution": arguments.execution,
            "devices": found,
        }
        console.say(json.dumps(document, indent=2))
        return OK
    console.say(report.summary)
    for name, facts, groups in answers:
        console.say(f"\n{name}: {clean(facts.name)}")
        for group in groups:
            console.say("\n".join(f"  {line}" for line in group.lines()))
    return OK


def doctor_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the answer as JSON")


def _doctor(arguments: argparse.Namespace) -> int:
    from .doctor import diagnose

    found = diagnose()
    console.say(json.dumps(found.to_dict(), indent=2) if arguments.json else found.text())
    return OK


COMMANDS: dict[str, tuple[str, Callable[[argparse.ArgumentParser], None], Callable[[argparse.Namespace], int]]] = {
    "repair": ("Write a mended copy of a file: lossless mends only.", repair_arguments, answered("repair", _repair)),
    "plan": ("Say which kernel would run each layer of a file, and why.", plan_arguments, answered("plan", _plan)),
    "doctor": (
        "Versions, devices and kernels of this machine, for a bug report.",
        doctor_arguments,
        answered("doctor", _doctor),
    ),
    "convert-workflow": (
        "Put this pack's loaders in place of the stock ones in a workflow.",
        convert_arguments,
        answered("convert-workflow", _convert),
    ),
}
"""Subcommand -> (help, what adds its arguments, what runs it)."""
