"""One contract for every store: each line of `ArtifactStore`'s docstrings, checked on all of them."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import pytest
from fsspec.implementations.local import LocalFileSystem as FsspecLocal
from fsspec.implementations.memory import MemoryFileSystem
from pyarrow import fs as pafs

from ray_artifact_sync.errors import (
    ArtifactNotFoundError,
    CannotAppendError,
    InvalidPathError,
    PreconditionFailedError,
    StorageError,
)
from ray_artifact_sync.layout import STATE_DIR, TMP
from ray_artifact_sync.stores import ArtifactStore, open_store
from ray_artifact_sync.stores.arrow import ArrowStore
from ray_artifact_sync.stores.cloud import CloudStore
from ray_artifact_sync.stores.posix import PosixStore
from tests.support.azure_server import CONTAINER, azure_filesystem_at, connection_string_at
from tests.support.fault_proxy import FaultProxy
from tests.support.plain_handler import PlainHandler
from tests.support.s3_servers import BUCKET, filesystem_at
from tests.support.sessions import open_session, read_tree, save

MIB = 1024 * 1024
# pyarrow's removal of one file hangs for a minute now and then on Azurite: not of these.
DELETES = ("names_are_literal", "many_threads", "delete_accepts_a_generator", "empty_parents")
AZURE_KINDS = ("obstore_azurite", "arrow_azurite", "arrow_adlfs")
LITERAL_NAMES = [
    "a b",
    "a%20b",
    "a#b",
    "a:b",
    "a?b",
    "a+b",
    "a&b=c",
    "f[1].txt",
    "f*",
    "~x",
    "back\\slash",
    "quote'\"",
    "{x,y}",
    "t_(1, 2)_[32, 32]",
    "emoji-\N{GRINNING FACE}",
    "umlaut-\N{LATIN SMALL LETTER U WITH DIAERESIS}",
    "n" * 200,
    ".hidden",
    "trailing.",
]

_numbers = itertools.count()

s3 = pytest.mark.s3
azure = pytest.mark.azure
KINDS = [
    "posix",
    "fsspec_local",
    pytest.param("obstore_rclone", marks=s3),
    pytest.param("obstore_moto", marks=s3),
    pytest.param("obstore_juicefs", marks=s3),
    pytest.param("obstore_nested", marks=s3),
    "arrow_memory",
    "arrow_plain",
    pytest.param("arrow_s3", marks=s3),
    pytest.param("obstore_azurite", marks=azure),
    pytest.param("arrow_azurite", marks=[azure, pytest.mark.exhaustive]),  # obstore is what Azure gets
    pytest.param("arrow_adlfs", marks=azure),
]


def patiently(act):
    """rclone's server answers 500 now and then to many writes into new directories."""
    for _ in range(10):
        try:
            return act()
        except StorageError as error:
            if not error.retryable:
                raise
    return act()


class Boom(Exception):  # noqa: N818
    """What a caller's own iterable raises."""


@pytest.fixture(scope="module")
def marker_proxy(request):
    """A proxy that answers markers, for pyarrow's S3 client in front of rclone."""
    with FaultProxy(request.getfixturevalue("rclone").endpoint) as proxy:
        yield proxy


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@pytest.fixture
def store(kind, request, tmp_path):
    """An empty store; every test has a root of its own."""
    number = next(_numbers)
    if kind == "arrow_azurite" and any(name in request.node.name for name in DELETES):
        pytest.skip("many removals of single files, of which each may hang for a minute")
    if kind == "posix":
        return PosixStore(tmp_path / "root")
    if kind == "fsspec_local":
        wrapped = pafs.PyFileSystem(pafs.FSSpecHandler(FsspecLocal()))
        return open_store(wrapped, str(tmp_path / "root"))
    if kind == "obstore_rclone":
        endpoint = request.getfixturevalue("marker_proxy").endpoint
        return open_store(filesystem_at(endpoint), f"{BUCKET}/contract/{number}")
    if kind == "obstore_moto":
        endpoint = request.getfixturevalue("moto").endpoint
        return open_store(filesystem_at(endpoint), f"{BUCKET}/contract/{number}")
    if kind == "obstore_juicefs":
        return open_store(filesystem_at(request.getfixturevalue("juicefs").endpoint), f"{BUCKET}/contract/{number}")
    if kind == "obstore_nested":
        base = filesystem_at(request.getfixturevalue("marker_proxy").endpoint)
        tree = pafs.SubTreeFileSystem("nested", pafs.SubTreeFileSystem(f"{BUCKET}/contract", base))
        return open_store(tree, str(number))
    if kind == "arrow_plain":
        (tmp_path / "mounted").mkdir()
        return open_store(pafs.PyFileSystem(PlainHandler(str(tmp_path / "mounted"))), f"/contract/{number}")
    if kind.endswith(("azurite", "adlfs")):
        return azure_store(kind, request.getfixturevalue("azurite").endpoint, f"{CONTAINER}/contract/{number}")
    if kind == "arrow_memory":
        memory = pafs.PyFileSystem(pafs.FSSpecHandler(MemoryFileSystem()))
        return open_store(memory, f"/contract/{number}")
    endpoint = request.getfixturevalue("marker_proxy").endpoint
    # A busy machine answers late: the default is 3 s.
    return ArrowStore(filesystem_at(endpoint, request_timeout=60), f"{BUCKET}/contract/arrow-{number}")


def azure_store(kind: str, endpoint: str, place: str) -> ArtifactStore:
    if kind == "obstore_azurite":
        return open_store(azure_filesystem_at(endpoint), place)
    if kind == "arrow_azurite":
        return ArrowStore(azure_filesystem_at(endpoint), place)
    adlfs = pytest.importorskip("adlfs")
    filesystem = adlfs.AzureBlobFileSystem(connection_string=connection_string_at(endpoint))
    return ArrowStore(pafs.PyFileSystem(pafs.FSSpecHandler(filesystem)), place)


def paths_of(store: ArtifactStore, prefix: str = "") -> list[str]:
    return sorted(file.path for file in store.list(prefix))


def dirs_of(store: ArtifactStore) -> list[str]:
    """Without what temporary files leave where an empty directory cannot be removed."""
    return [name for name in store.list_dirs() if name != STATE_DIR]


def stream(size: int, *, step: int = MIB, seed: int = 0):
    """Chunks that are not all alike, without holding them."""
    for start in range(0, size, step):
        yield bytes((seed + start // step) % 251 for _ in range(8)) * (min(step, size - start) // 8)


def digest(chunks) -> str:
    hasher = hashlib.sha256()
    for chunk in chunks:
        hasher.update(chunk)
    return hasher.hexdigest()


class TestContract:
    def test_the_fixture_gives_the_store_that_it_says(self, store, kind):
        expected = {
            "posix": PosixStore,
            "fsspec_local": PosixStore,
            "obstore_rclone": CloudStore,
            "obstore_moto": CloudStore,
            "obstore_juicefs": CloudStore,
            "obstore_azurite": CloudStore,
            "obstore_nested": CloudStore,
        }.get(kind, ArrowStore)
        assert type(store) is expected
        assert "SECRET" not in store.description

    # --- put and read ----------------------------------------------------------------------------

    def test_put_returns_what_was_written(self, store):
        written = store.put("dir/sub/file.bin", b"0123456789")
        assert (written.path, written.size) == ("dir/sub/file.bin", 10)
        assert store.read("dir/sub/file.bin") == b"0123456789"
        found = store.stat("dir/sub/file.bin")
        assert found is not None
        assert (found.path, found.size) == ("dir/sub/file.bin", 10)
        assert found.etag == written.etag

    @pytest.mark.parametrize("data", [b"abc", bytearray(b"abc"), memoryview(b"abc")])
    def test_put_takes_every_buffer(self, store, data):
        assert store.put("x", data).size == 3
        assert store.read("x") == b"abc"

    def test_put_takes_chunks_of_every_kind(self, store):
        chunks = [b"a", bytearray(b"b"), memoryview(b"c"), b"", b"d"]
        assert store.put("x", iter(chunks)).size == 4
        assert store.read("x") == b"abcd"

    def test_put_counts_the_bytes_of_a_wide_memoryview(self, store):
        wide = memoryview(b"01234567").cast("I")
        assert store.put("x", [wide]).size == 8
        assert store.read("x") == b"01234567"

    def test_put_replaces_with_shorter_content(self, store):
        store.put("x", b"long content")
        store.put("x", b"s")
        assert store.read("x") == b"s"
        assert store.stat("x").size == 1

    @pytest.mark.parametrize("empty", [b"", [], [b""]])
    def test_empty_file_round_trip(self, store, empty):
        assert store.put("empty", empty).size == 0
        assert store.read("empty") == b""
        assert store.stat("empty").size == 0
        assert paths_of(store) == ["empty"]
        assert [file.path for file in store.list_files()] == ["empty"]

    def test_large_stream(self, store):
        size = 20 * MIB
        written = store.put("big", stream(size), size_hint=size)
        assert written.size == size
        assert store.stat("big").size == size
        assert digest(store.read_chunks("big")) == digest(stream(size))
        assert paths_of(store) == ["big"]

    def test_large_buffer(self, store):
        data = b"".join(stream(9 * MIB))
        assert store.put("big", data).size == 9 * MIB
        assert digest(store.read_chunks("big")) == hashlib.sha256(data).hexdigest()

    def test_large_stream_stays_flat_in_memory(self, store, kind):
        if kind == "arrow_memory":
            pytest.skip("the storage itself is memory")
        if kind == "arrow_adlfs":
            pytest.skip("adlfs holds blocks of 50 MiB, several at once")
        size = 128 * MIB
        tracemalloc.start()
        try:
            store.put("big", stream(size, step=MIB), size_hint=size)
            put_peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.reset_peak()
            assert sum(len(chunk) for chunk in store.read_chunks("big")) == size
            read_peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        store.delete(["big"])
        assert max(put_peak, read_peak) < 80 * MIB  # four parts in flight, and what waits

    # --- all or nothing --------------------------------------------------------------------------

    @pytest.mark.parametrize("before", [0, 5, 9 * MIB, 18 * MIB])
    @pytest.mark.parametrize("error", [Boom("mine"), OSError(5, "mine"), ValueError("mine")])
    def test_raising_iterable_publishes_nothing(self, store, before, error):
        def broken():
            yield from stream(before) if before >= MIB else [b"x" * before]
            raise error

        with pytest.raises(type(error), match="mine") as caught:
            store.put("new/file", broken())
        assert caught.value is error
        assert store.stat("new/file") is None
        assert paths_of(store) == []

    @pytest.mark.parametrize("before", [5, 18 * MIB])
    def test_raising_iterable_leaves_the_old_content(self, store, before):
        store.put("file", b"old")

        def broken():
            yield from stream(before) if before >= MIB else [b"x" * before]
            raise Boom

        with pytest.raises(Boom):
            store.put("file", broken())
        assert store.read("file") == b"old"
        assert paths_of(store) == ["file"]

    def test_readers_never_see_a_part(self, store):
        """Readers beside a writer see one of its versions, whole."""
        versions = [bytes([65 + number]) * 200_000 for number in range(6)]
        store.put("file", versions[0])

        def write():
            for version in versions:
                store.put("file", version)

        with ThreadPoolExecutor(3) as pool:
            writer = pool.submit(write)
            seen = []
            while not writer.done():
                try:
                    seen.append(store.read("file"))
                except StorageError as error:  # replaced between two requests of one read
                    assert error.retryable or isinstance(error, ArtifactNotFoundError)  # noqa: PT017
            writer.result()
        assert set(seen) <= set(versions)

    # --- names -----------------------------------------------------------------------------------

    def test_names_are_literal(self, store, kind):
        names = [name for name in LITERAL_NAMES if not (kind in AZURE_KINDS and "\\" in name)]
        for place, name in enumerate(names):
            store.put(f"d/{name}", str(place).encode())
        assert paths_of(store, "d") == sorted(f"d/{name}" for name in names)
        assert [file.path for file in store.list_files("d")] == sorted(f"d/{n}" for n in names)
        for place, name in enumerate(names):
            assert store.read(f"d/{name}") == str(place).encode()
            assert store.stat(f"d/{name}").size == len(str(place))
        for name in names:
            store.copy(f"d/{name}", f"copy/{name}")
        assert paths_of(store, "copy") == sorted(f"copy/{name}" for name in names)
        # Each delete takes its own file, whatever its name would mean as a pattern.
        for gone in range(len(names)):
            store.delete([f"d/{names[gone]}"])
            assert paths_of(store, "d") == sorted(f"d/{name}" for name in names[gone + 1 :])

    def test_azure_takes_no_name_that_it_would_change(self, store, kind):
        """It makes slashes of backslashes: `a\\b` would be the file `b` in the directory `a`."""
        if kind not in AZURE_KINDS:
            pytest.skip("a backslash is a character like any other")
        store.put("d/a/b", b"another")
        with pytest.raises(InvalidPathError, match="backslash"):
            store.put("d/a\\b", b"x")
        assert store.read("d/a/b") == b"another"

    def test_directories_have_literal_names_too(self, store):
        names = ["a b", "a%20b", "a?b", "a#b", "t_(1, 2)_[32, 32]", "*"]
        for name in names:
            store.put(f"{name}/sub/f", name.encode())
        assert dirs_of(store) == sorted(names)
        for name in names:
            assert paths_of(store, name) == [f"{name}/sub/f"]
            assert store.list_dirs(name) == ["sub"]

    @pytest.mark.parametrize("bad", ["", "/abs", "a//b", "a/./b", "../up", "a/..", "nul\0", "tab\t", "sur\udcffrogate"])
    def test_invalid_names_are_refused(self, store, bad):
        with pytest.raises(InvalidPathError):
            store.put(bad, b"x")
        with pytest.raises(InvalidPathError):
            store.stat(bad)
        with pytest.raises(InvalidPathError):
            list(store.read_chunks(bad))
        with pytest.raises(InvalidPathError):
            store.delete([bad])
        with pytest.raises(InvalidPathError):
            store.copy("x", bad)

    # --- listing ---------------------------------------------------------------------------------

    def test_listing_what_does_not_exist(self, store):
        assert paths_of(store) == []
        assert paths_of(store, "nothing/here") == []
        assert store.list_dirs("nothing") == []
        assert store.list_files("nothing") == []
        assert store.stat("nothing") is None

    def test_prefixes_are_directories(self, store):
        for name in ("t_1/a", "t_1/sub/b", "t_10/c", "t_1.txt", "t_1/sub/deep/d"):
            store.put(name, b"x")
        assert paths_of(store, "t_1") == ["t_1/a", "t_1/sub/b", "t_1/sub/deep/d"]
        assert paths_of(store, "t_1/") == paths_of(store, "t_1")
        assert paths_of(store, "t_1/sub") == ["t_1/sub/b", "t_1/sub/deep/d"]
        assert [file.path for file in store.list_files("t_1")] == ["t_1/a"]
        assert dirs_of(store) == ["t_1", "t_10"]
        assert store.list_dirs("t_1") == ["sub"]
        assert [file.path for file in store.list_files()] == ["t_1.txt"]

    def test_a_file_is_no_prefix_and_a_directory_no_file(self, store):
        store.put("dir/file", b"x")
        assert store.stat("dir") is None
        assert paths_of(store, "dir/file") == []
        assert store.list_files("dir/file") == []
        assert store.stat("dir/file/below") is None
        with pytest.raises(ArtifactNotFoundError):
            list(store.read_chunks("dir/nothing"))

    def test_listing_says_size_and_time(self, store):
        store.put("a", b"123")
        (found,) = store.list()
        assert found.size == 3
        assert found.mtime_ns is None or found.mtime_ns > 1_500_000_000 * 10**9
        assert found.etag == store.stat("a").etag

    def test_more_files_than_one_page(self, store, kind):
        if kind in ("arrow_s3", "obstore_moto", "arrow_azurite", "arrow_adlfs"):
            pytest.skip("slow servers; the same client code is tested on the others")
        names = {f"many/{number:04}" for number in range(1_050)}
        with ThreadPoolExecutor(16) as pool:
            list(pool.map(lambda name: store.put(name, b"x"), names))
        assert {file.path for file in store.list("many")} == names
        assert len(store.list_files("many")) == 1_050
        store.delete(sorted(names))
        assert paths_of(store) == []

    # --- ranges ----------------------------------------------------------------------------------

    @pytest.mark.parametrize(
        ("start", "length", "expected"),
        [
            (0, None, b"0123456789"),
            (3, None, b"3456789"),
            (0, 4, b"0123"),
            (3, 4, b"3456"),
            (8, 10, b"89"),
            (0, 10, b"0123456789"),
            (0, 11, b"0123456789"),
            (10, None, b""),
            (10, 5, b""),
            (25, 5, b""),
            (3, 0, b""),
        ],
    )
    def test_ranges(self, store, start, length, expected):
        store.put("x", b"0123456789")
        assert b"".join(map(bytes, store.read_chunks("x", start=start, length=length))) == expected

    def test_a_range_of_an_empty_file(self, store):
        store.put("x", b"")
        assert b"".join(map(bytes, store.read_chunks("x", start=0, length=5))) == b""
        assert b"".join(map(bytes, store.read_chunks("x", start=2))) == b""

    @pytest.mark.parametrize("length", [None, 0, 5])
    def test_reading_what_does_not_exist(self, store, length):
        store.put("other", b"x")
        with pytest.raises(ArtifactNotFoundError):
            list(store.read_chunks("nope", length=length))
        with pytest.raises(FileNotFoundError):
            store.read("nope")

    def test_a_reader_may_stop_early(self, store):
        store.put("x", stream(10 * MIB))
        chunks = store.read_chunks("x", chunk_size=MIB)
        assert len(next(chunks)) > 0
        chunks.close()
        assert store.stat("x").size == 10 * MIB

    # --- copy and delete -------------------------------------------------------------------------

    def test_copy_is_independent_of_its_source(self, store):
        store.put("source", b"first")
        store.copy("source", "deep/er/target")
        store.put("source", b"second")
        assert store.read("deep/er/target") == b"first"
        store.copy("source", "deep/er/target")
        assert store.read("deep/er/target") == b"second"
        store.delete(["source"])
        assert store.read("deep/er/target") == b"second"

    def test_copy_is_independent_of_appends_to_its_source(self, store):
        if not store.can_append:
            pytest.skip("cannot append")
        first = b"first" * (1 + store.min_append_size // 5)
        store.put("source", first)
        store.copy("source", "target")
        with contextlib.suppress(CannotAppendError):
            store.append("source", len(first), [b"+"])
        assert store.read("target") == first

    @pytest.mark.parametrize("size", [0, 9 * MIB])
    def test_copy_of_empty_and_large_files(self, store, size):
        store.put("source", stream(size))
        store.copy("source", "target")
        assert digest(store.read_chunks("target")) == digest(stream(size))
        assert paths_of(store) == ["source", "target"]

    def test_copy_of_nothing(self, store):
        with pytest.raises(ArtifactNotFoundError):
            store.copy("nope", "target")
        assert store.stat("target") is None

    def test_delete_forgives_missing_files(self, store):
        for name in ("a", "dir/b", "dir/c", "keep"):
            store.put(name, b"x")
        store.delete(["nope", "a", "dir/nope", "dir/b", "no/where", "dir/c", "a"])
        assert paths_of(store) == ["keep"]
        store.delete(["a"])
        store.delete([])

    def test_delete_of_a_directory_deletes_nothing(self, store, kind):
        if kind in ("obstore_rclone", "obstore_nested"):
            pytest.skip("rclone has real directories, and calls this an internal error")
        store.put("dir/b", b"x")
        store.delete(["dir"])
        assert paths_of(store) == ["dir/b"]

    def test_delete_accepts_a_generator(self, store):
        store.put("a", b"x")
        store.delete(name for name in ("a", "b"))
        assert paths_of(store) == []

    def test_a_path_may_change_between_file_and_directory(self, store):
        store.put("x", b"file")
        store.delete(["x"])
        store.put("x/y/z", b"below")
        assert paths_of(store) == ["x/y/z"]
        store.delete(["x/y/z"])
        store.put("x", b"file")
        assert store.read("x") == b"file"
        assert paths_of(store) == ["x"]
        store.delete(["x"])
        store.put("x/y", b"below")
        store.delete(["x/y"])
        store.put("x", stream(9 * MIB))
        assert store.stat("x").size == 9 * MIB

    def test_empty_parents_go_where_there_are_directories(self, store, kind):
        if kind == "arrow_azurite":
            pytest.skip("pyarrow puts a marker in place of a directory that it empties")
        if kind == "arrow_plain":
            pytest.skip("pyarrow removes a directory with all that somebody else may just have put there: it stays")
        store.put("a/b/c", b"x")
        store.put("a/d", b"x")
        store.delete(["a/b/c"])
        assert store.list_dirs("a") == []
        store.delete(["a/d"])
        assert store.list_dirs() == []

    # --- directories, writers --------------------------------------------------------------------

    def test_a_store_below(self, store):
        store.put("a/b.txt", b"b")
        store.put("a b/c.txt", b"not below a")
        below = store.below("a")
        assert paths_of(below) == ["b.txt"]
        assert below.read("b.txt") == b"b"
        below.put("d/e.txt", b"e")
        below.delete(["b.txt"])
        assert store.read("a/d/e.txt") == b"e"
        assert paths_of(store.below("a/d")) == paths_of(below.below("d")) == ["e.txt"]
        assert type(below) is type(store)
        assert "/a" in below.description
        assert paths_of(store.below("none")) == []
        for bad in ("../a", "", "/a", "a//b"):
            with pytest.raises(InvalidPathError):
                store.below(bad)

    def test_make_dir(self, store):
        store.make_dir("d/e")
        assert paths_of(store) == []
        assert store.list_dirs() == (["d"] if isinstance(store, PosixStore) else store.list_dirs())
        store.make_dir("d/e")
        store.put("d/e/f", b"x")
        assert paths_of(store) == ["d/e/f"]

    def test_writing_leaves_no_temporary_files_in_listings(self, store):
        store.begin_writing("00000000000000000001")
        seen = []

        def data():
            yield b"x" * (9 * MIB)
            seen.extend(paths_of(store))
            yield b"y"

        store.put("file", data())
        assert seen == []
        assert paths_of(store) == ["file"]
        assert not [path for path in paths_of(store) if path.startswith(TMP)]

    def test_a_stream_may_read_from_the_store_that_it_is_written_to(self, store):
        store.put("source", stream(18 * MIB))
        store.put("target", store.read_chunks("source"))
        assert digest(store.read_chunks("target")) == digest(stream(18 * MIB))

    def test_chunks_may_share_one_buffer(self, store):
        def reuse():
            buffer = bytearray(3 * MIB)
            for number in range(6):
                buffer[:] = bytes([number]) * len(buffer)
                yield memoryview(buffer)

        store.put("x", reuse())
        expected = b"".join(bytes([number]) * (3 * MIB) for number in range(6))
        assert store.read("x") == expected

    def test_append(self, store, kind):
        store.put("log", b"one")
        if not store.can_append:
            with pytest.raises((NotImplementedError, CannotAppendError)):
                store.append("log", 3, [b"x"])
            return
        if store.min_append_size:
            with pytest.raises(CannotAppendError):
                store.append("log", 3, [b"x"])
        one = b"one" * (1 + store.min_append_size // 3)
        size = len(one)
        first = store.put("log", one)
        if kind in ("obstore_rclone", "obstore_nested"):
            with pytest.raises(CannotAppendError):
                store.append("log", size, [b" two", b" three"])
            assert not store.can_append
            assert store.read("log") == one
            return
        written = store.append("log", size, [b" two", b" three"], if_match=first.etag)
        assert (written.path, written.size) == ("log", size + 10)
        assert written.etag == store.stat("log").etag
        assert store.read("log") == one + b" two three"
        with pytest.raises(PreconditionFailedError):
            store.append("log", size, [b"x"])
        with pytest.raises(PreconditionFailedError):
            store.append("nope", size, [b"x"])
        if not isinstance(store, PosixStore):
            with pytest.raises(PreconditionFailedError):
                store.append("log", size + 10, [b"x"], if_match=first.etag)
        assert store.read("log") == one + b" two three"
        assert paths_of(store) == ["log"]

    def test_preconditions_where_they_are_enforced(self, store, kind):
        if kind not in ("obstore_moto", "obstore_azurite", "posix", "fsspec_local"):
            pytest.skip("this backend does not enforce them")
        first = store.put("x", b"1", if_absent=True)
        with pytest.raises(PreconditionFailedError):
            store.put("x", b"2", if_absent=True)
        second = store.put("x", b"22", if_match=first.etag)
        with pytest.raises(PreconditionFailedError):
            store.put("x", b"3", if_match=first.etag)
        assert store.read("x") == b"22"
        assert store.stat("x").etag == second.etag
        with pytest.raises(PreconditionFailedError):
            store.put("nope", b"3", if_match=first.etag)
        assert store.stat("nope") is None

    # --- threads ---------------------------------------------------------------------------------

    def test_many_threads(self, store, kind):
        def work(number: int) -> bytes:
            # JuiceFS' gateway tidies a directory away when its last file goes, now and then with one that just came.
            name = f"f{number}" if kind == "obstore_juicefs" else f"d{number % 3}/f{number}"
            patiently(lambda: store.put(name, str(number).encode()))
            patiently(lambda: store.copy(name, f"copy/{number}"))
            found = store.read(f"copy/{number}")
            store.delete([name])
            return found

        with ThreadPoolExecutor(12) as pool:
            results = list(pool.map(work, range(48)))
        assert results == [str(number).encode() for number in range(48)]
        assert paths_of(store) == sorted(f"copy/{number}" for number in range(48))

    def test_two_stores_do_not_see_each_other(self, store, kind, tmp_path):
        """Roots are prefixes of whole segments: `x/1` is not in the way of `x/10`."""
        store.put("a", b"x")
        if isinstance(store, CloudStore):
            other = CloudStore(store.client, f"{store.root}0")
        elif isinstance(store, ArrowStore):
            other = ArrowStore(store.filesystem, f"{store.root}0")
        else:
            other = PosixStore(f"{store.root}0")
        assert paths_of(other) == []
        other.put("b", b"y")
        assert paths_of(store) == ["a"]
        assert paths_of(other) == ["b"]


@pytest.mark.s3
def test_trees_in_trees_are_one_prefix(moto):
    """What is written through them is where the innermost file system has it, and the other way round."""
    base = filesystem_at(moto.endpoint)
    tree = pafs.SubTreeFileSystem("nested", pafs.SubTreeFileSystem(f"{BUCKET}/trees", base))
    store = open_store(tree, "trial")
    assert isinstance(store, CloudStore)
    store.put("dir/a b", b"ours")
    with base.open_input_stream(f"{BUCKET}/trees/nested/trial/dir/a b") as file:
        assert file.read() == b"ours"
    with tree.open_output_stream("trial/theirs") as file:
        file.write(b"theirs")
    assert store.read("theirs") == b"theirs"


def test_a_trial_on_a_file_system_of_ones_own(tmp_path):
    """Renames that do not replace, no copies, no etags: a checkpoint is restored all the same."""
    (tmp_path / "mounted").mkdir()
    filesystem = pafs.PyFileSystem(PlainHandler(str(tmp_path / "mounted")))
    store = open_store(filesystem, "/runs/trial")
    assert isinstance(store, ArrowStore)
    session = open_session(tmp_path / "work", store, 1)
    work = tmp_path / "work"
    (work / "log.txt").write_bytes(b"1\n")
    (work / "large.bin").write_bytes(b"".join(stream(9 * MIB)))
    assert save(session, "checkpoint_000000")
    saved = read_tree(work)
    (work / "log.txt").write_bytes(b"1\n2\n")
    session.sync()
    session.close()
    session = open_session(tmp_path / "other", open_store(filesystem, "/runs/trial"), 2)
    assert session.restore("checkpoint_000000", fresh=True).exact
    assert read_tree(tmp_path / "other") == saved
    session.close()
