"""Counts what was found against what was expected. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ray_artifact_sync.demo.scenarios import Scenario, expected_at_resume


@dataclass(frozen=True, slots=True)
class Observed:
    """What one trial left.

    Attributes:
        log: Content of the log in storage; None if there is none.
        at_stop: The files of the end in storage; None where there is none.
        resumed_from: The step of the checkpoint that the trial resumed from; None if it never did.
        at_resume: The rewritten files in the working dir when training resumed; None where one was missing.
    """

    log: str | None
    at_stop: Mapping[str, str | None]
    resumed_from: int | None
    at_resume: Mapping[str, str | None]


@dataclass(frozen=True, slots=True)
class LineCount:
    """Lines of a log against those that should be in it.

    Attributes:
        expected: How many there should be.
        lost: Expected ones that are not there.
        duplicated: Surplus copies of expected ones.
        foreign: Others: torn ones, for example.
        in_order: The log is the expected one, but for losses, copies and foreign lines.
    """

    expected: int
    lost: int
    duplicated: int
    foreign: int
    in_order: bool

    @property
    def exact(self) -> bool:
        """Whether the log is the expected one."""
        return self.lost == self.duplicated == self.foreign == 0 and self.in_order


@dataclass(frozen=True, slots=True)
class FileCount:
    """Files that hold what they should, of how many."""

    right: int
    expected: int

    @property
    def exact(self) -> bool:
        """Whether all do."""
        return self.right == self.expected


@dataclass(frozen=True, slots=True)
class TrialCount:
    """All that is counted of one trial.

    Attributes:
        lines: Its log, in storage.
        at_resume: The rewritten files, when training resumed; None for a trial that does not resume.
        at_stop: The files of the end, in storage.
    """

    lines: LineCount
    at_resume: FileCount | None
    at_stop: FileCount

    @property
    def exact(self) -> bool:
        """Whether nothing is lost, twice, or of another time."""
        return self.lines.exact and self.at_stop.exact and (self.at_resume is None or self.at_resume.exact)


def count_trial(scenario: Scenario, observed: Observed, *, resumes_from: int) -> TrialCount:
    """Counts one trial.

    Args:
        scenario: What happened to it.
        observed: What it left.
        resumes_from: The step of the checkpoint that it should have resumed from.
    """
    at_resume = None
    if scenario.kills:
        seen = observed.at_resume if observed.resumed_from == resumes_from else {}
        at_resume = count_files(expected_at_resume(resumes_from), seen)
    return TrialCount(
        lines=count_lines(scenario.expected_lines(), (observed.log or "").splitlines()),
        at_resume=at_resume,
        at_stop=count_files(scenario.expected_at_stop(), observed.at_stop),
    )


def count_lines(expected: Sequence[str], found: Sequence[str]) -> LineCount:
    """Counts the lines of a log; the expected ones are all different."""
    counts = Counter(found)
    wanted = set(expected)
    known = [line for line in found if line in wanted]
    first_seen = list(dict.fromkeys(known))
    return LineCount(
        expected=len(expected),
        lost=sum(1 for line in expected if not counts[line]),
        duplicated=len(known) - len(first_seen),
        foreign=len(found) - len(known),
        in_order=first_seen == [line for line in expected if counts[line]],
    )


def count_files(expected: Mapping[str, str], found: Mapping[str, str | None]) -> FileCount:
    """Counts the expected files that are there with the expected content."""
    return FileCount(sum(1 for name, text in expected.items() if found.get(name) == text), len(expected))
