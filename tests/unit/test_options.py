"""Options are told to be wrong when a run is set up, not in a worker."""

import pickle
import threading

import pytest

from ray_artifact_sync.errors import ConfigurationError
from ray_artifact_sync.options import SyncOptions
from ray_artifact_sync.patterns import Selection
from ray_artifact_sync.registry import ArtifactRegistry


def test_the_defaults():
    options = SyncOptions()
    assert (options.sync_period, options.sync_timeout, options.on_error, options.history) == (
        30.0,
        1800.0,
        "warn",
        True,
    )
    assert not options.adopt_foreign_artifacts


@pytest.mark.parametrize(
    "good",
    [
        {"max_concurrency": 1},
        {"retries": 0},
        {"on_error": "raise"},
        {"sync_period": 0},
        {"sync_period": 0.1},
        {"sync_timeout": None},
        {"sync_timeout": 1},
        {"predecessor_wait": 0},
    ],
)
def test_what_works(good):
    ((name, value),) = good.items()
    assert getattr(SyncOptions(**good), name) == value


@pytest.mark.parametrize(
    "bad",
    [
        {"max_concurrency": 0},
        {"max_concurrency": -1},
        {"max_concurrency": 2.5},
        {"max_concurrency": "8"},
        {"max_concurrency": True},
        {"max_concurrency": None},
        {"retries": -1},
        {"retries": 1.5},
        {"retries": None},
        {"on_error": "ignore"},
        {"on_error": None},
        {"sync_period": -1},
        {"sync_period": float("nan")},
        {"sync_period": float("inf")},
        {"sync_period": "30"},
        {"sync_period": None},
        {"sync_period": threading.TIMEOUT_MAX * 2},
        {"sync_timeout": 0},
        {"sync_timeout": -1},
        {"sync_timeout": float("nan")},
        {"sync_timeout": float("inf")},
        {"sync_timeout": "1"},
        {"predecessor_wait": -1},
        {"predecessor_wait": float("nan")},
    ],
    ids=str,
)
def test_what_cannot_work_is_named(bad):
    ((name, value),) = bad.items()
    with pytest.raises(ConfigurationError) as caught:
        SyncOptions(**bad)
    assert name in str(caught.value)
    assert repr(value) in str(caught.value)


def test_options_travel():
    options = SyncOptions(
        selection=Selection.of(exclude=["*.tmp"]),
        registry=ArtifactRegistry.default().with_owner("Mine", "logs/"),
        retries=1,
    )
    again = pickle.loads(pickle.dumps(options))
    assert again.retries == 1
    for path, is_dir in (("a.tmp", False), ("logs", True), ("progress.csv", False), ("x", False)):
        assert again.skip_rule(path, is_dir) == options.skip_rule(path, is_dir)


def test_the_skip_rule_names_owner_and_pattern():
    options = SyncOptions(
        selection=Selection.of(exclude=["*.tmp", "cache/"]),
        registry=ArtifactRegistry.default().with_owner("Predictions", "extra.json", "logs/"),
    )
    rule = options.skip_rule
    owned = rule("extra.json", False)
    assert owned.kind == "owned"
    assert "Predictions" in owned.reason
    assert "/extra.json" in owned.reason
    assert rule("logs", True).kind == "owned"
    assert rule("logs/deep/x", False).kind == "owned"
    assert rule("progress.csv", False).kind == "owned"
    assert rule("result.json", False).kind == "owned"
    assert rule("events.out.tfevents.123", False).kind == "owned"
    excluded = rule("sub/a.tmp", False)
    assert (excluded.path, excluded.kind) == ("sub/a.tmp", "excluded")
    assert "*.tmp" in excluded.reason
    assert rule("cache", True).kind == "excluded"
    for path in ("checkpoint_notes.txt", "sub/progress.csv", "sub/extra.json", "sub/logs/x", "logs.txt"):
        assert rule(path, False) is None
    assert rule("sub", True) is None


def test_an_owner_comes_before_an_exclude():
    """The reason that a user can do something about is the owner's."""
    options = SyncOptions(selection=Selection.of(exclude=["*.csv"]))
    assert options.skip_rule("progress.csv", False).kind == "owned"
