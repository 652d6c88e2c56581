"""Artifacts in real Ray Train workers: V2 where the installed Ray has it by default, else V1."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest
import ray.train
from pyarrow import fs as pafs
from ray import cloudpickle
from ray.train import FailureConfig, RunConfig, ScalingConfig

from ray_artifact_sync import ArtifactSyncer, ConfigurationError, train
from ray_artifact_sync.run_parts import MERGED, open_part, rank_part
from tests.integration import train_loops
from tests.support.independent_reader import head_tree, snapshots, store_place, tree_of

pytestmark = [pytest.mark.ray, pytest.mark.slow]

V2 = getattr(ray.train, "is_v2_enabled", lambda: False)()
LINES = [str(n) for n in range(1, 7)]

needs_v2 = pytest.mark.skipif(not V2, reason="needs Ray Train V2")


@pytest.fixture(autouse=True)
def _by_value(ray_cluster):
    cloudpickle.register_pickle_by_value(train_loops)


def trainer_class():
    if V2:
        from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
    else:
        from ray.train.data_parallel_trainer import DataParallelTrainer
    return DataParallelTrainer


def trainer(place, tmp_path, config, *, loop=train_loops.loop, workers=2, failures=2, name="run"):
    markers = tmp_path / "markers"
    markers.mkdir(exist_ok=True)
    return trainer_class()(
        loop,
        train_loop_config={"markers": str(markers), **config},
        scaling_config=ScalingConfig(num_workers=workers, resources_per_worker={"CPU": 0.5}),
        run_config=RunConfig(name=name, failure_config=FailureConfig(max_failures=failures), **place.run_options),
    )


def run(place, tmp_path, config, **options):
    result = trainer(place, tmp_path, config, **options).fit()
    assert result.error is None
    return result


def part_of(place, result, part):
    """A part of the run, for the reader that knows nothing of the library."""
    filesystem = place.filesystem or pafs.LocalFileSystem()
    return store_place(open_part(filesystem, result.path, part).store)


def text(tree, name):
    return tree[name].decode()


def marker(tmp_path, name):
    return (tmp_path / "markers" / name).read_text()


def test_a_rank_is_killed_and_the_run_goes_on(place, tmp_path):
    """Two ranks write files of the same names on one node; every rank's are as of the checkpoint."""
    result = run(place, tmp_path, {"kill_at": 6})
    for rank in (0, 1):
        assert marker(tmp_path, f"log_4_{rank}").split() == LINES[:4]
        assert marker(tmp_path, f"files_0_{rank}") == ""
        assert marker(tmp_path, f"files_4_{rank}") == f"log.txt rewritten_{rank}.txt same.txt"
        tree = head_tree(part_of(place, result, rank_part(rank)))
        assert text(tree, "log.txt").split() == [*LINES, "end"], "written after the last report, too"
        assert text(tree, f"rewritten_{rank}.txt") == "version 6"
        assert len(tree) == 3
        kept = part_of(place, result, rank_part(rank))
        for checkpoint, path in snapshots_of(kept).items():
            step = len(text(tree_of(kept, path), "log.txt").split())
            assert step in (2, 4, 6), checkpoint
        assert len(snapshots_of(kept)) == 3


def snapshots_of(kept):
    """Like `snapshots`, for checkpoints of any name."""
    return snapshots(kept) or {name.partition("/")[0]: name for name in kept.names() if "/.ray_artifact_sync-" in name}


def test_merged(place, tmp_path):
    """One set of all ranks: `same.txt` once, and each rank goes on with its own log."""
    result = run(place, tmp_path, {"kill_at": 6, "artifacts": {"merged": True}, "reporting": "all"})
    everything = "log_0.txt log_1.txt rewritten_0.txt rewritten_1.txt same.txt"
    for rank in (0, 1):
        assert marker(tmp_path, f"log_4_{rank}").split() == LINES[:4]
        assert marker(tmp_path, f"files_4_{rank}") == everything
    tree = head_tree(part_of(place, result, MERGED))
    assert sorted(tree) == everything.split()
    for rank in (0, 1):
        assert text(tree, f"log_{rank}.txt").split() == [*LINES, "end"]
        assert text(tree, f"rewritten_{rank}.txt") == "version 6"


@pytest.mark.exhaustive
def test_merged_conflict_is_told_by_every_rank(place, tmp_path):
    config = {"conflict": 2, "steps": 2, "artifacts": {"merged": True, "syncer": ArtifactSyncer(on_error="raise")}}
    told = failure_of(trainer(place, tmp_path, config, failures=0))
    assert "'conflict.txt' has different bytes from ranks 0 and 1" in told


def failure_of(trainer) -> str:
    """What the driver says, with all causes."""
    try:
        error = trainer.fit().error
    except Exception as raised:
        error = raised
    lines = []
    while error is not None:
        lines.append(str(error))
        error = error.__cause__
    return "\n".join(lines)


@pytest.mark.exhaustive
@needs_v2
def test_world_size_changes_between_runs(place, tmp_path):
    """A run of the same name continues: 2 workers, then 1, then 3."""
    run(place, tmp_path, {"steps": 2})
    run(place, tmp_path, {"steps": 4}, workers=1)
    result = run(place, tmp_path, {"steps": 6}, workers=3)
    assert marker(tmp_path, "log_2_0").split() == ["1", "2"]
    assert marker(tmp_path, "log_4_0").split() == ["1", "2", "3", "4"]
    assert marker(tmp_path, "files_4_1") == "", "a rank that did not take part in the checkpoint begins empty"
    assert marker(tmp_path, "files_4_2") == ""
    tree = head_tree(part_of(place, result, rank_part(0)))
    assert text(tree, "log.txt").split() == [*LINES, "end"]


@pytest.mark.exhaustive
@needs_v2
@pytest.mark.parametrize("option", ["upload_fn", "named"])
def test_options_of_report(option, tmp_path):
    from tests.integration.places import local_place

    place = local_place(tmp_path)
    if option == "upload_fn" and "checkpoint_upload_fn" not in inspect.signature(ray.train.report).parameters:
        pytest.skip("this Ray has no checkpoint_upload_fn")
    result = run(place, tmp_path, {option: True, "kill_at": 4, "reporting": "all"})
    names = sorted(path.name for path in Path(result.path).iterdir() if (path / "state.json").exists())
    assert len(names) == 3
    for name in names:
        assert option != "upload_fn" or (Path(result.path) / name / "by_user").exists()
        assert option != "named" or name.startswith("epoch_")
        assert {path.name for path in (Path(result.path) / name).glob("part_*")} == {"part_0.bin", "part_1.bin"}
    assert marker(tmp_path, "log_2_1").split() == ["1", "2"]


def test_a_loop_that_raises_keeps_its_files(tmp_path):
    from tests.integration.places import local_place

    place = local_place(tmp_path)
    assert "a bug" in failure_of(trainer(place, tmp_path, {}, loop=train_loops.raising_loop, failures=0))
    found = sorted((tmp_path / "storage").rglob("artifacts/rank_*/why.txt"))
    assert [path.read_text() for path in found] == ["rank 0", "rank 1"]


def test_under_tune(tmp_path):
    from ray import tune

    from tests.integration.places import local_place

    place = local_place(tmp_path)
    (tmp_path / "markers").mkdir()
    common = {"markers": str(tmp_path / "markers"), "storage": place.storage_path}
    if V2:
        trainable = tune.with_resources(train_loops.tune_function, {"cpu": 0.5})
        space = {**common, "who": tune.grid_search(["a", "b"])}
    else:
        trainable = trainer(place, tmp_path, {"steps": 2})
        space = {"train_loop_config": {"who": tune.grid_search(["a", "b"])}}
    results = tune.Tuner(
        trainable,
        param_space=space,
        tune_config=tune.TuneConfig(max_concurrent_trials=1),
        run_config=tune.RunConfig(name="exp", storage_path=place.storage_path, verbose=0),
    ).fit()
    assert results.num_errors == 0
    paths = [result.metrics["path"] if V2 else result.path for result in results]
    assert len(set(paths)) == 2
    for path in paths:
        for rank in (0, 1):
            assert (Path(path) / f"artifacts/rank_{rank}/log.txt").read_text().split() == ["1", "2", "end"]


LOCAL_MODE = """
import sys
sys.path.insert(0, {root!r})
from ray.train import RunConfig, ScalingConfig
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
from tests.integration import train_loops
DataParallelTrainer(
    train_loops.loop,
    train_loop_config={{"markers": {markers!r}, "steps": 4, "artifacts": {{"local_storage_path": {storage!r}}}}},
    scaling_config=ScalingConfig(num_workers=0),
    run_config=RunConfig(name="local"),
).fit()
"""


@needs_v2
def test_local_mode(tmp_path):
    markers = tmp_path / "markers"
    markers.mkdir()
    root = str(Path(__file__).resolve().parents[2])
    code = LOCAL_MODE.format(root=root, markers=str(markers), storage=str(tmp_path / "storage"))
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "RAY_TRAIN_V2_ENABLED": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    if "num_workers" in done.stderr and "must be" in done.stderr:
        pytest.skip("this Ray has no local mode")
    assert done.returncode == 0, done.stderr
    run_dir = tmp_path / "storage/local"
    assert (run_dir / "artifacts/rank_0/log.txt").read_text().split() == ["1", "2", "3", "4", "end"]
    assert len(list(run_dir.glob("checkpoint_*/.ray_artifact_sync/rank_0/.ray_artifact_sync-*.json"))) == 2


def test_outside_of_a_worker():
    with pytest.raises(ConfigurationError, match="train_loop_per_worker"), train.artifacts():
        pass
    with pytest.raises(ConfigurationError, match="on_conflict"), train.artifacts(on_conflict="never"):
        pass
