"""Files that the program writes through a mapping: later writes to a page do not show in the file's times."""

from __future__ import annotations

import mmap
import os
import time

import pytest

from ray_artifact_sync.local_files import mapped_inodes
from ray_artifact_sync.stores.posix import PosixStore
from tests.support import independent_reader
from tests.support.sessions import open_session, save

pytestmark = pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="only Linux tells what is mapped")


@pytest.fixture
def mapped(tmp_path):
    """A file of the working dir, and its mapping."""
    (tmp_path / "work").mkdir()
    path = tmp_path / "work/state.bin"
    path.write_bytes(b"0" * mmap.PAGESIZE)
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0) as mapping:
        yield path, mapping


def test_only_what_may_be_written_counts(mapped, tmp_path):
    path, _ = mapped
    other = tmp_path / "read.bin"
    other.write_bytes(b"1")
    with open(other, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ):
        assert os.stat(path).st_ino in mapped_inodes()
        assert os.stat(other).st_ino not in mapped_inodes()


def settle(path):
    """Makes the file old enough for its times to be believed."""
    past = time.time() - 60
    os.utime(path, (past, past))
    while time.time_ns() - os.stat(path).st_ctime_ns < 100_000_000:
        time.sleep(0.01)


def test_a_checkpoint_has_what_the_mapping_says(mapped, tmp_path):
    path, mapping = mapped
    session = open_session(tmp_path / "work", PosixStore(tmp_path / "storage"), 1, set_aside=False)
    mapping[:1] = b"1"  # the page is dirty from here on
    settle(path)
    session.sync()
    before = os.stat(path)
    mapping[:1] = b"2"
    after = os.stat(path)
    assert (after.st_mtime_ns, after.st_ctime_ns) == (before.st_mtime_ns, before.st_ctime_ns), "no test of anything"
    assert save(session, "checkpoint_000000")
    place = independent_reader.posix_place(tmp_path / "storage")
    snapshot = independent_reader.snapshots(place)["checkpoint_000000"]
    assert independent_reader.tree_of(place, snapshot)["state.bin"][:1] == b"2"
    # And once more after the mapping is gone: what was written last.
    mapping[:1] = b"3"
    mapping.close()
    session.close()
    assert independent_reader.head_tree(place)["state.bin"][:1] == b"3"
