"""A restore whose content somebody deleted or replaced: the rest comes back, and it is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from ray_artifact_sync import IncompleteSyncError, TrialArtifacts
from ray_artifact_sync.layout import make_token
from ray_artifact_sync.options import SyncOptions
from ray_artifact_sync.stores.posix import PosixStore


def begin(tmp_path: Path, token: int, **options) -> TrialArtifacts:
    session = TrialArtifacts(
        str(tmp_path / f"wd{token}"),
        PosixStore(tmp_path / "t"),
        trial="t",
        token=make_token(token),
        options=SyncOptions(sync_period=1000, **options),
    )
    session.begin()
    return session


def checkpoint(session: TrialArtifacts) -> None:
    session.commit_checkpoint("checkpoint_000000", lambda engine: engine.store.make_dir("checkpoint_000000"))


@pytest.fixture
def saved(tmp_path):
    session = begin(tmp_path, 1)
    for name in ("deleted.txt", "replaced.txt", "kept.txt"):
        Path(session.working_dir, name).write_text(f"{name} at the checkpoint")
    checkpoint(session)
    session.close()
    (tmp_path / "t/deleted.txt").unlink()
    (tmp_path / "t/replaced.txt").write_text("by somebody else")
    return tmp_path


def test_training_resumes_with_the_rest(saved, caplog):
    session = begin(saved, 2)
    report = session.restore("checkpoint_000000", fresh=True)
    assert not report.exact
    assert report.lost == ("deleted.txt", "replaced.txt")
    assert "nowhere in" in caplog.text
    directory = Path(session.working_dir)
    assert (directory / "kept.txt").read_text() == "kept.txt at the checkpoint"
    assert (directory / "replaced.txt").read_text() == "by somebody else"
    assert not (directory / "deleted.txt").exists()
    session.sync()
    assert set(session.trial.head().manifest.entries) == {"kept.txt", "replaced.txt"}
    session.close()


def test_raise_is_for_those_who_want_it(saved):
    session = begin(saved, 2, on_error="raise")
    with pytest.raises(IncompleteSyncError, match=r"2 of 3 artifacts could not be restored") as caught:
        session.restore("checkpoint_000000", fresh=True)
    assert set(caught.value.failures) == {"deleted.txt", "replaced.txt"}


def test_without_history_a_checkpoint_restores_the_newest_version(tmp_path):
    session = begin(tmp_path, 1, history=False)
    path = Path(session.working_dir, "model.bin")
    path.write_text("old")
    checkpoint(session)
    path.write_text("new")
    session.sync()
    assert not (tmp_path / "t/.ray_artifact_sync/objects").exists()
    session.close()
    restored = begin(tmp_path, 2, history=False)
    assert restored.restore("checkpoint_000000", fresh=True).lost == ("model.bin",)
    assert Path(restored.working_dir, "model.bin").read_text() == "new"
    restored.close()
