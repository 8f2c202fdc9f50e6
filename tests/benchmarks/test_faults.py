"""The list of damaged checkpoints: what the benchmark claims of each is what the check says, without a server."""

from __future__ import annotations

import pytest
from quant_loader.benchmarks import damage, faults
from quant_loader.checkpoint import check

SHARED, FURTHER = damage.stock_cases(), damage.further_cases()
CASES = {case.name: case for case in (*SHARED, *FURTHER)}


@pytest.fixture(scope="module")
def library() -> damage.Library:
    return damage.Library()


def test_there_are_more_than_a_hundred_and_all_are_different(library):
    damaged = [case for case in SHARED if case.proof != "sound"]
    assert len(damaged) >= 100
    assert len(CASES) == len(SHARED) + len(FURTHER)
    assert {case.base.removesuffix("+inputs") for case in SHARED} == set(damage.FORMATS)
    assert len({(case.base, case.what) for case in CASES.values()}) == len(CASES)


def test_damage_changes_the_file_and_leaves_the_sound_one_whole(library):
    """Damage puts other tensors in place of the sound ones, and writes into none of them."""
    for case in CASES.values():
        tensors, metadata = library.sound(case.base)
        before = {name: tensor._version for name, tensor in tensors.items()}
        draft = library.draft(case)
        replaced = {name for name, tensor in draft.tensors.items() if tensors.get(name) is not tensor}
        changed = replaced or draft.metadata != metadata or draft.finish or set(draft.tensors) != set(tensors)
        assert bool(changed) == (not case.what.endswith("a sound file") and "input layers" not in case.what), case.name
        assert {name: tensor._version for name, tensor in tensors.items()} == before, case.name


@pytest.mark.parametrize("base", [*damage.FORMATS, *damage.NOT_IN_STOCK])
def test_sound_files_are_sound(library, tmp_path, base):
    for case in CASES.values():
        if case.base.removesuffix("+inputs") == base and case.proof == "sound":
            assert check([library.write(case, tmp_path)], deep=True).errors == (), case.name


@pytest.mark.parametrize("base", [*damage.FORMATS, *damage.NOT_IN_STOCK])
def test_what_the_header_proves_is_refused_with_layer_expected_found_and_fix(library, tmp_path, base):
    let_through, incomplete = set(), set()
    for case in CASES.values():
        if case.base == base and case.proof == "header":
            report = check([library.write(case, tmp_path)])
            if report.verdict != "refused":
                let_through.add(case.name)
            elif not faults.is_complete(report, case.layer):
                incomplete.add(case.name)
    assert not let_through
    assert not incomplete


@pytest.mark.parametrize("base", [*damage.FORMATS, *damage.NOT_IN_STOCK])
def test_what_no_header_proves_is_let_through_and_the_deep_check_tells_of_what_it_can(library, tmp_path, base):
    for case in CASES.values():
        if case.base != base or case.proof not in ("model", "deep", "none"):
            continue
        known = faults.known(case, library.write(case, tmp_path))
        assert known.verdict == "ok", case.name
        told = bool(known.deep_errors or known.deep_warnings)
        assert told == (case.proof == "deep"), (case.name, known)


def attempt(outcome: faults.Outcome) -> faults.Attempt:
    return faults.Attempt(outcome)


def row(name: str, stock: faults.Outcome, ours: faults.Outcome, complete: bool = True) -> faults.Row:
    refused = ours == "refused"
    known = faults.Known("refused" if refused else "ok", (), (), (), (), complete and refused)
    return faults.Row(CASES[name], known, attempt(stock), attempt(ours))


def test_a_silent_picture_or_a_late_error_of_ours_misses_the_goal():
    provable = ("nvfp4-marker-missing", "silent", "refused")
    hidden = row("nvfp4-nibbles", "silent", "silent")
    met = {goal.name: goal.met for goal in faults.goals([row(*provable), hidden], [])}
    assert met["silent wrong pictures, where the header proves the fault"]
    assert met["refused before loading, where the header proves the fault"]
    assert met["refusals with layer, expected, found and fix"]
    assert not met["damaged files tried on both loaders"]

    missed = faults.goals([row("nvfp4-marker-missing", "silent", "silent"), hidden], [])
    assert [goal.explanation for goal in missed[:2]] == ["nvfp4-marker-missing (silent wrong picture)"] * 2
    assert not any(goal.met for goal in missed[:3])


def test_the_summary_counts_each_outcome_apart():
    rows = [
        row("nvfp4-marker-missing", "silent", "refused"),
        row("fp8-marker-missing", "error", "refused"),
        row("nvfp4-nibbles", "silent", "silent"),
    ]
    lines = {tuple(line[:2]): line[2:] for line in faults.summary_table(rows).rows}
    assert lines["the header proves it (2)", faults.STOCK] == [1, 1, 0, 0, 0, 0]
    assert lines["the header proves it (2)", faults.OURS] == [0, 0, 0, 2, 0, 0]
    assert lines["no header can prove it (1)", faults.OURS] == [1, 0, 0, 0, 0, 0]
