"""What `doctor` tries out on a storage, in the order in which one thing rests on another.

It writes below `.ray_artifact_sync/doctor-<random>/` of the place only, and removes what it wrote, also when a check
fails. Killed in between, a probe of at most 5 MiB is left, which `gc` takes away.
"""

from __future__ import annotations

import importlib.metadata
import os
import secrets
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from blake3 import blake3

from ray_artifact_sync import layout
from ray_artifact_sync._version import __version__
from ray_artifact_sync.errors import (
    ArtifactSyncError,
    CannotAppendError,
    PreconditionFailedError,
    StoragePermissionError,
)
from ray_artifact_sync.experiments import Place
from ray_artifact_sync.stores import ArtifactStore, open_store
from ray_artifact_sync.stores.clients import ClientLimits
from ray_artifact_sync.stores.cloud import CloudStore
from ray_artifact_sync.stores.common import scrub
from ray_artifact_sync.stores.posix import PosixStore

OLDEST_RAY = (2, 43)
LATENCY_REQUESTS = 9
SLOW_MS = 500.0
CLOCK_SECONDS = 60.0
LITTLE_SPACE = 1_000_000_000
APPEND_SIZE = 5 * 1024 * 1024
"""Bytes of the object that an append is tried on: the smallest that S3 copies a part of."""

Status = Literal["ok", "note", "wrong"]


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found; `text` is a sentence or two for people."""

    check: str
    status: Status
    text: str


@dataclass(slots=True)
class Diagnosis:
    """What all checks found.

    Attributes:
        findings: In order.
        latency_ms: Milliseconds of a request, by what it does; medians.
        versions: Package to its version; None where it is not installed.
    """

    findings: list[Finding] = field(default_factory=list)
    latency_ms: dict[str, float] = field(default_factory=dict)
    versions: dict[str, str | None] = field(default_factory=dict)

    @property
    def is_right(self) -> bool:
        """Whether nothing is wrong."""
        return all(finding.status != "wrong" for finding in self.findings)

    def add(self, check: str, status: Status, text: str) -> None:
        """Adds a finding."""
        self.findings.append(Finding(check, status, text))


def diagnose(place: Place) -> Diagnosis:
    """Tries out a place. See the module for what is written.

    Raises:
        ConfigurationError: The place cannot be one.
    """
    diagnosis = Diagnosis()
    check_versions(diagnosis)
    limits = ClientLimits(connect_timeout=5.0, request_timeout=30.0, retries=1, retry_timeout=10.0)
    store = open_store(place.filesystem, place.path, limits=limits)
    diagnosis.add("client", "ok", f"Storage is {store.description}; this client was chosen because {store.reason}.")
    if not check_reading(diagnosis, store):
        return diagnosis
    with _tidy(store) as folder:
        if check_writing(diagnosis, store, f"{folder}/probe"):
            check_latency(diagnosis, store, f"{folder}/probe")
            check_clock(diagnosis, store, f"{folder}/probe")
            _try(diagnosis, "copies", lambda: check_copies(diagnosis, store, f"{folder}/probe", f"{folder}/copy"))
            _try(diagnosis, "conditions", lambda: check_conditions(diagnosis, store, f"{folder}/condition"))
            _try(diagnosis, "append", lambda: check_append(diagnosis, store, f"{folder}/append"))
            if not isinstance(store, PosixStore):
                check_rays_client(diagnosis, place, store, f"{folder}/ray")
    check_traps(diagnosis, store)
    return diagnosis


def _try(diagnosis: Diagnosis, check: str, act: Callable[[], None]) -> None:
    try:
        act()
    except ArtifactSyncError as error:
        diagnosis.add(check, "wrong", str(error))


@contextmanager
def _tidy(store: ArtifactStore) -> Iterator[str]:
    """A directory for probes; what is written there is deleted in the end, and directories made for it are."""
    folder = f"{layout.STATE_DIR}/doctor-{secrets.token_hex(8)}"
    made = _missing_dirs(store.root) if isinstance(store, PosixStore) else []
    try:
        yield folder
    finally:
        with suppress(ArtifactSyncError):
            store.delete([file.path for file in store.list(folder)])
        for directory in made:
            with suppress(OSError):
                os.rmdir(directory)


def _missing_dirs(path: str) -> list[str]:
    """A directory and those above it that do not exist, the innermost first."""
    missing = []
    while not os.path.lexists(path):
        missing.append(path)
        path = os.path.dirname(path)
    return missing


# --- checks -----------------------------------------------------------------------------------------


def check_versions(diagnosis: Diagnosis) -> None:
    """Which packages are installed, and whether they go together."""
    versions = diagnosis.versions
    versions["python"] = ".".join(map(str, sys.version_info[:3]))
    versions["ray-artifact-sync"] = __version__
    for package in ("ray", "pyarrow", "obstore", "fsspec", "botocore"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    shown = ", ".join(f"{name} {version or '(not installed)'}" for name, version in versions.items())
    ray = versions["ray"]
    if ray is None:
        diagnosis.add("versions", "note", f"{shown}. Without Ray, artifacts can be read here, but no trial can run.")
    elif _numbers(ray) < OLDEST_RAY:
        diagnosis.add(
            "versions", "wrong", f"{shown}. Ray {ray} is too old: {'.'.join(map(str, OLDEST_RAY))} or newer is needed."
        )
    else:
        diagnosis.add("versions", "ok", f"{shown}.")


def check_reading(diagnosis: Diagnosis, store: ArtifactStore) -> bool:
    """Whether the credentials are good for a listing."""
    try:
        files, dirs = store.list_files(), store.list_dirs()
    except StoragePermissionError as error:
        diagnosis.add("credentials", "wrong", f"The credentials are refused: {error}")
        return False
    except ArtifactSyncError as error:
        diagnosis.add("credentials", "wrong", f"The place cannot be listed: {error}")
        return False
    there = f"{len(files)} files and {len(dirs)} directories" if files or dirs else "nothing yet"
    diagnosis.add("credentials", "ok", f"The credentials are accepted, and the place can be listed ({there}).")
    return True


def check_writing(diagnosis: Diagnosis, store: ArtifactStore, path: str) -> bool:
    """Whether a file can be written, read back and deleted."""
    content = secrets.token_bytes(1000)
    try:
        store.put(path, content)
        found = store.read(path)
        store.delete([path])
        gone = store.stat(path) is None
        store.put(path, content)
    except StoragePermissionError as error:
        diagnosis.add(
            "write access",
            "wrong",
            f"Writing is refused: {error} Looking at artifacts works (ls, pull, diff, history, verify, ArtifactView), "
            "running trials does not.",
        )
        return False
    except ArtifactSyncError as error:
        diagnosis.add("write access", "wrong", f"A file cannot be written, read back and deleted: {error}")
        return False
    if found != content or not gone:
        what = "gives back other bytes than were written" if found != content else "shows a file that was deleted"
        diagnosis.add("write access", "wrong", f"The storage {what}; nothing stored there can be trusted.")
        return False
    diagnosis.add("write access", "ok", "A file was written, read back and deleted.")
    if isinstance(store, PosixStore) and (free := shutil.disk_usage(store.root).free) < LITTLE_SPACE:
        diagnosis.add("space", "wrong", f"Only {free / 1e6:.0f} MB are free there.")
    return True


def check_latency(diagnosis: Diagnosis, store: ArtifactStore, path: str) -> None:
    """How long requests take."""
    try:
        diagnosis.latency_ms["look"] = _median_ms(lambda: store.stat(path))
        diagnosis.latency_ms["write"] = _median_ms(lambda: store.put(path, b"probe"))
        diagnosis.latency_ms["read"] = _median_ms(lambda: store.read(path))
    except ArtifactSyncError as error:
        diagnosis.add("latency", "wrong", str(error))
        return
    slowest = max(diagnosis.latency_ms.values())
    shown = ", ".join(f"to {what} {ms:.1f} ms" for what, ms in diagnosis.latency_ms.items())
    text = f"A small request takes (median of {LATENCY_REQUESTS}): {shown}."
    if slowest > SLOW_MS:
        text += " That is slow: syncs of many small files will be, too. Store closer to the nodes."
    diagnosis.add("latency", "note" if slowest > SLOW_MS else "ok", text)


def check_clock(diagnosis: Diagnosis, store: ArtifactStore, path: str) -> None:
    """Whether the storage's clock and this machine's agree: `gc` judges by them."""
    try:
        store.put(path, b"probe")
        found = store.stat(path)
    except ArtifactSyncError as error:
        diagnosis.add("clock", "wrong", str(error))
        return
    if found is None or found.mtime_ns is None:
        diagnosis.add("clock", "note", "The storage does not say when files were written; gc leaves trials alone.")
        return
    difference = found.mtime_ns / 1e9 - time.time()
    if abs(difference) > CLOCK_SECONDS:
        diagnosis.add(
            "clock", "wrong", f"The storage's clock is {difference:+.0f} s from this machine's: set this machine's."
        )
    else:
        diagnosis.add("clock", "ok", "The storage's clock and this machine's agree.")


def check_copies(diagnosis: Diagnosis, store: ArtifactStore, source: str, target: str) -> None:
    """Whether the storage copies files by itself: what a checkpoint needs is kept so."""
    content = secrets.token_bytes(1000)
    store.put(source, content)
    store.copy(source, target)
    if store.read(target) == content:
        diagnosis.add("copies", "ok", "Copies within the storage work: versions that checkpoints need can be kept.")
    else:
        diagnosis.add(
            "copies", "wrong", "A copy within the storage has other bytes: versions that checkpoints need are lost."
        )


def check_conditions(diagnosis: Diagnosis, store: ArtifactStore, path: str) -> None:
    """Whether writes can be bound to what is there: that is what stops a replaced worker on object stores."""
    if store.can_fence:
        diagnosis.add(
            "conditions", "ok", "A replaced worker is kept from writing by renames; conditional writes are not needed."
        )
        return
    if store.can_precondition is not False:
        store.can_precondition = True
        stored = store.put(path, b"first")
        created = _is_refused(lambda: store.put(path, b"second", if_absent=True))
        replaced = _is_refused(lambda: store.put(path, b"third", if_match='"0123456789abcdef0123456789abcdef"'))
        allowed = stored.etag is None or not _is_refused(lambda: store.put(path, b"fourth", if_match=stored.etag))
        if created and replaced and allowed and store.can_precondition:
            diagnosis.add("conditions", "ok", "Conditional writes are enforced: a replaced worker cannot write.")
            return
    diagnosis.add(
        "conditions",
        "note",
        "Conditional writes are not enforced. A worker that Ray replaced stops at its next request, but one that is "
        "under way lands; readers notice by the digest.",
    )


def _is_refused(write: Callable[[], object]) -> bool:
    try:
        write()
    except PreconditionFailedError:
        return True
    return False


def check_append(diagnosis: Diagnosis, store: ArtifactStore, path: str) -> None:
    """Whether a file that grew can be sent what it grew by."""
    if not store.can_append:
        why = (
            " With the extra ray-artifact-sync[s3] it may be."
            if isinstance(store, CloudStore)
            and store.description.startswith("S3 ")
            and diagnosis.versions.get("botocore") is None
            else ""
        )
        diagnosis.add("append", "note", f"Appending is not possible here: a file that grew is sent whole.{why}")
        return
    size = APPEND_SIZE if store.min_append_size else 1000
    content, tail = secrets.token_bytes(size), b"and more"
    stored = store.put(path, content, size_hint=size)
    try:
        digest = str(blake3(content + tail).hexdigest())
        store.append(path, size, [tail], if_match=stored.etag, digest=digest)
    except (CannotAppendError, PreconditionFailedError) as error:
        diagnosis.add("append", "note", f"Appending does not work here: a file that grew is sent whole. ({error})")
        return
    if store.read(path) != content + tail:
        diagnosis.add("append", "wrong", "An append gave other bytes.")
    elif store.min_append_size:
        least = store.min_append_size / 1e6
        diagnosis.add("append", "ok", f"Appending works: of a file from {least:.0f} MB on, what it grew by is sent.")
    else:
        diagnosis.add("append", "ok", "Appending works: of a file that grew, only what it grew by is sent.")


def check_rays_client(diagnosis: Diagnosis, place: Place, store: ArtifactStore, path: str) -> None:
    """Whether Ray's own client can write: Ray itself writes a marker file with it when a run starts."""
    content = b"probe"
    filesystem: Any = place.filesystem
    if not hasattr(filesystem, "open_output_stream"):  # fsspec's; Ray wraps it likewise
        from pyarrow import fs as pafs  # noqa: PLC0415

        filesystem = pafs.PyFileSystem(pafs.FSSpecHandler(filesystem))
    try:
        with filesystem.open_output_stream(f"{place.path}/{path}") as stream:
            stream.write(content)
        right = store.read(path) == content
    except Exception as error:
        right, reason = False, scrub(error)
    else:
        reason = "what it wrote is not what was asked for"
    if right:
        diagnosis.add("Ray's client", "ok", "Ray's own client (pyarrow) can write there, too.")
        return
    hint = (
        " This server may not know chunked uploads: set AWS_REQUEST_CHECKSUM_CALCULATION=when_required on every node."
        if "411" in reason
        else ""
    )
    diagnosis.add("Ray's client", "wrong", f"Ray's own client (pyarrow) cannot write there: {reason}.{hint}")


def check_traps(diagnosis: Diagnosis, store: ArtifactStore) -> None:
    """What is known to go wrong with these versions, on this kind of storage."""
    if isinstance(store, PosixStore):
        return
    pyarrow = _numbers(diagnosis.versions.get("pyarrow") or "")
    if pyarrow >= (18,):
        diagnosis.add(
            "trap",
            "note",
            f"pyarrow {diagnosis.versions['pyarrow']}: `pyarrow.fs.copy_files`, which Ray uploads with where this "
            "library does not, can return normally although the storage refused the bytes (seen with 21 and 26, not "
            "with 17). This library does not use it.",
        )
    if store.description.startswith("S3 "):
        if pyarrow >= (20,) and "AWS_REQUEST_CHECKSUM_CALCULATION" not in os.environ:
            diagnosis.add(
                "trap",
                "note",
                "pyarrow from 20 on sends chunks without a length, and some S3-compatible servers answer 411. If Ray "
                "cannot write, set AWS_REQUEST_CHECKSUM_CALCULATION=when_required on every node.",
            )
        diagnosis.add(
            "trap",
            "note",
            "An upload of a large file that is cut off leaves parts that no listing shows, and that are paid for: a "
            "lifecycle rule AbortIncompleteMultipartUpload on the bucket takes them away.",
        )


def _median_ms(act: Callable[[], object]) -> float:
    times = []
    for _ in range(LATENCY_REQUESTS):
        started = time.perf_counter()
        act()
        times.append(time.perf_counter() - started)
    return statistics.median(times) * 1000


def _numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version."""
    numbers = []
    for part in version.split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)
