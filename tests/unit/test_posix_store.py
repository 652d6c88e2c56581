"""What only the POSIX store has: the kernel's failures, links, and the fence between attempts."""

from __future__ import annotations

import errno
import os
import threading
import time

import pytest

from ray_artifact_sync.errors import (
    ArtifactConflictError,
    ArtifactNotFoundError,
    PreconditionFailedError,
    StorageError,
    StoragePermissionError,
)
from ray_artifact_sync.layout import TMP, make_token
from ray_artifact_sync.stores import posix
from ray_artifact_sync.stores.posix import PosixStore


@pytest.fixture
def root(tmp_path):
    return tmp_path / "root"


@pytest.fixture
def store(root):
    return PosixStore(root)


def everything(root) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*"))


def failing(code: int):
    def fail(*args, **kwargs):
        raise OSError(code, os.strerror(code))

    return fail


# --- temporary files -----------------------------------------------------------------------------


def test_a_one_off_write_leaves_nothing_else(store, root):
    store.put("a/b", b"x")
    assert everything(root) == ["a", "a/b"]


def test_a_failed_write_leaves_nothing(store, root):
    def broken():
        yield b"x"
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        store.put("a/b", broken())
    assert everything(root) == []


def test_new_files_respect_the_umask(store, root):
    before = os.umask(0o027)
    try:
        store.put("x", b"1")
        store.copy("x", "y")
        store.put("z", b"1", if_absent=True)
    finally:
        os.umask(before)
    assert {oct((root / name).stat().st_mode & 0o777) for name in "xyz"} == {"0o640"}


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_names_the_place_and_cleans_up(store, root, monkeypatch, code):
    store.put("x", b"old")
    monkeypatch.setattr(posix.os, "write", failing(code))
    with pytest.raises(StorageError, match=str(root)) as caught:
        store.put("x", b"new")
    assert not caught.value.retryable
    monkeypatch.undo()
    assert store.read("x") == b"old"
    assert everything(root) == ["x"]


def test_a_full_disk_found_at_close(store, root, monkeypatch):
    real = os.close

    def close(descriptor):
        real(descriptor)
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(posix.os, "close", close)
        with pytest.raises(StorageError, match="space"):
            store.put("x", b"new")
    assert everything(root) == []


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.ETIMEDOUT])
def test_passing_errors_are_retryable(store, monkeypatch, code):
    monkeypatch.setattr(posix.os, "write", failing(code))
    with pytest.raises(StorageError) as caught:
        store.put("x", b"new")
    assert caught.value.retryable


@pytest.mark.parametrize("code", [errno.EACCES, errno.EPERM, errno.EROFS])
def test_refusals(store, monkeypatch, code):
    monkeypatch.setattr(posix.os, "replace", failing(code))
    with pytest.raises(StoragePermissionError) as caught:
        store.put("x", b"new")
    assert isinstance(caught.value, PermissionError)
    assert not caught.value.retryable


def test_short_writes_are_continued(store, monkeypatch):
    real = os.write
    monkeypatch.setattr(posix.os, "write", lambda fd, data: real(fd, bytes(data[:3])))
    store.put("x", b"0123456789")
    store.append("x", 10, [b"abcdefgh"])
    assert store.read("x") == b"0123456789abcdefgh"


# --- file against directory ----------------------------------------------------------------------


def test_a_directory_is_in_the_way(store, root):
    store.put("d/f", b"x")
    with pytest.raises(StorageError, match="directory has the name") as caught:
        store.put("d", b"x")
    assert not caught.value.retryable
    assert everything(root) == ["d", "d/f"]


@pytest.mark.parametrize("path", ["f/below", "f/deep/below"])
def test_a_file_is_in_the_way(store, root, path):
    store.put("f", b"x")
    with pytest.raises(StorageError, match="file has the name") as caught:
        store.put(path, b"y")
    assert not caught.value.retryable
    assert everything(root) == ["f"]
    with pytest.raises(StorageError, match="file has the name"):
        store.put(path, b"y", if_absent=True)


def test_an_empty_directory_in_the_way_is_not_replaced(store, root):
    store.make_dir("d")
    with pytest.raises(StorageError):
        store.put("d", b"x")
    assert everything(root) == ["d"]


def test_a_delete_next_to_a_put_never_loses_the_put(store):
    """The delete tidies the directory away that the put is about to use."""
    stop = threading.Event()

    def tidy():
        while not stop.is_set():
            store.put("d/e/other", b"x")
            store.delete(["d/e/other"])

    thread = threading.Thread(target=tidy)
    thread.start()
    try:
        for number in range(300):
            store.put("d/e/mine", str(number).encode())
            store.delete(["d/e/mine"])
    finally:
        stop.set()
        thread.join()


# --- what is not an ordinary file ----------------------------------------------------------------


def test_links_are_neither_listed_nor_followed(store, root, tmp_path):
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret").write_text("secret")
    store.put("inside", b"x")
    (root / "link").symlink_to(tmp_path / "outside" / "secret")
    (root / "dirlink").symlink_to(tmp_path / "outside")
    (root / "dangling").symlink_to("nowhere")
    assert [file.path for file in store.list()] == ["inside"]
    assert [file.path for file in store.list_files()] == ["inside"]
    assert store.list_dirs() == []
    assert store.stat("link") is None
    with pytest.raises(ArtifactNotFoundError):
        store.read("link")
    with pytest.raises(ArtifactNotFoundError):
        store.copy("link", "copy")
    with pytest.raises(StorageError):
        store.append("link", 6, [b"x"])
    # A write replaces the link itself, and a delete removes it.
    store.put("link", b"new")
    assert store.read("link") == b"new"
    store.delete(["dangling", "dirlink"])
    assert (tmp_path / "outside" / "secret").read_text() == "secret"


def test_fifos_do_not_hang(store, root):
    store.put("x", b"1")
    os.mkfifo(root / "fifo")
    assert [file.path for file in store.list()] == ["x"]
    assert store.stat("fifo") is None
    with pytest.raises(ArtifactNotFoundError):
        store.read("fifo")


def test_names_that_are_not_text_are_skipped(store, root):
    store.put("d/x", b"1")
    with open(os.path.join(os.fsencode(root), b"d", b"bad-\xff"), "wb"):
        pass
    assert [file.path for file in store.list()] == ["d/x"]
    assert [file.path for file in store.list_files("d")] == ["d/x"]


def test_an_unreadable_directory_is_an_error(store, root, monkeypatch):
    store.put("d/x", b"1")
    monkeypatch.setattr(posix.os, "scandir", failing(errno.EACCES))
    with pytest.raises(StoragePermissionError):
        list(store.list())


# --- copies --------------------------------------------------------------------------------------


def test_a_copy_is_no_link(store, root):
    store.put("a", b"x")
    store.copy("a", "b")
    assert (root / "a").stat().st_ino != (root / "b").stat().st_ino
    assert (root / "b").stat().st_nlink == 1


@pytest.mark.parametrize("code", [errno.EXDEV, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL])
def test_copy_falls_back_where_the_kernel_cannot(store, monkeypatch, code):
    store.put("a", b"x" * 100_000)
    monkeypatch.setattr(posix.os, "copy_file_range", failing(code), raising=False)
    store.copy("a", "b")
    assert store.read("b") == b"x" * 100_000


def test_copy_goes_on_where_the_kernel_stops(store, monkeypatch):
    """Some file systems answer 0 although there is more, or fail in the middle."""
    store.put("a", bytes(range(256)) * 400)
    real = os.copy_file_range
    calls = []

    def odd(source, target, count):
        calls.append(count)
        return real(source, target, 1000) if len(calls) == 1 else 0

    monkeypatch.setattr(posix.os, "copy_file_range", odd)
    store.copy("a", "b")
    assert store.read("b") == bytes(range(256)) * 400


def test_copy_without_the_call(store, monkeypatch):
    store.put("a", b"x" * 100_000)
    monkeypatch.delattr(posix.os, "copy_file_range")
    store.copy("a", "b")
    assert store.read("b") == b"x" * 100_000


def test_a_full_disk_while_copying(store, root, monkeypatch):
    store.put("a", b"x")
    monkeypatch.setattr(posix.os, "copy_file_range", failing(errno.ENOSPC))
    with pytest.raises(StorageError, match="space"):
        store.copy("a", "b")
    assert everything(root) == ["a"]


# --- preconditions -------------------------------------------------------------------------------


def test_if_absent_without_links(store, monkeypatch):
    monkeypatch.setattr(posix.os, "link", failing(errno.EPERM))
    store.put("x", b"1", if_absent=True)
    with pytest.raises(PreconditionFailedError):
        store.put("x", b"2", if_absent=True)
    assert store.read("x") == b"1"


def test_if_absent_lets_one_of_many_through(store):
    barrier = threading.Barrier(8)
    won = []

    def race(number):
        barrier.wait()
        try:
            store.put("deep/x", str(number).encode(), if_absent=True)
            won.append(number)
        except PreconditionFailedError:
            pass

    threads = [threading.Thread(target=race, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert store.read("deep/x") == str(won[0]).encode()
    assert store.stat("deep/x") is not None


# --- the fence between attempts ------------------------------------------------------------------

OLD, NEW, NEWEST = (make_token(number) for number in (9, 10, 100))


def test_a_newer_attempt_cuts_off_every_write(store, root):
    store.begin_writing(OLD)
    store.put("x", b"old")
    PosixStore(root).begin_writing(NEW)
    for act in (
        lambda: store.put("x", b"late"),
        lambda: store.put("y", b"late"),
        lambda: store.put("y", b"late", if_absent=True),
        lambda: store.copy("x", "y"),
        lambda: store.append("x", 3, [b"late"]),
        lambda: store.delete(["x"]),
    ):
        with pytest.raises(ArtifactConflictError, match="newer attempt"):
            act()
    assert store.read("x") == b"old"
    assert [file.path for file in store.list()] == ["x"]


@pytest.mark.parametrize("if_absent", [False, True])
def test_a_write_in_flight_is_cut_off(store, root, if_absent):
    store.begin_writing(OLD)

    def slow():
        yield b"late"
        PosixStore(root).begin_writing(NEW)
        yield b"later"

    with pytest.raises(ArtifactConflictError):
        store.put("x", slow(), if_absent=if_absent)
    assert store.stat("x") is None
    assert everything(root / TMP) == [NEW]


def test_an_older_attempt_cannot_begin(store, root):
    store.begin_writing(NEW)
    late = PosixStore(root)
    with pytest.raises(ArtifactConflictError, match=NEW):
        late.begin_writing(OLD)
    assert everything(root / TMP) == [NEW]
    store.put("x", b"1")


def test_beginning_twice_with_one_token(store, root):
    store.begin_writing(OLD)
    again = PosixStore(root)
    again.begin_writing(OLD)
    store.put("x", b"1")
    again.put("x", b"2")
    assert store.read("x") == b"2"


def test_the_token_directory_is_never_made_again(store, root):
    store.begin_writing(OLD)
    (root / TMP / OLD).rmdir()
    with pytest.raises(ArtifactConflictError):
        store.put("x", b"1")
    assert not (root / TMP / OLD).exists()


def test_leftovers_go_and_the_living_stay(store, root):
    tmp = root / TMP
    for name in (OLD, "free-1-dead", "free-2-alive", "gone-half"):
        (tmp / name).mkdir(parents=True)
        (tmp / name / "file").write_text("x")
    past = time.time() - 2 * 24 * 3600
    os.utime(tmp / "free-1-dead", (past, past))
    store.begin_writing(NEW)
    assert everything(tmp) == [NEW, "free-2-alive", "free-2-alive/file"]


def test_a_store_may_begin_again_with_a_newer_token(store, root):
    store.begin_writing(OLD)
    store.put("x", b"1")
    store.begin_writing(NEWEST)
    store.put("x", b"2")
    assert everything(root / TMP) == [NEWEST]


def test_temporary_files_are_never_shown(store, root):
    store.begin_writing(OLD)
    (root / TMP / OLD / "writing").write_text("x")
    store.put(".ray_artifact_sync/manifest.json", b"{}")
    assert [file.path for file in store.list()] == [".ray_artifact_sync/manifest.json"]
    assert list(store.list(TMP)) == []
    assert store.list_dirs(".ray_artifact_sync") == []


# --- appends -------------------------------------------------------------------------------------


def test_append_keeps_the_inode_and_never_creates(store, root):
    store.put("x", b"one")
    before = (root / "x").stat().st_ino
    written = store.append("x", 3, iter([b"two"]))
    assert (root / "x").stat().st_ino == before
    assert written == store.stat("x")
    with pytest.raises(PreconditionFailedError):
        store.append("gone", 0, [b"x"])
    assert everything(root) == ["x"]


def test_append_whose_iterable_raises_leaves_the_file_as_it_was(store):
    store.put("x", b"one")

    def broken():
        yield b"two"
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        store.append("x", 3, broken())
    assert store.read("x") == b"one"


def test_a_failed_append_of_a_replaced_writer_touches_nothing(store, root):
    """A newer one may have looked at the file meanwhile."""
    store.begin_writing(OLD)
    store.put("x", b"one")

    def broken():
        yield b"two"
        PosixStore(root).begin_writing(NEW)
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        store.append("x", 3, broken())
    assert store.read("x") == b"onetwo"
