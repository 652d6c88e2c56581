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

    Example:
        ```python
        from ray_artifact_sync import ArtifactSyncError, ShardedUpload

        try:
            ShardedUpload("s3://bucket/nothing-here").manifest()
        except ArtifactSyncError as error:  # all errors of this package
            print(type(error).__name__, error)
        ```
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
    """A path that cannot be an artifact path (absolute, `..`, empty segment, NUL ...).

    Example:
        ```python
        from ray_artifact_sync import InvalidPathError, RemoteUploader

        with RemoteUploader("s3://bucket/run") as uploader:
            try:
                uploader.upload_file_async("../model.pt", "model.pt")
            except InvalidPathError as error:
                assert "'..'" in str(error)
        ```
    """


class ConfigurationError(ArtifactSyncError, ValueError):
    """Options or their combination cannot work; raised as early as that can be known, most often before a run.

    Example:
        ```python
        from ray_artifact_sync import ArtifactSyncer, ConfigurationError

        try:
            ArtifactSyncer(retries=-1)
        except ConfigurationError as error:
            assert "retries" in str(error)
        ```
    """


class ManifestError(ArtifactSyncError, ValueError):
    """A manifest, snapshot or writer file is damaged, hostile, or of an unknown format version.

    Example:
        ```python
        import os
        from ray_artifact_sync import ManifestError, ShardedUpload

        os.makedirs("damaged/.ray_artifact_sync")
        with open("damaged/.ray_artifact_sync/manifest.json", "w") as file:
            file.write("{}")
        try:
            ShardedUpload(os.path.abspath("damaged")).manifest()
        except ManifestError as error:
            assert "manifest.json" in str(error)
        ```
    """


class UnknownFormatError(ManifestError):
    """A document of a format version that this release does not know: a newer one wrote it, it is not damaged."""


class ArtifactConflictError(ArtifactSyncError):
    """Two writers claim the same thing: a newer attempt owns the trial, or ranks disagree on a path.

    Example:
        ```python
        from ray_artifact_sync import ArtifactConflictError, TrialArtifacts
        from ray_artifact_sync.layout import make_token
        from ray_artifact_sync.stores import open_uri

        store = open_uri("s3://bucket/conflict/trial")
        newer = TrialArtifacts("conflict", store, trial="trial", token=make_token(2))
        newer.begin()
        newer.close()
        try:
            TrialArtifacts("conflict", store, trial="trial", token=make_token(1)).begin()
        except ArtifactConflictError as error:
            assert "newer attempt" in str(error)
        ```
    """


class IntegrityError(ArtifactSyncError):
    """Bytes read do not have the size or the digest that the manifest names.

    Example:
        ```python
        import os
        from ray_artifact_sync import IncompleteSyncError, IntegrityError, ShardedUpload

        sharded = ShardedUpload(os.path.abspath("replaced"))
        with sharded.store_path() as path, open(f"{path}/model.bin", "w") as file:
            file.write("weights")
        with open("replaced/model.bin", "w") as file:  # somebody else
            file.write("garbage")
        try:
            with sharded.restore_path():
                pass
        except IncompleteSyncError as error:
            assert isinstance(error.failures["model.bin"], IntegrityError)
        ```
    """


class FileChangedError(ArtifactSyncError):
    """A local file changed while it was read, so that no consistent version was seen."""


class PathTakenError(ArtifactSyncError):
    """The driver writes the same file; a worker's version is not stored."""


class SyncTimeoutError(ArtifactSyncError, TimeoutError):
    """A sync did not end before its deadline (`sync_timeout`).

    Example:
        ```python
        from ray_artifact_sync import SyncTimeoutError
        from ray_artifact_sync.ray_collective import RayCollective

        try:
            RayCollective("alone", 0, 2, join_timeout=0.2)
        except SyncTimeoutError as error:
            assert "did not come" in str(error)
        ```
    """


class StorageError(ArtifactSyncError, OSError):
    """The storage refused or failed an operation.

    Attributes:
        retryable: Whether the same request may succeed later (throttling, resets, 5xx, timeouts).

    Example:
        ```python
        import os
        from ray_artifact_sync import RemoteUploader, StorageError

        open("a-file", "w").close()
        try:
            RemoteUploader(os.path.abspath("a-file/below"))
        except StorageError as error:
            assert isinstance(error, OSError) and not error.retryable
        ```
    """

    retryable: bool = False

    def __init__(self, message: str = "", *, retryable: bool = False, **fields: Any) -> None:
        super().__init__(message, retryable=retryable, **fields)


class ArtifactNotFoundError(StorageError, FileNotFoundError):
    """Something that was asked for by name is not in the storage.

    Example:
        ```python
        from ray_artifact_sync import ArtifactNotFoundError, ShardedUpload

        try:
            ShardedUpload("s3://bucket/nothing-here").manifest()
        except FileNotFoundError as error:  # the built-in of the same meaning
            assert isinstance(error, ArtifactNotFoundError)
        ```
    """


class StoragePermissionError(StorageError, PermissionError):
    """The storage refused the credentials or the right to do this.

    Example:
        ```python
        import pyarrow.fs
        from ray_artifact_sync import RemoteUploader, StoragePermissionError

        stranger = pyarrow.fs.S3FileSystem(access_key="stranger", secret_key="wrong")
        try:
            RemoteUploader("bucket/run", stranger)
        except StoragePermissionError as error:
            assert "cannot write" in str(error)
        ```
    """


class PreconditionFailedError(StorageError):
    """A conditional write was refused: the object is not what the writer believed it to be."""


class CannotAppendError(StorageError):
    """The storage does not append to this object (or does it wrong): the whole file has to be written."""


class ArtifactExistsError(StorageError, FileExistsError):
    """A file is there already, and replacing it was not asked for.

    Example:
        ```python
        from ray_artifact_sync import ArtifactExistsError, RemoteUploader

        with open("notes.txt", "w") as file:
            file.write("new")
        uploader = RemoteUploader("s3://bucket/notes")
        uploader.upload_file_async("notes.txt", "notes.txt", overwrite=True).result()
        again = uploader.upload_file_async("notes.txt", "notes.txt")
        assert isinstance(again.exception(), ArtifactExistsError)
        uploader.close()
        ```
    """


class StagingError(ArtifactSyncError, OSError):
    """A local file could not be copied aside before its upload (disk full, over the limit); nothing was kept.

    Attributes:
        errno: The system's error number, where there was one.

    Example:
        ```python
        from ray_artifact_sync import RemoteUploader, StagingError

        with open("large.bin", "wb") as file:
            file.write(bytes(2000))
        with RemoteUploader("s3://bucket/run", max_staged_bytes=1000) as uploader:
            try:
                uploader.upload_file_async("large.bin", "large.bin")
            except StagingError as error:
                assert "max_staged_bytes" in str(error)
        ```
    """


class WorkerDiedError(ArtifactSyncError, RuntimeError):
    """A worker process ended in the middle of an upload.

    Example:
        ```python
        import ray
        from ray_artifact_sync import WorkerDiedError
        from ray_artifact_sync.ray_collective import RayCollective


        @ray.remote(num_cpus=0.5)
        def work(rank):
            with RayCollective("leaving", rank, 2) as collective:
                if rank == 1:
                    return "left"  # without taking part
                try:
                    collective.barrier()
                except WorkerDiedError:
                    return "told"


        assert ray.get([work.remote(rank) for rank in range(2)]) == ["told", "left"]
        ```
    """


class IncompleteSyncError(ArtifactSyncError):
    """Some files of a sync could not be transferred; the others were.

    Attributes:
        failures: Path to the error that stopped it.

    Example:
        ```python
        import os
        from ray_artifact_sync import IncompleteSyncError, RemoteUploader

        with open("notes.txt", "w") as file:
            file.write("new")
        os.makedirs("target", exist_ok=True)
        with open("target/notes.txt", "w") as file:
            file.write("old")
        uploader = RemoteUploader(os.path.abspath("target"))
        uploader.upload_file_async("notes.txt", "notes.txt")  # exists, and replacing it was not asked for
        uploader.upload_file_async("others.txt", "notes.txt")
        try:
            uploader.wait_and_close()
        except IncompleteSyncError as error:
            assert list(error.failures) == ["notes.txt"] and os.path.exists("target/others.txt")
        ```
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
