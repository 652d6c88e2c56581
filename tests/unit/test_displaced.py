"""A restore brings back a version that its path does not hold any more; the next attempt must know that."""

from __future__ import annotations

from pathlib import Path

from ray_artifact_sync import TrialArtifacts
from ray_artifact_sync.layout import make_token
from ray_artifact_sync.manifest import decode, encode
from ray_artifact_sync.options import SyncOptions
from ray_artifact_sync.stores.posix import PosixStore


def begin(tmp_path: Path, token: int) -> TrialArtifacts:
    session = TrialArtifacts(
        str(tmp_path / f"wd{token}"),
        PosixStore(tmp_path / "t"),
        trial="t",
        token=make_token(token),
        options=SyncOptions(sync_period=0),
    )
    session.begin()
    return session


def test_two_crashes_do_not_leave_a_newer_version_at_the_path(tmp_path):
    first = begin(tmp_path, 1)
    path = Path(first.working_dir, "f")
    path.write_text("0")
    first.commit_checkpoint("checkpoint_000000", lambda engine: engine.store.make_dir("checkpoint_000000"))
    Path(first.working_dir, "g").write_text("so that the restore has a head to commit")
    path.write_text("1")
    first.sync()
    second = begin(tmp_path, 2)
    second.restore("checkpoint_000000", fresh=True)  # and dies before its first sync
    assert second.trial.head().displaced == {"f"}
    third = begin(tmp_path, 3)
    third.restore("checkpoint_000000", fresh=True)
    third.sync()
    assert (tmp_path / "t/f").read_text() == "0"
    assert decode(encode(third.trial.head().document("manifest", token=make_token(3))), kind="manifest", where="x")
    third.close()
