"""An attempt that was replaced writes nothing over its successor's files: stopped, resumed, or simply still alive."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from ray_artifact_sync import layout
from ray_artifact_sync.concurrency import Deadline
from ray_artifact_sync.errors import ArtifactConflictError
from ray_artifact_sync.stores import open_store
from ray_artifact_sync.stores.cloud import CloudStore
from ray_artifact_sync.stores.posix import PosixStore
from ray_artifact_sync.trial_dir import TrialDir, TrialWriter
from tests.support import independent_reader
from tests.support.s3_servers import BUCKET, filesystem_at
from tests.support.sessions import abandon, open_session, read_tree, save
from tests.support.victim import store_of

AT_ZERO = {"log.txt": b"one\n", "same.txt": b"the same in both attempts\n"}
OF_NEW = {"log.txt": b"one\nNEW ATTEMPT\n", "new.txt": b"new\n", "same.txt": AT_ZERO["same.txt"]}


class OldWriter:
    """The old attempt's process, and the lines that it printed."""

    def __init__(self, **job) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.old_writer", json.dumps(job)], stdout=subprocess.PIPE, text=True
        )
        self.lines: dict[str, str] = {}
        self._reader = threading.Thread(target=self._listen, daemon=True)
        self._reader.start()

    def _listen(self):
        for line in self.process.stdout:
            word, _, text = line.strip().partition(" ")
            self.lines[word] = text

    def wait_for(self, word, seconds=30):
        deadline = time.monotonic() + seconds
        while word not in self.lines:
            assert time.monotonic() < deadline, (word, self.lines)
            time.sleep(0.01)
        return self.lines[word]

    def signal(self, number):
        self.process.send_signal(number)

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.process.kill()  # also ends a stopped process
        self.process.wait()
        self._reader.join(10)
        self.process.stdout.close()


def replace(working_dir, store, *, restore=True):
    """A new attempt on another node: goes back to the checkpoint, and goes on from there."""
    session = open_session(working_dir, store, 2)
    if restore:
        assert session.restore("checkpoint_000000", fresh=True).exact
        assert read_tree(working_dir) == AT_ZERO
    with open(os.path.join(working_dir, "log.txt"), "ab") as file:
        file.write(b"NEW ATTEMPT\n")
    Path(working_dir, "new.txt").write_bytes(b"new\n")
    assert save(session, "checkpoint_000001", {"model.bin": b"new"})
    return session


def wait_until(condition, seconds=30):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_posix_refuses_even_the_rename_in_flight(tmp_path):
    storage, flag = tmp_path / "storage", str(tmp_path / "flag")
    with OldWriter(working_dir=str(tmp_path / "old"), storage=str(storage), token=1, pause=flag) as old:
        old.wait_for("syncing")
        wait_until(lambda: os.path.exists(f"{flag}.reached"))
        old.signal(signal.SIGSTOP)
        session = replace(tmp_path / "new", PosixStore(storage))
        os.unlink(f"{flag}.hold")
        old.signal(signal.SIGCONT)
        assert old.wait_for("sync") == "ArtifactConflictError"
        assert old.wait_for("checkpoint") == "ArtifactConflictError"
        assert old.wait_for("close") == "fine"
    place = independent_reader.posix_place(storage)
    assert independent_reader.head_tree(place) == OF_NEW
    assert {path: place.read(path) for path in OF_NEW} == OF_NEW
    assert place.read("checkpoint_000001/model.bin") == b"new"
    snapshots = independent_reader.snapshots(place)
    assert independent_reader.tree_of(place, snapshots["checkpoint_000000"]) == AT_ZERO
    assert independent_reader.tree_of(place, snapshots["checkpoint_000001"]) == OF_NEW
    abandon(session)


@pytest.mark.parametrize(
    "server",
    [
        pytest.param("moto", marks=pytest.mark.s3),
        pytest.param("rclone", marks=pytest.mark.s3),
        pytest.param("azurite", marks=pytest.mark.azure),
    ],
)
def test_a_request_in_flight_to_an_object_store(server, request, tmp_path):
    proxy = request.getfixturevalue("proxy" if server == "rclone" else f"{server}_proxy")
    prefix = f"writers/{tmp_path.name}"
    storage = {"endpoint": proxy.endpoint, "prefix": prefix, "server": server}
    new_store = lambda: store_of(storage)  # noqa: E731
    place = independent_reader.store_place(new_store())
    # The first PUT of log.txt passes, the second hangs on its way.
    rule = proxy.hang("put_object", "/log.txt", times=1)
    with OldWriter(working_dir=str(tmp_path / "old"), storage=storage, token=1) as old:
        wait_until(rule.reached.is_set)
        first, rule = rule, proxy.hang("put_object", "/log.txt", times=1)  # set before the old attempt can go on
        first.release()
        old.wait_for("saved")
        old.wait_for("syncing")
        wait_until(rule.reached.is_set)
        old.signal(signal.SIGSTOP)
        proxy_log = len(proxy.log)
        session = replace(tmp_path / "new", new_store())
        assert session.store.can_precondition == (server != "rclone")
        rule.release()  # the bytes that the stopped process had sent reach the server now
        wait_until(lambda: proxy.in_flight == 0)
        old.signal(signal.SIGCONT)
        assert old.wait_for("sync", 60) == "ArtifactConflictError"
        assert old.wait_for("checkpoint") == "ArtifactConflictError"
        assert old.wait_for("close") == "fine"
        assert len(proxy.log) > proxy_log
    snapshots = independent_reader.snapshots(place)
    assert independent_reader.tree_of(place, snapshots["checkpoint_000000"]) == AT_ZERO
    assert place.read("checkpoint_000001/model.bin") == b"new"
    assert json.loads(place.read(layout.WRITER))["token"] == layout.make_token(2)
    if server != "rclone":
        assert independent_reader.head_tree(place) == OF_NEW
        assert independent_reader.tree_of(place, snapshots["checkpoint_000001"]) == OF_NEW
        assert place.read("log.txt") == OF_NEW["log.txt"]
    else:
        # What no store without conditional writes can prevent: the request that was under way lands. It is noticed.
        assert place.read("log.txt") == b"OLD ATTEMPT\n"
        with pytest.raises(AssertionError, match=r"log\.txt"):
            independent_reader.head_tree(place)
        # The new attempt goes on; from its next write of the file on, all is well again.
        with open(tmp_path / "new" / "log.txt", "ab") as file:
            file.write(b"more\n")
        assert save(session, "checkpoint_000002")
        after = {**OF_NEW, "log.txt": OF_NEW["log.txt"] + b"more\n"}
        assert independent_reader.head_tree(place) == after
        found = independent_reader.snapshots(place)
        assert independent_reader.tree_of(place, found["checkpoint_000000"]) == AT_ZERO
        assert independent_reader.tree_of(place, found["checkpoint_000001"]) == OF_NEW  # a prefix of what is there now
        assert independent_reader.tree_of(place, found["checkpoint_000002"]) == after
    abandon(session)


@pytest.mark.s3
def test_a_large_upload_that_was_stopped_is_not_completed(moto_proxy, tmp_path):
    """Multipart uploads know no preconditions: the writer is asked before each chunk is read instead.

    What has been read by then (some 40 MiB: the parts in flight) may still be completed; nothing here can stop that.
    """
    proxy, prefix = moto_proxy, f"writers/{tmp_path.name}"
    new_store = lambda: open_store(filesystem_at(proxy.endpoint), f"{BUCKET}/{prefix}")  # noqa: E731
    (tmp_path / "old").mkdir()
    old = open_session(tmp_path / "old", new_store(), 1, retries=0)
    content = os.urandom(1 << 20)
    with open(tmp_path / "old" / "big.bin", "wb") as file:
        file.writelines([content] * 96)
    rule = proxy.hang("upload_part", "big.bin")
    errors = []

    def sync():
        try:
            old.sync()
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=sync)
    thread.start()
    wait_until(rule.reached.is_set)
    time.sleep(2.1)  # longer than the lease
    new = open_session(tmp_path / "new", new_store(), 2)
    Path(tmp_path, "new", "big.bin").write_bytes(b"new")
    new.sync()
    rule.release()
    thread.join(60)
    assert isinstance(errors[0], ArtifactConflictError), errors
    assert independent_reader.store_place(new_store()).read("big.bin") == b"new"
    assert not proxy.counts["complete_multipart"]
    abandon(old)
    abandon(new)


# --- on the same node --------------------------------------------------------------------------------


def test_a_new_attempt_waits_for_a_living_one(tmp_path):
    """Large `predecessor_wait`: the old one's last flush is complete before its files are moved away."""
    storage = tmp_path / "storage"
    with OldWriter(working_dir=str(tmp_path / "work"), storage=str(storage), token=1, linger=1.0) as old:
        old.wait_for("sync")
        session = open_session(tmp_path / "work", PosixStore(storage), 2, predecessor_wait=30)
        assert old.wait_for("close") == "fine"  # said before `begin` returned, or right after
        assert old.lines["checkpoint"] == "fine"
    place = independent_reader.posix_place(storage)
    assert place.read("only-old.txt") == b"later\n"
    assert read_tree(tmp_path / "work") == {}
    report = session.restore("checkpoint_000001", fresh=True)
    assert report.exact
    assert report.files_local == 3
    abandon(session)


def test_an_old_attempt_that_does_not_end(tmp_path):
    """Small `predecessor_wait`: the new one goes on without it, whose flush then takes nothing of the new one's."""
    storage, flag = tmp_path / "storage", str(tmp_path / "flag")
    with OldWriter(working_dir=str(tmp_path / "work"), storage=str(storage), token=1, pause=flag) as old:
        old.wait_for("syncing")
        wait_until(lambda: os.path.exists(f"{flag}.reached"))
        started = time.monotonic()
        session = open_session(tmp_path / "work", PosixStore(storage), 2, predecessor_wait=0.3)
        assert session.restore("checkpoint_000000", fresh=True).exact
        Path(tmp_path, "work", "secret of the new.txt").write_bytes(b"new")
        session.sync()
        assert time.monotonic() - started < 10  # the old one holds the node's lock all the time
        os.unlink(f"{flag}.hold")
        assert old.wait_for("sync") == "ArtifactConflictError"
        assert old.wait_for("checkpoint") == "ArtifactConflictError"
        assert old.wait_for("close") == "fine"
    # `only-old.txt` was written into the working dir by the old process after the new one began: nobody can tell whose
    # it is. But the old one sent nothing.
    place = independent_reader.posix_place(storage)
    assert independent_reader.head_tree(place) == {**AT_ZERO, "secret of the new.txt": b"new"}
    abandon(session)


def test_a_stopped_process_that_holds_the_lock_stops_nobody(tmp_path):
    storage, flag = tmp_path / "storage", str(tmp_path / "flag")
    with OldWriter(working_dir=str(tmp_path / "work"), storage=str(storage), token=1, pause=flag) as old:
        wait_until(lambda: os.path.exists(f"{flag}.reached"))
        old.signal(signal.SIGSTOP)
        started = time.monotonic()
        session = open_session(tmp_path / "work", PosixStore(storage), 2, predecessor_wait=0.5, sync_timeout=30)
        for number in range(5):
            Path(tmp_path, "work", "log.txt").write_text(f"new {number}\n")
            session.sync()
        assert time.monotonic() - started < 5  # waited for the lock once, not at each sync
        assert independent_reader.head_tree(independent_reader.posix_place(storage)) == {"log.txt": b"new 4\n"}
        abandon(session)


def test_a_loser_lets_go_of_the_working_dir(tmp_path):
    store = PosixStore(tmp_path / "storage")
    new = open_session(tmp_path / "work", store, 2)
    abandon(new)
    with pytest.raises(ArtifactConflictError):
        open_session(tmp_path / "work", PosixStore(tmp_path / "storage"), 1)
    # In another process, since record locks do not hold within one.
    code = (
        "import sys; from tests.support.sessions import *; from ray_artifact_sync.stores.posix import PosixStore;"
        "open_session(sys.argv[1], PosixStore(sys.argv[2]), 3, predecessor_wait=60)"
    )
    started = time.monotonic()
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "work"), str(tmp_path / "storage")], check=True)
    assert time.monotonic() - started < 30


# --- the claim ---------------------------------------------------------------------------------------


def test_two_that_claim_at_once(tmp_path):
    """Whatever the order of their requests, the larger token wins, and the other one is told."""
    for _ in range(30):
        root = tmp_path / os.urandom(4).hex()
        writers = [TrialWriter(TrialDir(PosixStore(root), "t"), layout.make_token(token)) for token in (1, 2, 3)]
        lost = []

        def claim(writer, lost=lost):
            try:
                writer.claim()
            except ArtifactConflictError:
                lost.append(writer.token)

        threads = [threading.Thread(target=claim, args=(writer,)) for writer in writers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        writers[2].confirm()
        writers[2].commit_head(open_head())
        for writer in writers[:2]:
            with pytest.raises(ArtifactConflictError):
                writer.confirm()
            with pytest.raises(ArtifactConflictError):
                writer.commit_head(open_head())


def open_head():
    from ray_artifact_sync.manifest import ManifestStack

    return ManifestStack()


def test_an_older_claim_that_wrote_last_is_taken_back():
    """Without preconditions a slow older claim can overwrite a newer one; the newer one puts that right."""
    from obstore.store import MemoryStore

    client = MemoryStore()

    def writer(token):
        store = CloudStore(client, "t")
        store.can_precondition = False
        return TrialWriter(TrialDir(store, "t"), layout.make_token(token))

    old, new = writer(1), writer(2)
    new.claim()
    old.store.put(layout.WRITER, old._claim_body())  # it had read before `new` wrote
    new.confirm()
    with pytest.raises(ArtifactConflictError):
        old.confirm()


def test_a_damaged_claim_does_not_hide_what_is_there(tmp_path):
    session = open_session(tmp_path / "work", PosixStore(tmp_path / "storage"), 1)
    Path(session.working_dir, "a").write_bytes(b"old")
    assert save(session, "checkpoint_000000")
    abandon(session)
    (tmp_path / "storage" / layout.WRITER).write_bytes(b"{")
    session = open_session(tmp_path / "other", PosixStore(tmp_path / "storage"), 2)
    Path(session.working_dir, "a").write_bytes(b"new")
    assert save(session, "checkpoint_000001")
    place = independent_reader.posix_place(tmp_path / "storage")
    found = independent_reader.snapshots(place)
    assert independent_reader.tree_of(place, found["checkpoint_000000"]) == {"a": b"old"}
    abandon(session)


def test_many_threads_ask_once_for_each_lease(tmp_path, monkeypatch):
    from ray_artifact_sync import trial_dir

    writer = TrialWriter(TrialDir(PosixStore(tmp_path), "t"), layout.make_token(1))
    writer.claim()
    monkeypatch.setattr(trial_dir, "LEASE_SECONDS", 0.05)
    asked = []
    read = writer._read_writer
    monkeypatch.setattr(writer, "_read_writer", lambda: (asked.append(1), time.sleep(0.02), read())[-1])
    time.sleep(0.06)
    threads = [threading.Thread(target=writer.check) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(asked) <= 2


def test_engine_writes_never_without_condition_where_conditions_work(tmp_path):
    """A path whose content is not known (a failed upload) is not overwritten blindly."""
    from obstore.store import MemoryStore

    client = MemoryStore()
    old = open_session(tmp_path / "old", CloudStore(client, "t"), 1)
    Path(old.working_dir, "a").write_bytes(b"old")
    old.sync()
    new = open_session(tmp_path / "new", CloudStore(client, "t"), 2)
    Path(new.working_dir, "b").write_bytes(b"new")
    new.sync()
    from ray_artifact_sync.local_files import ConsistentReader
    from ray_artifact_sync.plan import PathState

    with pytest.raises(ArtifactConflictError):
        # Still within the old one's lease.
        old._engine.put_file("b", ConsistentReader(f"{old.working_dir}/a"), 3, PathState(), Deadline())
    assert new.store.read("b") == b"new"
    abandon(old)
    abandon(new)
