"""What happens to each trial of the demo, and what must be in storage afterwards. Pure.

Every trial appends a line a step to `log.txt`, rewrites three files a step, and writes two files in `cleanup()`. A
checkpoint is saved every 4 steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

STEPS = 8
CHECKPOINT_EVERY = 4
CRASH_AT = 6
LOG = "log.txt"
REWRITTEN = ("summary.json", "best.txt", "plots/curve.csv")
AT_STOP = ("final_report.txt", "tables/final.csv")
ERROR_REPORT = "error_report.txt"


@dataclass(frozen=True, slots=True)
class Scenario:
    """What happens to one trial in step `CRASH_AT`.

    Attributes:
        name: Value of the trial's config and name of its trial dir.
        title: For people.
        kills: The worker process gets SIGKILL, once, and Ray restores the trial; else the step raises and, as without a
            `FailureConfig`, the trial has failed.
        wipes: The working dir goes with the process.
    """

    name: str
    title: str
    kills: bool
    wipes: bool = False

    @property
    def last_step(self) -> int:
        """The step that the trial ends with: the last one, or the one that raises."""
        return STEPS if self.kills else CRASH_AT

    def expected_lines(self) -> list[str]:
        """The lines of `log.txt` at the end."""
        return [line(step) for step in range(1, self.last_step + 1)]

    def expected_at_stop(self) -> dict[str, str]:
        """The files of the end, with their content."""
        names = AT_STOP if self.kills else (*AT_STOP, ERROR_REPORT)
        return {name: content(name, self.last_step) for name in names}


SCENARIOS = (
    Scenario("same-node", "Killed, resumed on the same node", kills=True),
    Scenario("other-node", "Killed, resumed without its working dir (another node)", kills=True, wipes=True),
    Scenario("raises", "A step raises, the trial fails", kills=False),
)


def scenario_named(name: str) -> Scenario:
    """The scenario with this name."""
    return next(scenario for scenario in SCENARIOS if scenario.name == name)


def line(step: int) -> str:
    """What a step appends to the log."""
    return f"step {step}"


def content(name: str, step: int) -> str:
    """What a file holds when it was written last in or after this step."""
    return f"{name} as of step {step}\n"


def expected_at_resume(step: int) -> Mapping[str, str]:
    """The rewritten files, as of the checkpoint that was saved after this step."""
    return {name: content(name, step) for name in REWRITTEN}
