"""Storage that refuses, throttles, hangs or is full: honest errors, a session that goes on, nothing half-written."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import threading
import time

import pytest

from ray_artifact_sync import layout
from ray_artifact_sync.checkpoint_upload import upload_checkpoint
from ray_artifact_sync.concurrency import Deadline
from ray_artifact_sync.errors import (
    ArtifactSyncError,
    IncompleteSyncError,
    StorageError,
    StoragePermissionError,
    SyncTimeoutError,
)
from ray_artifact_sync.stores import open_store
from ray_artifact_sync.stores.posix import PosixStore
from tests.support import independent_reader
from tests.support.s3_servers import BUCKET, filesystem_at
from tests.support.sessions import WrappedStore, abandon, open_session, read_tree, save

MIB = 1024 * 1024
LARGE = 20 * MIB  # several parts


@pytest.fixture
def trial(proxy, tmp_path):
    """A function that gives a new store for one trial dir behind the proxy."""
    return lambda: open_store(filesystem_at(proxy.endpoint), f"{BUCKET}/refused/{tmp_path.name}")


@pytest.fixture
def place(trial):
    return independent_reader.store_place(trial())


@pytest.fixture
def session(trial, tmp_path):
    session = open_session(tmp_path / "work", trial(), 1, retries=2)
    yield session
    abandon(session)


@pytest.fixture
def work(session):
    return session.working_dir


def write(root, path, data):
    target = os.path.join(root, path)
    os.makedirs(os.path.dirname(target), exist_ok=True)
    with open(target, "wb") as file:
        file.write(data)


refusals = pytest.mark.parametrize(
    ("kind", "size"), [("put_object", 10), ("upload_part", LARGE), ("complete_multipart", LARGE)]
)


@pytest.mark.s3
@refusals
def test_a_refused_artifact_is_an_error(proxy, session, work, place, kind, size):
    write(work, "fine.txt", b"fine")
    session.sync()
    write(work, "refused.bin", os.urandom(size))
    proxy.fail(kind, "refused.bin", status=403)
    with pytest.raises(IncompleteSyncError) as caught:
        session.sync()
    assert isinstance(caught.value.failures["refused.bin"], StoragePermissionError)
    assert independent_reader.head_tree(place) == {"fine.txt": b"fine"}
    assert not save(session, "checkpoint_000000")  # on_error="warn": the checkpoint is there, without a snapshot
    assert independent_reader.snapshots(place) == {}
    assert place.read("checkpoint_000000/model.bin") == b"model of checkpoint_000000"
    proxy.clear()
    assert save(session, "checkpoint_000001")
    assert independent_reader.tree_of(place, independent_reader.snapshots(place)["checkpoint_000001"]) == read_tree(
        work
    )


@pytest.mark.s3
@refusals
def test_a_refused_checkpoint_file_raises_and_leaves_no_snapshot(proxy, session, work, place, tmp_path, kind, size):
    write(work, "log.txt", b"1\n")
    source = tmp_path / "source"
    write(source, "shard.bin", os.urandom(size))
    write(source, "meta.json", b"{}")
    proxy.fail(kind, "shard.bin", status=403)
    with pytest.raises(IncompleteSyncError, match="checkpoint_000000 was not saved"):
        session.commit_checkpoint(
            "checkpoint_000000",
            lambda engine: upload_checkpoint(PosixStore(source), engine, "checkpoint_000000", Deadline()),
        )
    assert independent_reader.snapshots(place) == {}
    proxy.clear()
    assert session.commit_checkpoint(
        "checkpoint_000000",
        lambda engine: upload_checkpoint(PosixStore(source), engine, "checkpoint_000000", Deadline()),
    )
    assert place.read("checkpoint_000000/shard.bin") == (source / "shard.bin").read_bytes()


@pytest.mark.s3
def test_throttled_twice_then_fine(proxy, session, work, place):
    write(work, "a", b"a")
    rule = proxy.fail("put_object", "/a", status=503, times=2)
    session.sync()
    assert rule.hits == 2
    assert independent_reader.head_tree(place) == {"a": b"a"}
    assert session.stats.failed_syncs == 0


@pytest.mark.s3
def test_refused_for_good_is_counted_and_its_cause_said_once(proxy, session, work, place, caplog):
    caplog.set_level(logging.DEBUG, logger="ray_artifact_sync.session_log")
    proxy.fail("put_object", status=403)
    for number in range(4):
        write(work, "log.txt", b"line\n" * (number + 1))
        with pytest.raises(ArtifactSyncError):
            session.sync()
    assert session.stats.failed_syncs == 4
    errors = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert len(errors) == 1
    assert "AccessDenied" in errors[0].getMessage()
    proxy.clear()
    session.sync()
    assert independent_reader.head_tree(place) == {"log.txt": b"line\n" * 4}
    assert session.metrics()["artifact_sync/failed_syncs"] == 4


@pytest.mark.s3
def test_a_failed_snapshot_is_counted_once_and_restores_all_the_same(proxy, session, work, trial, tmp_path):
    write(work, "a", b"a")
    proxy.reset("put_object", ".ray_artifact_sync-", forward=True)  # it lands, its answer is lost
    assert not save(session, "checkpoint_000000")
    assert session.stats.failed_syncs == 1
    proxy.clear()
    for content in (b"b", b"c"):
        write(work, "a", content)
        assert save(session, f"checkpoint_00000{1 + (content == b'c')}")
    abandon(session)
    # The snapshot that seemed to fail is there, so what it lists must be.
    after = open_session(tmp_path / "other node", trial(), 2)
    assert after.restore("checkpoint_000000", fresh=True).exact
    assert read_tree(after.working_dir) == {"a": b"a"}
    abandon(after)


@pytest.mark.s3
def test_a_commit_whose_answer_was_lost(proxy, session, work, place):
    """The head may have landed although the sync failed: it stays readable until the next sync replaces it."""
    write(work, "a", b"old")
    session.sync()
    write(work, "a", b"new")
    write(work, "b", b"b")
    proxy.reset("put_object", "manifest.json", forward=True)
    with pytest.raises(ArtifactSyncError):
        session.sync()
    proxy.clear()
    assert independent_reader.head_tree(place) == {"a": b"new", "b": b"b"}
    write(work, "a", b"old")
    os.unlink(os.path.join(work, "b"))
    proxy.fail("put_object", "manifest.json", status=403)
    with pytest.raises(ArtifactSyncError):
        session.sync()
    assert independent_reader.head_tree(place) == {"a": b"new", "b": b"b"}  # its `a` was preserved
    proxy.clear()
    session.sync()
    assert independent_reader.head_tree(place) == {"a": b"old"}


@pytest.mark.s3
@pytest.mark.parametrize("files", [1, 3])
def test_a_hang_ends_in_time_and_its_late_end_overwrites_nothing(proxy, trial, tmp_path, place, files):
    session = open_session(tmp_path / "work", trial(), 1, sync_timeout=1.5, retries=1)
    work = session.working_dir
    write(work, "a", b"first")
    session.sync()
    for name in "abc"[:files]:
        write(work, name, b"hangs")
    rule = proxy.hang("put_object", "/a", times=1)
    started = time.monotonic()
    with pytest.raises(SyncTimeoutError):
        session.sync()
    assert time.monotonic() - started < 1.5 + 3
    assert session.stats.failed_syncs == 1
    write(work, "a", b"newest")
    # Nothing is sent to this path while the request hangs, whatever its fate.
    with pytest.raises(ArtifactSyncError):
        session.sync()
    assert independent_reader.head_tree(place)["a"] == b"first"
    rule.release()
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            session.sync()
        except ArtifactSyncError:
            time.sleep(0.1)
        else:
            break
    time.sleep(0.3)
    tree = independent_reader.head_tree(place)
    assert tree == read_tree(work)
    assert place.read("a") == b"newest"
    abandon(session)


class Hanging(WrappedStore):
    """Like an NFS mount whose server is away: writes hang, then go on."""

    def __init__(self, inner):
        super().__init__(inner)
        self.free = threading.Event()
        self.free.set()
        self.hung = threading.Event()
        self.spared = ".ray"

    def around(self, verb, path, act):
        if verb in ("put", "append") and not path.startswith((".ray", self.spared)) and not self.free.is_set():
            self.hung.set()
            self.free.wait(30)
        return act()


def test_a_mount_that_hangs(tmp_path):
    store = Hanging(PosixStore(tmp_path / "storage"))
    session = open_session(tmp_path / "work", store, 1, sync_timeout=0.8, retries=1)
    for name in "abc":
        write(session.working_dir, name, b"1")
    session.sync()
    store.free.clear()
    for name in "abc":
        write(session.working_dir, name, b"older")
    with pytest.raises(SyncTimeoutError):
        session.sync()
    for name in "abc":
        write(session.working_dir, name, b"newest")
    with pytest.raises(ArtifactSyncError):
        session.sync()
    store.free.set()
    time.sleep(0.5)
    session.sync()
    place = independent_reader.posix_place(tmp_path / "storage")
    assert independent_reader.head_tree(place) == read_tree(session.working_dir)
    assert place.read("a") == b"newest"
    abandon(session)


class SlowListing(WrappedStore):
    """Looking around takes longer than a sync may take, once it is switched on."""

    slow = False

    def around(self, verb, path, act):
        found = act()
        if self.slow and verb in ("list", "list_files"):
            time.sleep(0.6)
        return found


def test_a_look_around_that_takes_too_long_forgets_no_checkpoint(tmp_path):
    """What was not read must not look like what is not there: the old versions would be deleted."""
    store = SlowListing(PosixStore(tmp_path / "storage"))
    first = open_session(tmp_path / "work", store, 1)
    for number in range(2):
        write(first.working_dir, "a", b"version %d" % number)
        assert save(first, f"checkpoint_00000{number}")
    write(first.working_dir, "a", b"version 2")
    first.sync()
    abandon(first)
    store.slow = True
    second = open_session(tmp_path / "second", store, 2, sync_timeout=0.5, retries=0)
    write(second.working_dir, "a", b"version 3")
    with contextlib.suppress(ArtifactSyncError):
        second.sync()
    store.slow = False
    for number in (2, 3):
        write(second.working_dir, "a", b"another %d" % number)
        save(second, f"checkpoint_00000{number}")
    place = independent_reader.posix_place(tmp_path / "storage")
    found = independent_reader.snapshots(place)
    assert len(found) == 4
    for number in range(2):
        tree = independent_reader.tree_of(place, found[f"checkpoint_00000{number}"])
        assert tree["a"] == b"version %d" % number
    abandon(second)


class DeletesAndFails(WrappedStore):
    """Old versions are deleted, and the answer says that they are not."""

    armed = False

    def around(self, verb, path, act):
        found = act()
        if self.armed and verb == "delete" and path.startswith(layout.OBJECTS):
            self.armed = False
            raise StorageError("the answer was lost")
        return found


def test_a_deletion_that_landed_and_failed(tmp_path, caplog):
    """The content comes back later: it must be preserved anew, not be taken for preserved."""
    store = DeletesAndFails(PosixStore(tmp_path / "storage"))
    session = open_session(tmp_path / "work", store, 1)

    def become(data, checkpoint=None):
        write(session.working_dir, "status", data)
        assert save(session, checkpoint) if checkpoint else session.sync()

    become(b"A", "checkpoint_000000")
    become(b"B")
    shutil.rmtree(tmp_path / "storage/checkpoint_000000")
    store.armed = True
    become(b"B", "checkpoint_000001")
    assert not store.armed
    assert "Old versions in" in caplog.text
    become(b"A", "checkpoint_000002")
    become(b"C")
    place = independent_reader.posix_place(tmp_path / "storage")
    snapshot = independent_reader.snapshots(place)["checkpoint_000002"]
    assert independent_reader.tree_of(place, snapshot) == {"status": b"A"}
    abandon(session)


def test_an_artifact_that_hangs_does_not_cost_the_checkpoint(tmp_path, caplog):
    """Its request holds the thread of all operations; the checkpoint's own files go their own way."""
    store = Hanging(PosixStore(tmp_path / "storage"))
    session = open_session(tmp_path / "work", store, 1, sync_timeout=0.5, retries=0)
    write(session.working_dir, "a", b"1")
    assert save(session, "checkpoint_000000")
    store.free.clear()
    store.spared = "checkpoint_"
    write(session.working_dir, "a", b"22")
    assert not save(session, "checkpoint_000001")
    assert "Checkpoint checkpoint_000001 of trial was saved WITHOUT its artifacts" in caplog.text
    place = independent_reader.posix_place(tmp_path / "storage")
    assert place.read("checkpoint_000001/model.bin") == b"model of checkpoint_000001"
    assert set(independent_reader.snapshots(place)) == {"checkpoint_000000"}
    store.free.set()
    abandon(session)


def test_background_syncs_go_on_after_a_hang(tmp_path):
    """One that waited for its turn behind a hanging operation, in vain, must not be the last."""
    store = Hanging(PosixStore(tmp_path / "storage"))
    session = open_session(tmp_path / "work", store, 1, sync_timeout=0.5, sync_period=0.05, retries=0)
    write(session.working_dir, "a", b"1")
    session.sync()
    store.free.clear()
    write(session.working_dir, "a", b"2")
    store.hung.wait(10)
    time.sleep(2.5)
    store.free.set()
    write(session.working_dir, "a", b"3")
    place = independent_reader.posix_place(tmp_path / "storage")
    deadline = time.monotonic() + 10
    while independent_reader.head_tree(place) != {"a": b"3"}:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    abandon(session)


def test_storage_that_is_full(small_disk, tmp_path):
    place = independent_reader.posix_place(small_disk)
    # One at a time, the largest first: `big.bin` lands, and nothing else does.
    session = open_session(tmp_path / "work", PosixStore(small_disk), 1, retries=0, max_concurrency=1)
    work = session.working_dir
    write(work, "log.txt", b"1\n")
    assert save(session, "checkpoint_000000")
    before = read_tree(work)
    with open(os.path.join(work, "log.txt"), "ab") as file:
        file.write(os.urandom(700_000))
    write(work, "big.bin", os.urandom(900_000))
    with pytest.raises(ArtifactSyncError, match=r"[Ff]ree some space|No space"):
        session.sync()
    with pytest.raises((ArtifactSyncError, OSError)):
        save(session, "checkpoint_000001", {"model": os.urandom(900_000)})
    assert independent_reader.tree_of(place, independent_reader.snapshots(place)["checkpoint_000000"]) == before
    independent_reader.head_tree(place)
    os.unlink(os.path.join(work, "big.bin"))
    (small_disk / "big.bin").unlink()
    session.sync()
    assert independent_reader.head_tree(place) == read_tree(work)
    assert not [name for name in place.names() if "/tmp/" in name]
    abandon(session)


def test_an_append_to_a_full_disk_is_an_append_the_next_time_too(small_disk, tmp_path):
    """What it has written is taken back. The whole file, once more beside the stored one, would never fit."""
    session = open_session(tmp_path / "work", PosixStore(small_disk), 1, retries=0)
    log = os.path.join(session.working_dir, "log.txt")
    write(session.working_dir, "log.txt", os.urandom(500_000))
    session.sync()
    (small_disk / "in the way").write_bytes(bytes(300_000))
    with open(log, "ab") as file:
        file.write(os.urandom(300_000))
    for _ in range(2):
        with pytest.raises(IncompleteSyncError, match=r"No space left.*Free some space"):
            session.sync()
        assert (small_disk / "log.txt").stat().st_size == 500_000
    (small_disk / "in the way").unlink()
    assert session.sync().bytes_sent == 300_000
    assert independent_reader.head_tree(independent_reader.posix_place(small_disk)) == read_tree(session.working_dir)
    abandon(session)


def test_a_node_that_is_full(small_disk, tmp_path):
    """The restore says so, and the next one, with room, is exact."""
    storage = PosixStore(tmp_path / "storage")
    session = open_session(tmp_path / "work", storage, 1)
    write(session.working_dir, "big.bin", os.urandom(900_000))
    assert save(session, "checkpoint_000000")
    tree = read_tree(session.working_dir)
    abandon(session)
    (small_disk / "in the way").write_bytes(os.urandom(400_000))
    second = open_session(small_disk / "work", PosixStore(tmp_path / "storage"), 2)
    with pytest.raises(ArtifactSyncError, match=f"No space left on device: '{second.working_dir}/big.bin'"):
        second.restore("checkpoint_000000", fresh=True)
    abandon(second)
    (small_disk / "in the way").unlink()
    third = open_session(small_disk / "work", PosixStore(tmp_path / "storage"), 3)
    # What the second left half-done was set aside and takes its room too. It may be deleted at any time.
    shutil.rmtree(small_disk / "work" / layout.SET_ASIDE)
    assert third.restore("checkpoint_000000", fresh=True).exact
    assert read_tree(third.working_dir) == tree
    abandon(third)


def test_a_node_that_is_full_from_the_start(small_disk, tmp_path):
    def begin(token):
        return open_session(small_disk / "work", PosixStore(tmp_path / "storage"), token)

    with open(small_disk / "in the way", "wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    with pytest.raises(OSError, match=f"No space left on device: '{small_disk}/work/"):
        begin(1)
    assert not list((small_disk / "work").rglob("token*"))
    (small_disk / "in the way").unlink()
    session = begin(2)
    write(session.working_dir, "a", b"a")
    assert save(session, "checkpoint_000000")
    abandon(session)


def test_a_failing_copy_keeps_files_and_directories_apart(tmp_path):
    """A file became a directory, and its old version could not be preserved: the manifest must not list both."""

    class NoCopy(WrappedStore):
        refuse = False

        def around(self, verb, path, act):
            if verb == "copy" and self.refuse:
                raise StorageError("injected")
            return act()

    store = NoCopy(PosixStore(tmp_path / "storage"))
    session = open_session(tmp_path / "work", store, 1)
    work = session.working_dir
    write(work, "d", b"a file")
    assert save(session, "checkpoint_000000")
    os.unlink(os.path.join(work, "d"))
    os.makedirs(os.path.join(work, "d", "empty"))
    write(work, "d/x", b"x")
    store.refuse = True
    with pytest.raises(IncompleteSyncError):
        session.sync()
    abandon(session)
    after = open_session(tmp_path / "work", PosixStore(tmp_path / "storage"), 2)
    assert after.restore("checkpoint_000000", fresh=True).exact
    assert read_tree(after.working_dir) == {"d": b"a file"}
    abandon(after)
