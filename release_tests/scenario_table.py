"""Scenario by scenario: what Ray alone does, and what happens with this library. Writes `docs/scenarios.md`.

    python -m release_tests.scenario_table [--only NAME]

Each cell is measured in this run, on real Ray, with the same trainable on both sides; Ray alone has
`SyncConfig(sync_artifacts=True)`. S3 is a real server on 127.0.0.1 behind a proxy that injects the faults.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import platform
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("AWS_REQUEST_CHECKSUM_CALCULATION", "when_required")
os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")

import ray
from ray import cloudpickle, tune

import ray_artifact_sync
from ray_artifact_sync import ArtifactSyncer, ArtifactSyncMixin, configure, restore_tuner, with_artifacts
from tests.integration import drivers
from tests.integration import trainables as t
from tests.integration.places import Place, local_place, s3_place
from tests.integration.runs import LINES, exploiting
from tests.support.fault_proxy import FaultProxy
from tests.support.s3_servers import RcloneServer, filesystem_at

ROOT = Path(__file__).parents[1]


@dataclass
class Side:
    """One of the two columns, with a fresh place for each scenario."""

    ours: bool
    scratch: Path
    proxy: FaultProxy

    def fit(
        self, trainable: Any, config: dict, *, place: Place | None = None, frequency: int = 4, **options: Any
    ) -> Any:
        markers = self.scratch / "markers"
        markers.mkdir(exist_ok=True)
        syncer = options.pop("syncer", None) or ArtifactSyncer()
        period = options.pop("period", None)
        run_config = tune.RunConfig(
            name="exp",
            sync_config=tune.SyncConfig(sync_artifacts=True, **({} if period is None else {"sync_period": period})),
            checkpoint_config=options.pop("checkpoint", None) or tune.CheckpointConfig(checkpoint_frequency=frequency),
            failure_config=tune.FailureConfig(max_failures=options.pop("max_failures", 2)),
            verbose=0,
            **(place or self.local).run_options,
            stop=options.pop("stop", None),
            callbacks=options.pop("callbacks", None),
        )
        return tune.Tuner(
            trainable,
            param_space={**config, "markers": str(markers)},
            run_config=self.configured(run_config, syncer, period) if self.ours else run_config,
            tune_config=options.pop("tune_config", None),
        ).fit()

    @staticmethod
    def configured(run_config: Any, syncer: ArtifactSyncer, period: float | None) -> Any:
        return configure(run_config, syncer=syncer, **({} if period is None else {"sync_period": period}))

    @property
    def local(self) -> Place:
        return local_place(self.scratch)

    def s3(self) -> Place:
        return s3_place(self.scratch, filesystem_at(self.proxy.endpoint))

    def pick(self, body: type, mixed: type) -> type:
        return mixed if self.ours else body


def log_cell(directory: Path) -> str:
    log = directory / "log.txt"
    if not log.exists():
        return "the log is not there"
    lines = log.read_text().split()
    if lines == LINES:
        return "exact: 1 to 8"
    lost = [line for line in LINES if line not in lines]
    twice = sorted({line for line in lines if lines.count(line) > 1})
    said = [f"lost: {' '.join(lost)}"] if lost else []
    said += [f"twice: {' '.join(twice)}"] if twice else []
    return "; ".join(said) or f"order: {' '.join(lines)}"


def present(directory: Path, *names: str) -> str:
    missing = [name for name in names if not (directory / name).exists()]
    return f"missing: {', '.join(missing)}" if missing else "all there"


SCENARIOS: dict[str, Callable[[Side], str]] = {}


def scenario(title: str) -> Callable[[Callable[[Side], str]], Callable[[Side], str]]:
    def register(function: Callable[[Side], str]) -> Callable[[Side], str]:
        SCENARIOS[title] = function
        return function

    return register


@scenario("worker killed after a checkpoint, resumed on the same node: log")
def _(side: Side) -> str:
    results = side.fit(side.pick(t.LoggingBody, t.Logging), {"crash_at": 6, "sync_first": True})
    return log_cell(Path(results[0].path))


@scenario("the same, resumed on another node: log")
def _(side: Side) -> str:
    config = {"crash_at": 6, "sync_first": True, "wipe": True}
    return log_cell(Path(side.fit(side.pick(t.LoggingBody, t.Logging), config)[0].path))


@scenario("the same, on S3: log")
def _(side: Side) -> str:
    place = side.s3()
    config = {"crash_at": 6, "sync_first": True, "wipe": True}
    result = side.fit(side.pick(t.LoggingBody, t.Logging), config, place=place)[0]
    return log_cell(place.fetch(result.path))


@scenario("a file rewritten after the checkpoint, when training resumes on the same node")
def _(side: Side) -> str:
    side.fit(side.pick(t.LoggingBody, t.Logging), {"crash_at": 6, "sync_first": True})
    seen = (side.scratch / "markers/rewritten_at_restore").read_text().strip()
    return f"is {seen}" + (" (the checkpoint's)" if seen == "version 4" else ", the checkpoint's is version 4")


@scenario("worker killed before the first checkpoint: log after the restart")
def _(side: Side) -> str:
    results = side.fit(side.pick(t.LoggingBody, t.Logging), {"crash_at": 3, "sync_first": True})
    return log_cell(Path(results[0].path))


@scenario("worker killed between a checkpoint's upload and its registration: log")
def _(side: Side) -> str:
    return log_cell(Path(side.fit(side.pick(t.LoggingBody, t.Logging), {"kill_in_save": 2})[0].path))


@scenario("log opened in setup() and kept open, resumed on another node: log")
def _(side: Side) -> str:
    config = {"crash_at": 6, "sync_first": True, "wipe": True, "open_in_setup": True}
    return log_cell(Path(side.fit(side.pick(t.LoggingBody, t.Logging), config)[0].path))


@scenario("written in cleanup()")
def _(side: Side) -> str:
    return present(Path(side.fit(side.pick(t.LoggingBody, t.Logging), {})[0].path), "cleanup.txt")


@scenario("written in the step that raised, no retry left")
def _(side: Side) -> str:
    config = {"crash_at": 6, "crash": "raise"}
    results = side.fit(side.pick(t.LoggingBody, t.Logging), config, max_failures=0)
    return present(Path(results[0].path), "raised.txt", "plots/6.bin", "cleanup.txt")


@scenario("worker killed long after the last checkpoint, no retry left: its newest files (sync period 0.1 s)")
def _(side: Side) -> str:
    config = {"crash_at": 3}

    class Slow(side.pick(t.LoggingBody, t.Logging)):  # type: ignore[misc]
        def crash(self) -> None:
            time.sleep(2)  # a step goes on for some time after it wrote its files
            super().crash()

    run = side.fit(Slow, config, max_failures=0, frequency=100, period=0.1)
    return present(Path(run[0].path), "plots/2.bin", "plots/3.bin")


@scenario("function stopped early: written in finally:")
def _(side: Side) -> str:
    function = with_artifacts(t.function) if side.ours else t.function
    results = side.fit(function, {"steps": 100, "slow_finally": 1}, stop={"n": 5}, checkpoint=tune.CheckpointConfig())
    return present(Path(results[0].path), "cleanup.txt")


@scenario("function killed after a checkpoint, resumed on another node: log")
def _(side: Side) -> str:
    function = with_artifacts(t.function) if side.ours else t.function
    try:
        results = side.fit(function, {"crash_at": 6, "wipe": True}, checkpoint=tune.CheckpointConfig())
    except Exception as error:
        return f"the run fails: {type(error).__name__}"
    if results[0].error:
        return f"the trial fails: {str(results[0].error).strip().splitlines()[-1][:60]}"
    return log_cell(Path(results[0].path))


@scenario("reuse_actors=True: each trial has its own files only")
def _(side: Side) -> str:
    results = side.fit(
        side.pick(t.ReusableBody, t.Reusable),
        {"who": tune.grid_search(["a", "b", "c"])},
        tune_config=tune.TuneConfig(reuse_actors=True, max_concurrent_trials=1),
        checkpoint=tune.CheckpointConfig(),
    )
    wrong = []
    for result in results:
        directory, who = Path(result.path), result.config["who"]
        have = sorted(path.name for path in directory.glob("only_*"))
        if have != [f"only_{who}.txt"]:
            wrong.append(f"{who} has {have or 'nothing'}")
    return "; ".join(wrong) or "yes"


@scenario("PBT: crash right after an exploit: the trial's own log")
def _(side: Side) -> str:
    results = side.fit(
        side.pick(t.ExploitedBody, t.Exploited),
        {"score": tune.grid_search([0, 100]), "lr": 0.1, "crash_after_exploit": True},
        tune_config=tune.TuneConfig(scheduler=exploiting()),
        checkpoint=tune.CheckpointConfig(),
    )
    said = []
    for result in results:
        lines = (Path(result.path) / "own.txt").read_text().splitlines()
        twice = len(lines) - len(set(lines))
        foreign = sum(result.metrics["trial_id"] not in line for line in lines)
        for count, what in ((twice, "twice"), (foreign, "of another trial")):
            if count:
                said.append(f"{count} lines {what}")
    return "; ".join(said) or "exact"


@scenario("an experiment that began on Ray alone; a step raised, resumed on the same node: log")
def _(side: Side) -> str:
    before = type("Trained", (t.LoggingBody,), {})
    after = type("Trained", (ArtifactSyncMixin, t.LoggingBody), {}) if side.ours else before
    Side(False, side.scratch, side.proxy).fit(before, {"crash_at": 6, "crash": "raise"}, max_failures=0)
    restore = restore_tuner if side.ours else tune.Tuner.restore
    return log_cell(Path(restore(f"{side.local.storage_path}/exp", after, resume_errored=True).fit()[0].path))


@scenario(
    "worker stopped (SIGSTOP), its trial restored and ended elsewhere, worker goes on: whose files are in storage"
)
def _(side: Side) -> str:
    spec = {
        "storage_path": side.local.storage_path,
        "trainable": "Stamped" if side.ours else "StampedBody",
        "plain": not side.ours,
        "config": {"wait_at": 6},
        "options": {"max_failures": 0},
    }
    markers = side.scratch / "markers"
    first = drivers.start_driver(side.scratch, spec)
    try:
        drivers.wait_for(markers / "waiting", first)
        worker = int((markers / "waiting").read_text())
        os.kill(worker, signal.SIGSTOP)
        (markers / "go_on").touch()
        result = drivers.run_driver(side.scratch, {**spec, "restore": f"{side.local.storage_path}/exp"})
        os.kill(worker, signal.SIGCONT)
        out, _ = first.communicate(timeout=150)
    finally:
        drivers.end_driver(first)
    error = json.loads(out.splitlines()[-1])["error"]
    stored = int(Path(result["path"], "pid.txt").read_text())
    whose = "the stopped worker's" if stored == worker else "the new worker's"
    said = next(
        (word for word in error.replace("(", " ").replace(":", " ").split() if word.endswith("ConflictError")), ""
    )
    return f"{whose}; the stopped one ends with {said}" if said else f"{whose}; nothing is said"


@scenario("callback and trainable write summary.json; killed, resumed on another node: the two files")
def _(side: Side) -> str:
    period = os.environ.get("TUNE_GLOBAL_CHECKPOINT_S")
    os.environ["TUNE_GLOBAL_CHECKPOINT_S"] = "0"
    try:
        result = side.fit(
            side.pick(t.SummarizingBody, t.Summarizing),
            {"die_at": 4, "wipe": True},
            frequency=2,
            callbacks=[t.Summaries(3)],
        )[0]
    finally:
        if period is None:
            del os.environ["TUNE_GLOBAL_CHECKPOINT_S"]
        else:
            os.environ["TUNE_GLOBAL_CHECKPOINT_S"] = period
    resumed = (side.scratch / "markers/summary_at_restore").read_text()
    at_resume = "as of the checkpoint" if resumed == "worker 2" else "not there" if resumed == "none" else resumed
    at_end = (Path(result.path) / "summary.json").read_text()
    return f"at resume: {at_resume}; in storage at the end: {'the callback' if at_end == 'driver 8' else at_end}'s"


@scenario("S3 refuses a checkpoint's upload (403)")
def _(side: Side) -> str:
    place = side.s3()
    for kind in ("put_object", "upload_part", "complete_multipart"):
        side.proxy.fail(kind=kind, path="/checkpoint_000000/n", status=403)
    result = side.fit(side.pick(t.LoggingBody, t.Logging), {"steps": 4}, place=place, max_failures=0)[0]
    side.proxy.clear()
    there = (place.fetch(result.path) / "checkpoint_000000/n").exists()
    if result.error is None and result.checkpoint is not None and not there:
        return "reported as saved, and not there"
    return "an error, and no checkpoint" if result.error is not None and result.checkpoint is None else "?"


@scenario("S3 refuses one artifact (403)")
def _(side: Side) -> str:
    place = side.s3()
    for kind in ("put_object", "upload_part", "complete_multipart"):
        side.proxy.fail(kind=kind, path="/plots/2.bin", status=403)
    result = side.fit(
        side.pick(t.LoggingBody, t.Logging), {"steps": 4}, place=place, max_failures=0, syncer=ArtifactSyncer(retries=0)
    )[0]
    side.proxy.clear()
    there = place.fetch(result.path)
    failed = result.metrics.get("artifact_sync/failed_syncs")
    said = f"counted ({failed} failed syncs)" if failed else "not said in the results"
    others = present(there, "plots/1.bin", "plots/4.bin", "log.txt")
    return f"training goes on; the other artifacts: {others}; {said}"


@scenario("a last flush of more than 10 s at the end of the experiment (60 files)")
def _(side: Side) -> str:
    place = side.s3()
    side.proxy.latency = 0.25
    result = side.fit(
        side.pick(t.ManyFilesBody, t.ManyFiles),
        {},
        place=place,
        stop={"n": 2},
        checkpoint=tune.CheckpointConfig(),
        syncer=ArtifactSyncer(max_concurrency=1),
    )[0]
    side.proxy.latency = 0
    count = len(list(place.fetch(result.path).glob("[0-9]*.txt")))
    return f"{count} of 60 there"


@scenario("sync with nothing changed (12 files on S3): requests with content")
def _(side: Side) -> str:
    place = side.s3()
    proxy = side.proxy

    class Twice(side.pick(t.LoggingBody, t.Logging)):  # type: ignore[misc]
        def cleanup(self) -> None:
            self._storage.persist_artifacts(force=True)
            time.sleep(0.5)  # the measuring side reads its counters
            self.mark("synced")
            while not Path(self.cfg["markers"], "counted").exists():
                time.sleep(0.02)
            self._storage.persist_artifacts(force=True)
            self.mark("synced_again")
            while not Path(self.cfg["markers"], "counted_again").exists():
                time.sleep(0.02)

    import threading

    counts: list[int] = []
    markers = side.scratch / "markers"

    def measure() -> None:
        for before, after in (("synced", "counted"), ("synced_again", "counted_again")):
            while not (markers / before).exists():
                time.sleep(0.02)
            counts.append(sum(proxy.counts[kind] for kind in ("put_object", "upload_part")))
            (markers / after).touch()

    markers.mkdir(exist_ok=True)
    thread = threading.Thread(target=measure, daemon=True)
    thread.start()
    side.fit(Twice, {}, place=place)
    thread.join(30)
    return str(counts[1] - counts[0])


def cells(title: str, function: Callable[[Side], str], proxy: FaultProxy) -> list[str]:
    row = []
    for ours in (False, True):
        with tempfile.TemporaryDirectory(prefix="scenario-") as scratch:
            proxy.clear()
            proxy.latency = 0
            try:
                row.append(function(Side(ours, Path(scratch), proxy)))
            except Exception as error:
                logging.getLogger(__name__).exception("%s", title)
                row.append(f"{type(error).__name__}: {str(error).splitlines()[0][:80]}")
    return row


@contextlib.contextmanager
def cluster() -> Iterator[FaultProxy]:
    cloudpickle.register_pickle_by_value(t)
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    ray.init(num_cpus=2, include_dashboard=False, logging_level=logging.ERROR, log_to_driver=False)
    logging.getLogger("ray").setLevel(logging.CRITICAL)
    try:
        with RcloneServer() as server, FaultProxy(server.endpoint) as proxy:
            yield proxy
    finally:
        ray.shutdown()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="run the scenarios whose title contains this, and write no file")
    only = parser.parse_args().only
    rows = []
    with cluster() as proxy:
        for title, function in SCENARIOS.items():
            if only and only not in title:
                continue
            rows.append([title, *cells(title, function, proxy)])
            print(" | ".join(rows[-1]), flush=True)
    if not only:
        head = (
            "# What happens, scenario by scenario\n\nMeasured by `python -m release_tests.scenario_table` "
            f"(ray {ray.__version__}, ray-artifact-sync {ray_artifact_sync.__version__}, Python "
            f"{platform.python_version()}); both sides run the same trainable. Ray alone has "
            "`SyncConfig(sync_artifacts=True)`.\n\n| scenario | Ray alone | with this library |\n|---|---|---|\n"
        )
        (ROOT / "docs/scenarios.md").write_text(head + "".join(f"| {' | '.join(row)} |\n" for row in rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
