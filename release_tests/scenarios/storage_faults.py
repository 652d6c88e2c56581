"""One run on S3 for each way in which a network or a server misbehaves: training goes on, and nothing is wrong after.

Latency, resets, 503, little bandwidth, requests that are never answered, and a minute without any server. Whatever Ray
has registered as a checkpoint must have its files; it must have its artifacts, exactly, or it must have been said that
it has not.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray_artifact_sync import ArtifactSyncMixin
from release_tests import trials
from release_tests.checks import Storage, check_trial, digests, storage_at
from release_tests.cluster import wait_until
from release_tests.local_ray import local_ray
from release_tests.runs import Accomplice, tuner
from release_tests.told import listen, told
from tests.support import independent_reader
from tests.support.fault_proxy import FaultProxy, Rule

NAME = "storage faults"
quick = False
TIMEOUT = 480

STEPS = 10
SMALL_FILES = 25
"""Rewritten in each step: requests for the random faults to hit."""
BIG = 3 * 1024 * 1024
OUTAGE = 60.0


def small_file(n: int, number: int) -> bytes:
    return f"{number} of step {n}\n".encode()


def expected(n: int, config: dict[str, Any], rank: int = 0) -> dict[str, str]:
    small = {f"small/{number}.txt": small_file(n, number) for number in range(SMALL_FILES)}
    return {**trials.expected(n, config, rank), **digests(small)}


class Faulted(ArtifactSyncMixin, trials.WriterBody):
    def setup(self, config: dict[str, Any]) -> None:
        listen(config["shared"])
        super().setup(config)

    def step(self) -> dict[str, Any]:
        Path("small").mkdir(exist_ok=True)
        for number in range(SMALL_FILES):
            Path("small", f"{number}.txt").write_bytes(small_file(self.n + 1, number))
        return super().step()


@dataclass(frozen=True)
class Fault:
    """One kind of trouble.

    Attributes:
        name: For the figures.
        begin: Begins it at the proxy; the rule that says how often it came, if there is one.
        act: What happens to it while the trial runs: it gets a function that waits for a step.
        pause: Seconds that each step takes beside its files.
        sync: Of `configure`.
        failures: How often Ray may have to start the trial again.
        may_skip: Whether checkpoints may end up without artifacts (it must be said then).
    """

    name: str
    begin: Callable[[FaultProxy], Rule | None]
    act: Callable[[FaultProxy, Callable[[int], object]], object] | None = None
    pause: float = 0.0
    sync: Any = None
    failures: int = 0
    may_skip: bool = False


def _set(name: str, value: float) -> Callable[[FaultProxy], None]:
    return lambda proxy: setattr(proxy, name, value)


def _late_answers(proxy: FaultProxy, wait_for_step: Callable[[int], object]) -> None:
    """What hung goes on to the server now, long after the library has given it up."""
    wait_for_step(STEPS - 3)
    proxy.clear()


def _outage(proxy: FaultProxy, wait_for_step: Callable[[int], object]) -> None:
    wait_for_step(STEPS // 2)
    proxy.go_down()
    time.sleep(OUTAGE)  # the length of the outage is what this is about
    proxy.come_back()


FAULTS = (
    Fault("20 ms", _set("latency", 0.02)),
    Fault("200 ms", _set("latency", 0.2)),
    Fault("1% resets", lambda proxy: proxy.reset(chance=0.01)),
    Fault("5% 503", lambda proxy: proxy.fail(status=503, chance=0.05)),
    Fault("5 MB/s", _set("bandwidth", 5e6)),
    Fault(
        "hangs",
        lambda proxy: proxy.hang("put_object", "/Faulted_", chance=0.05, times=4),
        act=_late_answers,
        pause=1.0,
        sync={"sync_timeout": 3.0},
        may_skip=True,
    ),
    Fault("outage", lambda proxy: None, act=_outage, pause=0.5, failures=100, may_skip=True),
)


def run(workdir: Path, *, quick: bool) -> dict[str, object]:
    figures: dict[str, object] = {}
    with local_ray():
        for number, fault in enumerate(FAULTS):
            directory = workdir / f"fault-{number}"
            directory.mkdir()
            started = time.monotonic()
            with storage_at("rclone", directory) as storage:
                found = suffer(directory, storage, fault, seed=number)
            figures[fault.name] = f"{found}, {time.monotonic() - started:.0f} s"
            print(fault.name, figures[fault.name], flush=True)
    return figures


def suffer(directory: Path, storage: Storage, fault: Fault, *, seed: int) -> str:
    proxy = storage.proxy
    assert proxy is not None
    shared = directory / "shared"
    shared.mkdir()
    config = {"shared": str(shared), "big": BIG, "steps": STEPS, "pause": fault.pause}
    sync = {"sync_period": 0.5, **(fault.sync or {})}
    prepared = tuner(Faulted, storage, config, frequency=1, max_failures=fault.failures, **sync)

    def wait_for_step(n: int) -> None:
        wait_until((shared / f"step-{n}").exists, 200, what=f"step {n}")

    proxy.dice.seed(seed)
    rule = fault.begin(proxy)
    with Accomplice(lambda: fault.act and fault.act(proxy, wait_for_step)):
        result = prepared.fit()[0]
    proxy.clear()
    assert result.error is None, result.error
    assert result.metrics["n"] == STEPS
    assert rule is None or (rule.hits and not rule.times), "nothing was hit, or less than was meant"
    starts = len([*shared.glob("started-*")])
    without = check(storage, result, config, shared)
    assert fault.may_skip or not without, f"without artifacts, by {fault.name}: {without}"
    assert fault.failures or starts == 1, f"{starts} starts"
    hits = f"{rule.hits} requests hit, " if rule is not None else ""
    return f"{hits}{starts - 1} restarts, {len(without)} of {STEPS} checkpoints without artifacts"


def check(storage: Storage, result: Any, config: dict[str, Any], shared: Path) -> set[str]:
    """Everything that Ray or the library has reported must be there, as it must be.

    Returns:
        Registered checkpoints without artifacts; each of them was named in the log.
    """
    place = storage.look(result.path)
    found = independent_reader.snapshots(place)
    check_trial(place, config, steps=STEPS, checkpoints=set(found), expected=expected)
    registered = {Path(checkpoint.path).name for checkpoint, _ in result.best_checkpoints}
    steps = sorted(int(place.read(f"{name}/n")) for name in registered)  # its own files are there
    assert steps == [*range(1, STEPS + 1)], steps
    assert max(registered) in found, "the trouble was over, and the last checkpoint has no artifacts"
    without = registered - found.keys()
    named = {record["checkpoint"] for record in told(shared, "checkpoint_without_artifacts")}
    assert without <= named, f"without artifacts, and nobody said so: {without - named}"
    return without
