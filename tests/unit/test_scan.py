"""Walking a working dir: every file is an artifact, or left out with a reason; nothing hangs, nothing raises."""

import os
import socket
import sys
import tempfile

import pytest

from ray_artifact_sync.entries import LocalFile, Skip
from ray_artifact_sync.local_files import FileStat, HashedFile
from ray_artifact_sync.scan import HashCache, as_local_files, hash_local_file, scan_tree


@pytest.fixture
def root(tmp_path):
    directory = tmp_path / "work"
    directory.mkdir()
    return directory


def write(root, *paths, data=b"data"):
    for path in paths:
        target = root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)


def reasons(scan):
    return {skip.path: (skip.kind, skip.reason) for skip in scan.skips}


def test_files_empty_files_and_empty_dirs(root):
    write(root, "a", "sub/deep/b", ".hidden", "sub/.hidden/c")
    write(root, "empty", data=b"")
    (root / "void" / "inner").mkdir(parents=True)
    scan = scan_tree(str(root))
    assert scan.files.keys() == {"a", "sub/deep/b", ".hidden", "sub/.hidden/c", "empty"}
    assert scan.files["a"] == FileStat.of((root / "a").stat())
    assert scan.files["empty"].size == 0
    assert scan.empty_dirs == ("void/inner",)
    assert scan.skips == ()


def test_a_missing_directory_is_an_empty_one(tmp_path):
    for path in (tmp_path / "missing", tmp_path / "missing" / "deep"):
        scan = scan_tree(str(path))
        assert (scan.files, scan.empty_dirs, scan.skips) == ({}, (), ())
        assert not path.exists()


def test_an_empty_root_is_no_artifact(root):
    assert scan_tree(str(root)).empty_dirs == ()


def test_a_root_that_is_a_file_is_an_empty_one(tmp_path):
    write(tmp_path, "file")
    assert scan_tree(str(tmp_path / "file")).files == {}


def test_special_names_are_ordinary(root):
    names = [
        "a b",
        "a%20b",
        "a#b",
        "a:b",
        "a?b",
        "f[1].txt",
        "f*",
        "~x",
        "back\\slash",
        "emoji-😀",
        "-rf",
        "n" * 250,
        "...",
    ]
    write(root, *names)
    assert scan_tree(str(root)).files.keys() == set(names)


def test_names_that_storage_cannot_hold_are_skipped(root):
    names = [b"new\nline", b"tab\t", b"bell\x07", b"del\x7f", b"latin-\xe9"]
    for name in names:
        with open(os.path.join(os.fsencode(str(root)), name), "wb"):
            pass
    os.mkdir(os.path.join(os.fsencode(str(root)), b"dir\xff"))
    with open(os.path.join(os.fsencode(str(root)), b"dir\xff", b"inner"), "wb"):
        pass
    write(root, "good")
    scan = scan_tree(str(root))
    assert scan.files.keys() == {"good"}
    found = reasons(scan)
    assert found.keys() == {repr(os.fsdecode(name))[1:-1] for name in [*names, b"dir\xff"]}
    for path, (kind, reason) in found.items():
        assert kind == "invalid"
        assert reason.endswith("Rename the file")
        assert path.isprintable(), "a file name must not break a log"
        assert reason.isprintable()


# --- links --------------------------------------------------------------------------------------------


def test_a_symlink_to_a_file_inside_is_that_file(root):
    write(root, "data/real", data=b"12345")
    (root / "latest").symlink_to("data/real")
    (root / "absolute").symlink_to(root / "data/real")
    (root / "chain").symlink_to("latest")
    scan = scan_tree(str(root))
    assert scan.files.keys() == {"data/real", "latest", "absolute", "chain"}
    assert scan.files["latest"].size == 5
    assert scan.files["latest"] == scan.files["data/real"], "the target's stat: a change of it is seen"


def test_a_root_that_is_a_link_itself(root, tmp_path):
    write(root, "real")
    (root / "link").symlink_to("real")
    (tmp_path / "alias").symlink_to(root)
    assert scan_tree(str(tmp_path / "alias")).files.keys() == {"real", "link"}


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("nowhere", "dangling"),
        ("../nowhere", "dangling"),
        ("/etc/passwd", "leaves the working dir"),
        ("../outside", "leaves the working dir"),
        ("../work-evil/x", "leaves the working dir"),
        ("sub/../../outside", "leaves the working dir"),
        ("..", "leaves the working dir"),
        ("sub", "directory"),
        (".", "directory"),
        ("link", "dangling"),  # itself
        ("other", "dangling"),  # other leads back to link
        (".ray_artifact_sync/token", "own directory"),
    ],
)
def test_other_symlinks_are_skipped(root, tmp_path, target, reason):
    write(root, "sub/file", ".ray_artifact_sync/token")
    write(tmp_path, "outside", "work-evil/x", data=b"secret")
    (root / "other").symlink_to("link")
    (root / "link").symlink_to(target)
    scan = scan_tree(str(root))
    assert scan.files.keys() == {"sub/file"}
    kind, why = reasons(scan)["link"]
    assert kind == "unsupported"
    assert reason in why


def test_a_link_to_a_file_through_a_directory_that_leads_out(root, tmp_path):
    write(tmp_path, "outside/x", data=b"secret")
    (root / "dir").symlink_to("../outside")
    (root / "link").symlink_to("dir/x")
    scan = scan_tree(str(root))
    assert scan.files == {}
    assert "leaves" in reasons(scan)["link"][1]
    assert "leaves" in reasons(scan)["dir"][1]


# --- what is no file ------------------------------------------------------------------------------------


def test_fifo_and_socket_are_named_and_do_not_hang(root):
    os.mkfifo(root / "pipe")
    (root / "pipe-link").symlink_to("pipe")
    with tempfile.TemporaryDirectory(dir="/tmp") as short, socket.socket(socket.AF_UNIX) as server:
        server.bind(f"{short}/s")  # a socket's path is at most 108 bytes
        os.rename(f"{short}/s", root / "sock")
        scan = scan_tree(str(root))
    assert scan.files == {}
    found = reasons(scan)
    assert found.keys() == {"pipe", "pipe-link", "sock"}
    assert "FIFO" in found["pipe"][1]
    assert "FIFO" in found["pipe-link"][1]
    assert "socket" in found["sock"][1]
    assert {kind for kind, _ in found.values()} == {"unsupported"}


@pytest.mark.skipif(not os.path.exists("/dev/null"), reason="needs a device")
def test_a_device(root):
    (root / "null").symlink_to("/dev/null")
    assert scan_tree(str(root)).files == {}


@pytest.fixture
def refuse(monkeypatch):
    """Makes `os.scandir` refuse some directories (tests may run as root, whom permissions do not stop)."""
    real = os.scandir

    def install(error, *names):
        def scandir(path):
            if os.path.basename(path) in names:
                raise error
            return real(path)

        monkeypatch.setattr("ray_artifact_sync.scan.os.scandir", scandir)

    return install


def test_an_unreadable_directory_is_named(root, refuse):
    write(root, "locked/a", "open/b")
    refuse(PermissionError(13, "Permission denied"), "locked")
    scan = scan_tree(str(root))
    assert scan.files.keys() == {"open/b"}
    assert reasons(scan) == {"locked": ("unreadable", "unreadable directory: Permission denied")}
    assert scan.empty_dirs == (), "unreadable is not empty"


@pytest.mark.skipif(os.geteuid() == 0, reason="permissions do not stop root")
def test_a_directory_without_permission_is_named(root):
    write(root, "locked/a", "open/b")
    (root / "locked").chmod(0)
    try:
        assert "locked" in reasons(scan_tree(str(root)))
    finally:
        (root / "locked").chmod(0o700)


# --- moving targets -------------------------------------------------------------------------------------


def test_a_directory_deleted_during_the_walk(root, refuse):
    write(root, "gone/a", "stays/b")
    refuse(FileNotFoundError(2, "No such file"), "gone")
    scan = scan_tree(str(root))
    assert scan.files.keys() == {"stays/b"}
    assert scan.skips == ()


def test_a_file_deleted_during_the_walk(root):
    write(root, "a", "b", "sub/c")

    def rule(path, is_dir):
        if not is_dir:
            os.unlink(root / path)

    scan = scan_tree(str(root), rule)
    assert scan.files == {}
    assert {skip.path: skip.kind for skip in scan.skips} == {"a": "vanished", "b": "vanished", "sub/c": "vanished"}


def test_a_directory_that_becomes_a_file_during_the_walk(root):
    write(root, "d/x")

    def rule(path, is_dir):
        if path == "d":
            os.unlink(root / "d/x")
            os.rmdir(root / "d")
            (root / "d").write_bytes(b"file")

    assert scan_tree(str(root), rule).files == {}


# --- rules ----------------------------------------------------------------------------------------------


def test_the_rule_is_asked_about_files_and_directories_and_prunes(root):
    write(root, "keep/a", "drop/b", "drop/deep/c", "x.tmp")
    asked = []

    def rule(path, is_dir):
        asked.append((path, is_dir))
        return Skip(path, "because", "excluded") if path in ("drop", "x.tmp") else None

    scan = scan_tree(str(root), rule)
    assert scan.files.keys() == {"keep/a"}
    assert sorted(asked) == [("drop", True), ("keep", True), ("keep/a", False), ("x.tmp", False)]
    assert {skip.path for skip in scan.skips} == {"drop", "x.tmp"}
    assert scan.empty_dirs == ()


def test_checkpoints_and_our_own_directory(root):
    write(
        root,
        ".ray_artifact_sync/token",
        ".ray_artifact_sync_notes",
        "sub/.ray_artifact_sync/mine",
        "checkpoint_000003/model.pt",
        "sub/checkpoint_000003/mine",
        "checkpoint_notes.txt",
        "checkpoint_000003.txt",
        "checkpoint_best/model.pt",
    )
    everything = scan_tree(str(root)).files.keys()
    without = scan_tree(str(root), skip_checkpoints=True).files.keys()
    assert everything - without == {"checkpoint_000003/model.pt"}
    assert everything == {
        ".ray_artifact_sync_notes",
        "sub/.ray_artifact_sync/mine",
        "checkpoint_000003/model.pt",
        "sub/checkpoint_000003/mine",
        "checkpoint_notes.txt",
        "checkpoint_000003.txt",
        "checkpoint_best/model.pt",
    }


def test_a_file_with_the_name_of_a_checkpoint_is_a_file(root):
    write(root, "checkpoint_000003")
    assert "checkpoint_000003" in scan_tree(str(root), skip_checkpoints=True).files


def test_deep_trees_need_no_recursion(root):
    depth = sys.getrecursionlimit() // 2
    here = os.open(root, os.O_RDONLY)
    try:
        for _ in range(depth):
            os.mkdir("d", dir_fd=here)
            deeper = os.open("d", os.O_RDONLY, dir_fd=here)
            os.close(here)
            here = deeper
    finally:
        os.close(here)
    scan = scan_tree(str(root))
    assert scan.empty_dirs == ("/".join(["d"] * depth),)


def test_a_tree_deeper_than_a_path_can_be(root):
    name = "d" * 200
    here = os.open(root, os.O_RDONLY)
    try:
        for _ in range(30):
            os.mkdir(name, dir_fd=here)
            deeper = os.open(name, os.O_RDONLY, dir_fd=here)
            os.close(here)
            here = deeper
    finally:
        os.close(here)
    write(root, "good")
    scan = scan_tree(str(root))
    assert scan.files.keys() == {"good"}
    assert len(scan.skips) == 1


# --- what the planner gets ------------------------------------------------------------------------------


def hashed(stat, digest="d", *, settled=True):
    return HashedFile(stat, digest, {}, settled)


def test_the_cache_vouches_only_for_the_very_version():
    cache, seen = HashCache(), FileStat(3, 100, 100, 7)
    cache.remember("x", hashed(seen))
    assert cache.get("x", seen) == "d"
    for other in (
        FileStat(4, 100, 100, 7),
        FileStat(3, 101, 100, 7),
        FileStat(3, 100, 101, 7),
        FileStat(3, 100, 100, 8),
    ):
        assert cache.get("x", other) is None
    assert cache.get("y", seen) is None
    cache.remember("x", hashed(seen, settled=False))
    assert cache.get("x", seen) is None
    cache.remember("x", hashed(seen))
    cache.forget_except({"y"})
    assert cache.get("x", seen) is None


def test_a_scan_in_the_planners_terms(root):
    write(root, "known", "new")
    (root / "void").mkdir()
    scan, cache = scan_tree(str(root)), HashCache()
    cache.remember("known", hashed(scan.files["known"]))
    files = as_local_files(scan, cache)
    assert files["known"] == LocalFile("known", 4, scan.files["known"].mtime_ns, "d")
    assert files["new"].digest is None
    assert files["void"].is_dir


def test_hashing_what_the_scan_saw(root):
    write(root, "x", data=b"12345")
    cache = HashCache()
    seen = LocalFile("x", 3, 1)
    file = hash_local_file(seen, [2, 5, 9], str(root / "x"), cache)
    assert (file.size, file.prefix_digests.keys()) == (5, {2, 5}), (
        "the version that was read, not the one that was seen"
    )
    missing = hash_local_file(LocalFile("y", 3, 1), [], str(root / "y"))
    assert (missing.path, missing.kind) == ("y", "vanished")
    os.mkfifo(root / "pipe")
    pipe = hash_local_file(LocalFile("pipe", 3, 1), [], str(root / "pipe"))
    assert (pipe.path, pipe.kind) == ("pipe", "unstable")


def test_an_unreadable_file_is_a_skip(root, monkeypatch):
    write(root, "x")

    def refuse(*_args):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("ray_artifact_sync.scan.hash_file", refuse)
    skip = hash_local_file(LocalFile("x", 4, 1), [], str(root / "x"))
    assert (skip.kind, skip.reason) == ("unreadable", "unreadable: Permission denied")
