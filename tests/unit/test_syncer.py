"""`ArtifactSyncer` by Ray's contract, alone and as the driver uses it (no cluster needed)."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest
from ray.train._internal.syncer import Syncer

from ray_artifact_sync import ArtifactRegistry, ArtifactSyncer, ConfigurationError, SyncConfig, configure
from ray_artifact_sync.errors import ArtifactSyncError, IncompleteSyncError, SyncTimeoutError
from ray_artifact_sync.options import DEFAULT_SYNC_PERIOD, DEFAULT_SYNC_TIMEOUT


def write(root: Path, files: dict[str, str]) -> None:
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)


def tree(root: Path) -> dict[str, str]:
    return {
        str(path.relative_to(root)): path.read_text()
        for path in root.rglob("*")
        if path.is_file() and ".ray_artifact_sync" not in path.parts
    }


def sync_up(syncer: ArtifactSyncer, local: Path, remote: object, **kwargs) -> None:
    assert syncer.sync_up(str(local), str(remote), **kwargs) is True
    syncer.wait()


def test_is_a_ray_syncer_that_survives_pickling():
    syncer = ArtifactSyncer(exclude="*.tmp", retries=2, sync_timeout=9)
    copy = pickle.loads(pickle.dumps(syncer))
    assert isinstance(copy, Syncer)
    assert (copy.retries, copy.sync_timeout, copy.selection) == (2, 9, syncer.selection)


def test_up_and_down(tmp_path):
    write(tmp_path / "a", {"x.txt": "1", "sub/y.txt": "2", "sub/z.tmp": "3"})
    syncer = ArtifactSyncer(exclude="*.tmp")
    sync_up(syncer, tmp_path / "a", tmp_path / "b")
    assert tree(tmp_path / "b") == {"x.txt": "1", "sub/y.txt": "2"}
    assert syncer.sync_down(f"file://{tmp_path}/b", str(tmp_path / "c")) is True
    syncer.wait()
    assert tree(tmp_path / "c") == {"x.txt": "1", "sub/y.txt": "2"}
    assert syncer.delete(str(tmp_path / "b")) is True
    syncer.wait()
    assert tree(tmp_path / "b") == {}


def test_rays_exclude_lists_keep_their_meaning(tmp_path):
    write(tmp_path / "a", {"t/checkpoint_1/model": "1", "t/progress.csv": "2"})
    sync_up(ArtifactSyncer(), tmp_path / "a", tmp_path / "b", exclude=["*/checkpoint_*"])
    assert tree(tmp_path / "b") == {"t/progress.csv": "2"}


def test_nothing_is_deleted_and_only_changes_are_sent(tmp_path):
    write(tmp_path / "a", {"x.txt": "1", "y.txt": "2"})
    syncer = ArtifactSyncer()
    sync_up(syncer, tmp_path / "a", tmp_path / "b")
    before = os.stat(tmp_path / "b/x.txt").st_mtime_ns
    (tmp_path / "a/y.txt").unlink()
    write(tmp_path / "a", {"z.txt": "3"})
    sync_up(syncer, tmp_path / "a", tmp_path / "b")
    assert tree(tmp_path / "b") == {"x.txt": "1", "y.txt": "2", "z.txt": "3"}
    assert os.stat(tmp_path / "b/x.txt").st_mtime_ns == before


def test_returns_false_while_one_is_running_and_wait_raises(tmp_path, monkeypatch):
    import threading

    go_on, begun = threading.Event(), threading.Event()
    syncer = ArtifactSyncer()

    def slow(*_args):
        begun.set()
        go_on.wait()
        raise IncompleteSyncError("refused")

    monkeypatch.setattr(syncer, "_sync_up_now", slow)
    assert syncer.sync_up(str(tmp_path), str(tmp_path / "b")) is True
    begun.wait()
    assert syncer.sync_up(str(tmp_path), str(tmp_path / "b")) is False
    assert syncer.sync_down(str(tmp_path / "b"), str(tmp_path)) is False
    with pytest.raises(SyncTimeoutError, match=r"within 0\.01 s"):
        syncer.wait(timeout=0.01)
    go_on.set()
    with pytest.raises(IncompleteSyncError, match="refused"):
        syncer.wait()
    syncer.wait()  # reported once


def test_sync_up_never_raises_and_an_unread_failure_is_logged(tmp_path, caplog):
    syncer = ArtifactSyncer(retries=0)
    (tmp_path / "file").write_text("in the way")
    write(tmp_path / "a", {"x.txt": "1"})
    remote = str(tmp_path / "file/below")
    assert syncer.sync_up(str(tmp_path / "a"), remote) is True
    syncer._operation.wait_done(10)
    assert syncer.sync_up(str(tmp_path / "a"), remote) is True
    assert "nobody waited for it" in caplog.text
    with pytest.raises(ArtifactSyncError):
        syncer.wait()
    syncer.retry()
    with pytest.raises(RuntimeError, match="Failed sync"):
        syncer.wait_or_retry(max_retries=1, backoff_s=0)


def test_what_a_syncer_was_given_holds_in_a_run_unless_the_run_has_its_own():
    """Ray, too, leaves a custom syncer its period."""
    own = ArtifactSyncer(sync_period=5, sync_timeout=7)
    for config in (SyncConfig(syncer=own), configure(syncer=own).sync_config):
        assert (config.sync_period, config.sync_timeout) == (5, 7)
    config = configure(syncer=own, sync_period=0, sync_timeout=9).sync_config
    assert (config.sync_period, config.sync_timeout) == (0, 9)
    for config in (SyncConfig(syncer=ArtifactSyncer()), SyncConfig()):
        assert (config.sync_period, config.sync_timeout) == (DEFAULT_SYNC_PERIOD, DEFAULT_SYNC_TIMEOUT)
    assert SyncConfig(syncer=ArtifactSyncer(sync_timeout=None)).sync_timeout is None


def test_sync_up_if_needed_keeps_the_period(tmp_path):
    syncer = ArtifactSyncer(sync_period=1000)
    write(tmp_path / "a", {"x.txt": "1"})
    assert syncer.sync_up_if_needed(str(tmp_path / "a"), str(tmp_path / "b")) is True
    syncer.wait()
    assert not syncer.sync_up_if_needed(str(tmp_path / "a"), str(tmp_path / "b"))
    syncer.reset()
    assert syncer.sync_up_if_needed(str(tmp_path / "a"), str(tmp_path / "b")) is True
    syncer.wait()


@pytest.mark.parametrize("slash", ["", "/"])
def test_trailing_slash_makes_no_difference(tmp_path, slash):
    write(tmp_path / "a", {"x.txt": "1"})
    syncer = ArtifactSyncer()
    sync_up(syncer, tmp_path / "a", f"{tmp_path}/b")
    sync_up(syncer, tmp_path / "a", f"{tmp_path}/b{slash}")
    assert tree(tmp_path / "b") == {"x.txt": "1"}


@pytest.mark.parametrize(
    "options",
    [{"max_concurrency": 0}, {"retries": -1}, {"on_error": "ignore"}, {"sync_timeout": 0}, {"exclude": "../x"}],
)
def test_bad_options_are_told_when_they_are_given(options):
    with pytest.raises(ConfigurationError):
        ArtifactSyncer(**options)


@pytest.mark.s3
def test_s3_uri(tmp_path, s3_uri, proxy):
    write(tmp_path / "a", {"x.txt": "1", "sub/y.txt": "2"})
    syncer = ArtifactSyncer()
    sync_up(syncer, tmp_path / "a", s3_uri("up"))
    syncer.sync_down(s3_uri("up"), str(tmp_path / "c"))
    syncer.wait()
    assert tree(tmp_path / "c") == {"x.txt": "1", "sub/y.txt": "2"}
    proxy.fail(kind="put_object", path="x.txt", status=403)
    write(tmp_path / "a", {"x.txt": "changed"})
    assert syncer.sync_up(str(tmp_path / "a"), s3_uri("up")) is True
    with pytest.raises(IncompleteSyncError, match=r"x\.txt"):
        syncer.wait()


@pytest.mark.s3
def test_driver_sends_what_changed(tmp_path, s3_filesystem, proxy):
    """1,000 trials with 5 files each, 10 files changed: as many requests as changes, and at most ten."""
    from tests.support.s3_servers import BUCKET

    staging = tmp_path / "staging"
    write(staging, {f"trial_{n}/{name}": f"{n}" for n in range(1000) for name in "abcde"})
    syncer = ArtifactSyncer(max_concurrency=32).bind(
        s3_filesystem,
        sync_period=30,
        sync_timeout=600,
        registry=ArtifactRegistry.default().with_owner("test", *"abcde"),
    )
    sync_up(syncer, staging, f"{BUCKET}/{tmp_path.name}/exp")
    write(staging, {f"trial_{n}/a": f"{n} more" for n in range(10)})
    proxy.reset_counts()
    sync_up(syncer, staging, f"{BUCKET}/{tmp_path.name}/exp")
    print(dict(proxy.counts))
    assert sum(proxy.counts.values()) <= 20
    proxy.reset_counts()
    sync_up(syncer, staging, f"{BUCKET}/{tmp_path.name}/exp")
    assert sum(proxy.counts.values()) == 0


def test_undeclared_and_colliding_files_of_the_driver(tmp_path, caplog):
    """The driver's summary.json stays, the worker's is kept for its checkpoint, and both are named once."""
    from pyarrow import fs as pafs

    from ray_artifact_sync import TrialArtifacts
    from ray_artifact_sync.layout import make_token
    from ray_artifact_sync.stores.posix import PosixStore

    experiment, staging = tmp_path / "exp", tmp_path / "staging"

    def session(token: int) -> TrialArtifacts:
        session = TrialArtifacts(
            str(tmp_path / f"wd{token}"), PosixStore(experiment / "t_1"), trial="t_1", token=make_token(token)
        )
        session.begin()
        return session

    worker = session(1)
    write(tmp_path / "wd1", {"summary.json": "the worker's"})
    worker.commit_checkpoint("checkpoint_000000", lambda engine: engine.store.make_dir("checkpoint_000000"))
    worker.close()
    write(staging, {"t_1/summary.json": "the driver's", "t_1/progress.csv": "x", "experiment_state-1.json": "{}"})
    driver = ArtifactSyncer().bind(
        pafs.LocalFileSystem(), sync_period=30, sync_timeout=60, registry=ArtifactRegistry.default()
    )
    sync_up(driver, staging, experiment)
    sync_up(driver, staging, experiment)
    assert (experiment / "t_1/summary.json").read_text() == "the driver's"
    said = [record.getMessage() for record in caplog.records if "summary.json" in record.getMessage()]
    assert len(said) == 2
    assert "artifact_patterns = ('summary.json',)" in said[0]
    assert "is written by the driver and by the trainable" in said[1]
    assert "progress.csv" not in caplog.text
    restored = session(2)
    report = restored.restore("checkpoint_000000", fresh=True)
    restored.close(flush=False)
    assert report.exact
    assert (tmp_path / "wd2/summary.json").read_text() == "the worker's"


@pytest.mark.parametrize("active", [False, True])
def test_a_run_without_the_callback_is_told(tmp_path, caplog, monkeypatch, active):
    from pyarrow import fs as pafs

    from ray_artifact_sync import ArtifactSyncCallback

    monkeypatch.setattr(ArtifactSyncCallback, "active", active)
    write(tmp_path / "staging", {"x": "1"})
    driver = ArtifactSyncer().bind(
        pafs.LocalFileSystem(), sync_period=30, sync_timeout=60, registry=ArtifactRegistry.default()
    )
    sync_up(driver, tmp_path / "staging", tmp_path / "exp")
    assert ("no ArtifactSyncCallback" in caplog.text) is not active


def test_state_that_the_driver_writes_anew_meanwhile_is_stored_whole(tmp_path, monkeypatch):
    """Ray's driver writes it in place, and may have begun the next one when the sync reads it."""
    from pyarrow import fs as pafs

    from ray_artifact_sync.directory_sync import DirectorySync

    staging, experiment = tmp_path / "staging", tmp_path / "exp"
    driver = ArtifactSyncer().bind(
        pafs.LocalFileSystem(), sync_period=30, sync_timeout=60, registry=ArtifactRegistry.default()
    )
    send = DirectorySync.sync_up

    def begin_the_next_one(self, *args, **kwargs):
        write(staging, {"experiment_state-1.json": ""})
        return send(self, *args, **kwargs)

    monkeypatch.setattr(DirectorySync, "sync_up", begin_the_next_one)
    for state in ("first", "second, which is longer", "third"):
        write(staging, {"experiment_state-1.json": state, "t_1/result.json": "{}"})
        sync_up(driver, staging, experiment)
        assert tree(experiment) == {"experiment_state-1.json": state, "t_1/result.json": "{}"}
