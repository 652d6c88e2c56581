"""Experiments on a storage that may be read and not written, on real Ray."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from ray import tune

from ray_artifact_sync.stores import open_store
from ray_artifact_sync.trial_dir import TrialDir
from tests.integration.places import local_place, s3_place
from tests.integration.runs import LINES, check_exact, tuner
from tests.integration.trainables import Logging
from tests.support.s3_servers import filesystem_at

pytestmark = pytest.mark.ray

WRITES = ("put_object", "upload_part", "create_multipart", "complete_multipart", "copy_object", "delete", "delete_many")


@pytest.fixture(params=["local", pytest.param("s3", marks=pytest.mark.s3)])
def lockable(request, tmp_path):
    """A place, and a function that takes the right to write there away."""
    if request.param == "s3":
        proxy = request.getfixturevalue("proxy")

        def refuse() -> None:
            for kind in (*WRITES, "marker"):
                proxy.fail(kind, status=403)

        yield s3_place(tmp_path, filesystem_at(proxy.endpoint)), refuse
        return
    place = local_place(tmp_path)
    Path(place.storage_path).mkdir()

    def remount() -> None:
        for options in (["--bind", place.storage_path], ["-o", "remount,ro,bind"]):
            done = subprocess.run(["mount", *options, place.storage_path], check=False, capture_output=True)
            if done.returncode:
                pytest.skip(f"cannot mount read-only: {done.stderr.decode().strip()}")

    yield place, remount
    subprocess.run(["umount", "--lazy", place.storage_path], check=False, capture_output=True)


def test_results_can_be_read(ray_cluster, lockable, tmp_path):
    place, lock = lockable
    results = tuner(Logging, place, tmp_path, {}).fit()
    before = results[0]
    lock()
    restored = tune.Tuner.restore(f"{place.storage_path}/exp", Logging, storage_filesystem=place.filesystem)
    (result,) = restored.get_results()
    assert result.error is None
    assert (result.path, result.metrics["n"]) == (before.path, 8)
    with result.checkpoint.as_directory() as directory:
        assert Path(directory, "n").read_text() == "8"
    check_exact(place.fetch(result.path))
    store = open_store(result.filesystem, result.path)
    trial = TrialDir(store, Path(result.path).name)
    assert trial.head().manifest.get("cleanup.txt") is not None
    assert trial.snapshot("checkpoint_000000").manifest.get("plots/4.bin") is not None


@pytest.mark.s3
def test_a_worker_that_may_only_read_its_trial_dir(ray_cluster, proxy, tmp_path):
    """Its artifacts come back though it cannot claim the trial dir; it trains on, and says what failed."""
    place = s3_place(tmp_path, filesystem_at(proxy.endpoint))
    tuner(
        Logging,
        place,
        tmp_path,
        {"crash_at": 6, "crash": "raise", "steps": 7},
        max_failures=0,
        checkpoint={"checkpoint_frequency": 4, "checkpoint_at_end": False},
    ).fit()
    for kind in WRITES:
        proxy.fail(kind, "/exp/Logging_", status=403)
    restored = tune.Tuner.restore(
        f"{place.storage_path}/exp", Logging, storage_filesystem=place.filesystem, resume_errored=True
    )
    (result,) = restored.fit()
    assert result.error is None
    assert result.metrics["n"] == 7
    assert result.metrics["artifact_sync/failed_syncs"] > 0
    assert (tmp_path / "markers/log_at_restore").read_text().split() == LINES[:4]
    assert (tmp_path / "markers/rewritten_at_restore").read_text() == "version 4\n"
