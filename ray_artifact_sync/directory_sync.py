"""Keeps one directory on storage equal to a local one: what the driver's staging dir and standalone use need.

Unlike a trial's session, there is no history, no claim and no restore point; nothing is ever deleted. A manifest beside
the files makes that only changes are sent, and that a download can be verified.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import TypeVar

from blake3 import blake3

from ray_artifact_sync import layout
from ray_artifact_sync.concurrency import Deadline, run_all
from ray_artifact_sync.entries import FileEntry, Manifest, validate_path
from ray_artifact_sync.errors import ArtifactNotFoundError, IncompleteSyncError, IntegrityError, ManifestError
from ray_artifact_sync.local_files import hash_file
from ray_artifact_sync.manifest import ManifestStack
from ray_artifact_sync.options import SyncOptions
from ray_artifact_sync.plan import PathState, parents
from ray_artifact_sync.progress import TransferProgress, Watcher, counted, watched_by
from ray_artifact_sync.scan import HashCache, SkipRule, scan_tree, take_all
from ray_artifact_sync.stores.base import ArtifactStore, StoredFile
from ray_artifact_sync.sync_up import Mirror, SyncPass, SyncReport
from ray_artifact_sync.transfer import SharedPaths, TransferEngine, call_with_retries
from ray_artifact_sync.trial_dir import TrialDir, TrialWriter

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


class DirectorySync:
    """Syncs one local directory to one remote directory, again and again.

    Not thread-safe: one call at a time.

    Args:
        local_dir: Local directory.
        store: Storage, with the remote directory as its root.
        options: Concurrency and retries.
        verify_remote: Before the first sync, list the remote directory to find out what of the manifest is still true.
            Otherwise everything is sent once in this process (right for the driver, whose directory holds all trials
            with all their checkpoints).
        shared: Paths of the remote directory that somebody else may write, too.
        watcher: Shows the progress of what takes long.
    """

    def __init__(
        self,
        local_dir: str,
        store: ArtifactStore,
        *,
        options: SyncOptions,
        verify_remote: bool,
        shared: SharedPaths | None = None,
        watcher: Watcher | None = None,
    ) -> None:
        self.local_dir = local_dir
        self.store = store
        self._options = options
        self._verify_remote = verify_remote
        self._dir = TrialDir(store, "")
        self._writer = TrialWriter(self._dir, layout.make_token(time.time_ns()))
        self._engine = TransferEngine(
            store,
            max_concurrency=options.max_concurrency,
            retries=options.retries,
            token=self._writer.token,
            shared=shared,
            watcher=watcher,
            what=os.path.basename(local_dir),
        )
        self._mirror = Mirror()
        self._cache = HashCache()
        self._stack: ManifestStack | None = None
        self._layers: set[str] = set()

    def sync_up(
        self, deadline: Deadline, rule: SkipRule = take_all, *, elsewhere: Mapping[str, str] | None = None
    ) -> SyncReport:
        """Sends what changed since the last sync, then commits the manifest.

        Args:
            deadline: Ends the work.
            rule: Leaves local files out.
            elsewhere: Path to the local file to send in its place: a copy of it.

        Raises:
            IncompleteSyncError: Some files were refused; the others are there and committed.
        """
        stack = self._stack if self._stack is not None else self._learn(deadline)
        report = SyncPass(
            root=self.local_dir,
            engine=self._engine,
            mirror=self._mirror,
            cache=self._cache,
            pinned=(),
            deadline=deadline,
            rule=rule,
            elsewhere=elsewhere or {},
        ).run()
        # What is stored stays: files that are gone locally, or left out this time, are still there.
        manifest = Manifest(_on_top(stack.manifest.entries, report.manifest.entries), self._writer.token)
        if not manifest.same_content(stack.manifest):
            stack = self._request(lambda: self._commit(stack, manifest), deadline, "Committing the manifest")
        self._stack = stack
        self._mirror.head = stack.manifest
        if report.failures:
            path, error = next(iter(report.failures.items()))
            raise IncompleteSyncError(
                f"{len(report.failures)} files of {self.local_dir} could not be written to {self.store.description}; "
                f"the first: {path}: {error}",
                failures=report.failures,
            )
        return report

    @property
    def stored(self) -> Mapping[str, PathState]:
        """What this process left at which path of the remote directory."""
        return self._mirror.states

    def forget(self, paths: Iterable[str]) -> None:
        """Says that somebody else has written there: the next sync sends these files again."""
        for path in paths:
            self._mirror.states.pop(path, None)

    def _learn(self, deadline: Deadline) -> ManifestStack:
        try:
            stack = self._request(self._dir.head, deadline, "Reading the manifest")
        except ManifestError as error:
            logger.warning("%s All files are sent again.", error)
            return ManifestStack()
        if stack is None:
            return ManifestStack()
        self._layers = {ref.name for ref in stack.refs}
        if self._verify_remote:
            listed = self._request(lambda: list(self.store.list()), deadline, "Listing the remote directory")
            head = _manifest_in(listed)
            for file in listed:
                entry = stack.manifest.get(file.path)
                if entry is not None and entry.size == file.size and not _is_newer(file, head):
                    self._mirror.states[file.path] = PathState(entry.size, entry.digest, own=False, etag=file.etag)
        self._mirror.head = stack.manifest
        return stack

    def _commit(self, stack: ManifestStack, manifest: Manifest) -> ManifestStack:
        stack = self._writer.advance(stack, manifest)
        self._writer.commit_head(stack)
        layers = {ref.name for ref in stack.refs}
        self._writer.delete(f"{layout.LAYERS}/{name}" for name in self._layers - layers)
        self._layers = layers
        return stack

    def _request(self, call: Callable[[], Result], deadline: Deadline, what: str) -> Result:
        return call_with_retries(call, retries=self._options.retries, deadline=deadline, what=what)


def _on_top(old: Mapping[str, FileEntry], new: Mapping[str, FileEntry]) -> dict[str, FileEntry]:
    """Both listings, without old entries that a file or directory of the new one took the place of."""
    files = {path for path, entry in new.items() if not entry.is_dir}
    directories = {parent for path in new for parent in parents(path)}
    kept = {path: entry for path, entry in old.items() if path not in directories and files.isdisjoint(parents(path))}
    return {**kept, **new}


def _manifest_in(listed: Iterable[StoredFile]) -> StoredFile | None:
    """The manifest as the same listing shows it: elsewhere, its time can have another resolution (HEAD: seconds)."""
    return next((file for file in listed if file.path == layout.MANIFEST), None)


def _is_newer(file: StoredFile, head: StoredFile | None) -> bool:
    """Whether a file was written after the manifest that lists it: by a sync that never came to its commit."""
    return (
        head is not None and head.mtime_ns is not None and file.mtime_ns is not None and file.mtime_ns > head.mtime_ns
    )


def sync_directory_down(
    store: ArtifactStore,
    local_dir: str,
    *,
    options: SyncOptions,
    deadline: Deadline,
    rule: SkipRule = take_all,
    watcher: Watcher | None = None,
) -> int:
    """Downloads a remote directory; files that are there already are left alone.

    Each file is written to a temporary name and renamed when it is complete, and verified where the remote directory
    has a manifest that lists it. Local files that the remote directory does not have stay.

    Returns:
        Files downloaded.

    Raises:
        ArtifactNotFoundError: There is nothing at the remote directory.
        IncompleteSyncError: Some files could not be downloaded; the others were.
    """

    def request(call: Callable[[], Result], what: str) -> Result:
        return call_with_retries(call, retries=options.retries, deadline=deadline, what=what)

    listed = _listed(store, request)
    found = request(lambda: list(store.list()), "Listing the remote directory")
    head = _manifest_in(found)
    files = [file for file in found if not layout.is_reserved(file.path) and rule(file.path, False) is None]
    if not files and listed is None:
        raise ArtifactNotFoundError(f"There is nothing at {store.description}.")
    local = scan_tree(local_dir).files
    os.makedirs(local_dir, exist_ok=True)
    failures: dict[str, BaseException] = {}
    done: list[str] = []
    progress = TransferProgress(f"{store.description} down", files=len(files), bytes=sum(file.size for file in files))

    def work(file: StoredFile) -> None:
        try:
            entry = listed.get(file.path) if listed is not None else None
            local_path = os.path.join(local_dir, validate_path(file.path))
            if entry is not None and (entry.is_dir or entry.size != file.size or _is_newer(file, head)):
                entry = None  # written by a sync that never came to its commit
            if entry is not None and file.path in local and _holds(local_path, entry):
                progress.bytes_done(file.size)
                progress.file_done()
                return
            download = partial(_download, store, file, local_path, entry, scratch, progress)
            try:
                request(download, f"Downloading {file.path}")
            except IntegrityError:
                request(download, f"Downloading {file.path}")  # the bytes may have been wrong on the way only
            progress.file_done()
            done.append(file.path)
        except Exception as error:
            failures[file.path] = error

    with _scratch_dir(local_dir) as scratch, watched_by(watcher, progress):
        run_all(files, work, workers=options.max_concurrency, deadline=deadline)
    for entry in listed or ():
        if entry.is_dir and rule(entry.path, True) is None:
            with suppress(FileExistsError, NotADirectoryError):  # it got content, or became a file, since then
                os.makedirs(os.path.join(local_dir, entry.path))
    if failures:
        path, error = next(iter(failures.items()))
        raise IncompleteSyncError(
            f"{len(failures)} of {len(files)} files of {store.description} could not be downloaded; the first: "
            f"{path}: {error}",
            failures=failures,
        )
    return len(done)


def _listed(
    store: ArtifactStore, request: Callable[[Callable[[], ManifestStack | None], str], ManifestStack | None]
) -> Manifest | None:
    try:
        stack = request(TrialDir(store, "").head, "Reading the manifest")
    except ManifestError as error:
        logger.warning("%s The files are downloaded unverified.", error)
        return None
    return stack.manifest if stack is not None else None


def _holds(local_path: str, entry: FileEntry) -> bool:
    return os.path.getsize(local_path) == entry.size and hash_file(local_path).digest == entry.digest


@contextmanager
def _scratch_dir(local_dir: str) -> Iterator[str]:
    """A directory for files being written, where no sync looks: a process that is killed leaves no half file behind."""
    base = os.path.join(local_dir, layout.STATE_DIR)
    scratch = os.path.join(base, f"download-{secrets.token_hex(8)}")
    os.makedirs(scratch)
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        with suppress(OSError):
            os.rmdir(base)  # stays if anything else is in it


def _download(  # noqa: PLR0917  (one caller)
    store: ArtifactStore,
    file: StoredFile,
    local_path: str,
    entry: FileEntry | None,
    scratch: str,
    progress: TransferProgress,
) -> None:
    os.makedirs(os.path.dirname(local_path), exist_ok=True)
    temporary = os.path.join(scratch, secrets.token_hex(8))
    hasher, size = blake3(), 0
    try:
        # Opened with the permissions that a user's file has.
        with counted(progress.bytes_done) as count, open(temporary, "xb") as out:
            # Where the digest decides, its size is asked for: a known end spares a request for all of it.
            for chunk in store.read_chunks(file.path, length=None if entry is None else entry.size):
                hasher.update(chunk)
                size += out.write(chunk)
                count(len(chunk))
        if size != file.size or (entry is not None and hasher.hexdigest() != entry.digest):
            raise IntegrityError(  # noqa: TRY301  (the temporary file must go)
                f"{store.description}/{file.path} gave {size} bytes that are not the {file.size} bytes it should hold."
            )
        os.replace(temporary, local_path)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
