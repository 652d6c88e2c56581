"""What goes wrong in the life of a trial: a test for each kind that has been reported of tools like this one.

- A slow save runs, a new file is written, the trial stops: here.
- Written in cleanup(), in finally:, in the step that raised, after the last report: `integration/test_class_trainable`,
  `integration/test_function_trainable`.
- `reuse_actors=True`: the same two.
- Restart on the same node, local data newer than the checkpoint: `integration/test_class_trainable`; `test_attacks`.
- Another trial's checkpoint (PBT): `integration/test_restore_workflows`; `test_attacks`.
- The checkpoint was deleted: here; `integration/test_restore_workflows`.
- One file of ten is slow and the process is killed: here; `test_kill_at_any_moment`.
- A background upload failed: here; `test_refused`; `integration/test_endings`.
"""

from __future__ import annotations

import itertools
import json
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from ray_artifact_sync import layout
from ray_artifact_sync.errors import IncompleteSyncError
from ray_artifact_sync.stores import open_store
from tests.support import independent_reader
from tests.support.s3_servers import BUCKET, filesystem_at
from tests.support.sessions import abandon, open_session, read_tree, save

pytestmark = pytest.mark.s3

ROOT = Path(__file__).parents[2]
CHECKPOINT = "checkpoint_000000"
_numbers = itertools.count()


@pytest.fixture
def prefix():
    return f"life/{next(_numbers)}"


@pytest.fixture
def new_store(proxy, prefix):
    return lambda: open_store(filesystem_at(proxy.endpoint), f"{BUCKET}/{prefix}")


@pytest.fixture
def place(new_store):
    return independent_reader.store_place(new_store())


def wait_until(condition, seconds=30):
    ends = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.01)


def test_a_slow_save_is_running_a_new_file_is_written_and_the_trial_stops(proxy, new_store, place, tmp_path):
    """The final version of everything lands: of the file that is being sent, of one that was sent, of a new one."""
    session = open_session(tmp_path / "work", new_store(), 1)
    slow, sent, new = (tmp_path / "work" / name for name in ("slow.bin", "sent.txt", "new.txt"))
    slow.write_bytes(b"1" * 1000)
    sent.write_text("first")
    rule = proxy.hang("put_object", "slow.bin", times=1)
    running = session._submit(session._background_sync, "A background sync")
    wait_until(rule.reached.is_set)
    slow.write_bytes(b"2" * 2000)
    sent.write_text("last")
    new.write_text("written meanwhile")
    stop = threading.Thread(target=session.close)
    stop.start()
    assert not running.done()
    rule.release()
    stop.join(60)
    assert not stop.is_alive()
    assert independent_reader.head_tree(place) == {
        "slow.bin": b"2" * 2000,
        "sent.txt": b"last",
        "new.txt": b"written meanwhile",
    }
    assert session.stats.failed_syncs == 0


def test_the_checkpoint_was_deleted_and_its_artifacts_outlive_it(new_store, tmp_path, caplog):
    """`num_to_keep` took the checkpoint that is asked for: the newest artifacts come back, and one line says so."""
    session = open_session(tmp_path / "work", new_store(), 1)
    for number in range(3):
        with open(tmp_path / "work/log.txt", "a") as file:
            file.write(f"{number}\n")
        (tmp_path / "work/rewritten.txt").write_text(f"version {number}")
        assert save(session, f"checkpoint_{number:06d}")
    store = new_store()
    for number in range(2):
        store.delete([file.path for file in store.list(f"checkpoint_{number:06d}")])
    session.close()
    newest = {"log.txt": b"0\n1\n2\n", "rewritten.txt": b"version 2"}
    for name, exact in (("checkpoint_000002", True), ("checkpoint_000000", False)):
        again = open_session(tmp_path / name, new_store(), 3 - exact)
        caplog.clear()
        assert again.restore(name, fresh=True).exact is exact
        assert read_tree(tmp_path / name) == newest
        said = [record.message for record in caplog.records if record.levelname == "WARNING"]
        assert len(said) == (0 if exact else 1)
        abandon(again)
    assert said[0].startswith("Checkpoint checkpoint_000000 of trial has no snapshot of its artifacts")


KILLED = """
import json, os, sys
from tests.support.victim import store_of
from tests.support.sessions import open_session, save

job = json.loads(sys.argv[1])
session = open_session(job["working_dir"], store_of(job["storage"]), 1, retries=0)
for number in range(10):
    with open(os.path.join(job["working_dir"], f"f{number}.txt"), "wb") as file:
        file.write(b"content %d" % number)
save(session, "checkpoint_000000")
"""


def test_one_file_of_ten_is_slow_and_the_process_is_killed(proxy, new_store, prefix, place, tmp_path):
    """Neither head nor snapshot names what is not there; the nine that went through harm nobody."""
    rule = proxy.hang("put_object", "/f7.txt")
    job = {"working_dir": str(tmp_path / "work"), "storage": {"endpoint": proxy.endpoint, "prefix": prefix}}
    victim = subprocess.Popen([sys.executable, "-c", KILLED, json.dumps(job)], cwd=ROOT)
    try:
        wait_until(lambda: rule.reached.is_set() and len(list(place_names(place))) == 9, 60)
    finally:
        victim.send_signal(signal.SIGKILL)
        victim.wait()
    proxy.clear()
    names = set(place.names())
    assert layout.MANIFEST not in names
    assert not any(name.startswith(CHECKPOINT) for name in names)
    again = open_session(tmp_path / "again", new_store(), 2)
    (tmp_path / "again/f7.txt").write_text("of the next attempt")
    assert save(again, CHECKPOINT)
    abandon(again)
    snapshot = independent_reader.snapshots(place)[CHECKPOINT]
    assert independent_reader.tree_of(place, snapshot) == {"f7.txt": b"of the next attempt"}


def place_names(place):
    return (name for name in place.names() if name.startswith("f"))


@pytest.mark.parametrize("on_error", ["warn", "raise"])
def test_a_background_upload_failed(proxy, new_store, place, tmp_path, caplog, on_error):
    """It is said and counted at once, and the next save meets it again: nothing is taken for sent."""
    session = open_session(tmp_path / "work", new_store(), 1, retries=0, on_error=on_error)
    (tmp_path / "work/refused.bin").write_bytes(b"x")
    (tmp_path / "work/fine.txt").write_text("fine")
    proxy.fail("put_object", "refused.bin", status=403)
    session._submit(session._background_sync, "A background sync").wait()
    assert session.stats.failed_syncs == 1
    assert session.metrics()["artifact_sync/failed_syncs"] == 1
    assert [record.levelname for record in caplog.records if "refused.bin" in record.message] == ["ERROR"]
    if on_error == "raise":
        with pytest.raises(IncompleteSyncError, match=r"refused\.bin"):
            save(session, CHECKPOINT)
    else:
        assert not save(session, CHECKPOINT), "a checkpoint without a snapshot"
    assert session.stats.failed_syncs == 2
    proxy.clear()
    assert save(session, "checkpoint_000001")
    snapshots = independent_reader.snapshots(place)
    assert snapshots.keys() == {"checkpoint_000001"}
    assert independent_reader.tree_of(place, snapshots["checkpoint_000001"]) == {
        "refused.bin": b"x",
        "fine.txt": b"fine",
    }
    abandon(session)
