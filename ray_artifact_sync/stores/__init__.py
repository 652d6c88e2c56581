"""Storage: one port (`ArtifactStore`) and its implementations. Nothing here knows Ray."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ray_artifact_sync.stores.base import ArtifactStore, StoredFile

if TYPE_CHECKING:
    from ray_artifact_sync.stores.resolve import open_store, open_uri, resolve_uri

__all__ = ["ArtifactStore", "StoredFile", "open_store", "open_uri", "resolve_uri"]


def __getattr__(name: str) -> Any:
    # pyarrow and obstore are loaded by the first who opens a store.
    if name in ("open_store", "open_uri", "resolve_uri"):
        from ray_artifact_sync.stores import resolve  # noqa: PLC0415

        return getattr(resolve, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
