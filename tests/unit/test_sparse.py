"""Holes: a sparse file needs no more room in storage, in a copy, and after a restore, and is the same byte for byte."""

from __future__ import annotations

import os

import pytest

from ray_artifact_sync.stores import posix
from ray_artifact_sync.stores.posix import PosixStore, copy_data
from ray_artifact_sync.stores.sparse import data_ranges, is_hole
from tests.support.sessions import abandon, open_session, save

MIB = 1024 * 1024
SHAPES = {
    "hole in the middle": [b"a" * 5000, 20 * MIB, b"b" * MIB],
    "hole at the end": [b"a" * MIB, 20 * MIB],
    "hole at the start": [20 * MIB, b"b"],
    "nothing but a hole": [20 * MIB],
    "no hole": [b"x" * 3 * MIB],
    "zeros that were written": [bytes(2 * MIB), b"y", bytes(100_000)],
    "empty": [],
}
shapes = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


@pytest.fixture
def disk(tmp_path):
    """A place that keeps holes."""
    probe = tmp_path / "probe"
    with open(probe, "wb") as file:
        file.truncate(MIB)
    if room(probe):
        pytest.skip("this file system has no holes")
    return tmp_path


def make(path, shape) -> bytes:
    with open(path, "wb") as file:
        for part in shape:
            if isinstance(part, int):
                file.truncate(file.seek(part, os.SEEK_CUR))
            else:
                file.write(part)
    return path.read_bytes()


def room(path) -> int:
    return os.stat(path).st_blocks * 512


@shapes
def test_stored_copied_and_restored(disk, shape):
    store = PosixStore(disk / "storage")
    session = open_session(disk / "work", store, 1)
    local = disk / "work" / "file"
    content = make(local, shape)
    most = (
        sum(len(part) for part in shape if isinstance(part, bytes)) + 8 * MIB
    )  # a chunk that is zeros in part is written
    session.sync()
    assert (disk / "storage" / "file").read_bytes() == content
    assert room(disk / "storage" / "file") <= most
    store.copy("file", "copy")
    assert (disk / "storage" / "copy").read_bytes() == content
    assert room(disk / "storage" / "copy") <= most
    assert save(session, "checkpoint_000000")
    abandon(session)
    after = open_session(disk / "elsewhere", PosixStore(disk / "storage"), 2)
    assert after.restore("checkpoint_000000", fresh=True).exact
    assert (disk / "elsewhere" / "file").read_bytes() == content
    assert room(disk / "elsewhere" / "file") <= most
    abandon(after)


def test_an_append_of_zeros(disk):
    store = PosixStore(disk / "storage")
    store.put("file", b"abc")
    written = store.append("file", 3, [bytes(MIB), b"d", bytes(MIB)])
    assert written.size == 2 * MIB + 4
    assert store.read("file") == b"abc" + bytes(MIB) + b"d" + bytes(MIB)


def test_a_restore_writes_zeros_over_old_content(disk):
    """In place: a hole is only left where nothing was before."""
    store = PosixStore(disk / "storage")
    session = open_session(disk / "work", store, 1)
    local = disk / "work" / "file"
    content = make(local, [b"a" * MIB, 8 * MIB])
    assert save(session, "checkpoint_000000")
    local.write_bytes(b"z" * 3 * MIB)
    session.restore("checkpoint_000000", fresh=False)
    assert local.read_bytes() == content
    abandon(session)


def test_a_file_system_that_cannot_tell(disk, monkeypatch):
    content = make(disk / "source", [b"a", 3 * MIB, b"b"])

    def seek(descriptor, position, how, real=os.lseek):
        if how == os.SEEK_DATA:
            raise OSError(22, "Invalid argument")
        return real(descriptor, position, how)

    monkeypatch.setattr(posix.os, "lseek", seek)
    source, target = os.open(disk / "source", os.O_RDONLY), os.open(disk / "target", os.O_WRONLY | os.O_CREAT)
    copy_data(source, target)
    assert list(data_ranges(source, 10)) == [(0, 10)]
    os.close(source)
    os.close(target)
    assert (disk / "target").read_bytes() == content


def test_what_a_hole_is():
    assert is_hole(bytes(64 * 1024))
    assert not is_hole(bytes(64 * 1024 - 1))
    assert not is_hole(bytes(40_000) + b"x" + bytes(40_000))
