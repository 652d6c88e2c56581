"""Every error of this package: one base, and the built-in it is a kind of.

Errors cross process borders (Ray actors, process pools), so each one survives pickling with all of its
fields; see `ArtifactSyncError.__reduce__`.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from typing import Any


class ArtifactSyncError(Exception):
    """Base of all errors that this package raises on purpose.

    Args:
        message: What was wrong, where, and what to do.
        **fields: Facts about the failure, kept as attributes and through pickling.
    """

    def __init__(self, message: str = "", **fields: Any) -> None:
        super().__init__(message)
        self._fields = fields
        for name, value in fields.items():
            setattr(self, name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        fields = self._fields
        # What others keep on it: Ray derives classes from ours at run time, with a constructor of their own.
        others = {name: value for name, value in self.__dict__.items() if name != "_fields" and name not in fields}
        return _rebuild, (type(self), str(self.args[0]) if self.args else "", fields), others or None

    def __str__(self) -> str:
        return (str(self.args[0]) if self.args else "") or type(self).__name__


def _rebuild(cls: type[ArtifactSyncError], message: str, fields: dict[str, Any]) -> ArtifactSyncError:
    error = cls.__new__(cls)
    ArtifactSyncError.__init__(error, message, **fields)
    return error


class InvalidPathError(ArtifactSyncError, ValueError):
    """A path that cannot be an artifact path (absolute, `..`, empty segment, NUL ...)."""


class ConfigurationError(ArtifactSyncError, ValueError):
    """Options or their combination cannot work; raised when a run is set up, not in a worker."""


class ManifestError(ArtifactSyncError, ValueError):
    """A manifest, snapshot or writer file is damaged, hostile, or of an unknown format version."""


class UnknownFormatError(ManifestError):
    """A document of a format version that this release does not know: a newer one wrote it, it is not damaged."""


class ArtifactConflictError(ArtifactSyncError):
    """Two writers claim the same thing: a newer attempt owns the trial, or ranks disagree on a path."""


class IntegrityError(ArtifactSyncError):
    """Bytes read do not have the size or the digest that the manifest names."""


class FileChangedError(ArtifactSyncError):
    """A local file changed while it was read, so that no consistent version was seen."""


class SyncTimeoutError(ArtifactSyncError, TimeoutError):
    """A sync did not end before its deadline (`sync_timeout`)."""


class StorageError(ArtifactSyncError, OSError):
    """The storage refused or failed an operation.

    Attributes:
        retryable: Whether the same request may succeed later (throttling, resets, 5xx, timeouts).
    """

    retryable: bool = False

    def __init__(self, message: str = "", *, retryable: bool = False, **fields: Any) -> None:
        super().__init__(message, retryable=retryable, **fields)


class ArtifactNotFoundError(StorageError, FileNotFoundError):
    """Something that was asked for by name is not in the storage."""


class StoragePermissionError(StorageError, PermissionError):
    """The storage refused the credentials or the right to do this."""


class PreconditionFailedError(StorageError):
    """A conditional write was refused: the object is not what the writer believed it to be."""


class CannotAppendError(StorageError):
    """The storage does not append to this object (or does it wrong): the whole file has to be written."""


class ArtifactExistsError(StorageError, FileExistsError):
    """A file is there already, and replacing it was not asked for."""


class StagingError(ArtifactSyncError, OSError):
    """A local file could not be copied aside before its upload (disk full, over the limit); nothing was kept.

    Attributes:
        errno: The system's error number, where there was one.
    """


class WorkerDiedError(ArtifactSyncError, RuntimeError):
    """A worker process ended in the middle of an upload."""


class IncompleteSyncError(ArtifactSyncError):
    """Some files of a sync could not be transferred; the others were.

    Attributes:
        failures: Path to the error that stopped it.
    """

    failures: Mapping[str, BaseException]

    def __init__(
        self, message: str = "", *, failures: Mapping[str, BaseException] | None = None, **fields: Any
    ) -> None:
        super().__init__(message, failures=dict(failures or {}), **fields)

    def __reduce__(self) -> tuple[Any, ...]:
        rebuild, (cls, message, fields), others = super().__reduce__()
        failures = {path: portable(error) for path, error in self.failures.items()}
        return rebuild, (cls, message, {**fields, "failures": failures}), others


def portable(error: BaseException) -> BaseException:
    """The error itself if it survives pickling (clients' errors may hold a socket), else one with its text."""
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301  (our own bytes)
    except Exception:
        return ArtifactSyncError(f"{type(error).__name__}: {error}")
    return error
