"""The storage context without a cluster."""

from __future__ import annotations

import pytest

from tests.support.s3_servers import BUCKET, filesystem_at

pytest.importorskip("ray")


@pytest.mark.s3
def test_a_moment_without_storage_does_not_cost_a_checkpoint(proxy, tmp_path):
    from ray.tune import Checkpoint

    from ray_artifact_sync.config import SyncConfig
    from ray_artifact_sync.storage_context import ArtifactStorageContext
    from ray_artifact_sync.syncer import ArtifactSyncer

    context = ArtifactStorageContext(
        storage_path=f"{BUCKET}/{tmp_path.name}",
        storage_filesystem=filesystem_at(proxy.endpoint),
        experiment_dir_name="experiment",
        sync_config=SyncConfig(syncer=ArtifactSyncer(), sync_artifacts=False),
        trial_dir_name="trial",
        current_checkpoint_index=0,
    )
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "model").write_bytes(b"weights")
    # What pyarrow does not try again by itself: how long it does that with a reset differs between its releases.
    refused = proxy.fail("head_object", ".validate_storage_marker", status=400, times=2)
    saved = context.persist_current_checkpoint(Checkpoint.from_directory(str(tmp_path / "checkpoint")))
    assert refused.hits == 2
    with saved.filesystem.open_input_stream(f"{saved.path}/model") as file:
        assert file.read() == b"weights"
