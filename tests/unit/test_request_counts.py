"""Cost follows the change: requests and bytes, counted by a proxy before real S3 servers, or by a wrapped store."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter

import pytest

from ray_artifact_sync import attempt_sync, journal_files, layout, trial_dir
from ray_artifact_sync.stores import open_store
from ray_artifact_sync.stores.posix import PosixStore
from tests.support.s3_servers import BUCKET, filesystem_at
from tests.support.sessions import WrappedStore, abandon, open_session, save

FILES = 2_000
CHANGED = 5
DATA = ("put_object", "upload_part", "upload_part_copy", "copy_object", "create_multipart", "complete_multipart")


@pytest.fixture(params=[pytest.param("rclone", marks=pytest.mark.s3), pytest.param("moto", marks=pytest.mark.s3)])
def counted(request, tmp_path):
    """A proxy with counters, and a function that gives a new store for one trial dir behind it."""
    proxy = request.getfixturevalue("proxy" if request.param == "rclone" else "moto_proxy")
    path = f"{BUCKET}/counts/{request.param}-{tmp_path.name}"
    return proxy, lambda: open_store(filesystem_at(proxy.endpoint), path)


def write_files(root, count=FILES, size=4096):
    for number in range(count):
        path = os.path.join(root, f"d{number % 20:02d}", f"f{number:04d}")
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(number.to_bytes(4, "big") * (size // 4))


def some_paths(root, start):
    return [os.path.join(root, f"d{number % 20:02d}", f"f{number:04d}") for number in range(start, start + CHANGED)]


def counted_call(proxy, call):
    proxy.reset_counts()
    result = call()
    # Not reset_counts' zeros: a Counter lists only what was sent.
    return result, Counter(proxy.counts)


def test_cost_follows_the_change(counted, tmp_path, monkeypatch):
    proxy, new_store = counted
    root = tmp_path / "work"
    write_files(root)
    session = open_session(root, new_store(), 1, set_aside=False)
    first, counts = counted_call(proxy, session.sync)
    assert first.files_sent == FILES
    # The files, the claim (which probes for conditional writes), a layer, the head; rclone's server answers a sporadic
    # 500 to PUTs into new directories, which are sent again.
    assert FILES <= counts["put_object"] <= FILES + 40
    time.sleep(0.1)  # from now on times prove that a file was not written

    monkeypatch.setattr(trial_dir, "LEASE_SECONDS", 1000.0)  # whatever else this machine does meanwhile
    monkeypatch.setattr(journal_files, "PATIENCE", 1000.0)  # likewise; test_journal.py counts what the journal costs
    again, counts = counted_call(proxy, session.sync)
    assert (again.files_sent, again.bytes_sent) == (0, 0)
    assert not counts, counts  # nothing at all is sent within the writer's lease

    monkeypatch.setattr(trial_dir, "LEASE_SECONDS", -1.0)
    _, counts = counted_call(proxy, session.sync)
    assert counts == {"get_object": 1}, counts  # "am I still the writer?"
    monkeypatch.setattr(trial_dir, "LEASE_SECONDS", 1000.0)

    _, counts = counted_call(proxy, lambda: save(session, "checkpoint_000000"))
    # The checkpoint's own file and the snapshot; which checkpoints exist (one page of the trial dir's top level).
    assert counts - Counter(get_object=1) == {"put_object": 2, "list": 1}, counts

    for path in some_paths(root, 0):
        with open(path, "r+b") as file:
            file.write(b"rewritten")
    report, counts = counted_call(proxy, session.sync)
    assert report.files_sent == CHANGED
    # 5 versions that the checkpoint needs are copied on the server, 5 files sent, 1 head. Without conditional writes, a
    # look for the driver's note, and one at the claim, right before the head.
    looks = {} if session.store.can_precondition else {"get_object": 2}
    assert counts == {"copy_object": CHANGED, "put_object": CHANGED + 1, **looks}, counts

    for path in some_paths(root, 100):
        with open(path, "ab") as file:
            file.write(b"appended")
    report, counts = counted_call(proxy, session.sync)
    assert report.files_sent == CHANGED
    assert counts == {"put_object": CHANGED + 1, **looks}, counts  # the old version is a prefix of the new one

    proxy.reset_counts()
    assert save(session, "checkpoint_000001")
    look = {} if session.store.can_precondition else {"get_object": 1}
    assert proxy.counts == {"put_object": 2, "list": 1, **look}
    assert proxy.bytes_in["put_object"] < 64 * 1024
    abandon(session)


def test_an_attempt_that_takes_over_does_not_send_what_is_there(counted, tmp_path):
    proxy, new_store = counted
    root = tmp_path / "work"
    write_files(root, 200)
    session = open_session(root, new_store(), 1, set_aside=False)
    assert save(session, "checkpoint_000000")
    abandon(session)
    second = open_session(root, new_store(), 2)
    report = second.restore("checkpoint_000000", fresh=True)
    assert (report.files_local, report.bytes_read) == (200, 0)  # from what was set aside
    sync, counts = counted_call(proxy, second.sync)
    assert (sync.files_sent, sync.bytes_sent) == (0, 0)
    assert not any(counts[kind] for kind in DATA), counts
    abandon(second)


def test_a_flat_trial_dir_is_not_listed_at_each_checkpoint(counted, tmp_path, monkeypatch):
    """Its top level takes many requests to list; the checkpoints that are kept are looked at one by one instead."""
    monkeypatch.setattr(attempt_sync, "LIST_PAGE", 10)
    proxy, new_store = counted
    root = tmp_path / "work"
    root.mkdir()
    for number in range(50):
        (root / f"{number}.txt").write_text("x")
    session = open_session(root, new_store(), 1, set_aside=False)
    for number in range(6):
        (root / "flag").write_text(str(number))
        assert save(session, f"checkpoint_{number:06d}")
        if number >= 2:  # as Ray does with num_to_keep=2, after the save
            session.store.delete([file.path for file in session.store.list(f"checkpoint_{number - 2:06d}")])
    proxy.reset_counts()
    (root / "flag").write_text("last")
    assert save(session, "checkpoint_000006")
    assert proxy.counts["list"] == 0
    assert proxy.counts["head_object"] <= 4
    kept = {name for name in session.store.list_dirs() if name.startswith("checkpoint_")}
    assert kept == {f"checkpoint_{number:06d}" for number in (4, 5, 6)}
    # What the deleted ones needed is gone, but for those of the last two saves, which Ray has not deleted yet.
    assert len(list(session.store.list(layout.OBJECTS))) <= len(kept)
    abandon(session)


class CountingStore(WrappedStore):
    def __init__(self, inner):
        super().__init__(inner)
        self.counts: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self._lock = threading.Lock()

    def around(self, verb, path, act):
        with self._lock:
            self.counts[verb] += 1
            self.counts["journal"] += path.startswith(layout.JOURNAL)
        return act()

    def put(self, path, data, **options):
        stored = super().put(path, data, **options)
        ours = layout.is_reserved(path) or layout.snapshot_token(path.rpartition("/")[2]) is not None
        with self._lock:
            self.bytes["bookkeeping" if ours else "content"] += stored.size
        return stored

    def reset(self):
        self.counts.clear()
        self.bytes.clear()


@pytest.mark.exhaustive
def test_bookkeeping_of_100_000_files(tmp_path):
    root = tmp_path / "work"
    write_files(root, 100_000, size=4)
    store = CountingStore(PosixStore(tmp_path / "storage"))
    session = open_session(root, store, 1, set_aside=False, sync_timeout=600)
    assert save(session, "checkpoint_000000")
    time.sleep(0.1)
    times = {}
    for kind, mode in (("rewritten", "r+b"), ("appended", "ab")):
        for path in some_paths(root, 200 if mode == "ab" else 100):
            with open(path, mode) as file:
                file.write(b"new")
        store.reset()
        started = time.monotonic()
        assert save(session, f"checkpoint_{len(times) + 1:06d}")
        times[kind] = time.monotonic() - started
        assert store.bytes["bookkeeping"] <= 64 * 1024, store.bytes
        assert store.counts["list"] == 0
        # 5 files, head, snapshot, the checkpoint's own file; on a local disk, where an append costs next to nothing,
        # the two lines of the journal.
        assert store.counts["put"] + store.counts["append"] == CHANGED + 3 + store.counts["journal"], store.counts
        assert store.counts["journal"] == 1
        assert store.counts["copy"] == (CHANGED if kind == "rewritten" else 0)
        print(kind, f"{times[kind]:.2f} s", dict(store.counts), dict(store.bytes))
    abandon(session)
