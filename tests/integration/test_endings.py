"""How trials and experiments end: slow flushes, schedulers that stop or pause, failing syncs."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
from ray import tune
from ray.tune.schedulers import ASHAScheduler, HyperBandScheduler

from ray_artifact_sync import ArtifactSyncCallback, ArtifactSyncer
from tests.integration.places import s3_place
from tests.integration.runs import LINES, check_exact, content, trial_dir, tuner
from tests.integration.trainables import Logging, ManyFiles
from tests.support.s3_servers import filesystem_at

pytestmark = pytest.mark.ray

BUDGET = 20.0
"""Seconds: a busy machine takes some to start the trial."""


@pytest.mark.exhaustive
@pytest.mark.s3
@pytest.mark.slow
def test_a_slow_last_flush_is_waited_for(ray_cluster, tmp_path, proxy):
    """60 files, one at a time, 0.25 s each: more than the 10 s that Ray gives an actor at the end of an experiment."""
    place = s3_place(tmp_path, filesystem_at(proxy.endpoint))
    proxy.latency = 0.25
    started = time.monotonic()
    results = tuner(
        ManyFiles,
        place,
        tmp_path,
        {},
        syncer=ArtifactSyncer(max_concurrency=1),
        sync={"sync_period": 1000},
        stop={"n": 2},
        checkpoint={},
    ).fit()
    assert time.monotonic() - started > 14
    proxy.latency = 0
    directory = trial_dir(place, results[0])
    assert sorted(int(path.stem) for path in directory.glob("[0-9]*.txt")) == list(range(60))


def test_asha_stops_trials_early(ray_cluster, place, tmp_path):
    results = tuner(
        Logging,
        place,
        tmp_path,
        {"x": tune.grid_search([1, 2, 3])},
        tune_config=tune.TuneConfig(
            scheduler=ASHAScheduler(metric="n", mode="max", max_t=6, grace_period=2, reduction_factor=2)
        ),
    ).fit()
    for result in results:
        directory = trial_dir(place, result)
        assert (directory / "log.txt").read_text().split() == LINES[: result.metrics["n"]]
        assert (directory / "cleanup.txt").exists()


@pytest.mark.exhaustive
def test_hyperband_pauses_and_resumes(ray_cluster, place, tmp_path):
    results = tuner(
        Logging,
        place,
        tmp_path,
        {"x": tune.grid_search([1, 2, 3, 4])},
        checkpoint={},
        tune_config=tune.TuneConfig(scheduler=HyperBandScheduler(metric="n", mode="max", max_t=8)),
    ).fit()
    for result in results:
        directory = trial_dir(place, result)
        assert (directory / "log.txt").read_text().split() == LINES[: result.metrics["n"]]


@pytest.mark.s3
def test_refused_syncs_do_not_kill_a_trial(ray_cluster, tmp_path, proxy):
    place = s3_place(tmp_path, filesystem_at(proxy.endpoint))
    proxy.fail(kind="put_object", path="/plots/", status=403)
    results = tuner(Logging, place, tmp_path, {}, syncer=ArtifactSyncer(retries=0)).fit()
    assert results[0].error is None
    assert results[0].metrics["artifact_sync/failed_syncs"] > 0
    directory = trial_dir(place, results[0])
    assert (directory / "log.txt").read_text().split() == LINES
    assert (directory / "checkpoint_000001/n").read_text() == "8"
    assert not list(directory.glob("checkpoint_*/.ray_artifact_sync-*.json")), "a snapshot of what is not there"


@pytest.mark.s3
def test_refused_syncs_kill_a_trial_that_wants_it(ray_cluster, tmp_path, proxy):
    place = s3_place(tmp_path, filesystem_at(proxy.endpoint))
    proxy.fail(kind="put_object", path="/plots/", status=403)
    results = tuner(
        Logging, place, tmp_path, {}, max_failures=0, syncer=ArtifactSyncer(retries=0, on_error="raise")
    ).fit()
    assert results[0].error is not None
    assert "plots" in str(results[0].error)


def test_error_in_setup(ray_cluster, place, tmp_path):
    class Broken(Logging):
        def setup(self, config):
            super().setup(config)
            raise RuntimeError("broken setup")

    results = tuner(Broken, place, tmp_path, {}, max_failures=0).fit()
    assert "broken setup" in str(results[0].error)


def test_time_budget(ray_cluster, place, tmp_path):
    class Slow(Logging):
        def step(self):
            time.sleep(0.3)
            return super().step()

    results = tuner(
        Slow, place, tmp_path, {"steps": 1000}, tune_config=tune.TuneConfig(time_budget_s=BUDGET), checkpoint={}
    ).fit()
    directory = trial_dir(place, results[0])
    count = len((directory / "log.txt").read_text().split())
    assert (directory / "log.txt").read_text().split() == [str(n) for n in range(1, count + 1)]
    assert count >= results[0].metrics["n"]
    assert (directory / "cleanup.txt").exists()


def test_the_old_actor_is_still_stopping_when_the_new_one_begins(ray_cluster, place, tmp_path):
    """Ray starts the next attempt while `cleanup()` of the last one runs, in the same working dir."""

    class SlowEnd(Logging):
        def setup(self, config):
            super().setup(config)
            self.mark(f"began_{os.getpid()}")

        def cleanup(self):
            others = len(list(Path(self.cfg["markers"]).glob("began_*")))
            ends = time.monotonic() + 5
            while self.n == 6 and time.monotonic() < ends and others == 1:  # the attempt that raised
                time.sleep(0.05)
            Path(f"end_of_{os.getpid()}.txt").write_text("written in cleanup()")
            super().cleanup()

    results = tuner(SlowEnd, place, tmp_path, {"crash_at": 6, "crash": "raise"}).fit()
    directory = trial_dir(place, results[0])
    check_exact(directory)
    assert (tmp_path / "markers/log_at_restore").read_text().split() == LINES[:4]
    first, last = sorted((tmp_path / "markers").glob("began_*"), key=lambda path: path.stat().st_mtime_ns)
    listed = json.loads((directory / ".ray_artifact_sync/manifest.json").read_text())["entries"]
    ends = {f"end_of_{path.name.partition('_')[2]}.txt": path for path in (first, last)}
    assert [ends[name] for name in listed if name.startswith("end_of_")] == [last]
    snapshot = json.loads(next((directory / "checkpoint_000001").glob(".ray_artifact_sync-*")).read_text())
    assert not [name for name in snapshot["entries"] if name.startswith(("end_of_", "raised"))]


def test_checkpoint_at_end(ray_cluster, place, tmp_path):
    results = tuner(Logging, place, tmp_path, {}, checkpoint={"checkpoint_at_end": True}).fit()
    directory = trial_dir(place, results[0])
    check_exact(directory)
    assert list(directory.glob("checkpoint_*/.ray_artifact_sync-*.json"))


def test_without_changing_the_directory(tmp_path):
    """`RAY_CHDIR_TO_TRIAL_DIR=0`: files that the trainable puts into its logdir are the artifacts."""
    import subprocess
    import sys

    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys, ray\n"
        "from ray import tune\n"
        "from ray_artifact_sync import ArtifactSyncMixin, configure\n"
        "class T(ArtifactSyncMixin, tune.Trainable):\n"
        "    def step(self):\n"
        "        assert os.path.realpath(os.getcwd()) != os.path.realpath(self.logdir)\n"
        "        open(os.path.join(self.logdir, 'mine.txt'), 'w').write('x')\n"
        "        return {'done': True}\n"
        "    def save_checkpoint(self, d): pass\n"
        "    def load_checkpoint(self, d): pass\n"
        "ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)\n"
        f"run = tune.RunConfig(name='exp', storage_path={str(tmp_path / 'storage')!r}, verbose=0)\n"
        "results = tune.Tuner(T, run_config=configure(run)).fit()\n"
        "assert results[0].error is None, results[0].error\n"
        "assert open(os.path.join(results[0].path, 'mine.txt')).read() == 'x'\n"
    )
    subprocess.run(
        [sys.executable, str(script)],
        check=True,
        env={**os.environ, "RAY_CHDIR_TO_TRIAL_DIR": "0", "RAY_AIR_NEW_OUTPUT": "0"},
        timeout=120,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def test_configure_adds_one_callback_and_leaves_the_original_alone():
    from ray_artifact_sync import configure

    original = tune.RunConfig(callbacks=[])
    once = configure(original)
    twice = configure(once)
    assert original.callbacks == []
    assert [type(callback) for callback in twice.callbacks] == [ArtifactSyncCallback]


def test_importing_changes_nothing_for_others(ray_cluster, tmp_path):
    """Ray's own SyncConfig gives Ray's own storage context, also after our import."""
    from ray.train._internal.storage import StorageContext
    from ray.tune.experiment import Experiment

    from ray_artifact_sync import SyncConfig
    from ray_artifact_sync.storage_context import ArtifactStorageContext

    plain = Experiment("plain", lambda config: None, storage_path=str(tmp_path), sync_config=tune.SyncConfig())
    assert type(plain.storage) is StorageContext
    unset = Experiment("unset", lambda config: None, storage_path=str(tmp_path), sync_config=SyncConfig())
    assert type(unset.storage) is StorageContext
    ours = Experiment(
        "ours", lambda config: None, storage_path=str(tmp_path), sync_config=SyncConfig(syncer=ArtifactSyncer())
    )
    assert type(ours.storage) is ArtifactStorageContext


def test_periodic_syncs_bring_files_without_any_checkpoint(ray_cluster, place, tmp_path):
    """A worker that is killed has its files in storage up to the last period; nothing else brings them there."""
    results = tuner(
        Logging,
        place,
        tmp_path,
        {"crash_at": 3, "await_period": True, "wipe": True},
        sync={"sync_period": 0.1},
        checkpoint={},
        max_failures=0,
    ).fit()
    assert results[0].error is not None
    directory = place.fetch(results[0].path)
    assert (directory / "plots/3.bin").read_bytes() == content(3)
    assert (directory / "log.txt").read_text().split() == LINES[:3]
