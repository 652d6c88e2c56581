"""Inputs that broke tools like this one, each through a whole session: owners, moving files, types and names."""

from __future__ import annotations

import itertools
import json
import logging
import os
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
import tracemalloc

import pytest
from blake3 import blake3
from fsspec.implementations.memory import MemoryFileSystem
from pyarrow import fs as pafs

from ray_artifact_sync import layout, local_files, sync_up
from ray_artifact_sync.errors import IncompleteSyncError
from ray_artifact_sync.local_files import hash_file
from ray_artifact_sync.registry import ArtifactRegistry
from ray_artifact_sync.stores import open_store
from ray_artifact_sync.stores.arrow import ArrowStore
from ray_artifact_sync.stores.posix import PosixStore
from tests.support.azure_server import CONTAINER
from tests.support.s3_servers import BUCKET
from tests.support.sessions import WrappedStore, open_session, read_tree, save

MIB = 1024 * 1024
CHECKPOINT = "checkpoint_000000"

_numbers = itertools.count()

POSIX = "posix"
S3 = pytest.param("s3", marks=pytest.mark.s3)
AZURE = pytest.param("azure", marks=pytest.mark.azure)
ARROW_S3 = pytest.param("arrow_s3", marks=pytest.mark.s3)


@pytest.fixture(params=[POSIX, S3, "arrow_memory", ARROW_S3, AZURE])
def place(request, tmp_path):
    """A function from a trial's name to a store for its dir; the same name gives the same place."""
    number = next(_numbers)
    if request.param == "posix":
        return lambda name="trial": PosixStore(tmp_path / "storage" / name)
    if request.param == "arrow_memory":
        memory = pafs.PyFileSystem(pafs.FSSpecHandler(MemoryFileSystem()))
        return lambda name="trial": open_store(memory, f"/cases/{number}/{name}")
    if request.param == "azure":
        filesystem = request.getfixturevalue("azurite").filesystem()
        return lambda name="trial": open_store(filesystem, f"{CONTAINER}/cases/{number}/{name}")
    filesystem = request.getfixturevalue("s3_filesystem")
    root = f"{BUCKET}/cases/{number}"
    if request.param == "s3":
        return lambda name="trial": open_store(filesystem, f"{root}/{name}")
    return lambda name="trial": ArrowStore(filesystem, f"{root}/{name}")


posix_and_s3 = pytest.mark.parametrize("place", [POSIX, S3], indirect=True)
posix_only = pytest.mark.parametrize("place", [POSIX], indirect=True)


@pytest.fixture
def work(tmp_path):
    return tmp_path / "work"


@pytest.fixture
def begin():
    """Opens sessions, and ends all of them."""
    sessions = []

    def open_it(*arguments, **options):
        session = open_session(*arguments, **options)
        sessions.append(session)
        return session

    yield open_it
    for session in sessions:
        session.close(flush=False)


def write(root, *paths, data=b"data"):
    for path in paths:
        target = root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)


def stored(store):
    """What lies in the trial dir, without this library's own and without checkpoints."""
    return {
        file.path: store.read(file.path)
        for file in store.list()
        if not layout.is_reserved(file.path) and not file.path.startswith("checkpoint_0")
    }


def restored(begin, store, target, *, token=2, trial="trial", **options):
    """What another node gets back."""
    session = begin(target, store, token, trial=trial, **options)
    report = session.restore(CHECKPOINT, fresh=True)
    assert report.exact
    session.close(flush=False)
    return read_tree(target)


class Counting(WrappedStore):
    """Records every operation that changes storage."""

    def __init__(self, inner):
        super().__init__(inner)
        self.writes = []

    def around(self, verb, path, act):
        if verb in ("put", "append", "copy", "delete", "make_dir"):
            self.writes.append((verb, path))
        return act()


def warnings_of(caplog, name):
    """Whole-word matches: one record each."""
    return [
        record.getMessage()
        for record in caplog.records
        if record.levelno == logging.WARNING and record.getMessage().split(" ")[0] == name
    ]


# --- ownership ------------------------------------------------------------------------------------------


@posix_and_s3
def test_old_driver_files_in_the_working_dir_are_never_pushed_nor_pulled(place, work, begin, tmp_path, caplog):
    store = place()
    store.put("progress.csv", b"the driver's")
    store.put("result.json", b"the driver's")
    session = begin(work, store, 1)
    owned = ["progress.csv", "result.json", "events.out.tfevents.17.host"]
    write(work, *owned, data=b"an old copy")
    write(work, "mine.txt")
    with caplog.at_level(logging.WARNING):
        session.sync()
        session.sync()
        save(session, CHECKPOINT)
    for name, owner in zip(owned, ("CSVLoggerCallback", "JsonLoggerCallback", "TBXLoggerCallback"), strict=True):
        (said,) = warnings_of(caplog, name)
        assert owner in said
    assert stored(store) == {"progress.csv": b"the driver's", "result.json": b"the driver's", "mine.txt": b"data"}
    session.close()
    assert restored(begin, store, tmp_path / "other") == {"mine.txt": b"data"}


@posix_only
def test_a_listed_file_that_has_an_owner_now_is_not_pulled(place, work, begin, tmp_path):
    """The callback was added between two runs; the manifest still names the file."""
    store = place()
    session = begin(work, store, 1)
    write(work, "extra.json", "mine.txt")
    save(session, CHECKPOINT)
    session.close()
    registry = ArtifactRegistry.default().with_owner("Extra", "extra.json")
    target = tmp_path / "other"
    assert restored(begin, store, target, registry=registry) == {"mine.txt": b"data"}


@posix_and_s3
def test_declared_patterns_stay_out_and_lookalikes_go_up(place, work, begin, tmp_path):
    store = place()
    registry = ArtifactRegistry.default().with_owner("Predictions", "extra.json", "logs/")
    session = begin(work, store, 1, registry=registry)
    write(work, "extra.json", "logs/a", "logs/deep/b", "checkpoint_notes.txt", "sub/progress.csv")
    save(session, CHECKPOINT)
    expected = {"checkpoint_notes.txt": b"data", "sub/progress.csv": b"data"}
    assert stored(store) == expected
    session.close()
    assert restored(begin, store, tmp_path / "other", registry=registry) == expected


def test_sync_artifacts_false_writes_not_one_artifact_byte(tmp_path, monkeypatch):
    pytest.importorskip("ray")
    from ray_artifact_sync.config import SyncConfig
    from ray_artifact_sync.storage_context import ArtifactStorageContext
    from ray_artifact_sync.syncer import ArtifactSyncer

    def context(enabled, name):
        made = ArtifactStorageContext(
            storage_path=str(tmp_path / name),
            experiment_dir_name="experiment",
            sync_config=SyncConfig(syncer=ArtifactSyncer(), sync_artifacts=enabled),
            trial_dir_name="trial",
        )
        monkeypatch.setattr(type(made), "trial_working_directory", property(lambda _self: str(tmp_path / "work")))
        write(tmp_path / "work", "artifact")
        made.persist_artifacts(force=True)
        made.end_session()
        return {
            os.path.join(folder, file)
            for folder, _, files in os.walk(tmp_path / name)
            for file in files
            if "trial" in folder
        }

    assert context(False, "off") == set()
    assert any(path.endswith("trial/artifact") for path in context(True, "on")), "this test can fail"


# --- files that move while we look ----------------------------------------------------------------------


@pytest.fixture
def after_scan(monkeypatch):
    """Lets something happen between the listing and the reading, once."""

    def install(act):
        real, pending = sync_up.scan_tree, [act]

        def scan(*arguments, **options):
            result = real(*arguments, **options)
            if pending:
                pending.pop()()
            return result

        monkeypatch.setattr(sync_up, "scan_tree", scan)

    return install


@posix_and_s3
@pytest.mark.parametrize("known", [False, True], ids=["new", "known"])
def test_deleted_between_listing_and_reading(place, work, begin, after_scan, caplog, known):
    store = place()
    session = begin(work, store, 1)
    write(work, *(["gone"] if known else []), "before")
    session.sync()
    write(work, "gone", "a", "z", data=b"DATA")
    after_scan((work / "gone").unlink)
    with caplog.at_level(logging.WARNING):
        report = session.sync()
    assert [(skip.path, skip.kind) for skip in report.skips] == [("gone", "vanished")]
    assert len(warnings_of(caplog, "gone")) == 1
    assert report.manifest.entries.keys() == {"before", "a", "z"}
    assert stored(store).keys() >= {"before", "a", "z"}
    assert session.stats.failed_syncs == 0


@posix_only
def test_a_directory_deleted_between_listing_and_reading(place, work, begin, after_scan):
    store = place()
    session = begin(work, store, 1)
    write(work, *(f"gone/{number}" for number in range(40)), "stays")
    after_scan(lambda: shutil.rmtree(work / "gone"))
    report = session.sync()
    assert len(report.skips) == 40
    assert report.manifest.entries.keys() == {"stays"}


@posix_and_s3
@pytest.mark.parametrize("locked", ["locked", "locked/deep", "work"])
def test_a_directory_that_cannot_be_read_now_is_not_taken_for_deleted(
    place, work, begin, monkeypatch, tmp_path, caplog, locked
):
    """A stale NFS handle at the wrong moment must not cost a checkpoint its artifacts."""
    store = place()
    session = begin(work, store, 1)
    write(work, "locked/deep/a", "open/b")
    session.sync()
    write(work, "open/b", data=b"DATA")
    (work / "locked/void").mkdir()
    real = os.scandir

    def scandir(path):
        if str(path) == str(tmp_path / "work" / locked) or str(path) == str(tmp_path / locked):
            raise OSError(116, "Stale file handle")
        return real(path)

    with monkeypatch.context() as patched, caplog.at_level(logging.WARNING):
        patched.setattr("ray_artifact_sync.scan.os.scandir", scandir)
        save(session, CHECKPOINT)
    assert "Stale file handle" in caplog.text
    session.close(flush=False)
    tree = restored(begin, store, tmp_path / "other")
    assert tree["locked/deep/a"] == b"data"
    assert tree["open/b"] == (b"data" if locked == "work" else b"DATA")


@posix_only
def test_a_file_that_cannot_be_read_now_keeps_its_old_version(place, work, begin, monkeypatch, tmp_path):
    store = place()
    session = begin(work, store, 1)
    write(work, "x", data=b"old")
    session.sync()
    write(work, "x", data=b"newer")
    write(work, "unseen")
    real = local_files.open_regular

    def refuse(path):
        if path.endswith(("x", "unseen")):
            raise PermissionError(13, "Permission denied")
        return real(path)

    with monkeypatch.context() as patched:
        patched.setattr(local_files, "open_regular", refuse)
        save(session, CHECKPOINT)
    session.close(flush=False)
    assert restored(begin, store, tmp_path / "other") == {"x": b"old"}


@posix_only
def test_a_small_file_that_is_large_when_it_is_read(place, work, begin, after_scan):
    """Small files are read whole; by then this one has 300 MiB."""
    store = place()
    session = begin(work, store, 1)
    write(work, "log", "other")
    after_scan(lambda: os.truncate(work / "log", 300 * MIB))
    tracemalloc.start()
    try:
        report = session.sync()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 100 * MIB
    assert report.manifest.get("log").size == 300 * MIB
    assert store.stat("log").size == 300 * MIB


class Slow(WrappedStore):
    """Lets something happen once while a file is being read for an upload."""

    def __init__(self, inner, path, act):
        super().__init__(inner)
        self._path, self._act, self.times, self.quiet = path, act, 0, False

    def put(self, path, data, **options):
        if path != self._path or isinstance(data, bytes):
            if path == self._path:
                self.act()
            return super().put(path, data, **options)
        return super().put(path, self.between(data), **options)

    def between(self, chunks):
        for number, chunk in enumerate(chunks):
            yield chunk
            if number == 1:
                self.act()

    def act(self):
        self.times += 1
        if not self.quiet:
            self._act(self.times)


def content(version, size):
    return bytes([version]) * size


@posix_and_s3
@pytest.mark.parametrize("size", [100, 5 * MIB], ids=["small", "streamed"])
def test_overwritten_while_it_is_read(place, work, begin, size):
    """In place, at its beginning and its end: the worst mix there is."""

    def overwrite(times):
        if times > 3:
            return
        with open(work / "busy", "r+b") as file:
            file.write(content(times, size))

    store = place()
    slow = Slow(store, "busy", overwrite)
    session = begin(work, slow, 1)
    write(work, "busy", data=content(0, size))
    write(work, "other")
    report = session.sync()
    data = stored(store)["busy"]
    assert len(data) == size
    assert len(set(data)) == 1, "a mix of versions"
    assert report.manifest.get("busy").digest == blake3(data).hexdigest()
    assert stored(store)["other"] == b"data"
    assert slow.times > 1 or size == 100, "it was read again"
    slow.quiet = True
    session.sync()
    assert stored(store)["busy"] == (work / "busy").read_bytes()


@posix_only
def test_overwritten_by_a_thread_all_the_time(place, work, begin):
    """What lands is one of the versions, or nothing yet; never a mix; and the last one in the end."""
    size, stop, versions = 3 * MIB, threading.Event(), itertools.count(1)

    def run():
        while not stop.is_set():
            with open(work / "busy", "r+b", buffering=0) as file:
                file.write(content(next(versions) % 251, size))

    store = place()
    session = begin(work, store, 1)
    write(work, "busy", data=content(0, size))
    session.sync()
    thread = threading.Thread(target=run)
    thread.start()
    try:
        for _ in range(5):
            report = session.sync()
            data = store.read("busy")
            entry = report.manifest.get("busy")
            assert blake3(data[: entry.size]).hexdigest() == entry.digest
            # A single write(2) that is under way shows its beginning: a state that the file really was in.
            changes = sum(1 for one, two in itertools.pairwise(data[:: 64 * 1024]) if one != two)
            assert changes <= 1, "a mix of moments"
    finally:
        stop.set()
        thread.join()
    session.sync()
    assert store.read("busy") == (work / "busy").read_bytes()


@posix_and_s3
@pytest.mark.parametrize("size", [100, 5 * MIB], ids=["small", "streamed"])
def test_growing_while_it_is_read(place, work, begin, size):
    def grow(times):
        if times <= 3:
            with open(work / "log", "ab") as file:
                file.write(content(times, 1000))

    store = place()
    slow = Slow(store, "log", grow)
    session = begin(work, slow, 1)
    write(work, "log", data=content(9, size))
    report = session.sync()
    everything = (work / "log").read_bytes()
    landed = stored(store)["log"]
    assert len(everything) > size
    assert size <= len(landed) <= len(everything)
    assert everything.startswith(landed)
    assert report.manifest.get("log").digest == blake3(landed).hexdigest()
    assert session.stats.failed_syncs == 0
    slow.quiet = True
    session.sync()
    assert stored(store)["log"] == (work / "log").read_bytes()


@posix_and_s3
@pytest.mark.parametrize("again", [False, True], ids=["same session", "next attempt"])
def test_recreated_with_the_same_name_size_and_mtime(place, work, begin, monkeypatch, again):
    # A clock far ahead of the files': what was hashed counts as settled, so that only stat decides.
    now = time.time_ns
    monkeypatch.setattr(local_files.time, "time_ns", lambda: now() + 10**12)
    store = place()
    session = begin(work, store, 1)
    write(work, "weights", data=b"old-")
    os.utime(work / "weights", ns=(10**18, 10**18))
    session.sync()
    assert session.sync().files_sent == 0
    os.unlink(work / "weights")
    write(work, "weights", data=b"new!")
    os.utime(work / "weights", ns=(10**18, 10**18))
    assert (work / "weights").stat().st_mtime_ns == 10**18
    if again:
        session.close(flush=False)
        session = begin(work, store, 2, set_aside=False)
    session.sync()
    assert stored(store) == {"weights": b"new!"}


@posix_and_s3
def test_a_second_save_with_no_change_sends_nothing(place, work, begin, tmp_path):
    store = Counting(place())
    session = begin(work, store, 1)
    write(work, *(f"sub/{number}" for number in range(20)), data=b"x" * 1000)
    (work / "void").mkdir()
    save(session, CHECKPOINT)
    store.writes.clear()
    before = (session.stats.bytes_sent, session.stats.files_sent)
    report = session.sync()
    session.sync()
    assert store.writes == []
    assert (report.bytes_sent, report.files_sent) == (0, 0)
    save(session, "checkpoint_000001")
    # On a local disk, the journal gets its line right away.
    written = {path for _, path in store.writes if not path.startswith(f"{layout.JOURNAL}/")}
    assert {path.split("/")[0] for path in written} == {"checkpoint_000001"}
    assert len(store.writes) - len(written) <= (1 if store.can_append else 0)
    assert (session.stats.bytes_sent, session.stats.files_sent) == before
    session.close()
    # The next process reads its files, and sends none of them.
    store.writes.clear()
    session = begin(work, store, 2, set_aside=False)
    assert session.sync().bytes_sent == 0
    assert {path for _, path in store.writes} <= {layout.WRITER}


@posix_and_s3
@pytest.mark.parametrize("missing", [False, True], ids=["empty", "missing"])
def test_a_sync_of_an_empty_or_missing_directory(place, work, begin, missing):
    store = Counting(place())
    session = begin(work, store, 1)
    if missing:
        shutil.rmtree(work)
    report = session.sync()
    assert len(report.manifest) == 0
    assert {path for verb, path in store.writes if verb == "put"} <= {layout.WRITER}
    assert session.stats.failed_syncs == 0
    write(work, "later")
    session.sync()
    assert stored(store) == {"later": b"data"}


# --- file types and names -------------------------------------------------------------------------------


@posix_and_s3
def test_links_pipes_and_sockets(place, work, begin, tmp_path, caplog):
    write(tmp_path, "outside/secret", data=b"secret")
    store = place()
    session = begin(work, store, 1)
    write(work, "real")
    (work / "dangling").symlink_to("nowhere")
    (work / "leaving").symlink_to(tmp_path / "outside/secret")
    (work / "leaving-dir").symlink_to(tmp_path / "outside")
    (work / "inside").symlink_to("real")
    os.mkfifo(work / "pipe")
    with tempfile.TemporaryDirectory(dir="/tmp") as short, socket.socket(socket.AF_UNIX) as server:
        server.bind(f"{short}/s")
        os.rename(f"{short}/s", work / "sock")
        with caplog.at_level(logging.WARNING):
            save(session, CHECKPOINT)
            session.sync()
    for name in ("dangling", "leaving", "leaving-dir", "pipe", "sock"):
        assert len(warnings_of(caplog, name)) == 1, name
    assert stored(store) == {"real": b"data", "inside": b"data"}
    session.close()
    assert restored(begin, store, tmp_path / "other") == {"real": b"data", "inside": b"data"}


@posix_and_s3
def test_a_pipe_that_takes_the_place_of_a_file(place, work, begin, after_scan):
    store = place()
    session = begin(work, store, 1)
    write(work, "pipe", "other")

    def swap():
        (work / "pipe").unlink()
        os.mkfifo(work / "pipe")

    after_scan(swap)
    report = session.sync()
    assert report.manifest.entries.keys() == {"other"}
    assert stored(store) == {"other": b"data"}


def test_empty_directories_and_empty_files(place, work, begin, tmp_path):
    store = place()
    session = begin(work, store, 1)
    write(work, "empty", "sub/empty", data=b"")
    (work / "void/inner").mkdir(parents=True)
    write(work, "full")
    save(session, CHECKPOINT)
    session.close()
    expected = {"empty": b"", "sub/empty": b"", "void/inner": None, "full": b"data"}
    assert restored(begin, store, tmp_path / "other") == expected


@posix_and_s3
def test_an_empty_directory_gets_content_and_loses_it_again(place, work, begin, tmp_path):
    store = place()
    session = begin(work, store, 1)
    (work / "d").mkdir()
    save(session, CHECKPOINT)
    write(work, "d/x")
    save(session, "checkpoint_000001")
    (work / "d/x").unlink()
    save(session, "checkpoint_000002")
    session.close()
    for number, (name, expected) in enumerate(
        [(CHECKPOINT, {"d": None}), ("checkpoint_000001", {"d/x": b"data"}), ("checkpoint_000002", {"d": None})]
    ):
        again = begin(tmp_path / f"other-{number}", store, 2 + number)
        again.restore(name, fresh=True)
        assert read_tree(tmp_path / f"other-{number}") == expected
        again.close(flush=False)


SPARSE = """
import json, os, resource, sys, time
from ray_artifact_sync import layout
from ray_artifact_sync.options import SyncOptions
from ray_artifact_sync.session import TrialArtifacts
from ray_artifact_sync.stores import open_store
from ray_artifact_sync.stores.posix import PosixStore

place, work, size = sys.argv[1], sys.argv[2], int(sys.argv[3])
if place.startswith("http"):
    from tests.support.s3_servers import filesystem_at
    endpoint, _, path = place.partition("|")
    store = open_store(filesystem_at(endpoint), path)
else:
    store = PosixStore(place)
session = TrialArtifacts(work, store, trial="trial", token=layout.make_token(1), options=SyncOptions(sync_period=3600))
session.begin()
with open(os.path.join(work, "small"), "wb") as file:
    file.write(b"warm-up" * 1000)
session.sync()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
with open(os.path.join(work, "sparse"), "wb") as file:
    file.truncate(size - 5)
    file.seek(size - 5)
    file.write(b"<end>")
report = session.sync()
entry = report.manifest.get("sparse")
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
sent_again = session.sync().files_sent
session.close()
print(json.dumps({
    "grown": (peak - before) * 1024, "size": entry.size, "digest": entry.digest,
    "failures": len(report.failures), "again": sent_again, "store": type(store).__name__,
}))
"""


def sync_a_sparse_file(place, work, size):
    done = subprocess.run(
        [sys.executable, "-c", SPARSE, place, str(work), str(size)],
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
        cwd=os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["size"], found["failures"], found["again"]) == (size, 0, 0)
    return found


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
def test_a_sparse_file_of_6_gib(tmp_path):
    size = 6 * 1024 * MIB
    if shutil.disk_usage(tmp_path).free < 2 * size:
        pytest.skip("needs 12 GiB of disk")
    storage = tmp_path / "storage"
    try:
        found = sync_a_sparse_file(str(storage), tmp_path / "work", size)
        assert found["grown"] < 100 * MIB, "memory must stay flat"
        there = hash_file(str(storage / "sparse"))
        assert (there.stat.size, there.digest) == (size, found["digest"])
    finally:
        shutil.rmtree(storage, ignore_errors=True)


@pytest.mark.slow
@pytest.mark.s3
def test_a_sparse_file_of_300_mib_in_parts(tmp_path, proxy, s3_filesystem):
    size = 300 * MIB
    path = f"{BUCKET}/cases/sparse-{next(_numbers)}"
    found = sync_a_sparse_file(f"{proxy.endpoint}|{path}", tmp_path / "work", size)
    assert found["store"] == "CloudStore"
    assert found["grown"] < 250 * MIB, "memory must not follow the size"
    assert proxy.counts["upload_part"] > 5
    assert proxy.counts["complete_multipart"] == 1
    store = open_store(s3_filesystem, path)
    hasher = blake3()
    for chunk in store.read_chunks("sparse"):
        hasher.update(chunk)
    assert hasher.hexdigest() == found["digest"]
    store.delete(["sparse"])


NAMES = ["a b", "a%20b", "a#b", "a:b", "a?b"]
MORE_NAMES = [
    "a+b",
    "a&b=c",
    "f[1].txt",
    "f*",
    "~x",
    "{x,y}",
    "quote'\"",
    "back\\slash",
    "ümlaut",
    "😀",
    "n" * 200,
    ".hidden",
]


def test_names_that_look_alike(place, work, begin, tmp_path):
    store = place()
    session = begin(work, store, 1)
    for name in NAMES:
        write(work, name, f"sub {name}/{name}", data=f"content of {name}".encode())
    save(session, CHECKPOINT)
    # They all change, so that each old version is preserved too.
    for name in NAMES:
        write(work, name, data=f"CONTENT OF {name}".encode())
    save(session, "checkpoint_000001")
    session.close()
    assert {path for path in stored(store) if "/" not in path} == set(NAMES)
    expected = {name: f"content of {name}".encode() for name in NAMES}
    expected |= {f"sub {name}/{name}": f"content of {name}".encode() for name in NAMES}
    assert restored(begin, store, tmp_path / "other") == expected


@posix_and_s3
def test_other_names(place, work, begin, tmp_path):
    store = place()
    session = begin(work, store, 1)
    for name in MORE_NAMES:
        write(work, name, data=f"content of {name}".encode())
    save(session, CHECKPOINT)
    session.close()
    assert restored(begin, store, tmp_path / "other") == {name: f"content of {name}".encode() for name in MORE_NAMES}


@posix_and_s3
def test_names_that_storage_cannot_hold(place, work, begin, caplog):
    store = place()
    session = begin(work, store, 1)
    write(work, "good", "new\nline")
    with open(os.path.join(os.fsencode(str(work)), b"latin-\xe9"), "wb"):
        pass
    with caplog.at_level(logging.WARNING):
        report = session.sync()
    assert stored(store) == {"good": b"data"}
    assert {skip.kind for skip in report.skips} == {"invalid"}
    assert session.stats.failed_syncs == 0
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2
    for message in messages:
        assert message.isprintable(), "a file name must not break the log"


@pytest.mark.parametrize("trial", ["Train_(1, 2)_lr=0.1", "Train_[32, 32]_x", "a b#c?d%20e", "t_1"])
def test_trial_dir_names(place, work, begin, tmp_path, trial):
    store = place(trial)
    session = begin(work, store, 1, trial=trial)
    write(work, "x", "sub/y")
    save(session, CHECKPOINT)
    session.close()
    assert restored(begin, place(trial), tmp_path / trial, trial=trial) == {"x": b"data", "sub/y": b"data"}


@pytest.mark.s3
def test_a_restore_of_t_1_never_reads_t_10(s3_filesystem, proxy, begin, tmp_path):
    root = f"{BUCKET}/cases/alike-{next(_numbers)}"
    for token, trial in enumerate(("t_1", "t_10", "t_1x"), start=1):
        session = begin(tmp_path / trial, open_store(s3_filesystem, f"{root}/{trial}"), token, trial=trial)
        write(tmp_path / trial, "same-name", f"only-{trial}", data=trial.encode())
        save(session, CHECKPOINT)
        session.close()
    proxy.reset_counts()
    store = open_store(s3_filesystem, f"{root}/t_1")
    tree = restored(begin, store, tmp_path / "other", token=9, trial="t_1")
    assert tree == {"same-name": b"t_1", "only-t_1": b"t_1"}
    touched = [request.path for request in proxy.log if "t_10" in request.path or "t_1x" in request.path]
    assert proxy.log
    assert touched == []
    assert all("t_1/" in request.path for request in proxy.log if request.kind == "get_object")


@posix_only
def test_a_restore_of_t_1_never_takes_t_10(place, begin, tmp_path):
    for token, trial in enumerate(("t_1", "t_10"), start=1):
        session = begin(tmp_path / trial, place(trial), token, trial=trial)
        write(tmp_path / trial, "same-name", f"only-{trial}", data=trial.encode())
        save(session, CHECKPOINT)
        session.close()
    assert restored(begin, place("t_1"), tmp_path / "other", token=9, trial="t_1") == {
        "same-name": b"t_1",
        "only-t_1": b"t_1",
    }


@posix_and_s3
def test_a_snapshot_of_another_trial_does_not_count(place, begin, tmp_path):
    """A user copies a checkpoint directory from t_1 to t_10."""
    session = begin(tmp_path / "t_1", place("t_1"), 1, trial="t_1")
    write(tmp_path / "t_1", "x", data=b"of t_1")
    save(session, CHECKPOINT)
    session.close()
    source, target = place("t_1"), place("t_10")
    session = begin(tmp_path / "t_10", target, 2, trial="t_10")
    write(tmp_path / "t_10", "x", data=b"of t_10")
    session.sync()
    session.close()
    for file in list(source.list(CHECKPOINT)):
        target.put(file.path, source.read(file.path))
    session = begin(tmp_path / "other", target, 3, trial="t_10")
    assert not session.restore(CHECKPOINT, fresh=True).exact
    assert read_tree(tmp_path / "other") == {"x": b"of t_10"}


def test_a_trailing_slash_of_the_destination(place, work, begin):
    """Two stores for one place, with and without: the second finds everything there."""
    write(work, "a", "sub/b")
    keys = []
    for token, name in enumerate(("trial", "trial/"), start=1):
        store = Counting(place(name))
        session = begin(work, store, token, set_aside=False)
        report = session.sync()
        save(session, CHECKPOINT)
        session.close()
        assert report.files_sent == (2 if token == 1 else 0)
        names = {file.path for file in place().list()}
        of_attempts = {path for path in names if layout.snapshot_token(path.split("/")[-1]) or layout.JOURNAL in path}
        keys.append(names - of_attempts)
    assert keys[0] == keys[1]
    assert {"a", "sub/b"} <= keys[0]


# --- and what is left when one of them cannot be stored ---------------------------------------------------


@posix_only
def test_one_refused_file_does_not_keep_the_others(place, work, begin):
    """A file stands in storage where a directory must be: named, and only that file is missing."""
    store = place()
    store.put("taken", b"somebody else's")
    session = begin(work, store, 1)
    write(work, "taken/x", "good")
    with pytest.raises(IncompleteSyncError, match="taken/x"):
        session.sync()
    assert stored(store) == {"taken": b"somebody else's", "good": b"data"}


@posix_only
def test_permissions_of_restored_files_are_those_of_new_files(place, work, begin, tmp_path):
    store = place()
    session = begin(work, store, 1)
    write(work, "x")
    save(session, CHECKPOINT)
    session.close()
    before = os.umask(0o027)
    try:
        restored(begin, store, tmp_path / "other")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "other/x").stat().st_mode) == 0o640
