"""Reading files that somebody writes: one consistent version or an error, never a mix."""

import os
import socket
import tempfile
import threading
import time

import pytest
from blake3 import blake3

from ray_artifact_sync import local_files
from ray_artifact_sync.errors import FileChangedError
from ray_artifact_sync.local_files import EMPTY_DIGEST, ConsistentReader, FileStat, hash_file, open_regular
from ray_artifact_sync.scan import HashCache

KIB = 1024


def digest(data):
    return blake3(data).hexdigest()


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "file")


def write(path, data, mode="wb"):
    with open(path, mode) as file:
        file.write(data)


@pytest.fixture
def later(monkeypatch):
    """A clock far behind every file's times: what was written is long settled."""
    now = time.time_ns
    monkeypatch.setattr(local_files.time, "time_ns", lambda: now() + 10**12)


@pytest.fixture
def during(monkeypatch):
    """Calls a function after the n-th read of file content."""

    def install(act, *, after=1):
        real, reads = os.pread, []

        def pread(*arguments):
            data = real(*arguments)
            reads.append(len(data))
            if len(reads) == after:
                act()
            return data

        monkeypatch.setattr(local_files.os, "pread", pread)
        return reads

    return install


# --- hash_file ----------------------------------------------------------------------------------------


def test_hash_and_marks(path):
    data = os.urandom(3 * local_files.READ_SIZE + 17)
    write(path, data)
    marks = [0, 1, local_files.READ_SIZE, local_files.READ_SIZE + 1, len(data) - 1, len(data), len(data) + 1, 10**12]
    hashed = hash_file(path, marks)
    assert hashed.digest == digest(data)
    assert hashed.prefix_digests == {mark: digest(data[:mark]) for mark in marks if mark <= len(data)}
    assert hashed.stat == FileStat.of(os.stat(path))


def test_an_empty_file(path):
    write(path, b"")
    hashed = hash_file(path, [0, 1])
    assert hashed.digest == EMPTY_DIGEST == digest(b"")
    assert hashed.prefix_digests == {0: EMPTY_DIGEST}


def test_only_a_settled_file_is_vouched_for(path, monkeypatch):
    write(path, b"abc")
    assert not hash_file(path).settled, "just written: another write may hide in the same clock tick"
    now = time.time_ns
    monkeypatch.setattr(local_files.time, "time_ns", lambda: now() + 10**12)
    assert hash_file(path).settled


def test_a_settled_file_is_read_once(path, later, during):
    write(path, b"x" * 100)
    reads = during(lambda: None)
    hash_file(path)
    assert reads == [100]


def test_a_fresh_file_is_read_twice(path, during):
    write(path, b"x" * 100)
    reads = during(lambda: None)
    hash_file(path)
    assert reads == [100, 100]


def test_growth_while_hashing_gives_the_prefix(path, during):
    write(path, b"x" * 100)
    during(lambda: write(path, b"more", "ab"))
    hashed = hash_file(path)
    assert (hashed.stat.size, hashed.digest, hashed.settled) == (100, digest(b"x" * 100), False)


@pytest.mark.parametrize(
    "other",
    [b"y" * 100, b"x" * 99 + b"y", b"x" * 50, b""],
    ids=["all", "last byte", "shorter", "empty"],
)
def test_a_change_while_hashing_gives_the_new_version(path, during, other):
    write(path, b"x" * 100)
    during(lambda: write(path, other))
    hashed = hash_file(path)
    assert (hashed.stat.size, hashed.digest) == (len(other), digest(other))


def test_endless_change_is_an_error(path, monkeypatch):
    write(path, b"0" * 100)
    real, count = os.pread, iter(range(1, 1000))

    def pread(*arguments):
        data = real(*arguments)
        write(path, str(next(count)).encode() * 100)
        return data

    monkeypatch.setattr(local_files.os, "pread", pread)
    with pytest.raises(FileChangedError, match="keeps changing"):
        hash_file(path)


def test_a_missing_file_is_an_os_error(path):
    with pytest.raises(FileNotFoundError):
        hash_file(path)


def test_no_descriptor_is_left_open(path):
    write(path, b"x" * 100)
    before = len(os.listdir("/proc/self/fd"))
    hash_file(path)
    list(ConsistentReader(path))
    iterator = iter(ConsistentReader(path, chunk_size=10))
    next(iterator)
    iterator.close()
    with pytest.raises(FileChangedError):
        list(ConsistentReader(path, expect_digest="0" * 64))
    assert len(os.listdir("/proc/self/fd")) == before


# --- open_regular -------------------------------------------------------------------------------------


def test_no_hang_on_a_fifo(path):
    os.mkfifo(path)
    for read in (open_regular, hash_file, lambda p: list(ConsistentReader(p))):
        with pytest.raises(FileChangedError, match="regular"):
            read(path)


def test_a_directory_and_a_socket_are_no_files(tmp_path):
    with pytest.raises(FileChangedError):
        open_regular(str(tmp_path))
    with tempfile.TemporaryDirectory(dir="/tmp") as short, socket.socket(socket.AF_UNIX) as server:
        server.bind(f"{short}/s")
        with pytest.raises((FileChangedError, OSError)):
            open_regular(f"{short}/s")


# --- ConsistentReader ---------------------------------------------------------------------------------


def test_all_bytes_in_chunks(path):
    data = os.urandom(10_000)
    write(path, data)
    reader = ConsistentReader(path, chunk_size=KIB)
    chunks = list(reader)
    assert b"".join(chunks) == data
    assert max(map(len, chunks)) == KIB
    assert reader.hashed.digest == digest(data)
    assert reader.hashed.stat == FileStat.of(os.stat(path))
    assert reader.read_all() == data, "again, for a retry"


def test_no_more_in_memory_than_allowed(path):
    write(path, b"x" * 1000)
    reader = ConsistentReader(path, chunk_size=100)
    assert len(reader.read_all(1000)) == 1000
    with pytest.raises(FileChangedError, match="small"):
        reader.read_all(999)


@pytest.mark.parametrize("size", [0, 1, KIB - 1, KIB, KIB + 1, 10_000])
def test_the_first_bytes_only(path, size):
    data = os.urandom(10_000)
    write(path, data)
    reader = ConsistentReader(path, size=size, chunk_size=KIB)
    assert reader.read_all() == data[:size]
    assert (reader.hashed.stat.size, reader.hashed.digest) == (size, digest(data[:size]))
    assert not reader.hashed.settled or size == len(data)


def test_an_empty_file_gives_nothing(path):
    write(path, b"")
    reader = ConsistentReader(path)
    assert list(reader) == []
    assert reader.hashed.digest == EMPTY_DIGEST


def test_settled(path, later):
    write(path, b"abc")
    reader = ConsistentReader(path)
    reader.read_all()
    assert reader.hashed.settled
    reader = ConsistentReader(path, size=2)
    reader.read_all()
    assert not reader.hashed.settled, "the stat of the whole file does not vouch for a prefix"


def interrupted(path, act, **options):
    """Reads all but the end, lets `act` happen, and reads on; the chunks before an error are in the error's place."""
    iterator = iter(ConsistentReader(path, chunk_size=10, **options))
    chunks = [next(iterator)]
    act()
    chunks.extend(iterator)
    return b"".join(chunks)


def test_growth_while_reading_gives_the_prefix(path):
    data = os.urandom(100)
    write(path, data)
    assert interrupted(path, lambda: write(path, b"more", "ab")) == data


@pytest.mark.parametrize(
    "change",
    [
        lambda path: write(path, b"y" * 100),
        lambda path: write(path, b"y", "r+b"),  # in what was given already
        lambda path: write(path, b"x" * 50),
        lambda path: write(path, b""),
        lambda path: write(path, b"y" * 200),
    ],
    ids=["same size", "first byte", "shorter", "empty", "longer"],
)
def test_a_change_while_reading_is_an_error_before_the_last_chunk(path, change):
    """A store that publishes at the end of the stream then publishes nothing."""
    write(path, b"x" * 100)
    got = []
    reader = ConsistentReader(path, chunk_size=10)
    with pytest.raises(FileChangedError):  # noqa: PT012
        for chunk in reader:
            got.append(chunk)
            if len(got) == 5:
                change(path)
    assert len(got) < 10
    assert reader.hashed is None


def test_the_planned_version_counts_even_if_it_is_overwritten_meanwhile(path):
    """What was given is exactly what was planned: nothing was mixed."""
    write(path, b"x" * 100)
    reader = ConsistentReader(path, expect_digest=digest(b"x" * 100), size=100, chunk_size=10)
    iterator = iter(reader)
    got = [next(iterator) for _ in range(9)]
    write(path, b"y" * 10, "r+b")
    got.extend(iterator)
    assert b"".join(got) == b"x" * 100
    assert not reader.hashed.settled


def test_another_version_than_the_planned_one_is_an_error(path):
    write(path, b"new")
    reader = ConsistentReader(path, size=3, expect_digest=digest(b"old"))
    with pytest.raises(FileChangedError, match="planned"):
        reader.read_all()


def test_a_shorter_file_than_planned_is_an_error(path):
    write(path, b"12")
    with pytest.raises(FileChangedError, match="shorter"):
        ConsistentReader(path, size=3).read_all()


def test_recreated_with_the_same_name_size_and_mtime(path):
    write(path, b"old")
    os.utime(path, ns=(10**18, 10**18))
    before = os.stat(path)
    cache = HashCache()
    hashed = hash_file(path)
    cache.remember("file", local_files.HashedFile(hashed.stat, hashed.digest, {}, settled=True))
    assert cache.get("file", FileStat.of(before)) == digest(b"old")
    os.unlink(path)
    write(path, b"new")
    os.utime(path, ns=(10**18, 10**18))
    after = os.stat(path)
    assert (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    assert FileStat.of(after) != FileStat.of(before)
    assert cache.get("file", FileStat.of(after)) is None
    assert hash_file(path).digest == digest(b"new")


def test_replaced_by_a_rename_while_reading_the_old_version_is_whole(path, tmp_path):
    data = os.urandom(100)
    write(path, data)
    other = str(tmp_path / "other")
    write(other, os.urandom(100))
    assert interrupted(path, lambda: os.replace(other, path)) == data


def test_a_file_that_vanished_between_tries_is_an_os_error(path):
    write(path, b"x")
    reader = ConsistentReader(path)
    reader.read_all()
    os.unlink(path)
    with pytest.raises(FileNotFoundError):
        reader.read_all()


# --- the tail of an append ------------------------------------------------------------------------------


def test_the_tail_with_the_digest_of_the_whole(path):
    data = os.urandom(5000)
    write(path, data)
    reader = ConsistentReader(path, start=3000, size=4500, expect_digest=digest(data[:4500]), chunk_size=KIB)
    assert reader.read_all() == data[3000:4500]
    assert (reader.hashed.stat.size, reader.hashed.digest) == (4500, digest(data[:4500]))


def test_a_changed_beginning_spoils_an_append(path):
    data = os.urandom(5000)
    write(path, data)
    reader = ConsistentReader(path, start=3000, size=5000, expect_digest=digest(data))
    write(path, b"!", "r+b")
    got = []
    with pytest.raises(FileChangedError):
        got.extend(reader)
    assert got == []


def test_a_tail_that_changes_and_changes_back_is_no_append(path):
    """The bytes given must be those whose digest is checked, not those of a moment later."""
    data = b"x" * 100
    write(path, data)
    iterator = iter(ConsistentReader(path, start=50, size=100, expect_digest=digest(data), chunk_size=10))
    got = [next(iterator)]
    write(path, b"y" * 100)
    got.append(next(iterator))
    got.append(next(iterator))
    write(path, data)
    with pytest.raises(FileChangedError):
        got.extend(iterator)
    assert len(got) < 5


def test_an_empty_tail(path):
    write(path, b"123")
    reader = ConsistentReader(path, start=3, size=3, expect_digest=digest(b"123"))
    assert list(reader) == []
    assert reader.hashed.stat.size == 3


# --- hammering ------------------------------------------------------------------------------------------


class Hammer:
    """Rewrites a file all the time, block after block, each with the number of the version it belongs to.

    The states that the file really was in at some moment are those whose blocks show a number n up to some block and
    n - 1 from there on; any other is a mix of moments.
    """

    block = 4096
    blocks = 300

    def __init__(self, path):
        self._path = path
        self._stop = threading.Event()
        self.versions = 0
        self._thread = threading.Thread(target=self._run)

    def __enter__(self):
        self._write(0)
        self._thread.start()
        return self

    def __exit__(self, *exc):
        self._stop.set()
        self._thread.join()

    def _write(self, version):
        fd = os.open(self._path, os.O_WRONLY | os.O_CREAT)
        data = version.to_bytes(8, "big") * (self.block // 8)
        for number in range(self.blocks):
            os.pwrite(fd, data, number * self.block)
        os.close(fd)

    def _run(self):
        while not self._stop.is_set():
            self.versions += 1
            self._write(self.versions)

    def check(self, data):
        assert len(data) == self.block * self.blocks
        numbers = []
        for start in range(0, len(data), self.block):
            block = data[start : start + self.block]
            assert block == block[:8] * (self.block // 8), "half of a block"
            numbers.append(int.from_bytes(block[:8], "big"))
        assert numbers == sorted(numbers, reverse=True), "a mix of moments"
        assert numbers[0] - numbers[-1] <= 1, "a mix of moments"


def test_a_reader_under_a_hammering_writer_never_gives_a_mix(path):
    given = refused = 0
    with Hammer(path) as hammer:
        deadline = time.monotonic() + 10
        while (refused < 200 or hammer.versions < 50) and time.monotonic() < deadline:
            reader = ConsistentReader(path, chunk_size=64 * KIB)
            try:
                data = reader.read_all()
            except FileChangedError:
                refused += 1
                continue
            given += 1
            hammer.check(data)
            assert digest(data) == reader.hashed.digest
    assert refused >= 200
    hammer.check(ConsistentReader(path).read_all())


def test_hashing_under_a_hammering_writer_never_gives_a_mix(path):
    """Appended whole records: whatever is hashed is a prefix that really was there."""
    stop = threading.Event()
    written = []

    def run():
        with open(path, "ab", buffering=0) as file:
            while not stop.is_set() and len(written) < 20_000:
                record = f"{len(written)}\n".encode()
                written.append(record)
                file.write(record)

    write(path, b"")
    thread = threading.Thread(target=run)
    thread.start()
    try:
        results = [hash_file(path) for _ in range(50)]
    finally:
        stop.set()
        thread.join()
    everything = b"".join(written)
    for hashed in results:
        assert hashed.digest == digest(everything[: hashed.stat.size])
