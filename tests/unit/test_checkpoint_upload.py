"""A checkpoint's own files: all of them, or an error that names the one that is missing."""

import logging
import os

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from pyarrow import fs as pafs

from ray_artifact_sync import layout
from ray_artifact_sync.checkpoint_upload import upload_checkpoint
from ray_artifact_sync.concurrency import Deadline
from ray_artifact_sync.errors import (
    ArtifactConflictError,
    IncompleteSyncError,
    StorageError,
    StoragePermissionError,
    SyncTimeoutError,
)
from ray_artifact_sync.stores import open_store
from ray_artifact_sync.stores.posix import PosixStore
from ray_artifact_sync.transfer import TransferEngine

NAME = "checkpoint_000003"
SNAPSHOT = layout.snapshot_name(layout.make_token(1))


class Refusing(PosixStore):
    """Refuses some paths."""

    refused = ()
    error = StoragePermissionError("403")

    def put(self, path, data, **options):
        if path.removeprefix(f"{NAME}/") in self.refused:
            raise self.error
        return super().put(path, data, **options)


@pytest.fixture
def source(tmp_path):
    directory = tmp_path / "source"
    directory.mkdir()
    return directory


@pytest.fixture
def target(tmp_path):
    return Refusing(tmp_path / "trial")


def write(root, *paths, data=b"data"):
    for path in paths:
        place = root / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(data)


def upload(source, target, **options):
    store = source if not isinstance(source, os.PathLike) else PosixStore(source)
    return upload_checkpoint(store, TransferEngine(target, retries=1, **options), NAME, Deadline(60))


def stored(target):
    return {file.path.removeprefix(f"{NAME}/"): target.read(file.path) for file in target.list(NAME)}


def test_every_file_arrives(source, target):
    write(source, "model.pt", data=b"m" * 3_000_000)
    write(source, "sub/deep/state.bin", ".metadata.json", "a b#c")
    write(source, "empty", data=b"")
    assert upload(source, target) == 3_000_000 + 3 * 4
    assert stored(target) == {
        "model.pt": b"m" * 3_000_000,
        "sub/deep/state.bin": b"data",
        ".metadata.json": b"data",
        "a b#c": b"data",
        "empty": b"",
    }


def test_it_replaces_what_a_crashed_attempt_left(source, target):
    target.put(f"{NAME}/model.pt", b"half")
    write(source, "model.pt")
    upload(source, target)
    assert stored(target)["model.pt"] == b"data"


def test_our_own_files_are_left_out(source, target):
    write(source, "model.pt", SNAPSHOT, ".ray_artifact_sync/manifest.json", f"sub/{SNAPSHOT}")
    write(source, ".ray_artifact_sync-notes.json")
    upload(source, target)
    assert stored(target).keys() == {"model.pt", ".ray_artifact_sync-notes.json", f"sub/{SNAPSHOT}"}


def test_empty_directories_and_an_empty_checkpoint(source, target):
    assert upload(source, target) == 0
    assert os.listdir(target.root) == [NAME]
    (source / "void" / "inner").mkdir(parents=True)
    upload(source, target)
    assert os.path.isdir(f"{target.root}/{NAME}/void/inner")


def test_symlinks_are_followed_also_out_of_the_directory(source, target, tmp_path):
    write(tmp_path, "shared/weights.bin", data=b"weights")
    (source / "weights.bin").symlink_to(tmp_path / "shared/weights.bin")
    (source / "dir").symlink_to(tmp_path / "shared")
    upload(source, target)
    assert stored(target) == {"weights.bin": b"weights", "dir/weights.bin": b"weights"}
    assert not os.path.islink(f"{target.root}/{NAME}/weights.bin")


def test_a_directory_that_two_links_lead_to_is_there_twice(source, target):
    write(source, "step_3/model.pt")
    (source / "best").symlink_to("step_3")
    (source / "latest").symlink_to("step_3")
    upload(source, target)
    assert stored(target).keys() == {"step_3/model.pt", "best/model.pt", "latest/model.pt"}


def test_directories_that_contain_themselves_end(source, target):
    write(source, "a/x", "b/y")
    (source / "a/self").symlink_to("..")
    (source / "b/other").symlink_to("../a")
    upload(source, target)
    assert stored(target).keys() == {"a/x", "b/y", "b/other/x"}


def test_what_is_no_file_is_left_out_with_a_warning(source, target, caplog):
    write(source, "model.pt")
    (source / "dangling").symlink_to("nowhere")
    os.mkfifo(source / "pipe")
    with caplog.at_level(logging.WARNING):
        upload(source, target)
    assert stored(target).keys() == {"model.pt"}
    assert "dangling" in caplog.text
    assert "pipe" in caplog.text


def test_one_refused_file_is_an_error_that_names_it(source, target):
    write(source, *(f"shard-{number}" for number in range(10)))
    target.refused = ("shard-7",)
    with pytest.raises(IncompleteSyncError, match=r"1 of its 10 files.*shard-7.*403") as caught:
        upload(source, target)
    assert caught.value.failures.keys() == {"shard-7"}
    assert isinstance(caught.value.__cause__, StoragePermissionError)
    assert len(stored(target)) == 9, "the others are not given up"


def test_a_file_that_is_written_meanwhile_is_an_error_that_names_it(source, target, monkeypatch):
    write(source, "quiet")
    write(source, "busy", data=b"x" * 100)
    real = os.pread
    moves = iter(range(10**6))

    def pread(fd, *arguments):
        data = real(fd, *arguments)
        if os.readlink(f"/proc/self/fd/{fd}").endswith("busy"):
            (source / "busy").write_bytes(f"{next(moves):0100d}".encode())
        return data

    monkeypatch.setattr("ray_artifact_sync.local_files.os.pread", pread)
    with pytest.raises(IncompleteSyncError, match=r"busy.*written while it was read"):
        upload(source, target)
    assert stored(target).keys() == {"quiet"}


def test_a_name_that_storage_cannot_hold_is_an_error_that_names_it(source, target):
    write(source, "good", "bad\nname")
    with pytest.raises(IncompleteSyncError, match="control character"):
        upload(source, target)
    assert stored(target).keys() == {"good"}


@pytest.mark.parametrize("error", [ArtifactConflictError("replaced"), SyncTimeoutError("over")])
def test_a_replaced_writer_stops_as_such(source, target, error):
    write(source, "a", "b")

    def before_write():
        raise error

    with pytest.raises(type(error)):
        upload(source, target, before_write=before_write)
    assert stored(target) == {}


def test_a_transient_refusal_is_tried_again(source, target):
    write(source, "a", "b")
    tries = []

    class Flaky(PosixStore):
        def put(self, path, data, **options):
            tries.append(path)
            if tries.count(path) == 1:
                raise StorageError("503", retryable=True)
            return super().put(path, data, **options)

    flaky = Flaky(target.root)
    upload(source, flaky)
    assert stored(flaky).keys() == {"a", "b"}
    assert len(tries) == 4


@pytest.fixture
def memory():
    filesystem = pafs.PyFileSystem(pafs.FSSpecHandler(MemoryFileSystem()))
    store = open_store(filesystem, "/checkpoint-source")
    yield store
    store.delete([file.path for file in store.list()])


def test_a_source_on_another_store(memory, target):
    memory.put("model.pt", b"m" * 5_000_000)
    memory.put("sub/state", b"s")
    memory.put(SNAPSHOT, b"{}")
    assert upload(memory, target) == 5_000_001
    assert stored(target) == {"model.pt": b"m" * 5_000_000, "sub/state": b"s"}


def test_a_source_on_another_store_that_gives_less_is_an_error(memory, target, monkeypatch):
    memory.put("model.pt", b"m" * 100)
    memory.put("other", b"o")
    real = type(memory).read_chunks

    def short(self, path, **options):
        return iter([b"m" * 40]) if path == "model.pt" else real(self, path, **options)

    monkeypatch.setattr(type(memory), "read_chunks", short)
    with pytest.raises(IncompleteSyncError, match=r"model\.pt.*40 bytes instead of 100"):
        upload(memory, target)


@pytest.mark.s3
def test_from_a_directory_to_s3_and_from_s3_to_s3(source, s3_filesystem, proxy):
    write(source, "a b", "a%20b", "sub/x", SNAPSHOT)
    (source / "void").mkdir()
    one = open_store(s3_filesystem, "test-bucket/checkpoint-upload/one")
    two = open_store(s3_filesystem, "test-bucket/checkpoint-upload/two")
    upload(source, one)
    assert stored(one) == {"a b": b"data", "a%20b": b"data", "sub/x": b"data"}
    assert proxy.counts["marker"] == 0
    upload(open_store(s3_filesystem, f"test-bucket/checkpoint-upload/one/{NAME}"), two)
    assert stored(two) == stored(one)
    proxy.fail("put_object", "a%20b".replace("%", "%25"), status=403)
    rule = proxy.fail("put_object", "sub/x", status=403)
    with pytest.raises(IncompleteSyncError, match="sub/x"):
        upload(source, two)
    assert rule.hits
