"""`SyncConfig` and `configure`: what a user writes. Importing this module installs the seam into Ray Tune."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ray.tune import SyncConfig as _RaySyncConfig

from ray_artifact_sync.errors import ConfigurationError
from ray_artifact_sync.options import DEFAULT_SYNC_PERIOD, DEFAULT_SYNC_TIMEOUT
from ray_artifact_sync.registry import ArtifactRegistry
from ray_artifact_sync.storage_context import install
from ray_artifact_sync.syncer import ArtifactSyncer

if TYPE_CHECKING:
    from ray.tune import RunConfig

OPTIONS = ("sync_period", "sync_timeout", "sync_artifacts", "sync_artifacts_on_checkpoint", "registry")


@dataclass(kw_only=True)
class SyncConfig(_RaySyncConfig):  # type: ignore[misc]  # Ray has no type information here
    """Ray's `SyncConfig` with a syncer and the registry of who writes what.

    It travels to the workers and into the experiment state by pickling, so it holds neither credentials nor handles.

    Attributes:
        syncer: How to sync; None behaves exactly like Ray's own `SyncConfig`.
        registry: Which files belong to the driver's components.
        sync_period: Seconds between background syncs of a trial's artifacts; 0 for none. The syncer's if None.
        sync_timeout: Seconds that one sync of artifacts may take. The syncer's if None.
        sync_artifacts: Sync artifacts at all. True where there is a syncer. False: not one artifact byte is written.
        sync_artifacts_on_checkpoint: Commit the artifacts with each checkpoint. Without it, a restore brings back the
            newest artifacts instead of those of the checkpoint.

    Raises:
        ConfigurationError: An option makes no sense.

    Example:
        ```python
        from ray import tune
        from ray_artifact_sync import ArtifactRegistry, ArtifactSyncCallback, ArtifactSyncer, SyncConfig

        callbacks = [ArtifactSyncCallback()]  # and those of the run
        run_config = tune.RunConfig(
            callbacks=callbacks,
            sync_config=SyncConfig(
                syncer=ArtifactSyncer(), registry=ArtifactRegistry.from_callbacks(callbacks), sync_period=60
            ),
        )
        ```
    """

    sync_period: float | None = None
    sync_timeout: float | None = None
    sync_artifacts: bool | None = None
    sync_artifacts_on_checkpoint: bool = True
    syncer: ArtifactSyncer | None = None
    registry: ArtifactRegistry | None = None

    def __post_init__(self) -> None:
        if self.sync_artifacts is None:
            self.sync_artifacts = self.syncer is not None
        if self.syncer is not None and not isinstance(self.syncer, ArtifactSyncer):
            raise ConfigurationError(
                f"SyncConfig(syncer=...) takes an ArtifactSyncer, not {type(self.syncer).__name__}: "
                "`SyncConfig(syncer=ArtifactSyncer())`."
            )
        if self.registry is None:
            self.registry = ArtifactRegistry.default()
        if self.sync_period is None:
            self.sync_period = DEFAULT_SYNC_PERIOD if self.syncer is None else self.syncer.sync_period
        if self.sync_timeout is None:
            self.sync_timeout = DEFAULT_SYNC_TIMEOUT if self.syncer is None else self.syncer.sync_timeout
        if self.syncer is not None:
            self.syncer.options(registry=self.registry, sync_period=self.sync_period, sync_timeout=self.sync_timeout)


def configure(
    run_config: RunConfig | None = None, *, syncer: ArtifactSyncer | None = None, **options: Any
) -> RunConfig:
    """A copy of a run configuration under which the trials' artifacts are synced.

    Sets `sync_config` with a registry made from the run's callbacks, and adds `ArtifactSyncCallback`.

    Args:
        run_config: A `ray.tune.RunConfig`; None for the default one.
        syncer: How to sync; a default `ArtifactSyncer()` if None.
        **options: Of `SyncConfig`, except `syncer`.

    Returns:
        The copy; the original is not changed.

    Raises:
        ConfigurationError: An option makes no sense, or the configuration is one of Ray Train's.

    Example:
        ```python
        from ray import tune
        from ray_artifact_sync import ArtifactSyncer, configure

        run_config = tune.RunConfig(name="exp")
        configured = configure(run_config, syncer=ArtifactSyncer(exclude=["*.tmp"], on_error="raise"), sync_period=60)
        assert configured.name == "exp" and configured.sync_config.sync_period == 60
        assert run_config.sync_config is not configured.sync_config
        ```
    """
    from ray import tune  # noqa: PLC0415  (heavy; only needed here)

    from ray_artifact_sync.callback import ArtifactSyncCallback  # noqa: PLC0415  (imports ray.tune's callbacks)

    if run_config is None:
        run_config = tune.RunConfig()
    # Ray Train V2's has the attribute, with a text in it that says that it must not be set.
    if isinstance(getattr(run_config, "sync_config", ""), str):
        raise ConfigurationError(
            f"configure() takes a ray.tune.RunConfig, not {type(run_config).__module__}.{type(run_config).__name__}: "
            "Ray Train V2 has no artifact sync to hook into. Use `ray_artifact_sync.train` in the training loop."
        )
    if unknown := options.keys() - set(OPTIONS):
        raise ConfigurationError(
            f"configure() has no option {', '.join(sorted(unknown))}; it takes syncer, {', '.join(OPTIONS)}. "
            "Options like include, exclude or on_error belong to ArtifactSyncer(...)."
        )
    callbacks = list(run_config.callbacks or [])
    options.setdefault("registry", ArtifactRegistry.from_callbacks(callbacks))
    configured = copy.copy(run_config)
    configured.sync_config = SyncConfig(syncer=syncer if syncer is not None else ArtifactSyncer(), **options)
    if not any(isinstance(callback, ArtifactSyncCallback) for callback in callbacks):
        callbacks.append(ArtifactSyncCallback())
    configured.callbacks = callbacks
    return configured


install()
