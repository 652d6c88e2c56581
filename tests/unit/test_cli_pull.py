"""`pull`: every byte right, nothing twice, nothing lost of what is there, and no way out of the destination."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from blake3 import blake3

from ray_artifact_sync import layout
from ray_artifact_sync.stores.posix import PosixStore
from tests.support.looking import BIG, Spot, files_below, make_trial
from tests.support.terminals import Terminal


@pytest.fixture
def disk(tmp_path) -> Spot:
    return Spot(lambda path="": str(tmp_path / "storage" / path), None, tmp_path)


def test_a_trial(spot, command, tmp_path):
    trees = make_trial(spot, big=True)
    for checkpoint, tree in trees.items():
        uri = spot.uri("exp/trial_1") if checkpoint == "newest" else spot.at("exp/trial_1", checkpoint)
        dest = tmp_path / "dest" / checkpoint
        ran = command("pull", uri, dest)
        assert (ran.code, ran.err) == (0, "")
        assert files_below(dest) == tree
        assert (dest / "empty dir").is_dir()
        assert not (dest / layout.STATE_DIR).exists()
    written = (tmp_path / "work/exp/trial_1/log.txt").stat().st_mtime_ns
    assert (tmp_path / "dest/newest/log.txt").stat().st_mtime_ns == written


def test_an_experiment(spot, command, tmp_path):
    make_trial(spot, "trial_1")
    trees = make_trial(spot, "trial_2")
    ran = command("pull", spot.uri("exp"), tmp_path / "dest", "--json")
    assert ran.code == 0
    assert (ran.json["files"], ran.json["kept"], ran.json["failures"]) == (8, 0, [])
    assert files_below(tmp_path / "dest/trial_2") == trees["newest"]


def test_patterns(spot, command, tmp_path):
    make_trial(spot)
    command("pull", spot.uri("exp/trial_1"), tmp_path / "dest", "--include", "*.txt", "--exclude", "/empty.txt")
    assert set(files_below(tmp_path / "dest")) == {"log.txt", "rewritten.txt"}
    ran = command("pull", spot.uri("exp/trial_1"), tmp_path / "dest", "--include", "[")
    assert ran.code == 2
    assert "Invalid pattern" in ran.err


def test_again_reads_nothing(spot, command, tmp_path):
    make_trial(spot, big=True)
    command("pull", spot.uri("exp/trial_1"), tmp_path / "dest")
    (tmp_path / "dest/log.txt").unlink()
    (tmp_path / "dest/mine.txt").write_text("mine")
    if spot.proxy:
        spot.proxy.reset_counts()
    ran = command("pull", spot.uri("exp/trial_1"), tmp_path / "dest", "--json")
    assert (ran.json["files"], ran.json["bytes"], ran.json["kept"]) == (1, 6, 4)
    assert (tmp_path / "dest/mine.txt").read_text() == "mine"
    if spot.proxy:
        assert spot.proxy.bytes_out["get_object"] < 10_000


def test_files_that_differ_are_not_replaced(spot, command, tmp_path):
    trees = make_trial(spot)
    command("pull", spot.at("exp/trial_1", "checkpoint_000000"), tmp_path / "dest")
    ran = command("pull", spot.uri("exp/trial_1"), tmp_path / "dest")
    assert ran.code == 2
    assert ran.err.count("\n") == 1
    assert "is there already with other content (and 1 more like it); --force replaces such files" in ran.err
    assert files_below(tmp_path / "dest") == trees["checkpoint_000000"]
    assert command("pull", spot.uri("exp/trial_1"), tmp_path / "dest", "--force").code == 0
    assert files_below(tmp_path / "dest") == {**trees["checkpoint_000000"], **trees["newest"]}


def test_what_is_in_the_way_is_not_deleted(disk, command, tmp_path):
    make_trial(disk)
    (tmp_path / "a/log.txt/deep").mkdir(parents=True)
    (tmp_path / "b").mkdir()
    (tmp_path / "b/sub dir").write_text("a file")
    (tmp_path / "c").mkdir()
    (tmp_path / "c/empty dir").write_text("a file")
    (tmp_path / "d").write_text("a file")
    for dest, said in (
        ("a", "log.txt is a directory, and a file must go there; pull deletes nothing"),
        ("b", "is a file or a link, or lies behind one, where a directory must be"),
        ("c", "empty dir is a file or a link"),
        ("d", "is not a directory; name a directory to pull into"),
    ):
        before = files_below(tmp_path / dest) if dest != "d" else None
        ran = command("pull", disk.uri("exp/trial_1"), tmp_path / dest, "--force")
        assert ran.code == 2
        assert said in ran.err
        if before is not None:
            assert files_below(tmp_path / dest) == before


# --- interruptions ------------------------------------------------------------------------------------


def part_of(disk: Spot, path: str, dest) -> str:
    entry = json.loads(PosixStore(disk.uri("exp/trial_1")).read(layout.MANIFEST))["entries"][path]
    name = blake3(f"{entry['digest']} {entry['size']} {path}".encode()).hexdigest()[:32]
    return os.path.join(dest, layout.STATE_DIR, "pull", f"{name}.part")


def test_a_part_is_continued(spot, command, tmp_path):
    """What an earlier pull left is not asked for again, unless it is wrong."""
    trees = make_trial(spot, big=True)
    big = trees["newest"]["big.bin"]
    entry = json.loads(spot.store("exp/trial_1").read(layout.MANIFEST))["entries"]["big.bin"]
    name = blake3(f"{entry['digest']} {entry['size']} big.bin".encode()).hexdigest()[:32]
    for left, at_most in ((big[:-1000], 20_000), (big, 20_000), (b"x" * 1000, 2 * BIG), (big + b"more", 2 * BIG)):
        dest = tmp_path / f"dest{len(left)}"
        scratch = dest / layout.STATE_DIR / "pull"
        scratch.mkdir(parents=True)
        (scratch / f"{name}.part").write_bytes(left)
        (scratch / f"{'0' * 32}.part").write_bytes(b"of a version that nobody wants any more")
        ran = command("pull", spot.uri("exp/trial_1"), dest, "--json")
        assert ran.code == 0, ran.err
        assert files_below(dest) == trees["newest"]
        assert ran.json["bytes"] < at_most


@pytest.mark.s3
def test_killed_in_the_middle_and_run_again(s3_uri, proxy, tmp_path, command):
    spot = Spot(lambda path="": s3_uri(f"{tmp_path.name}/{path}"), proxy, tmp_path)
    trees = make_trial(spot, big=True)
    proxy.truncate("get_object", "big.bin", after=6_000_000, times=1)
    hang = proxy.hang("get_object", "big.bin", times=None)
    # The first answer breaks off after 6 MB; the next request for the file hangs, and the process is killed.
    hang_rules = proxy._rules
    hang_rules.remove(hang)
    process = subprocess.Popen(
        [sys.executable, "-m", "ray_artifact_sync", "pull", spot.uri("exp/trial_1"), str(tmp_path / "dest")],
        stderr=subprocess.DEVNULL,
    )
    hang_rules.append(hang)
    assert hang.reached.wait(60)
    scratch = tmp_path / "dest" / layout.STATE_DIR / "pull"
    until = time.monotonic() + 30
    while not any(file.stat().st_size > 1_000_000 for file in scratch.glob("*.part")) and time.monotonic() < until:
        threading.Event().wait(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    proxy.clear()
    assert not (tmp_path / "dest/big.bin").exists()
    proxy.reset_counts()
    ran = command("pull", spot.uri("exp/trial_1"), tmp_path / "dest")
    assert ran.code == 0, ran.err
    assert files_below(tmp_path / "dest") == trees["newest"]
    assert proxy.bytes_out["get_object"] < BIG - 1_000_000


@pytest.mark.s3
def test_broken_answers_are_continued_where_they_broke(s3_uri, proxy, tmp_path, command):
    spot = Spot(lambda path="": s3_uri(f"{tmp_path.name}/{path}"), proxy, tmp_path)
    trees = make_trial(spot, big=True)
    proxy.truncate("get_object", "big.bin", after=3_000_000, times=2)
    proxy.fail("get_object", status=503, times=3)
    proxy.reset_counts()
    ran = command("pull", spot.uri("exp/trial_1"), tmp_path / "dest")
    assert ran.code == 0, ran.err
    assert files_below(tmp_path / "dest") == trees["newest"]


@pytest.mark.s3
def test_a_wrong_byte_is_not_taken(s3_uri, proxy, tmp_path, command):
    spot = Spot(lambda path="": s3_uri(f"{tmp_path.name}/{path}"), proxy, tmp_path)
    trees = make_trial(spot, big=True)
    proxy.corrupt("get_object", "big.bin", after=5_000_000)
    ran = command("pull", spot.uri("exp/trial_1"), tmp_path / "dest")
    assert ran.code == 2
    assert "big.bin: trial_1/big.bin" in ran.err
    assert "is nowhere" in ran.err
    expected = {path: data for path, data in trees["newest"].items() if path != "big.bin"}
    assert {p: d for p, d in files_below(tmp_path / "dest").items() if layout.STATE_DIR not in p} == expected
    proxy.clear()
    assert command("pull", spot.uri("exp/trial_1"), tmp_path / "dest").code == 0
    assert files_below(tmp_path / "dest") == trees["newest"]


def test_only_one_pull_at_a_time(disk, command, tmp_path):
    import fcntl

    make_trial(disk)
    scratch = tmp_path / "dest" / layout.STATE_DIR / "pull"
    scratch.mkdir(parents=True)
    with open(scratch / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        ran = command("pull", disk.uri("exp/trial_1"), tmp_path / "dest")
        assert ran.code == 2
        assert "Another pull into" in ran.err
    assert command("pull", disk.uri("exp/trial_1"), tmp_path / "dest").code == 0
    assert not (tmp_path / "dest" / layout.STATE_DIR).exists()


def test_lost_content_is_named_and_the_rest_arrives(spot, command, tmp_path):
    trees = make_trial(spot)
    spot.store("exp/trial_1").put("log.txt", b"?")
    ran = command("pull", spot.uri("exp/trial_1"), tmp_path / "dest", "--json")
    assert ran.code == 2
    (failure,) = ran.json["failures"]
    assert failure["path"] == "log.txt"
    assert "is nowhere" in failure["error"]
    expected = {path: data for path, data in trees["newest"].items() if path != "log.txt"}
    assert files_below(tmp_path / "dest") == expected


# --- no way out -----------------------------------------------------------------------------------------


HOSTILE = ("../escaped.txt", "/etc/escaped.txt", "a/../../escaped.txt", "./a", "a//b", "", "..", "a\x00b", "a/.")


@pytest.mark.parametrize("path", HOSTILE)
def test_a_hostile_manifest_writes_nothing(disk, command, tmp_path, path):
    make_trial(disk)
    store = PosixStore(disk.uri("exp/trial_1"))
    document = json.loads(store.read(layout.MANIFEST))
    document["entries"][path] = document["entries"]["log.txt"]
    store.put(layout.MANIFEST, json.dumps(document).encode())
    ran = command("pull", disk.uri("exp/trial_1"), tmp_path / "inner/dest")
    assert ran.code == 2
    assert "lists a path that must not be" in ran.err
    assert files_below(tmp_path / "inner") == {}


@pytest.mark.parametrize("path", [".ray_artifact_sync/pull/lock", ".ray_artifact_sync_driver/files.json"])
def test_a_manifest_cannot_name_our_own_files(disk, command, tmp_path, path):
    make_trial(disk)
    store = PosixStore(disk.uri("exp/trial_1"))
    document = json.loads(store.read(layout.MANIFEST))
    document["entries"][path] = document["entries"]["log.txt"]
    store.put(layout.MANIFEST, json.dumps(document).encode())
    ran = command("pull", disk.uri("exp/trial_1"), tmp_path / "dest")
    assert ran.code == 2
    assert "belongs to this library" in ran.err


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("link", ["sub dir", "log.txt", "empty dir", layout.STATE_DIR, f"{layout.STATE_DIR}/pull"])
def test_links_in_the_destination_lead_nowhere(disk, command, tmp_path, link, force):
    make_trial(disk)
    outside, dest = tmp_path / "outside", tmp_path / "dest"
    outside.mkdir()
    (outside / "plot [1].png").write_text("not yours")
    (outside / "file").write_text("not yours")
    (dest / link).parent.mkdir(parents=True)
    (dest / link).symlink_to(outside / "file" if link == "log.txt" else outside)
    before = files_below(outside)
    ran = command("pull", disk.uri("exp/trial_1"), dest, *(["--force"] if force else []))
    assert files_below(outside) == before
    if link == "log.txt" and force:
        # The link itself is what was in the way; the file that it points to stays as it is.
        assert ran.code == 0
        assert not (dest / "log.txt").is_symlink()
        assert (dest / "log.txt").read_text() == "1\n2\n3\n"
    else:
        assert ran.code == 2
        assert ran.err.count("\n") == 1
        assert (dest / link).is_symlink()


def test_the_destination_itself_may_be_a_link(disk, command, tmp_path):
    trees = make_trial(disk)
    (tmp_path / "real").mkdir()
    (tmp_path / "dest").symlink_to(tmp_path / "real")
    assert command("pull", disk.uri("exp/trial_1"), tmp_path / "dest").code == 0
    assert files_below(tmp_path / "real") == trees["newest"]


def test_a_part_that_is_a_link_is_not_written_through(disk, command, tmp_path):
    make_trial(disk)
    part = part_of(disk, "log.txt", tmp_path / "dest")
    os.makedirs(os.path.dirname(part))
    (tmp_path / "victim").write_text("not yours")
    os.symlink(tmp_path / "victim", part)
    ran = command("pull", disk.uri("exp/trial_1"), tmp_path / "dest")
    assert ran.code == 2
    assert (tmp_path / "victim").read_text() == "not yours"


@pytest.mark.parametrize("dest", ["exp/trial_1", "exp/trial_1/plots/new", "exp/trial_1/checkpoint_000000"])
def test_storage_is_no_destination(disk, command, tmp_path, dest):
    make_trial(disk)
    before = files_below(tmp_path / "storage")
    ran = command("pull", disk.at("exp/trial_1", "checkpoint_000000"), tmp_path / "storage" / dest, "--force")
    assert ran.code == 2
    assert "is where a run stores its artifacts" in ran.err
    assert files_below(tmp_path / "storage") == before


def test_a_full_disk_or_a_closed_directory_is_one_sentence(disk, command, tmp_path):
    make_trial(disk)
    ran = command("pull", disk.uri("exp/trial_1"), "/proc/nowhere")
    assert ran.code == 2
    assert ran.err.count("\n") == 1
    assert "Traceback" not in ran.err


def test_a_file_that_appears_meanwhile_is_left_alone(disk, tmp_path):
    from contextlib import contextmanager

    from ray_artifact_sync import ArtifactView
    from ray_artifact_sync.commands.downloads import Wanted, download
    from ray_artifact_sync.progress import TransferProgress

    make_trial(disk)
    view = ArtifactView(disk.uri("exp/trial_1"))
    reader = view.readers["trial_1"]
    entry = reader.head.get("log.txt")

    @contextmanager
    def watch(size, files):
        (tmp_path / "dest/log.txt").write_text("written between the look and the move")
        yield TransferProgress("", files=files, bytes=size)

    report = download([Wanted(reader, entry, "log.txt")], str(tmp_path / "dest"), watch=watch)
    assert list(report.failures) == ["log.txt"]
    assert "appeared meanwhile and is left alone" in str(report.failures["log.txt"])
    assert (tmp_path / "dest/log.txt").read_text() == "written between the look and the move"


@pytest.mark.s3
def test_a_terminal_shows_a_bar(s3_uri, proxy, tmp_path):
    spot = Spot(lambda path="": s3_uri(f"{tmp_path.name}/{path}"), proxy, tmp_path)
    trees = make_trial(spot, big=True)
    hang = proxy.hang("get_object", "/trial_1/big.bin", times=1)
    arguments = ["pull", spot.uri("exp/trial_1"), str(tmp_path / "dest")]
    with Terminal([sys.executable, "-m", "ray_artifact_sync", *arguments]) as terminal:
        terminal.wait_for("1 file left")
        assert "Pulling" in terminal.shown
        hang.release()
        assert terminal.wait() == 0
        assert f"5 files, 9.4 MB, to {tmp_path}/dest" in terminal.shown
    assert files_below(tmp_path / "dest") == trees["newest"]


@pytest.mark.s3
def test_ctrl_c_ends_it_at_once(s3_uri, proxy, tmp_path, command):
    spot = Spot(lambda path="": s3_uri(f"{tmp_path.name}/{path}"), proxy, tmp_path)
    trees = make_trial(spot)
    hang = proxy.hang("get_object", "/trial_1/log.txt")
    arguments = ["pull", spot.uri("exp/trial_1"), str(tmp_path / "dest")]
    process = subprocess.Popen(
        [sys.executable, "-m", "ray_artifact_sync", *arguments], stderr=subprocess.PIPE, text=True
    )
    assert hang.reached.wait(60)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "Traceback" not in said
    proxy.clear()
    assert command(*arguments).code == 0
    assert files_below(tmp_path / "dest") == trees["newest"]
