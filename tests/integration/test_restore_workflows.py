"""`Tuner.restore` after the driver died, with the trial's worker dying with it; moved experiments; PBT; num_to_keep."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
from collections import Counter
from pathlib import Path

import pytest
from ray import tune

from ray_artifact_sync import ArtifactSyncer
from tests.integration.drivers import end_driver, run_and_kill, run_driver, start_driver, wait_for
from tests.integration.places import Place, local_place, s3_place
from tests.integration.runs import LINES, check_exact, exploiting, trial_dir, tuner
from tests.integration.trainables import Exploited, Logging
from tests.support.s3_servers import filesystem_at

pytestmark = pytest.mark.ray


@pytest.fixture
def killed(request, tmp_path, place):
    """An experiment whose driver and worker were killed in step 6, with a checkpoint after step 4."""
    spec = {"storage_path": place.storage_path, "trainable": "Logging", "config": {"wait_at": 6}}
    if place.filesystem is not None:
        spec["endpoint"] = request.getfixturevalue("proxy").endpoint
    run_and_kill(tmp_path, spec)
    return spec


def test_tuner_restore_after_the_driver_was_killed(killed, place, tmp_path):
    result = run_driver(tmp_path, {**killed, "restore": f"{place.storage_path}/exp"})
    assert not result["error"]
    check_exact(place.fetch(result["path"]))
    assert (tmp_path / "markers/log_at_restore").read_text().split() == LINES[:4]


@pytest.mark.exhaustive
@pytest.mark.parametrize("place", ["local"], indirect=True)
def test_unfinished_trials_that_are_not_resumed(killed, place, tmp_path):
    """`resume_unfinished=False`: the trial counts as ended; its results, and what it had stored, stay readable."""
    (directory,) = Path(place.storage_path).glob("exp/Logging_*")
    before = {path: path.read_bytes() for path in directory.rglob("*") if path.is_file() and "plots" in path.parts}
    result = run_driver(
        tmp_path,
        {**killed, "restore": f"{place.storage_path}/exp", "restore_options": {"resume_unfinished": False}},
    )
    assert not result["error"]
    assert Path(result["path"]) == directory
    assert not (tmp_path / "markers/log_at_restore").exists(), "it was not run"
    assert (directory / "log.txt").read_text().split() == LINES[:6]
    assert {path: path.read_bytes() for path in before} == before
    assert len(before) == 6


@pytest.mark.exhaustive
def test_moved_experiment(killed, place, tmp_path):
    if place.filesystem is not None:
        pytest.skip("moving is a local matter; the next test copies to S3")
    moved = tmp_path / "moved"
    shutil.move(place.storage_path, moved)
    result = run_driver(tmp_path, {**killed, "storage_path": str(moved), "restore": f"{moved}/exp"})
    assert not result["error"]
    check_exact(place.fetch(result["path"]))
    assert str(moved) in result["path"]
    assert not Path(place.storage_path).exists()
    assert (tmp_path / "markers/log_at_restore").read_text().split() == LINES[:4]


@pytest.mark.exhaustive
@pytest.mark.s3
def test_experiment_copied_to_another_store(tmp_path, proxy, rclone):
    place = local_place(tmp_path)
    spec = {"storage_path": place.storage_path, "trainable": "Logging", "config": {"wait_at": 6}}
    run_and_kill(tmp_path, spec)
    target = s3_place(tmp_path, filesystem_at(proxy.endpoint))
    for file in Path(place.storage_path).rglob("*"):
        if file.is_file():
            path = f"{target.storage_path}/{file.relative_to(place.storage_path)}"
            with target.filesystem.open_output_stream(path) as stream:
                stream.write(file.read_bytes())
    shutil.rmtree(place.storage_path)
    result = run_driver(
        tmp_path,
        {
            **spec,
            "endpoint": proxy.endpoint,
            "storage_path": target.storage_path,
            "restore": f"{target.storage_path}/exp",
        },
    )
    assert not result["error"]
    check_exact(target.fetch(result["path"]))
    assert (tmp_path / "markers/log_at_restore").read_text().split() == LINES[:4]


@pytest.mark.parametrize("option", ["resume_errored", "restart_errored"])
def test_errored_trials(ray_cluster, place, tmp_path, option):
    results = tuner(Logging, place, tmp_path, {"crash_at": 6, "crash": "raise"}, max_failures=0).fit()
    assert results[0].error is not None
    restored = tune.Tuner.restore(
        f"{place.storage_path}/exp", Logging, storage_filesystem=place.filesystem, **{option: True}
    )
    results = restored.fit()
    directory = trial_dir(place, results[0])
    check_exact(directory)
    if option == "resume_errored":
        assert (tmp_path / "markers/log_at_restore").read_text().split() == LINES[:4]


def test_deleted_checkpoints_take_their_snapshots_along(ray_cluster, place, tmp_path):
    config = {"crash_at": 7, "wipe": True, "sync_first": True}
    checkpoint = {"checkpoint_frequency": 1, "num_to_keep": 2}
    results = tuner(Logging, place, tmp_path, config, checkpoint=checkpoint).fit()
    directory = trial_dir(place, results[0])
    check_exact(directory)
    assert (tmp_path / "markers/log_at_restore").read_text().split() == LINES[:6]
    snapshots = list(directory.glob("checkpoint_*/.ray_artifact_sync-*.json"))
    assert len(snapshots) == 2
    kept = {path.name for path in directory.glob(".ray_artifact_sync/objects/*/*")}
    referenced = {
        entry["digest"]
        for path in [*snapshots, *directory.glob(".ray_artifact_sync/**/manifest.json")]
        for entry in json.loads(path.read_text())["entries"].values()
        if "digest" in entry
    }
    assert kept <= referenced


@pytest.mark.s3
def test_forced_syncs_are_bounded(ray_cluster, tmp_path, proxy):
    """With `num_to_keep=1`, Ray forces a sync of the experiment for each checkpoint: each sends what changed, once."""
    place = s3_place(tmp_path, filesystem_at(proxy.endpoint))
    results = tuner(
        Logging, place, tmp_path, {"steps": 8}, checkpoint={"checkpoint_frequency": 1, "num_to_keep": 1}
    ).fit()
    trial = results[0].path.rpartition("/")[2]
    sent = Counter(
        request.path.partition("/exp/")[2].replace(trial, "T") for request in proxy.log if request.kind == "put_object"
    )
    for n in range(1, 9):
        assert sent[f"T/plots/{n}.bin"] == 1
    assert sent["T/log.txt"] <= 8
    assert sent["T/params.json"] == 1
    assert sent["T/result.json"] <= 8
    states = sum(count for name, count in sent.items() if name.startswith("experiment_state"))
    # One for each checkpoint; at the beginning, and at the end.
    assert states <= 8 + 3, sent
    check_exact(trial_dir(place, results[0]))


def pbt(place: Place, tmp_path: Path, config: dict, *, syncer=None, **options):
    return tuner(
        Exploited,
        place,
        tmp_path,
        {"score": tune.grid_search([0, 100]), "lr": 0.1, **config},
        syncer=syncer,
        checkpoint={},
        tune_config=tune.TuneConfig(scheduler=exploiting(), **options),
    ).fit()


def own_lines(place: Place, result) -> list[list[str]]:
    return [line.split() for line in (trial_dir(place, result) / "own.txt").read_text().splitlines()]


@pytest.mark.parametrize(
    "reuse", [pytest.param(False, id="new-actor", marks=pytest.mark.exhaustive), pytest.param(True, id="reused-actor")]
)
def test_pbt_keeps_each_trials_own_artifacts(ray_cluster, place, tmp_path, reuse):
    results = pbt(place, tmp_path, {}, reuse_actors=reuse)
    exploited = 0
    for result in results:
        lines = own_lines(place, result)
        assert {line[0] for line in lines} == {result.metrics["trial_id"]}
        exploited += len({line[2] for line in lines}) > 1
        assert len(lines) == len({tuple(line) for line in lines}), "a step twice"
    assert exploited, "no trial was exploited; the test shows nothing"


@pytest.mark.exhaustive
def test_crash_right_after_an_exploit_returns_to_that_moment(ray_cluster, place, tmp_path):
    results = pbt(place, tmp_path, {"crash_after_exploit": True})
    assert (tmp_path / "markers/crash").exists(), "no trial was exploited; the test shows nothing"
    for result in results:
        lines = own_lines(place, result)
        assert {line[0] for line in lines} == {result.metrics["trial_id"]}
        assert len(lines) == len({tuple(line) for line in lines}), "a step twice"


@pytest.mark.exhaustive
def test_adopting_the_donors_artifacts(ray_cluster, place, tmp_path):
    """With `adopt_foreign_artifacts=True` the exploited trial goes on with the donor's log."""
    results = pbt(place, tmp_path, {}, syncer=ArtifactSyncer(adopt_foreign_artifacts=True))
    logs = {result.metrics["trial_id"]: own_lines(place, result) for result in results}
    adopted = {
        trial: {line[0] for line in lines} for trial, lines in logs.items() if len({line[0] for line in lines}) > 1
    }
    assert adopted, "no trial was exploited; the test shows nothing"
    for trial, authors in adopted.items():
        assert authors == set(logs), "lines of the donor, then its own"
        assert logs[trial][0][0] != trial
        assert logs[trial][-1][0] == trial
        assert len(logs[trial]) == len({tuple(line) for line in logs[trial]}), "a step twice"


def test_ctrl_c_on_the_driver(tmp_path):
    """What was synced before Ctrl-C is there; the restored experiment ends exactly."""
    place = local_place(tmp_path)
    spec = {"storage_path": place.storage_path, "trainable": "Logging", "config": {"wait_at": 6}}
    driver = start_driver(tmp_path, spec)
    try:
        wait_for(tmp_path / "markers/waiting", driver)
        worker = int((tmp_path / "markers/waiting").read_text())
        driver.send_signal(signal.SIGINT)
        driver.communicate(timeout=100)
    finally:
        end_driver(driver)
    with contextlib.suppress(ProcessLookupError):
        os.kill(worker, signal.SIGKILL)
    (directory,) = Path(place.storage_path).glob("exp/Logging_*")
    assert (directory / "log.txt").read_text().split() == LINES[:6]
    (tmp_path / "markers/go_on").touch()
    result = run_driver(tmp_path, {**spec, "restore": f"{place.storage_path}/exp"})
    assert not result["error"]
    check_exact(Path(result["path"]))


def test_storage_filesystem_that_cannot_be_pickled_is_told_at_once(ray_cluster, tmp_path):
    import threading

    from fsspec.implementations.memory import MemoryFileSystem
    from pyarrow import fs as pafs

    from ray_artifact_sync import ConfigurationError

    class Stubborn(MemoryFileSystem):
        cachable = False

        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.lock = threading.Lock()

        def __reduce__(self):
            raise TypeError("cannot pickle a lock")

    filesystem = pafs.PyFileSystem(pafs.FSSpecHandler(Stubborn()))
    with pytest.raises((ConfigurationError, TypeError), match="pickle"):
        tuner(Logging, Place("bucket", filesystem), tmp_path, {}, syncer=ArtifactSyncer()).fit()
