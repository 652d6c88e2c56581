"""`ShardedUpload`: many workers, one set of files; all of it is there, or nothing new is."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from ray_artifact_sync import layout
from ray_artifact_sync.collectives import Collective, SingleProcess, node_id
from ray_artifact_sync.concurrency import Deadline
from ray_artifact_sync.entries import Manifest, Skip
from ray_artifact_sync.errors import ArtifactNotFoundError, ConfigurationError, ManifestError
from ray_artifact_sync.options import (
    DEFAULT_MAX_CONCURRENCY,
    DEFAULT_RETRIES,
    DEFAULT_SYNC_TIMEOUT,
    SyncOptions,
)
from ray_artifact_sync.registry import ArtifactRegistry
from ray_artifact_sync.sharded_trial import Selector, ShardedTrial, Together, agree_on_token
from ray_artifact_sync.sharding import ON_CONFLICT, OnConflict
from ray_artifact_sync.stores import ArtifactStore, open_uri
from ray_artifact_sync.sync_down import RestorePass
from ray_artifact_sync.transfer import call_with_retries
from ray_artifact_sync.trial_dir import TrialDir
from ray_artifact_sync.working_dir import WorkingDir

Result = TypeVar("Result")

Download = Literal["per_node", "per_rank"]


class SetDir(TrialDir):
    """A directory on storage that holds one set of files, and no checkpoints of Ray."""

    def in_checkpoint(self, path: str) -> bool:  # noqa: ARG002  (the interface)
        """Never."""
        return False


@dataclass(frozen=True, slots=True)
class UploadReport:
    """What one upload did, all ranks together.

    Attributes:
        manifest: Every file of the set.
        metadata: Of all ranks, merged.
        bytes_sent: Content bytes sent.
        files_sent: Files sent.
        seconds: Duration.
    """

    manifest: Manifest
    metadata: Mapping[str, Any] = field(default_factory=dict)
    bytes_sent: int = 0
    files_sent: int = 0
    seconds: float = 0.0


class ShardedUpload:
    """One directory on storage that many workers fill together.

    Nothing is uploaded before all ranks agree that there is no conflict, and the set is committed when all ranks have
    said that their part is in storage. Every rank makes the same calls in the same order.

    **Atomicity.** The set that was there before stays whole, and is what readers see, until the new one is committed by
    one write; this holds when any rank is killed at any moment. A rank that dies makes the others fail: at once or
    within the time that the collective allows, with `WorkerDiedError`. What fails on one rank fails on all.

    Args:
        target: A URI, an absolute path, a path on `storage_filesystem`, or an `ArtifactStore`. One set at a time: a
            later upload replaces the set. Its files that the new set does not have stay in storage, unlisted.
        collective: The ranks; None for this process alone.
        storage_filesystem: What `target` is a path on: a pyarrow or fsspec file system.
        on_conflict: What happens where ranks bring different bytes under one path, or a file and a directory:
            `"error"`: every rank raises `ArtifactConflictError`, which names the paths and ranks, before a byte is
            sent; `"lowest_rank"`: its file, directory or metadata is taken; `"rank_suffix"`: every rank's file is taken
            as `<path>.rank_<rank>`. Identical files are uploaded once.
        max_concurrency: Requests in flight, for each rank.
        retries: Further tries of a request that may succeed later.
        sync_timeout: Seconds that one call may take; None for no limit.

    Raises:
        ConfigurationError: An option makes no sense.

    Example:
        One process alone; many pass a collective, such as `RayCollective("model", rank, world_size)`.

        ```python
        import os
        from ray_artifact_sync import ShardedUpload

        sharded = ShardedUpload("s3://bucket/model")
        with sharded.store_path(metadata={"step": 100}) as path:
            with open(os.path.join(path, f"shard_{sharded.rank}.bin"), "wb") as file:
                file.write(b"weights")
        with sharded.restore_path(selector="shard_0.bin".__eq__) as path:
            assert os.listdir(path) == ["shard_0.bin"]
        assert sharded.metadata() == {"step": 100}
        ```
    """

    def __init__(
        self,
        target: str | os.PathLike[str] | ArtifactStore,
        collective: Collective | None = None,
        *,
        storage_filesystem: Any = None,
        on_conflict: OnConflict = "error",
        max_concurrency: int = DEFAULT_MAX_CONCURRENCY,
        retries: int = DEFAULT_RETRIES,
        sync_timeout: float | None = DEFAULT_SYNC_TIMEOUT,
    ) -> None:
        if on_conflict not in ON_CONFLICT:
            raise ConfigurationError(f"on_conflict must be one of {', '.join(ON_CONFLICT)}, not {on_conflict!r}.")
        self.on_conflict: OnConflict = on_conflict
        self.store = target if isinstance(target, ArtifactStore) else open_uri(target, storage_filesystem)
        self._options = SyncOptions(
            registry=ArtifactRegistry(),
            max_concurrency=max_concurrency,
            retries=retries,
            sync_timeout=sync_timeout,
            journal=False,
            on_error="raise",
        )
        self._together = Together(collective or SingleProcess())

    @property
    def rank(self) -> int:
        """This rank's number."""
        return self._together.rank

    def upload(
        self,
        local_dir: str | os.PathLike[str] | None,
        *,
        metadata: Mapping[str, Any] | None = None,
        selector: Selector | None = None,
    ) -> UploadReport:
        """Uploads what the ranks bring, as one set. All ranks call it; blocks until the set is committed.

        Ranks that pass the same directory (same device and inode on one node) upload it once, or each its selection.
        Files that have not changed since the last upload to this target are not sent by this process again.

        Args:
            local_dir: What this rank brings; None for nothing.
            metadata: What this rank says about the set, JSON values. Dictionaries of all ranks are merged recursively.
            selector: Takes a path relative to `local_dir`; whether this rank brings that file. None: all of them.

        Returns:
            The same on every rank.

        Raises:
            ArtifactConflictError: The ranks' files or metadata contradict each other, and `on_conflict` does not say
                what then (nothing was uploaded); or a newer upload took over.
            ConfigurationError: All ranks pass None; or metadata that is no JSON.
            IncompleteSyncError: A rank could not upload some files. Nothing was committed.
            WorkerDiedError: A rank ended in the middle.
            SyncTimeoutError: `sync_timeout` passed.
            StorageError: Storage refused the bookkeeping.
        """
        trial = SetDir(self.store, self.store.description)
        token = agree_on_token(self._together, trial, self._options)
        sharded = ShardedTrial(
            None if local_dir is None else os.path.abspath(os.fspath(local_dir)),
            self.store,
            together=self._together,
            trial=trial,
            token=token,
            options=self._options,
            on_conflict=self.on_conflict,
            selector=selector,
            metadata=metadata,
            always_commit=True,
        )
        try:
            report = sharded.sync()
        finally:
            sharded.close(flush=False)
        self._together.on_first("old metadata", lambda: self._delete_old_metadata(token))
        return UploadReport(
            report.manifest, sharded.merged_metadata, report.bytes_sent, report.files_sent, report.seconds
        )

    @contextmanager
    def store_path(
        self,
        *,
        metadata: Mapping[str, Any] | None = None,
        shard: bool = True,
        selector: Selector | None = None,
        scratch_dir: str | None = None,
    ) -> Iterator[str]:
        """A temporary directory; what is in it when the block ends is uploaded, together with that of all ranks.

        If the block raises on one rank, all ranks raise at its end, and nothing is uploaded.

        Args:
            metadata: See `upload`. A dictionary that is filled in the block counts as it is at the end.
            shard: Every rank takes part. With False, rank 0 alone calls this and uploads; nobody else is asked.
            selector: See `upload`.
            scratch_dir: Where to make the directory; the system's temporary directory by default.

        Yields:
            Its path.

        Raises:
            ConfigurationError: `shard=False` on another rank than 0.
            ArtifactSyncError: See `upload`.
        """
        if not shard and self.rank != 0:
            raise ConfigurationError(f"store_path(shard=False) is for rank 0 only; this is rank {self.rank}.")
        uploading = self if shard else self._alone()
        path = tempfile.mkdtemp(prefix="artifacts-", dir=scratch_dir)
        try:
            try:
                yield path
            except Exception as error:
                uploading._tell(error)  # noqa: SLF001  (the same class)
                raise
            uploading._tell(None)  # noqa: SLF001  (the same class)
            uploading.upload(path, metadata=metadata, selector=selector)
        finally:
            shutil.rmtree(path, ignore_errors=True)

    @contextmanager
    def restore_path(
        self,
        *,
        selector: Selector | None = None,
        download: Download = "per_node",
        scratch_dir: str | None = None,
    ) -> Iterator[str]:
        """A temporary directory with the committed set, every byte verified. All ranks call it.

        Args:
            selector: Takes a path; whether this rank needs it. With `"per_node"`, the directory holds what any rank of
                the node needs.
            download: `"per_node"`: one download for all ranks of a node, which share the directory: read only.
                `"per_rank"`: each rank has its own.
            scratch_dir: Where to make the directory; the system's temporary directory by default.

        Yields:
            Its path. Removed when all ranks of the node have left the block.

        Raises:
            ArtifactNotFoundError: No set was ever committed there.
            IncompleteSyncError: Content cannot be read. On all ranks if on one.
            WorkerDiedError: A rank ended in the middle.
        """
        if download not in ("per_node", "per_rank"):
            raise ConfigurationError(f'download must be "per_node" or "per_rank", not {download!r}.')
        manifest = self._together.on_first("manifest", self.manifest)
        selections = self._together.all(
            "selections", lambda: frozenset(path for path in manifest.entries if selector is None or selector(path))
        )
        path, leaders = self._shared_dir(scratch_dir, per_node=download == "per_node")
        downloaded_by = leaders[self.rank]
        try:
            if downloaded_by == self.rank:
                here = frozenset().union(*(selections[rank] for rank, who in enumerate(leaders) if who == self.rank))
                self._together.all("download", lambda: self._download(manifest, here, path))
            else:
                self._together.all("download", lambda: None)
            try:
                yield path
            except Exception as error:
                self._tell(error)
                raise
            self._tell(None)
        finally:
            if downloaded_by == self.rank:
                shutil.rmtree(path, ignore_errors=True)

    def manifest(self) -> Manifest:
        """The committed set. Not a common step: one rank may ask alone.

        Raises:
            ArtifactNotFoundError: Nothing was ever committed.
            ManifestError: The manifest is damaged.
        """
        stack = self._request(SetDir(self.store, self.store.description).head, "Reading the manifest")
        if stack is None:
            raise ArtifactNotFoundError(f"No set of files was ever committed to {self.store.description}.")
        return stack.manifest

    def metadata(self) -> dict[str, Any]:
        """What the ranks said about the committed set. Not a common step: one rank may ask alone.

        Raises:
            ArtifactNotFoundError: Nothing was ever committed.
            ManifestError: The metadata is damaged.
        """
        path = f"{layout.METADATA}/{self.manifest().token}.json"
        try:
            data = self._request(lambda: self.store.read(path, limit=layout.MAX_LIST_BYTES), "Reading the metadata")
        except ArtifactNotFoundError:
            return {}
        try:
            found = json.loads(data)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise ManifestError(f"{self.store.description}/{path} is damaged.")
        return found

    # --- helpers ----------------------------------------------------------------------------------

    def _alone(self) -> ShardedUpload:
        return ShardedUpload(
            self.store,
            on_conflict=self.on_conflict,
            max_concurrency=self._options.max_concurrency,
            retries=self._options.retries,
            sync_timeout=self._options.sync_timeout,
        )

    def _tell(self, error: BaseException | None) -> None:
        """Lets all ranks know how the user's block ended here."""

        def say() -> None:
            if error is not None:
                raise error

        self._together.all("end of the block", say)

    def _shared_dir(self, scratch_dir: str | None, *, per_node: bool) -> tuple[str, Sequence[int]]:
        """A directory, and for each rank the one that fills and removes its: the lowest of those that can see it."""
        mark = secrets.token_hex(8)
        made: list[str] = []

        def make() -> tuple[str, str]:
            found = _marked_dir(scratch_dir, mark)
            made.append(found[0])
            return found

        try:
            return self._choose_dir(self._together.all("scratch", make), per_node=per_node)
        except BaseException:
            for path in made:
                shutil.rmtree(path, ignore_errors=True)
            raise

    def _choose_dir(self, own: Sequence[tuple[str, str]], *, per_node: bool) -> tuple[str, Sequence[int]]:
        nodes = self._together.all("nodes", node_id)
        path, leader = own[self.rank][0], self.rank
        if per_node:
            for rank in range(self.rank):
                # Containers on one machine have the same kernel, but not the same directories.
                if nodes[rank] == nodes[self.rank] and os.path.exists(os.path.join(*own[rank])):
                    path, leader = own[rank][0], rank
                    break
        leaders = self._together.all("choice", lambda: leader)
        os.unlink(os.path.join(*own[self.rank]))
        if leader != self.rank:
            os.rmdir(own[self.rank][0])
        return path, leaders

    def _download(self, manifest: Manifest, wanted: frozenset[str], path: str) -> None:
        def rule(name: str, is_dir: bool) -> Skip | None:
            taken = name in wanted or (is_dir and manifest.get(name) is None)
            return None if taken else Skip(name, "not selected", "excluded")

        trial = SetDir(self.store, self.store.description)
        objects = self._request(trial.objects, "Listing preserved versions")
        RestorePass(
            trial=trial,
            working_dir=WorkingDir(path, manifest.token),
            objects=objects,
            rule=rule,
            keep_unlisted=True,
            max_concurrency=self._options.max_concurrency,
            retries=self._options.retries,
            deadline=Deadline(self._options.sync_timeout, "The download"),
        ).run(manifest, exact=True)

    def _delete_old_metadata(self, token: str) -> None:
        old = [
            file.path
            for file in self._request(lambda: list(self.store.list(layout.METADATA)), "Listing old metadata")
            if (name := file.path.rpartition("/")[2].removesuffix(".json")) < token and layout.is_token(name)
        ]
        if old:
            self._request(lambda: self.store.delete(old), "Deleting old metadata")

    def _request(self, call: Callable[[], Result], what: str) -> Result:
        deadline = Deadline(self._options.sync_timeout, what)
        return call_with_retries(call, retries=self._options.retries, deadline=deadline, what=what)


def _marked_dir(scratch_dir: str | None, mark: str) -> tuple[str, str]:
    path = tempfile.mkdtemp(prefix="artifacts-", dir=scratch_dir)
    with open(os.path.join(path, mark), "xb"):
        return path, mark
