"""The storage context without a cluster."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from ray_artifact_sync.errors import ArtifactSyncError
from tests.support.s3_servers import BUCKET, filesystem_at
from tests.support.sessions import abandon, open_session

pytest.importorskip("ray")


@pytest.fixture
def context_at(proxy, tmp_path):
    """A function that gives the context of a trial on the server behind the proxy."""
    from ray_artifact_sync.config import SyncConfig
    from ray_artifact_sync.storage_context import ArtifactStorageContext
    from ray_artifact_sync.syncer import ArtifactSyncer

    return lambda **options: ArtifactStorageContext(
        storage_path=f"{BUCKET}/{tmp_path.name}",
        storage_filesystem=filesystem_at(proxy.endpoint),
        experiment_dir_name="experiment",
        sync_config=SyncConfig(syncer=ArtifactSyncer(**options), sync_artifacts=False),
        trial_dir_name="trial",
        current_checkpoint_index=0,
    )


@pytest.mark.s3
def test_a_moment_without_storage_does_not_cost_a_checkpoint(proxy, context_at, tmp_path):
    from ray.tune import Checkpoint

    context = context_at()
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "model").write_bytes(b"weights")
    # What pyarrow does not try again by itself: how long it does that with a reset differs between its releases.
    refused = proxy.fail("head_object", ".validate_storage_marker", status=400, times=2)
    saved = context.persist_current_checkpoint(Checkpoint.from_directory(str(tmp_path / "checkpoint")))
    assert refused.hits == 2
    with saved.filesystem.open_input_stream(f"{saved.path}/model") as file:
        assert file.read() == b"weights"


@pytest.mark.s3
def test_a_request_that_hangs_keeps_its_path_however_short_a_sync_may_be(proxy, context_at, tmp_path):
    """Without conditional writes: given up with the sync, it could arrive after the next version and land on that."""
    seconds = 2.0
    store = context_at(sync_timeout=seconds).trial_store()
    session = open_session(tmp_path / "work", store, 1, sync_timeout=seconds, retries=0)
    session.sync()
    written = Path(session.working_dir, "a")
    written.write_bytes(b"hangs")
    hung = proxy.hang("put_object", "/a", times=1)
    ends = time.monotonic() + 3 * seconds
    while time.monotonic() < ends:
        with pytest.raises(ArtifactSyncError):
            session.sync()
        written.write_bytes(b"newer")
    hung.release()
    session.sync()
    assert store.read("a") == b"newer"
    abandon(session)
