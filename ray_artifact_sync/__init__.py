"""Trial artifacts of Ray Tune and Ray Train that survive crashes, moves and restores.

Names are imported when they are first used, so that `import ray_artifact_sync` costs neither Ray nor a storage client.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ray_artifact_sync._version import __version__

if TYPE_CHECKING:
    from ray_artifact_sync import train as train
    from ray_artifact_sync.callback import ArtifactSyncCallback as ArtifactSyncCallback
    from ray_artifact_sync.config import SyncConfig as SyncConfig
    from ray_artifact_sync.config import configure as configure
    from ray_artifact_sync.errors import (
        ArtifactConflictError as ArtifactConflictError,
    )
    from ray_artifact_sync.errors import (
        ArtifactExistsError as ArtifactExistsError,
    )
    from ray_artifact_sync.errors import (
        ArtifactNotFoundError as ArtifactNotFoundError,
    )
    from ray_artifact_sync.errors import (
        ArtifactSyncError as ArtifactSyncError,
    )
    from ray_artifact_sync.errors import (
        ConfigurationError as ConfigurationError,
    )
    from ray_artifact_sync.errors import (
        IncompleteSyncError as IncompleteSyncError,
    )
    from ray_artifact_sync.errors import (
        IntegrityError as IntegrityError,
    )
    from ray_artifact_sync.errors import (
        InvalidPathError as InvalidPathError,
    )
    from ray_artifact_sync.errors import (
        ManifestError as ManifestError,
    )
    from ray_artifact_sync.errors import (
        StagingError as StagingError,
    )
    from ray_artifact_sync.errors import (
        StorageError as StorageError,
    )
    from ray_artifact_sync.errors import (
        StoragePermissionError as StoragePermissionError,
    )
    from ray_artifact_sync.errors import (
        SyncTimeoutError as SyncTimeoutError,
    )
    from ray_artifact_sync.errors import (
        WorkerDiedError as WorkerDiedError,
    )
    from ray_artifact_sync.function import with_artifacts as with_artifacts
    from ray_artifact_sync.registry import ArtifactRegistry as ArtifactRegistry
    from ray_artifact_sync.restore import restore_tuner as restore_tuner
    from ray_artifact_sync.session import TrialArtifacts as TrialArtifacts
    from ray_artifact_sync.sharded_upload import ShardedUpload as ShardedUpload
    from ray_artifact_sync.syncer import ArtifactSyncer as ArtifactSyncer
    from ray_artifact_sync.trainable import ArtifactSyncMixin as ArtifactSyncMixin
    from ray_artifact_sync.uploader import RemoteUploader as RemoteUploader
    from ray_artifact_sync.view import ArtifactView as ArtifactView

_HOMES = {
    "ArtifactSyncCallback": "callback",
    "SyncConfig": "config",
    "configure": "config",
    "ArtifactConflictError": "errors",
    "ArtifactExistsError": "errors",
    "ArtifactNotFoundError": "errors",
    "ArtifactSyncError": "errors",
    "ConfigurationError": "errors",
    "IncompleteSyncError": "errors",
    "IntegrityError": "errors",
    "InvalidPathError": "errors",
    "ManifestError": "errors",
    "StagingError": "errors",
    "StorageError": "errors",
    "StoragePermissionError": "errors",
    "SyncTimeoutError": "errors",
    "WorkerDiedError": "errors",
    "ArtifactRegistry": "registry",
    "restore_tuner": "restore",
    "TrialArtifacts": "session",
    "ShardedUpload": "sharded_upload",
    "ArtifactSyncer": "syncer",
    "ArtifactSyncMixin": "trainable",
    "with_artifacts": "function",
    "RemoteUploader": "uploader",
    "ArtifactView": "view",
}

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES and name != "train":  # a module: for `ray_artifact_sync.train.artifacts()`
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = importlib.import_module(f"{__name__}.{_HOMES.get(name, name)}")
    value = getattr(home, name) if name in _HOMES else home
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
