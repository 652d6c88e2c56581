"""One directory kept equal to a local one: only changes are sent, nothing is deleted, what is read is verified."""

import logging
import os
import threading

import pytest
from blake3 import blake3

from ray_artifact_sync import directory_sync as module
from ray_artifact_sync import layout
from ray_artifact_sync.concurrency import Deadline
from ray_artifact_sync.directory_sync import DirectorySync, sync_directory_down
from ray_artifact_sync.entries import Skip
from ray_artifact_sync.errors import ArtifactNotFoundError, IncompleteSyncError, StorageError, StoragePermissionError
from ray_artifact_sync.options import SyncOptions
from ray_artifact_sync.stores import open_store, open_uri
from ray_artifact_sync.stores.posix import PosixStore
from ray_artifact_sync.trial_dir import TrialDir

OPTIONS = SyncOptions(retries=1)


class Counting(PosixStore):
    """Counts and, where told so, refuses."""

    def __init__(self, root):
        super().__init__(root)
        self.puts = []
        self.deletes = []
        self.refused = set()

    def put(self, path, data, **options):
        if path in self.refused:
            raise StoragePermissionError(f"403 for {path}")
        self.puts.append(path)
        return super().put(path, data, **options)

    def append(self, path, offset, data, **options):
        self.puts.append(f"{path}+{offset}")
        return super().append(path, offset, data, **options)

    def delete(self, paths):
        paths = list(paths)
        self.deletes.extend(paths)
        super().delete(paths)

    def sent(self):
        sent = [path for path in self.puts if not layout.is_reserved(path)]
        self.puts.clear()
        return sorted(sent)


@pytest.fixture
def local(tmp_path):
    directory = tmp_path / "local"
    directory.mkdir()
    return directory


@pytest.fixture
def store(tmp_path):
    return Counting(tmp_path / "remote")


def write(root, *paths, data=b"data"):
    for path in paths:
        place = root / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(data)


def up(local, store, *, verify_remote=True, rule=None):
    """What a new process does."""
    sync = DirectorySync(str(local), store, options=OPTIONS, verify_remote=verify_remote)
    return sync, sync.sync_up(Deadline(60), **({"rule": rule} if rule else {}))


def down(store, target, **options):
    return sync_directory_down(store, str(target), options=OPTIONS, deadline=Deadline(60), **options)


def files(root):
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def stored(store):
    return {file.path: store.read(file.path) for file in store.list() if not layout.is_reserved(file.path)}


def head(store):
    return TrialDir(store, "").head().manifest


# --- up -----------------------------------------------------------------------------------------------


def test_only_changes_are_sent(local, store):
    write(local, "a", "b", "sub/c")
    sync, report = up(local, store)
    assert store.sent() == ["a", "b", "sub/c"]
    assert report.files_sent == 3
    assert sync.sync_up(Deadline(60)).files_sent == 0
    assert store.puts == [], "not even a manifest"
    write(local, "b", data=b"DATA")
    write(local, "new")
    sync.sync_up(Deadline(60))
    assert store.sent() == ["b", "new"]
    assert stored(store) == files(local)
    assert head(store).get("b").digest == blake3(b"DATA").hexdigest()


def test_a_grown_file_costs_what_was_appended(local, store):
    write(local, "log", data=b"1" * 100_000)
    sync, _ = up(local, store)
    store.sent()
    with open(local / "log", "ab") as log:
        log.write(b"2")
    report = sync.sync_up(Deadline(60))
    assert store.sent() == ["log+100000"]
    assert report.bytes_sent == 1
    assert stored(store) == files(local)


def test_a_new_process_sends_nothing_unchanged(local, store):
    write(local, "a", "b")
    up(local, store)
    store.sent()
    write(local, "b", data=b"DATA")
    up(local, store)
    assert store.sent() == ["b"]
    up(local, store)
    assert store.puts == []


def test_without_a_look_at_the_remote_a_new_process_sends_everything_once(local, store):
    write(local, "a", "b")
    up(local, store)
    store.sent()
    sync, _ = up(local, store, verify_remote=False)
    assert store.sent() == ["a", "b"]
    sync.sync_up(Deadline(60))
    assert store.puts == []


def test_what_somebody_deleted_or_changed_in_storage_is_sent_again(local, store):
    write(local, "gone", "changed", "kept")
    up(local, store)
    store.sent()
    PosixStore(store.root).delete(["gone"])
    PosixStore(store.root).put("changed", b"other content")
    up(local, store)
    assert store.sent() == ["changed", "gone"]
    assert stored(store) == files(local)


def test_a_sync_that_died_before_its_commit(local, store, monkeypatch):
    """What it sent is newer than the manifest, although the sizes are the same."""
    write(local, "x", data=b"old")
    up(local, store)
    manifest = os.stat(f"{store.root}/{layout.MANIFEST}").st_mtime_ns
    PosixStore(store.root).put("x", b"new")
    os.utime(f"{store.root}/x", ns=(manifest + 10**9, manifest + 10**9))
    store.sent()
    up(local, store)
    assert store.sent() == ["x"]
    assert stored(store) == {"x": b"old"}


def test_nothing_is_deleted(local, store):
    write(local, "a", "b")
    PosixStore(store.root).put("theirs", b"not ours")
    sync, _ = up(local, store)
    os.unlink(local / "a")
    sync.sync_up(Deadline(60))
    up(local, store)
    assert stored(store) == {"a": b"data", "b": b"data", "theirs": b"not ours"}
    assert head(store).entries.keys() == {"a", "b"}, "what is stored stays listed"
    assert not [path for path in store.deletes if not path.startswith(layout.LAYERS)]


def test_what_a_rule_leaves_out_stays_listed(local, store):
    write(local, "a", "b")
    up(local, store)
    store.sent()
    write(local, "a", "b", data=b"DATA")
    up(local, store, rule=lambda path, is_dir: Skip(path, "no", "excluded") if path == "a" else None)
    assert store.sent() == ["b"]
    assert head(store).entries.keys() == {"a", "b"}


def test_partial_failure_commits_the_rest(local, store):
    write(local, *(f"f{number}" for number in range(10)))
    store.refused = {"f3"}
    with pytest.raises(IncompleteSyncError, match=r"1 files.*f3.*403") as caught:
        up(local, store)
    assert caught.value.failures.keys() == {"f3"}
    assert head(store).entries.keys() == {f"f{number}" for number in range(10)} - {"f3"}
    store.refused = set()
    store.sent()
    up(local, store)
    assert store.sent() == ["f3"]


def test_a_failed_change_keeps_the_old_version_listed(local, store):
    write(local, "x", data=b"old")
    sync, _ = up(local, store)
    write(local, "x", data=b"newer")
    store.refused = {"x"}
    with pytest.raises(IncompleteSyncError):
        sync.sync_up(Deadline(60))
    assert head(store).get("x").digest == blake3(b"old").hexdigest()
    store.refused = set()
    sync.sync_up(Deadline(60))
    assert head(store).get("x").digest == blake3(b"newer").hexdigest()


def test_a_failed_commit_does_not_send_the_files_again(local, store):
    write(local, "x", "y")
    sync = DirectorySync(str(local), store, options=OPTIONS, verify_remote=True)
    store.refused = {layout.MANIFEST}
    with pytest.raises(StoragePermissionError):
        sync.sync_up(Deadline(60))
    assert store.sent() == ["x", "y"]
    store.refused = set()
    sync.sync_up(Deadline(60))
    assert store.sent() == []
    assert head(store).entries.keys() == {"x", "y"}


@pytest.mark.parametrize(("before", "after"), [("a", "a/x"), ("a/x", "a"), ("a/x/y", "a")])
def test_a_path_that_changes_between_file_and_directory(local, store, before, after):
    """The manifest must stay readable: it refuses a file that is a directory too."""
    write(local, before, "other")
    sync, _ = up(local, store)
    os.unlink(local / before)
    for parent in ("a/x", "a"):
        if os.path.isdir(local / parent):
            os.rmdir(local / parent)
    write(local, after)
    sync.sync_up(Deadline(60))
    assert head(store).entries.keys() == {after, "other"}
    assert stored(store) == files(local)
    store.sent()
    up(local, store)
    assert store.sent() == []


def test_a_damaged_manifest_is_written_anew(local, store, caplog):
    write(local, "x")
    up(local, store)
    store.sent()
    PosixStore(store.root).put(layout.MANIFEST, b"{}")
    with caplog.at_level(logging.WARNING):
        up(local, store)
    assert "sent again" in caplog.text
    assert store.sent() == ["x"]
    assert head(store).entries.keys() == {"x"}


@pytest.mark.parametrize("exists", [False, True])
def test_nothing_to_sync(tmp_path, store, exists):
    local = tmp_path / "nothing"
    if exists:
        local.mkdir()
    _, report = up(local, store)
    assert report.files_sent == 0
    assert store.puts == []
    assert local.exists() == exists


def test_many_files_need_few_layers(local, store):
    for number in range(300):
        write(local, f"f{number:03d}")
    sync, _ = up(local, store)
    for number in range(4):
        for other in range(150):
            write(local, f"f{other:03d}", data=f"{number}".encode())
        sync.sync_up(Deadline(60))
    layers = {file.path for file in store.list(layout.LAYERS)}
    assert layers == {f"{layout.LAYERS}/{ref.name}" for ref in TrialDir(store, "").head().refs}
    assert len(head(store)) == 300


# --- down ---------------------------------------------------------------------------------------------


def test_round_trip(local, store, tmp_path):
    write(local, "a", "sub/deep/b", "a b#?%20", data=os.urandom(5_000_000))
    write(local, "empty", data=b"")
    (local / "void/inner").mkdir(parents=True)
    up(local, store)
    target = tmp_path / "target"
    assert down(store, target) == 4
    assert files(target) == files(local)
    assert (target / "void/inner").is_dir()
    assert sorted(os.listdir(target)) == sorted(os.listdir(local)), "no scratch directory is left"


def test_files_that_are_there_are_left_alone(local, store, tmp_path):
    write(local, "same", "changed", "missing")
    up(local, store)
    target = tmp_path / "target"
    write(target, "same", "mine")
    write(target, "changed", data=b"DATA")
    inode = (target / "same").stat().st_ino
    assert down(store, target) == 2
    assert files(target) == {"same": b"data", "changed": b"data", "missing": b"data", "mine": b"data"}
    assert (target / "same").stat().st_ino == inode


def test_a_corrupt_file_is_an_error_and_the_rest_arrives(local, store, tmp_path):
    write(local, "good", "bad", "also-good")
    up(local, store)
    with open(f"{store.root}/bad", "r+b") as file:
        file.write(b"DATA")
    written = os.stat(f"{store.root}/{layout.MANIFEST}").st_mtime_ns
    os.utime(f"{store.root}/bad", ns=(written - 10**9, written - 10**9))
    target = tmp_path / "target"
    write(target, "bad", data=b"local")
    with pytest.raises(IncompleteSyncError, match="bad") as caught:
        down(store, target)
    assert caught.value.failures.keys() == {"bad"}
    assert files(target) == {"good": b"data", "also-good": b"data", "bad": b"local"}, (
        "never half a file, never a wrong one"
    )


@pytest.mark.parametrize("data", [b"DATA", b"longer than before"])
def test_a_file_newer_than_the_manifest_is_taken(local, store, tmp_path, data):
    """A sync that died before its commit must not make the directory unreadable."""
    write(local, "x", "y")
    up(local, store)
    written = os.stat(f"{store.root}/{layout.MANIFEST}").st_mtime_ns
    PosixStore(store.root).put("x", data)
    os.utime(f"{store.root}/x", ns=(written + 10**9, written + 10**9))
    target = tmp_path / "target"
    assert down(store, target) == 2
    assert files(target) == {"x": data, "y": b"data"}


def test_without_a_manifest(store, tmp_path):
    PosixStore(store.root).put("a/x", b"1")
    target = tmp_path / "target"
    assert down(store, target) == 1
    assert files(target) == {"a/x": b"1"}


def test_with_a_damaged_manifest(store, tmp_path, caplog):
    PosixStore(store.root).put("x", b"1")
    PosixStore(store.root).put(layout.MANIFEST, b"not json")
    with caplog.at_level(logging.WARNING):
        assert down(store, tmp_path / "target") == 1
    assert "unverified" in caplog.text


def test_nothing_there_is_an_error(store, tmp_path):
    with pytest.raises(ArtifactNotFoundError, match="nothing at"):
        down(store, tmp_path / "target")
    assert not (tmp_path / "target").exists()


def test_a_rule_leaves_files_out(local, store, tmp_path):
    write(local, "a", "b.tmp")
    (local / "void.tmp").mkdir()
    up(local, store)
    target = tmp_path / "target"
    assert down(store, target, rule=lambda p, _d: Skip(p, "no", "excluded") if p.endswith("tmp") else None) == 1
    assert files(target) == {"a": b"data"}
    assert not (target / "void.tmp").exists()


def test_a_directory_in_the_way_is_named(local, store, tmp_path):
    write(local, "a", "b")
    up(local, store)
    target = tmp_path / "target"
    write(target, "a/mine")
    with pytest.raises(IncompleteSyncError, match=": a: ") as caught:
        down(store, target)
    assert caught.value.failures.keys() == {"a"}
    assert files(target) == {"a/mine": b"data", "b": b"data"}


def test_a_stream_that_breaks_leaves_no_part(local, store, tmp_path, monkeypatch):
    write(local, "x")
    up(local, store)

    def broken(_self, path, **_options):
        yield b"da"
        raise StorageError("reset")

    target = tmp_path / "target"
    monkeypatch.setattr(module, "_listed", lambda *_args: None)
    monkeypatch.setattr(Counting, "read_chunks", broken)
    with pytest.raises(IncompleteSyncError, match="reset"):
        down(store, target)
    assert list(target.iterdir()) == []


def test_a_killed_download_leaves_nothing_that_a_sync_would_send(local, store, tmp_path, monkeypatch):
    write(local, "x")
    up(local, store)
    target = tmp_path / "target"

    class Killed(BaseException):
        pass

    during = []

    def killed(_self, _path, **_options):
        yield b"da"
        during.extend(str(path.relative_to(target)) for path in target.rglob("*") if path.is_file())
        raise Killed

    monkeypatch.setattr(Counting, "read_chunks", killed)
    monkeypatch.setattr(module, "_listed", lambda *_args: None)
    monkeypatch.setattr(module.os, "unlink", lambda _path: None)
    monkeypatch.setattr(module.shutil, "rmtree", lambda *_args, **_options: None)
    with pytest.raises(Killed):
        down(store, target)
    assert len(during) == 1
    assert layout.is_reserved(during[0]), "a half file lies where no sync looks"
    monkeypatch.undo()
    _, report = up(target, Counting(tmp_path / "elsewhere"))
    assert report.files_sent == 0


def test_downloads_leave_the_umask_alone(local, store, tmp_path, monkeypatch):
    """It belongs to the process: two threads that set it and set it back can leave it at 0 for ever."""
    write(local, *(f"f{number}" for number in range(20)))
    up(local, store)
    before = os.umask(0o027)
    try:
        monkeypatch.setattr(os, "umask", lambda _mask: pytest.fail("os.umask was called"))
        target = tmp_path / "target"
        down(store, target)
    finally:
        monkeypatch.undo()
        assert os.umask(before) == 0o027
    assert {oct((target / name).stat().st_mode & 0o777) for name in files(target)} == {"0o640"}


def test_a_hostile_listing_stays_below_the_directory(store, tmp_path, monkeypatch):
    PosixStore(store.root).put("good", b"1")
    real = Counting.list

    def listing(self, prefix=""):
        for file in real(self, prefix):
            yield file
            yield type(file)("../escaped", file.size, None, None)

    monkeypatch.setattr(Counting, "list", listing)
    monkeypatch.setattr(Counting, "read_chunks", lambda _self, _path, **_options: iter([b"1"]))
    monkeypatch.setattr(module, "_listed", lambda *_args: None)
    target = tmp_path / "deep" / "target"
    with pytest.raises(IncompleteSyncError, match="escaped"):
        down(store, target)
    assert not (tmp_path / "deep" / "escaped").exists()
    assert files(target) == {"good": b"1"}


def test_downloads_run_side_by_side(local, store, tmp_path, monkeypatch):
    write(local, *(f"f{number}" for number in range(4)))
    up(local, store)
    barrier = threading.Barrier(4, timeout=30)
    real = Counting.read_chunks

    def together(self, path, **options):
        if path.startswith("f"):
            barrier.wait()
        return real(self, path, **options)

    monkeypatch.setattr(Counting, "read_chunks", together)
    assert down(store, tmp_path / "target") == 4


# --- destinations ---------------------------------------------------------------------------------------


def test_a_trailing_slash_means_the_same_directory(local, tmp_path):
    write(local, "a", "sub/b")
    for number, place in enumerate((f"{tmp_path}/there", f"{tmp_path}/there/", f"{tmp_path}//there/")):
        _, report = up(local, open_uri(place))
        assert report.files_sent == (0 if number else 2)
    assert files(tmp_path / "there").keys() >= {"a", "sub/b"}
    assert os.listdir(tmp_path / "there") != []


@pytest.mark.s3
def test_a_trailing_slash_means_the_same_keys(local, s3_filesystem, proxy):
    write(local, "a", "sub/b")
    for number, place in enumerate(("test-bucket/slash/there", "test-bucket/slash/there/")):
        _, report = up(local, open_store(s3_filesystem, place))
        assert report.files_sent == (0 if number else 2)
    keys = {file.path for file in open_store(s3_filesystem, "test-bucket/slash").list()}
    assert keys == {"there/a", "there/sub/b", f"there/{layout.MANIFEST}"}
    assert not [request.path for request in proxy.log if "//" in request.path]


@pytest.mark.s3
def test_s3_round_trip_and_a_new_process(local, s3_filesystem, proxy, tmp_path):
    write(local, "a b", "a%20b", "a#b", "a:b", "a?b", "sub/x")
    write(local, "empty", data=b"")
    (local / "void").mkdir()
    up(local, open_store(s3_filesystem, "test-bucket/directory-sync"))
    proxy.reset_counts()
    up(local, open_store(s3_filesystem, "test-bucket/directory-sync"))
    assert proxy.counts["put_object"] == 0
    target = tmp_path / "target"
    down(open_store(s3_filesystem, "test-bucket/directory-sync"), target)
    assert files(target) == files(local)
    assert (target / "void").is_dir()
