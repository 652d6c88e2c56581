"""Every kind of request that this library sends to S3, in every operation that sends it, with every fault.

Success is never reported for data that is not there, no call hangs past its deadline, faults that pass are survived,
and afterwards everything goes on. The cases of one operation and kind run one after the other on the same session, as
a training job would live through them; operations and kinds run side by side, since they mostly wait.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path

import pytest

from ray_artifact_sync.errors import ArtifactSyncError
from tests.support.fault_proxy import FaultProxy, Rule
from tests.support.fault_scenarios import SCENARIOS, quick

pytestmark = pytest.mark.s3

SIDE_BY_SIDE = 64
BUSY = 4
"""How many may do more than wait at once: their requests are to be answered in time."""
# Kinds whose answer says something in its body.
WITH_BODY = ("get_object", "list", "create_multipart", "complete_multipart", "copy_object", "upload_part_copy")
FAULTS = {
    "403": lambda proxy, kind, path, times: proxy.fail(kind, status=403, times=times),
    "500": lambda proxy, kind, path, times: proxy.fail(kind, status=500, times=times),
    "503": lambda proxy, kind, path, times: proxy.fail(kind, status=503, times=times),
    "reset": lambda proxy, kind, path, times: proxy.reset(kind, after=500, times=times),
    "lost answer": lambda proxy, kind, path, times: proxy.reset(kind, times=times, forward=True),
    "hang": lambda proxy, kind, path, times: proxy.hang(kind, times=times, abandoned="dropped"),
    "truncated": lambda proxy, kind, path, times: proxy.truncate(kind, after=20, times=times),
    "wrong bytes": lambda proxy, kind, path, times: proxy.corrupt(kind, path, after=30, times=times),
}


@dataclass(frozen=True)
class Case:
    operation: str
    kind: str
    fault: str
    passes: bool

    def __str__(self) -> str:
        return f"{self.operation}-{self.kind}-{self.fault}-{'passes' if self.passes else 'lasts'}"

    @property
    def times(self) -> int | None:
        if not self.passes:
            return None
        return 1 if self.fault in ("hang", "wrong bytes") else 2

    @property
    def must_succeed(self) -> bool:
        """What passes is tried again, but for what is refused."""
        return self.passes and self.fault != "403" and not self.operation.endswith("refused")


def cases() -> Iterator[Case]:
    for operation, scenario in SCENARIOS.items():
        for kind in scenario.kinds:
            for fault in scenario.faults or FAULTS:
                if (fault == "truncated" and kind not in WITH_BODY) or (
                    fault == "wrong bytes" and kind != "get_object"
                ):
                    continue
                for passes in (True, False):
                    yield Case(operation, kind, fault, passes)


CASES = list(cases())
SAMPLE = 9
"""Every ninth case is run each time, the others are exhaustive."""


@dataclass
class Outcome:
    """How a case went: what was wrong with it, if anything."""

    problem: BaseException | None = None
    said: str = ""
    seconds: float = 0.0


class Runner:
    """Runs cases, those of one operation and kind in one place."""

    def __init__(self, servers: dict[str, str], scratch: Path) -> None:
        self.servers = servers
        self.scratch = scratch
        self.outcomes: dict[Case, Outcome] = {}
        self._busy = threading.BoundedSemaphore(BUSY)
        self._numbers = iter(range(10**6))
        self._lock = threading.Lock()

    def run_group(self, group: list[Case]) -> None:
        """One after the other; after one that went wrong, the next begins anew."""
        waiting = list(group)
        while waiting:
            with self._lock:
                number = next(self._numbers)
            scenario = SCENARIOS[waiting[0].operation]
            endpoint = self.servers[scenario.server]
            with ExitStack() as stack:
                proxy = stack.enter_context(FaultProxy(endpoint))
                try:
                    with self._busy:
                        place = scenario(proxy, endpoint, f"matrix/{number}", self.scratch / str(number))
                except Exception as error:
                    self.outcomes[waiting.pop(0)] = Outcome(error, "while preparing")
                    continue
                stack.callback(place.close)
                while waiting:
                    case = waiting.pop(0)
                    outcome = self.outcomes[case] = self.run_case(case, place, proxy)
                    if outcome.problem is not None:
                        break

    def run_case(self, case: Case, scenario, proxy: FaultProxy) -> Outcome:
        outcome = Outcome()
        try:
            rule = FAULTS[case.fault](proxy, case.kind, scenario.wrong_bytes_in, case.times)
            scenario.arm()
            with self._busy if case.must_succeed and case.fault != "hang" else nullcontext():
                success = self.act(case, scenario, rule, outcome)
            with self._busy:
                if success:
                    scenario.check_success()
                else:
                    scenario.check_sound()
                outcome.said += "; recovery"
                proxy.clear()
                if not success or not case.passes:
                    scenario.recover()
        except BaseException as error:
            outcome.problem = error
        finally:
            proxy.clear()
        return outcome

    def act(self, case: Case, scenario, rule: Rule, outcome: Outcome) -> bool:
        started = time.monotonic()
        failure: ArtifactSyncError | None = None
        success = False
        try:
            success = scenario.run()
        except ArtifactSyncError as error:
            failure = error
        outcome.seconds = time.monotonic() - started
        outcome.said = f"{'success' if success else failure!r} after {outcome.seconds:.1f} s, {rule.hits} hits"
        assert rule.hits, f"the fault was never met: {outcome.said}"
        assert outcome.seconds < scenario.seconds, f"too late: {outcome.said}"
        assert success or not case.must_succeed, f"it should have been survived: {outcome.said}"
        return success


@pytest.fixture(scope="module")
def outcomes(request, tmp_path_factory):
    """All cases that were asked for, run."""
    wanted: dict[tuple[str, str], list[Case]] = {}
    for item in request.session.items:
        case = item.callspec.params.get("case") if getattr(item, "callspec", None) else None
        if isinstance(case, Case):
            wanted.setdefault((case.operation, case.kind), []).append(case)
    servers = {name: request.getfixturevalue(name).endpoint for name in ("juicefs", "moto")}
    runner = Runner(servers, tmp_path_factory.mktemp("matrix"))
    with quick(), ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        list(pool.map(runner.run_group, wanted.values()))
    return runner.outcomes


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[pytest.mark.exhaustive] if n % SAMPLE else []) for n, case in enumerate(CASES)],
    ids=str,
)
def test_fault(case, outcomes):
    outcome = outcomes[case]
    if outcome.problem is not None:
        raise AssertionError(f"{case}: {outcome.said}: {outcome.problem}") from outcome.problem


@pytest.mark.parametrize("operation", SCENARIOS)
def test_the_table_names_every_kind_of_request(operation, request, tmp_path):
    scenario = SCENARIOS[operation]
    endpoint = request.getfixturevalue(scenario.server).endpoint
    with quick(), FaultProxy(endpoint) as proxy:
        place = scenario(proxy, endpoint, f"kinds/{operation}", tmp_path)
        seen: set[str] = set()
        for _ in range(4):  # garbage is there from the third checkpoint on
            proxy.reset_counts()
            place.arm()
            try:
                place.run()
            except ArtifactSyncError:
                assert operation.endswith("refused")
            seen |= proxy.counts.keys()
            proxy.clear()
        place.close()
    assert seen == {*scenario.kinds, *scenario.also}
