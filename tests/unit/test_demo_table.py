"""What the demo counts, and what it makes of it."""

from __future__ import annotations

import pytest
from rich.console import Console

from ray_artifact_sync.demo.counting import FileCount, LineCount, Observed, count_files, count_lines, count_trial
from ray_artifact_sync.demo.scenarios import AT_STOP, CHECKPOINT_EVERY, REWRITTEN, SCENARIOS, STEPS, content, line
from ray_artifact_sync.demo.table import side_by_side

EXPECTED = list("123456")
NAMES = [scenario.name for scenario in SCENARIOS]


@pytest.mark.parametrize(
    ("found", "lost", "duplicated", "foreign", "in_order"),
    [
        ("123456", 0, 0, 0, True),
        ("", 6, 0, 0, True),
        ("56", 4, 0, 0, True),
        ("1234556", 0, 1, 0, True),
        ("12345656", 0, 2, 0, True),
        ("1116", 4, 2, 0, True),
        ("12345x6", 0, 0, 1, True),
        ("213456", 0, 0, 0, False),
        ("456123", 0, 0, 0, False),
    ],
)
def test_lines(found, lost, duplicated, foreign, in_order):
    counted = count_lines(EXPECTED, list(found))
    assert counted == LineCount(6, lost, duplicated, foreign, in_order)
    assert counted.exact == (found == "123456")


@pytest.mark.parametrize(
    ("found", "right"),
    [({"a": "1", "b": "2"}, 2), ({"a": "1", "b": None}, 1), ({"a": "1", "b": "1"}, 1), ({}, 0), ({"c": "1"}, 0)],
)
def test_files(found, right):
    counted = count_files({"a": "1", "b": "2"}, found)
    assert counted == FileCount(right, 2)
    assert counted.exact == (right == 2)


def perfect(scenario, **changes):
    found = {
        "log": "".join(f"{text}\n" for text in scenario.expected_lines()),
        "at_stop": scenario.expected_at_stop(),
        "resumed_from": CHECKPOINT_EVERY if scenario.kills else None,
        "at_resume": {name: content(name, CHECKPOINT_EVERY) if scenario.kills else None for name in REWRITTEN},
    }
    return count_trial(scenario, Observed(**{**found, **changes}), resumes_from=CHECKPOINT_EVERY)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=NAMES)
def test_a_trial_with_everything_is_exact(scenario):
    assert perfect(scenario).exact


@pytest.mark.parametrize("scenario", SCENARIOS, ids=NAMES)
@pytest.mark.parametrize(
    "changes",
    [
        {"log": None},
        {"log": f"{line(1)}\n" * STEPS},
        {"at_stop": {}},
        {"at_stop": {name: content(name, CHECKPOINT_EVERY) for name in AT_STOP}},
    ],
    ids=["no log", "one line only", "nothing at the stop", "an earlier attempt's files"],
)
def test_a_trial_with_less_is_not(scenario, changes):
    assert not perfect(scenario, **changes).exact


@pytest.mark.parametrize(
    "changes",
    [
        {"at_resume": {name: content(name, CHECKPOINT_EVERY + 1) for name in REWRITTEN}},
        {"at_resume": dict.fromkeys(REWRITTEN)},
        {"resumed_from": None},
        {"resumed_from": 0},
    ],
    ids=["newer", "missing", "never resumed", "resumed elsewhere"],
)
def test_a_resume_with_other_files_is_not(changes):
    assert not perfect(SCENARIOS[0], **changes).exact


def test_a_trial_that_fails_does_not_resume():
    failing = next(scenario for scenario in SCENARIOS if not scenario.kills)
    assert perfect(failing).at_resume is None


def render(sides) -> str:
    console = Console(width=110, no_color=True)
    with console.capture() as capture:
        console.print(side_by_side(sides))
    return capture.get()


def test_the_table_has_every_scenario_and_side():
    bad = Observed(log=f"{line(1)}\n{line(1)}\nst", at_stop={}, resumed_from=None, at_resume={})
    sides = {
        "bad": {it.name: count_trial(it, bad, resumes_from=CHECKPOINT_EVERY) for it in SCENARIOS},
        "good": {it.name: perfect(it) for it in SCENARIOS},
    }
    text = render(sides)
    for scenario in SCENARIOS:
        assert scenario.title in text
    rows = [row for row in text.splitlines() if "lines expected" in row]
    assert len(rows) == len(SCENARIOS)
    for row in rows:
        assert "lost, 1 twice, 1 torn" in row
        assert "0 lost, 0 twice |" in row
    assert "0 of 3" in text
    assert "3 of 3" in text
