"""One trial's dir on storage: reading and committing manifests, the claim to be its writer, garbage.

`TrialDir` only reads and needs no write access. `TrialWriter` is the claim of one attempt: it holds while no newer
token is in `writer.json`.
"""

from __future__ import annotations

import itertools
import json
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TypeVar

from blake3 import blake3

from ray_artifact_sync import layout
from ray_artifact_sync.entries import FileEntry, Manifest
from ray_artifact_sync.errors import (
    ArtifactConflictError,
    ArtifactNotFoundError,
    ManifestError,
    PreconditionFailedError,
    StorageError,
    UnknownFormatError,
)
from ray_artifact_sync.manifest import (
    FORMAT,
    MAX_DOCUMENT_BYTES,
    MAX_LAYER_BYTES,
    Changes,
    Document,
    LayerRef,
    ManifestStack,
    assemble,
    decode,
    encode,
)
from ray_artifact_sync.stores.base import ArtifactStore, Buffer, StoredFile

logger = logging.getLogger(__name__)

LEASE_SECONDS = 2.0
"""How long a proof of being the writer is trusted before the next write asks again."""
Parsed = TypeVar("Parsed")
CONFLICT_TRIES = 5
"""How often a conditional write is made anew when somebody else's came first."""


@dataclass(frozen=True, slots=True)
class Inventory:
    """What lies in a trial dir, from one listing.

    Attributes:
        files: Path to file, for everything but this library's own.
        objects: Digest to the paths of its preserved copies.
        snapshots: Checkpoint dir name to the paths of the snapshots in it.
        layers: Names of the layer files.
        asides: Tokens with a manifest set aside.
        exploits: Keys of the exploit records.
        journals: File names of the journal's segments, with their bytes.
        head_mtime_ns: When the head was committed, by the storage's clock.
        head_etag: The storage's tag of the head.
        driver_note: Whether the driver left a note (see `driver_note.py`).
    """

    files: Mapping[str, StoredFile] = field(default_factory=dict)
    objects: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    snapshots: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    layers: frozenset[str] = frozenset()
    asides: frozenset[str] = frozenset()
    exploits: frozenset[str] = frozenset()
    journals: Mapping[str, int] = field(default_factory=dict)
    head_mtime_ns: int | None = None
    head_etag: str | None = None
    driver_note: bool = False

    def with_exploit(self, key: str) -> Inventory:
        """With one more exploit record."""
        return replace(self, exploits=self.exploits | {key})

    def without(self, paths: AbstractSet[str]) -> Inventory:
        """Without the objects, layers and records at these paths."""
        objects = {
            digest: left
            for digest, places in self.objects.items()
            if (left := tuple(place for place in places if place not in paths))
        }
        return replace(
            self,
            objects=objects,
            layers=frozenset(name for name in self.layers if f"{layout.LAYERS}/{name}" not in paths),
            asides=frozenset(token for token in self.asides if layout.aside_path(token) not in paths),
            exploits=frozenset(key for key in self.exploits if layout.exploit_path(key) not in paths),
            journals={name: size for name, size in self.journals.items() if f"{layout.JOURNAL}/{name}" not in paths},
        )


class TrialDir:
    """Reads a trial dir.

    Args:
        store: Its root is the trial dir.
        name: The trial dir's name; snapshots must carry it.
    """

    def __init__(self, store: ArtifactStore, name: str) -> None:
        self.store = store
        self.name = name
        self._layers: dict[str, Changes] = {}

    def describe(self, path: str) -> str:
        """A path in this trial dir, for messages."""
        return f"{self.store.description}/{path}"

    def head(self) -> ManifestStack | None:
        """The newest committed manifest, or None if nothing was ever committed.

        Raises:
            ManifestError: It is damaged.
        """
        return self._load(layout.MANIFEST)

    def aside(self, token: str) -> ManifestStack | None:
        """The manifest that the restore of this attempt superseded."""
        return self._load(layout.aside_path(token))

    def exploit(self, key: str) -> ManifestStack | None:
        """The trial's own manifest at the moment it took over another trial's checkpoint."""
        return self._load(layout.exploit_path(key))

    def snapshot(self, checkpoint: str, paths: Iterable[str] | None = None) -> ManifestStack | None:
        """The snapshot in a checkpoint, or None if it has none that counts.

        One counts if the trial and the checkpoint that it names are where it lies (Ray reuses directories, users
        copy them); of several, the one with the newest token.

        Args:
            checkpoint: Checkpoint dir name.
            paths: Paths of the candidates where a listing knows them already.
        """
        if paths is None:
            paths = [file.path for file in self.store.list_files(checkpoint)]
        named = {path: layout.snapshot_token(path.rsplit("/", 1)[-1]) for path in paths}
        ours = sorted(((token, path) for path, token in named.items() if token), reverse=True)
        for _, path in ours:
            try:
                stack = self.snapshot_at(path, checkpoint)
            except (ManifestError, ArtifactNotFoundError) as error:
                logger.warning("A snapshot is left out: %s", error)
                continue
            if stack is not None:
                return stack
        return None

    def snapshot_at(self, path: str, checkpoint: str) -> ManifestStack | None:
        """One snapshot; None if there is none, or it does not count where it lies (see `snapshot`).

        Raises:
            ManifestError: It is damaged.
        """
        document = self.document(path, "snapshot")
        token = layout.snapshot_token(path.rpartition("/")[2])
        if document is None or (document.trial, document.checkpoint, document.token) != (self.name, checkpoint, token):
            return None
        return self.assembled(document)

    def claim(self) -> str | None:
        """The token of the newest claim; None if there never was one, empty if it is damaged."""
        try:
            data = self.store.read(layout.WRITER, limit=layout.MAX_NOTE_BYTES)
        except ArtifactNotFoundError:
            return None
        except ManifestError:
            data = b""
        try:
            token = json.loads(data)["token"]
        except (ValueError, KeyError, TypeError, RecursionError):
            token = None
        return str(token) if layout.is_token(token) else ""

    def in_checkpoint(self, path: str) -> bool:
        """Whether a file belongs to a checkpoint."""
        return "/" in path and layout.is_checkpoint_dir(path.partition("/")[0])

    def inventory(self, listed: Iterable[StoredFile] | None = None) -> Inventory:
        """What lies in the trial dir. What has not exactly a name that this library gives is not among its own.

        Args:
            listed: All of its files, where they were listed already; otherwise they are (one request for each 1,000
                files on object stores).
        """
        files: dict[str, StoredFile] = {}
        objects: dict[str, list[str]] = {}
        snapshots: dict[str, list[str]] = {}
        layers, asides, exploits = set(), set(), set()
        journals: dict[str, int] = {}
        head_mtime_ns = head_etag = None
        driver_note = False
        for file in self.store.list() if listed is None else listed:
            parts = file.path.split("/")
            if parts[0] == layout.STATE_DIR:
                match parts[1:]:
                    case ["manifest.json"]:
                        head_mtime_ns, head_etag = file.mtime_ns, file.etag
                    case ["objects", token, digest] if layout.is_token(token) and layout.is_digest(digest):
                        objects.setdefault(digest, []).append(file.path)
                    case ["layers", name] if layout.is_layer_name(name):
                        layers.add(name)
                    case ["aside", token, "manifest.json"] if layout.is_token(token):
                        asides.add(token)
                    case ["exploits", name] if key := layout.record_key(name):
                        exploits.add(key)
                    case ["journal", name]:
                        journals[name] = file.size
            elif parts[0] == layout.DRIVER_DIR:
                driver_note = True
            elif self.in_checkpoint(file.path):
                if len(parts) == 2 and layout.snapshot_token(parts[1]):  # noqa: PLR2004
                    snapshots.setdefault(parts[0], []).append(file.path)
            else:
                files[file.path] = file
        return Inventory(
            files,
            {digest: tuple(sorted(paths, reverse=True)) for digest, paths in objects.items()},
            {name: tuple(paths) for name, paths in snapshots.items()},
            frozenset(layers),
            frozenset(asides),
            frozenset(exploits),
            journals,
            head_mtime_ns,
            head_etag,
            driver_note,
        )

    def objects(self) -> dict[str, tuple[str, ...]]:
        """Digest to the paths of its preserved copies, newest token first."""
        found: dict[str, list[str]] = {}
        for file in self.store.list(layout.OBJECTS):
            found.setdefault(file.path.rsplit("/", 1)[-1], []).append(file.path)
        return {digest: tuple(sorted(paths, reverse=True)) for digest, paths in found.items()}

    def places(
        self,
        entry: FileEntry,
        objects: Mapping[str, tuple[str, ...]],
        objects_now: Callable[[], Mapping[str, tuple[str, ...]]],
    ) -> Iterator[str]:
        """Where storage may hold an entry's content, the surest first.

        Args:
            entry: The version.
            objects: Digest to the paths of its preserved copies, as they were listed.
            objects_now: Lists them once more; called only when the other places were not right. A trial that goes on,
                or a replaced attempt, may have preserved and overwritten the version since.
        """
        known = objects.get(entry.digest, ())
        yield from known
        yield entry.path
        yield from (place for place in objects_now().get(entry.digest, ()) if place not in known)

    def chunks(self, entry: FileEntry, path: str) -> Iterator[Buffer]:
        """The bytes that a place may hold for an entry: the first `entry.size`; the reader checks the digest."""
        if entry.size == 0:
            return iter(())
        return self.store.read_chunks(path, length=entry.size)

    def document(self, path: str, kind: str) -> Document | None:
        """A head or snapshot as it is stored, whether it counts or not; None if there is none.

        Raises:
            ManifestError: It is damaged.
        """
        try:
            return self._parsed(
                path, lambda data: decode(data, kind=kind, where=self.describe(path)), limit=MAX_DOCUMENT_BYTES
            )
        except ArtifactNotFoundError:
            return None

    def _parsed(self, path: str, parse: Callable[[bytes], Parsed], *, limit: int) -> Parsed:
        """What a document says. One that is damaged is read once more: it may have been so on the way only."""
        try:
            return parse(self.store.read(path, limit=limit))
        except UnknownFormatError:
            raise
        except ManifestError:
            return parse(self.store.read(path, limit=limit))

    def assembled(self, document: Document) -> ManifestStack:
        """A document together with its layers.

        Raises:
            ManifestError: A layer is damaged or gone.
        """
        return assemble(document, {ref.name: self._layer(ref) for ref in document.layers})

    def _load(self, path: str) -> ManifestStack | None:
        document = self.document(path, "manifest")
        return self.assembled(document) if document is not None else None

    def _layer(self, ref: LayerRef) -> Changes:
        path = f"{layout.LAYERS}/{ref.name}"

        def parse(data: bytes) -> Changes:
            if blake3(data).hexdigest() != ref.digest:
                raise ManifestError(f"{self.describe(path)} is damaged: its digest is not the one referred to.")
            return decode(data, kind="layer", where=self.describe(path), count=ref.count).changes

        if ref.digest not in self._layers:
            try:
                self._layers[ref.digest] = self._parsed(path, parse, limit=MAX_LAYER_BYTES)
            except ArtifactNotFoundError:
                raise ManifestError(f"{self.describe(path)} is gone although a manifest refers to it.") from None
        return self._layers[ref.digest]


class TrialWriter:
    """The claim of one attempt to be the only writer of a trial dir, and what only the writer does.

    Thread-safe. `check` costs a request at most every `LEASE_SECONDS`: a process that was stopped (SIGSTOP, a lost
    network) for longer finds out before its next write that it was replaced. Where the store has preconditions, the
    writes themselves are conditional too; on POSIX, the temporary directory of an older token is taken away, so that
    even its rename in flight fails.
    """

    def __init__(self, trial: TrialDir, token: str) -> None:
        self.trial = trial
        self.store = trial.store
        self.token = token
        self._proven = float("-inf")
        self._lost: str | None = None
        self._claimed = False
        self._probe: threading.Thread | None = None
        self._writes_from = float("-inf")
        self._head_etag: str | None = None
        self._head_known = False
        self._layer_numbers = itertools.count(1)
        self.layers: set[str] = set()
        """Names of the layers that this attempt has written."""
        self._lock = threading.Lock()

    # --- the claim --------------------------------------------------------------------------------

    def claim(self) -> bool:
        """Becomes the writer.

        Returns:
            Whether there was a writer before (whether anything of ours may be in the trial dir).

        Raises:
            ArtifactConflictError: A newer attempt has claimed it.
        """
        self.store.begin_writing(self.token)  # before looking: what is seen from here on, no older attempt changes
        newest = self._read_writer()
        if newest is not None and newest > self.token:
            self._lose(newest)
        existed = newest is not None
        if newest != self.token or self.store.can_precondition is None:  # not known: the answer to a claim was lost
            existed = self._write_claim(self._claim_body(), existed=existed)
        if not self._claimed and existed and not self.is_protected:
            # The predecessor may trust its last proof for so long, and nothing else would stop it.
            self._writes_from = time.monotonic() + LEASE_SECONDS
        self._claimed = True
        self._proven = time.monotonic()
        return existed

    @property
    def is_protected(self) -> bool:
        """Whether the store itself refuses the writes of a replaced attempt."""
        return bool(self.store.can_fence or self.store.can_precondition)

    def _claim_body(self) -> bytes:
        return json.dumps({"format": FORMAT, "kind": "writer", "token": self.token}).encode()

    def _write_claim(self, body: bytes, *, existed: bool) -> bool:
        """Writes the claim; finds out on the way whether the store enforces preconditions, where that is not known.

        Returns:
            Whether there was one, as far as the store tells: one that was written after `existed` was found out counts.
        """
        if self.store.can_precondition is False:
            self.store.put(layout.WRITER, body)
        elif existed:
            self.store.can_precondition = not self._may_create(body)
            if self.store.can_precondition:
                self._replace_claim(body)
        elif not self._may_create(body):
            self.store.can_precondition = existed = True
            self._replace_claim(body)
        elif self.store.can_precondition is None:
            # The first writer of all: nobody can be in its way, so that its first files need not wait for the answer.
            self._probe = threading.Thread(target=self._find_out, args=(body,), name="artifact-sync-probe", daemon=True)
            self._probe.start()
        return existed

    def _find_out(self, body: bytes) -> None:
        with suppress(StorageError):  # asked again by `settle`
            self.store.can_precondition = not self._may_create(body)

    def settle(self) -> None:
        """Waits until it is known whether the store enforces preconditions.

        Raises:
            StorageError: It does not say.
        """
        if self._probe is None:
            return
        self._probe.join()
        self._probe = None
        if self.store.can_precondition is None:
            self.store.can_precondition = not self._may_create(self._claim_body())

    def _may_create(self, body: bytes) -> bool:
        """Writes the claim if the store says that there is none, or does not look."""
        try:
            self.store.put(layout.WRITER, body, if_absent=True)
        except PreconditionFailedError:
            return False
        return True

    def _replace_claim(self, body: bytes) -> None:
        for _ in range(CONFLICT_TRIES):
            present = self.store.stat(layout.WRITER)  # before the reading: what is read must not be older
            newest = self._read_writer()
            if newest is not None and newest > self.token:
                self._lose(newest)
            try:
                if present is None:
                    self.store.put(layout.WRITER, body, if_absent=True)
                else:
                    self.store.put(layout.WRITER, body, if_match=present.etag)
            except PreconditionFailedError:
                continue
            return
        raise ArtifactConflictError(f"Too many attempts claim {self.store.description} at once; gave up.")

    def check(self) -> None:
        """Raises if a newer attempt took over; asks storage only when the last proof is older than the lease.

        Raises:
            ArtifactConflictError: It did. From then on always, without a request.
        """
        if self._lost is not None:
            self._lose(self._lost)
        asked = False
        while True:
            if (early := self._writes_from - time.monotonic()) > 0:
                time.sleep(early)  # only then: even a sleep of 0 s costs as much as writing a small file
                asked = False
            if asked or time.monotonic() - self._proven <= LEASE_SECONDS:
                return
            with self._lock:
                if time.monotonic() - self._proven > LEASE_SECONDS:  # not asked by another thread meanwhile
                    self._ask()
            asked = True

    def confirm(self) -> None:
        """Asks storage now. See `check`."""
        with self._lock:
            self._ask()

    def _ask(self) -> None:
        asked = time.monotonic()
        newest = self._read_writer()
        if newest is not None and newest > self.token:
            self._lose(newest)
        if newest != self.token and self._claimed:
            # Of two that claimed at once, without preconditions, the older one wrote last; or the claim was deleted.
            self._write_claim(self._claim_body(), existed=newest is not None)
            if newest is not None and not self.is_protected:
                self._writes_from = time.monotonic() + LEASE_SECONDS  # it may trust what it has read, as at the claim
        self._proven = asked

    def _check_for_commit(self) -> None:
        self.settle()
        if self.is_protected:
            self.check()
            return
        while True:
            time.sleep(max(0.0, self._writes_from - time.monotonic()))
            self.confirm()
            if self._writes_from <= time.monotonic():
                return

    def _lose(self, newest: str) -> None:
        self._lost = newest
        raise ArtifactConflictError(
            f"A newer attempt (token {newest}) writes to {self.store.description} now; this one (token {self.token}) "
            "was replaced and stops writing.",
            newest=newest,
            token=self.token,
        )

    def newest_token(self) -> str:
        """The token of the newest claim, empty if there is none."""
        return self._read_writer() or ""

    def _read_writer(self) -> str | None:
        """The token of the newest claim; None if there never was one, empty if it is damaged.

        What ends this attempt, or makes it claim anew, is believed only if it is read twice: not for a wrong byte on
        the way.
        """
        found = self.trial.claim()
        if found == "" or (found is not None and self.token and found > self.token):
            found = self.trial.claim()
        if found == "":
            logger.warning("%s is damaged; claiming the trial dir anew.", self.trial.describe(layout.WRITER))
        return found

    # --- commits ----------------------------------------------------------------------------------

    def next_layer_name(self) -> str:
        """The file name of a new layer; never used twice, also over attempts (it carries the token)."""
        return f"{self.token}-{next(self._layer_numbers):06d}.json"

    def advance(self, stack: ManifestStack, manifest: Manifest) -> ManifestStack:
        """Moves on to a manifest, writing the layers that its documents will refer to."""
        stack, files = stack.advance(manifest, next_name=self.next_layer_name)
        for file in files:
            self.layers.add(file.ref.name)
            self.store.put(f"{layout.LAYERS}/{file.ref.name}", file.data)
        return stack

    def commit_head(self, stack: ManifestStack) -> None:
        """Makes a manifest the head. Atomic; from here on it is what the trial's artifacts are.

        Raises:
            ArtifactConflictError: A newer attempt took over; nothing was written.
        """
        self._check_for_commit()
        data = encode(stack.document("manifest", token=self.token))
        if not self.store.can_precondition:
            self.store.put(layout.MANIFEST, data)
            return
        if not self._head_known:
            self._look_at_head()
        for tries_left in range(CONFLICT_TRIES - 1, -1, -1):
            try:
                self._put_head(data)
                break
            except PreconditionFailedError:
                if not tries_left:
                    raise
                self._look_at_head()

    def _put_head(self, data: bytes) -> None:
        if self._head_etag is None:
            stored = self.store.put(layout.MANIFEST, data, if_absent=True)
        else:
            stored = self.store.put(layout.MANIFEST, data, if_match=self._head_etag)
        self._head_etag = stored.etag
        if self.store.can_precondition:
            self._proven = time.monotonic()

    def _look_at_head(self) -> None:
        present = self.store.stat(layout.MANIFEST)
        self._head_etag, self._head_known = (present.etag if present else None), True
        self.confirm()  # after the look: what it saw must not be a newer attempt's

    def saw_head(self, etag: str | None) -> None:
        """Says which head a listing showed that was made after the claim: the first commit replaces that one.

        Args:
            etag: The storage's tag; None if there was none.
        """
        self._head_etag, self._head_known = etag, True

    def take_over_head(self, stack: ManifestStack) -> bool:
        """Makes the head that was found this attempt's own, so that no commit of the one before can follow.

        Args:
            stack: The head that `saw_head` spoke of.

        Returns:
            False if it is not the head any more: a commit was under way. All must be looked at again then.

        Raises:
            ArtifactConflictError: A newer attempt took over; nothing was written.
        """
        self._check_for_commit()
        data = encode(stack.document("manifest", token=self.token))
        if not self.store.can_precondition:
            present = self.store.stat(layout.MANIFEST)
            if (present.etag if present else None) != self._head_etag:
                return False
            self.confirm()  # the look may have taken long
        try:
            self._put_head(data)
        except PreconditionFailedError:
            self.confirm()
            return False
        return True

    def write_snapshot(self, stack: ManifestStack, checkpoint: str) -> None:
        """Stores a manifest inside a checkpoint. Atomic; with it, the checkpoint has artifacts."""
        self._check_for_commit()
        document = stack.document("snapshot", token=self.token, trial=self.trial.name, checkpoint=checkpoint)
        self.store.put(f"{checkpoint}/{layout.snapshot_name(self.token)}", encode(document))

    def write_record(self, path: str, stack: ManifestStack) -> None:
        """Stores a manifest under another name (set aside, exploit)."""
        self._check_for_commit()
        self.store.put(path, encode(stack.document("manifest", token=self.token)))

    def delete(self, paths: Iterable[str]) -> None:
        """Deletes files of this library."""
        paths = list(paths)
        if paths:
            self._check_for_commit()
            self.store.delete(paths)
