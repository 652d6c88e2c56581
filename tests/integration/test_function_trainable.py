"""Function trainables under `with_artifacts`, on real Ray."""

from __future__ import annotations

import functools

import pytest
from ray import tune

from ray_artifact_sync import ArtifactSyncMixin, ConfigurationError, with_artifacts
from tests.integration.places import local_place
from tests.integration.runs import LINES, check_exact, trial_dir, tuner
from tests.integration.trainables import function

pytestmark = pytest.mark.ray

run = functools.partial(tuner, checkpoint={})


@pytest.mark.parametrize("wipe", [False, True], ids=["same-node", "other-node"])
def test_killed_after_a_checkpoint(ray_cluster, place, tmp_path, wipe):
    results = run(with_artifacts(function), place, tmp_path, {"crash_at": 6, "wipe": wipe}).fit()
    check_exact(trial_dir(place, results[0]))
    assert (tmp_path / "markers/log_at_restore").read_text().split() == LINES[:4]
    assert (tmp_path / "markers/rewritten_at_restore").read_text() == "version 4\n"


def test_killed_before_the_first_checkpoint_starts_clean(ray_cluster, place, tmp_path):
    results = run(with_artifacts(function), place, tmp_path, {"crash_at": 3}).fit()
    check_exact(trial_dir(place, results[0]))
    assert not (tmp_path / "markers/not_clean").exists()


def test_function_that_raises(ray_cluster, place, tmp_path):
    results = run(with_artifacts(function), place, tmp_path, {"crash_at": 6, "crash": "raise"}, max_failures=0).fit()
    directory = place.fetch(results[0].path)
    assert results[0].error is not None
    assert (directory / "log.txt").read_text().split() == LINES[:6]
    assert (directory / "cleanup.txt").exists()


def test_stopped_early_with_a_slow_finally(ray_cluster, place, tmp_path):
    results = run(with_artifacts(function), place, tmp_path, {"slow_finally": 3, "steps": 100}, stop={"n": 5}).fit()
    directory = trial_dir(place, results[0])
    assert (directory / "cleanup.txt").exists()
    assert (directory / "log.txt").read_text().split() == LINES[:5]


@pytest.mark.parametrize("after", ["returns", "raises"])
def test_written_after_the_last_report(ray_cluster, place, tmp_path, after):
    """Nobody reports any more, and the function ends: what it wrote since lands."""

    @with_artifacts
    def late(config):
        with open("log.txt", "a") as log:
            log.write("before\n")
        tune.report({"n": 1})
        with open("log.txt", "a") as log:
            log.write("after\n")
        with open("summary.txt", "w") as file:
            file.write("written after the last report")
        if config["after"] == "raises":
            raise RuntimeError("after the last report")

    results = run(late, place, tmp_path, {"after": after}, max_failures=0).fit()
    assert (results[0].error is not None) is (after == "raises")
    directory = place.fetch(results[0].path)
    assert (directory / "log.txt").read_text() == "before\nafter\n"
    assert (directory / "summary.txt").read_text() == "written after the last report"


def test_reused_actors_keep_trials_apart(ray_cluster, place, tmp_path):
    results = run(
        with_artifacts(function),
        place,
        tmp_path,
        {"who": tune.grid_search(["a", "b", "c"]), "steps": 3},
        tune_config=tune.TuneConfig(reuse_actors=True, max_concurrent_trials=1),
    ).fit()
    for result in results:
        directory = trial_dir(place, result)
        assert [path.name for path in directory.glob("only_*")] == [f"only_{result.config['who']}.txt"]
        assert (directory / "log.txt").read_text().split() == LINES[:3]


def test_early_stopped_reused_actors_keep_finally_writes(ray_cluster, tmp_path):
    place = local_place(tmp_path)
    results = run(
        with_artifacts(function),
        place,
        tmp_path,
        {"who": tune.grid_search(["a", "b", "c"]), "steps": 50, "slow_finally": 1},
        tune_config=tune.TuneConfig(reuse_actors=True, max_concurrent_trials=1),
        stop={"n": 2},
    ).fit()
    for result in results:
        directory = trial_dir(place, result)
        assert [path.name for path in directory.glob("only_*")] == [f"only_{result.config['who']}.txt"]
        assert (directory / "log.txt").read_text().split() == LINES[:2]


def test_composes_with_parameters_and_resources(ray_cluster, tmp_path):
    place = local_place(tmp_path)

    def inner(config, data):
        with open("data.txt", "w") as file:
            file.write(data)

    for number, trainable in enumerate(
        (
            tune.with_parameters(with_artifacts(inner), data="abc"),
            with_artifacts(tune.with_parameters(inner, data="abc")),
            tune.with_resources(tune.with_parameters(with_artifacts(inner), data="abc"), {"cpu": 1}),
            tune.with_parameters(with_artifacts(tune.with_resources(inner, {"cpu": 1})), data="abc"),
        )
    ):
        results = run(trainable, local_place(tmp_path / str(number)), tmp_path, {}).fit()
        assert (trial_dir(place, results[0]) / "data.txt").read_text() == "abc"


def test_without_the_wrapper_artifacts_are_uploaded(ray_cluster, place, tmp_path):
    results = run(function, place, tmp_path, {}).fit()
    assert (trial_dir(place, results[0]) / "log.txt").read_text().split() == LINES


def test_misuse_is_told():
    class Mixed(ArtifactSyncMixin, tune.Trainable):
        pass

    with pytest.raises(ConfigurationError, match="is for functions"):
        with_artifacts(Mixed)
    with pytest.raises(ConfigurationError, match="takes a function"):
        with_artifacts("train")
    with pytest.raises(ConfigurationError, match=r"after tune\.Trainable"):

        class Wrong(tune.Trainable, ArtifactSyncMixin):
            pass

    assert with_artifacts(with_artifacts(function)).__mixins__ == with_artifacts(function).__mixins__
