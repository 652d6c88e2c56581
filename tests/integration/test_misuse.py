"""Misuse is told when a run is set up, or in the worker's log, in a sentence that says what to do."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import ray
from ray import tune

from ray_artifact_sync import ArtifactSyncer, ConfigurationError, SyncConfig, configure
from tests.integration.places import local_place
from tests.integration.runs import LINES, trial_dir, tuner
from tests.integration.trainables import Logging, Plain, function

pytestmark = pytest.mark.ray


def test_the_mixin_without_our_sync_config(ray_cluster, tmp_path):
    (tmp_path / "markers").mkdir()
    run_config = tune.RunConfig(
        name="exp",
        storage_path=str(tmp_path / "storage"),
        verbose=0,
    )
    config = {"markers": str(tmp_path / "markers")}
    (result,) = tune.Tuner(Logging, param_space=config, run_config=run_config).fit()
    assert result.error is None
    # Said before Ray opens the files of `log_to_file`: in what the worker prints, which Ray shows on the driver.
    logs = Path(ray._private.worker.global_worker.node.get_session_dir_path(), "logs").glob("worker-*.err")
    said = "".join(path.read_text() for path in logs)
    assert said.count("Logging has ArtifactSyncMixin, but the run's sync_config has no ArtifactSyncer") == 1
    assert "Use `ray_artifact_sync.configure(run_config)`" in said


@pytest.mark.parametrize("trainable", [function, Plain], ids=["function", "class"])
def test_without_wrapper_or_mixin_one_line_says_what_they_would_add(ray_cluster, tmp_path, trainable):
    place = local_place(tmp_path)
    results = tuner(trainable, place, tmp_path, {}, checkpoint={}, log_to_file=True).fit()
    directory = trial_dir(place, results[0])
    assert (directory / "log.txt").read_text().split() == LINES[: results[0].metrics["n"]]
    said = (directory / "stderr").read_text()
    assert said.count("are uploaded, but a restore will not bring them back") == 1
    assert "derive the trainable from ArtifactSyncMixin, or wrap the function in with_artifacts(...)" in said


@pytest.mark.parametrize("earlier", ["2026-01-01_00-00-00/exp", "2026-01-01_00-00-00/another"])
def test_storage_inside_a_working_dir(ray_cluster, earlier):
    session = ray._private.worker.global_worker.node.get_session_dir_path()
    path = f"{session}/artifacts/{earlier}/working_dirs/trial/mine"
    with pytest.raises(ConfigurationError, match=r"lies inside the trials' working dirs.*another storage_path"):
        tune.Tuner(Plain, run_config=configure(tune.RunConfig(name="exp", storage_path=path, verbose=0))).fit()


def test_a_run_config_of_ray_train_v2(tmp_path):
    """In a process of its own: Ray decides at import."""
    script = (
        "import json, ray.train\n"
        "from ray_artifact_sync import ArtifactSyncer, ConfigurationError, SyncConfig, configure\n"
        "said = []\n"
        "for make in (lambda: configure(ray.train.RunConfig()),\n"
        "             lambda: ray.train.RunConfig(sync_config=SyncConfig(syncer=ArtifactSyncer()))):\n"
        "    try:\n"
        "        said.append(['nothing', str(make())])\n"
        "    except (ConfigurationError, DeprecationWarning) as error:\n"
        "        said.append([type(error).__name__, str(error)])\n"
        "print(json.dumps(said))\n"
    )
    environment = {**os.environ, "RAY_TRAIN_V2_ENABLED": "1"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    (ours, text), (rays, _) = json.loads(done.stdout.splitlines()[-1])
    assert ours == "ConfigurationError"
    assert "takes a ray.tune.RunConfig" in text
    assert "Use `ray_artifact_sync.train` in the training loop" in text
    assert rays == "DeprecationWarning", "Ray's own words; nothing is ignored"


def test_a_syncer_that_is_none():
    with pytest.raises(ConfigurationError, match=r"takes an ArtifactSyncer, not str"):
        SyncConfig(syncer="s3")
    with pytest.raises(ConfigurationError, match=r"has no option exclude"):
        configure(tune.RunConfig(), exclude="*.tmp")
    assert configure(tune.RunConfig(), syncer=ArtifactSyncer()).sync_config.sync_artifacts


@pytest.mark.skipif(importlib.util.find_spec("grpc") is None, reason="a Ray Client needs ray[client]")
def test_restore_tuner_through_a_ray_client(ray_cluster, tmp_path):
    """In a process of its own, which this one's cluster does not know of."""
    place = local_place(tmp_path)
    tuner(Logging, place, tmp_path, {}).fit()
    program = Path(__file__).with_name("client_driver.py")
    done = subprocess.run(
        [sys.executable, str(program), str(tmp_path / "storage/exp")],
        capture_output=True,
        text=True,
        timeout=180,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])},
        check=False,
    )
    assert "restore_tuner() does not work through a Ray Client; call it on the cluster." in done.stdout, done.stderr
