"""`ls`, `diff` and `history`, on a disk and on a real S3 server; what all commands say when something is wrong."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys

import pytest

from ray_artifact_sync import layout
from ray_artifact_sync.stores.posix import PosixStore
from tests.support.looking import Spot, make_trial
from tests.support.s3_servers import BUCKET, KEY, REGION, SECRET
from tests.support.sessions import open_session

WRITES = (
    *("put_object", "upload_part", "upload_part_copy", "create_multipart", "complete_multipart", "abort_multipart"),
    *("copy_object", "delete", "delete_many", "marker", "other"),
)
READING = ("ls", "pull", "diff", "history", "verify")
COMMANDS = (*READING, "gc", "doctor")


def arguments(name: str, uri: str, tmp_path) -> tuple[str, ...]:
    """A call of a command about one place."""
    more = {"pull": (str(tmp_path / "dest"),), "diff": (uri,), "history": ("log.txt",)}
    return (name, uri, *more.get(name, ()))


# --- ls --------------------------------------------------------------------------------------------


def test_ls_of_a_trial(spot, command):
    make_trial(spot)
    ran = command("ls", spot.uri("exp/trial_1"))
    assert (ran.code, ran.err) == (0, "")
    heading, *lines, total = ran.out.splitlines()
    assert heading.split() == ["SIZE", "WRITTEN", "(UTC)", "SINCE", "CHECKPOINT", "OWNER", "PATH"]
    assert [line.rpartition("  ")[2] for line in lines[:-1]] == [
        *("empty.txt", "log.txt", "progress.csv", "rewritten.txt", "sub dir/plot [1].png"),
    ]
    assert "CSVLoggerCallback" in lines[2]
    assert "checkpoint_000000" in lines[4]
    assert lines[-1] == "4 artifacts of 1 trial, 15 B"
    assert total == "1 more file that no manifest lists (--all shows them)"
    assert "gone.txt" in command("ls", spot.uri("exp/trial_1"), "--all").out


def test_ls_as_of_a_checkpoint(spot, command):
    trees = make_trial(spot)
    ran = command("ls", spot.at("exp/trial_1", "checkpoint_000000"), "--json")
    assert {a["path"] for a in ran.json["trials"][0]["artifacts"]} == set(trees["checkpoint_000000"])
    assert ran.json["checkpoint"] == "checkpoint_000000"
    by_option = command("ls", spot.uri("exp/trial_1"), "--at", "checkpoint_000000", "--json")
    assert by_option.json["trials"] == ran.json["trials"]
    assert "as of checkpoint_000000" in command("ls", spot.at("exp/trial_1", "checkpoint_000000")).out


def test_the_checkpoint_may_stand_after_the_options_or_before(spot, command):
    make_trial(spot)
    uri = spot.uri("exp/trial_1")
    path, question, options = uri.partition("?")
    first = command("ls", f"{path}@checkpoint_000000{question}{options}", "--json")
    last = command("ls", f"{uri}@checkpoint_000000", "--json")
    assert first.code == last.code == 0
    assert first.json["trials"] == last.json["trials"]


def test_ls_of_an_experiment(spot, command):
    make_trial(spot, "trial_1")
    make_trial(spot, "trial_2")
    lines = command("ls", spot.uri("exp")).out.splitlines()
    assert lines.index("trial_1") < lines.index("trial_2")
    assert sum("sub dir/plot [1].png" in line for line in lines) == 2
    ran = command("ls", spot.uri("exp"), "--trials")
    assert [line.split()[-1] for line in ran.out.splitlines()] == ["TRIAL", "trial_1", "trial_2"]
    chosen = command("ls", spot.uri("exp"), "--include", "*.png", "--exclude", "trial_1", "--json")
    assert [[a["path"] for a in t["artifacts"]] for t in chosen.json["trials"]] == [["sub dir/plot [1].png"]] * 2


def test_the_document_of_ls(spot, command):
    trees = make_trial(spot)
    document = command("ls", spot.uri("exp"), "--json", "--all").json
    assert {"command", "format", "uri", "checkpoint", "trials"} == set(document)
    assert (document["command"], document["format"], document["checkpoint"]) == ("ls", 1, None)
    (trial,) = document["trials"]
    assert trial["artifact_count"] == len(trees["newest"])
    assert trial["artifact_bytes"] == sum(map(len, trees["newest"].values()))
    assert [c["name"] for c in trial["checkpoints"]] == ["checkpoint_000000", "checkpoint_000001"]
    assert all(c["saved"].endswith("+00:00") for c in trial["checkpoints"])
    assert trial["other_files"] == ["gone.txt"]
    listed = {a["path"]: a for a in trial["artifacts"]}
    assert set(listed["log.txt"]) == {"path", "size", "written", "digest", "checkpoint", "owner"}
    assert len(listed["log.txt"]["digest"]) == 64
    assert listed["progress.csv"]["owner"] == "CSVLoggerCallback"


def test_one_damaged_trial_does_not_hide_the_others(spot, command):
    make_trial(spot, "trial_1")
    make_trial(spot, "trial_2")
    spot.store("exp/trial_1").put(layout.MANIFEST, b"nonsense")
    ran = command("ls", spot.uri("exp"))
    assert ran.code == 2
    assert "trial_2" in ran.out
    assert "trial_1" not in ran.out
    assert ran.err.count("\n") == 1
    assert "is not valid JSON" in ran.err
    document = command("ls", spot.uri("exp"), "--json").json
    assert [bool(trial["error"]) for trial in document["trials"]] == [True, False]


def test_names_cannot_speak_to_the_terminal(tmp_path, command):
    working_dir = tmp_path / "work"
    working_dir.mkdir()
    session = open_session(working_dir, PosixStore(tmp_path / "exp/trial"), 1)
    (working_dir / "[red]markup[bold].txt").touch()
    session.sync()
    session.close()
    (tmp_path / "exp/trial/events.out.tfevents.\x1b[31mred").touch()
    ran = command("ls", tmp_path / "exp/trial")
    assert "[red]markup[bold].txt" in ran.out
    assert "\\x1b[31mred" in ran.out
    assert "\x1b" not in ran.out


def on_a_terminal(*arguments: str) -> str:
    """What the command shows on a terminal."""
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "ray_artifact_sync", *arguments],
        stdout=follower,
        stderr=follower,
        env={**os.environ, "COLUMNS": "160", "TERM": "xterm-256color"},
    )
    os.close(follower)
    shown = b""
    while True:
        try:
            chunk = os.read(leader, 65536)
        except OSError:
            break
        if not chunk:
            break
        shown += chunk
    os.close(leader)
    assert process.wait(60) == 0, shown
    return shown.decode()


def test_a_terminal_gets_a_table(tmp_path):
    make_trial(Spot(lambda path="": str(tmp_path / path), None, tmp_path / "scratch"), "trial[bold]")
    shown = on_a_terminal("ls", str(tmp_path / "exp"))
    assert "trial[bold]" in shown
    assert "sub dir/plot [1].png" in shown
    assert "─" in shown


# --- diff and history -------------------------------------------------------------------------------


def test_diff(spot, command):
    make_trial(spot)
    old, new = spot.at("exp/trial_1", "checkpoint_000000"), spot.uri("exp/trial_1")
    ran = command("diff", old, new)
    assert ran.code == 0
    assert [line.split() for line in ran.out.splitlines()] == [
        ["OLD", "NEW", "PATH"],
        ["removed", "4", "B", "gone.txt"],
        ["changed", "2", "B", "6", "B", "log.txt"],
        ["changed", "5", "B", "5", "B", "rewritten.txt"],
        ["0", "added,", "1", "removed,", "2", "changed,", "3", "files", "equal"],
    ]
    document = command("diff", old, new, "--json").json
    assert [f["path"] for f in document["removed"]] == ["gone.txt"]
    assert [(f["path"], f["old"]["size"], f["new"]["size"]) for f in document["changed"]] == [
        ("log.txt", 2, 6),
        ("rewritten.txt", 5, 5),
    ]
    assert (document["added"], document["unchanged"]) == ([], 3)
    assert document["old"]["checkpoint"] == "checkpoint_000000"


def test_diff_of_experiments_compares_trials_of_one_name(spot, command):
    make_trial(spot, "trial_1")
    make_trial(spot, "trial_2")
    document = command("diff", spot.at("exp", "checkpoint_000001"), spot.uri("exp"), "--json").json
    assert [f["path"] for f in document["changed"]] == [
        f"trial_{n}/{name}" for n in (1, 2) for name in ("log.txt", "rewritten.txt")
    ]


def test_diff_of_two_trials(spot, command):
    make_trial(spot, "trial_1")
    make_trial(spot, "trial_2")
    ran = command("diff", spot.uri("exp/trial_1"), spot.uri("exp/trial_2"))
    assert ran.out == "0 added, 0 removed, 0 changed, 5 files equal\n"


def test_history(spot, command):
    make_trial(spot)
    ran = command("history", spot.uri("exp/trial_1"), "rewritten.txt")
    assert ran.code == 0
    title, heading, *lines = ran.out.splitlines()
    assert title == "trial_1/rewritten.txt"
    assert heading.split()[-2:] == ["BYTES", "AT"]
    assert [line.split()[5] for line in lines] == ["checkpoint_000000", "checkpoint_000001", "newest"]
    for uri, path in ((spot.uri("exp/trial_1"), "log.txt"), (spot.uri("exp"), "trial_1/log.txt")):
        versions = command("history", uri, path, "--json").json["versions"]
        assert [(v["size"], v["checkpoints"], v["newest"], v["place"]) for v in versions] == [
            (2, ["checkpoint_000000"], False, "log.txt"),
            (4, ["checkpoint_000001"], False, "log.txt"),
            (6, [], True, "log.txt"),
        ]


def test_history_of_one_file_in_all_trials(spot, command):
    make_trial(spot, "trial_1")
    make_trial(spot, "trial_2")
    versions = command("history", spot.uri("exp"), "log.txt", "--json").json["versions"]
    assert [v["trial"] for v in versions] == ["trial_1"] * 3 + ["trial_2"] * 3
    ran = command("history", spot.uri("exp/trial_1"), "nothing.txt")
    assert (ran.code, ran.out) == (2, "")
    assert ran.err == (
        "ray-artifact-sync: No checkpoint of trial_1 lists 'nothing.txt', nor do its newest artifacts.\n"
    )


# --- what is said when something is wrong -------------------------------------------------------------


def one_sentence(ran) -> str:
    assert ran.code == 2, (ran.out, ran.err)
    assert ran.out == ""
    assert ran.err.startswith("ray-artifact-sync: ")
    assert ran.err.count("\n") == 1
    assert "Traceback" not in ran.err
    return ran.err.removeprefix("ray-artifact-sync: ").strip()


@pytest.mark.parametrize("name", [*READING, "gc"])
def test_nothing_there(spot, command, tmp_path, name):
    make_trial(spot)
    uri = spot.uri("exp/trial_77")
    assert one_sentence(command(*arguments(name, uri, tmp_path))) == f"There is nothing at {uri}."


@pytest.mark.parametrize("name", [*READING, "gc"])
def test_an_experiment_of_ray_alone(spot, command, tmp_path, name):
    store = spot.store("plain")
    store.put("experiment_state-2026.json", b"{}")
    store.put("trial_1/result.json", b"{}")
    said = one_sentence(command(*arguments(name, spot.uri("plain"), tmp_path)))
    assert "was written by Ray, but without ray-artifact-sync" in said
    assert "was written by Ray" in one_sentence(command(*arguments(name, spot.uri("plain/trial_1"), tmp_path)))


@pytest.mark.parametrize("name", [*READING, "gc"])
def test_something_else_is_there(spot, command, tmp_path, name):
    spot.store("other").put("a/b.txt", b"x")
    spot.store("other").put("c.txt", b"x")
    said = one_sentence(command(*arguments(name, spot.uri("other"), tmp_path)))
    assert said.startswith("There is no experiment or trial at ")
    assert "none of its 1 files and 1 directories was written by ray-artifact-sync" in said


@pytest.mark.parametrize("name", ["ls", "pull", "verify", "gc"])
def test_a_newer_format(spot, command, tmp_path, name):
    make_trial(spot)
    store = spot.store("exp/trial_1")
    store.put(layout.MANIFEST, json.dumps({**json.loads(store.read(layout.MANIFEST)), "format": 9}).encode())
    more = ("--older-than", "0", "--nothing-running") if name == "gc" else ()
    ran = command(*arguments(name, spot.uri("exp/trial_1"), tmp_path), *more)
    assert ran.code == 2
    assert ran.err.count("\n") == 1
    assert "has format version 9; this release reads version 1. Install a newer ray-artifact-sync." in ran.err


@pytest.mark.parametrize("name", ["diff", "history"])
def test_a_newer_format_in_a_comparison(spot, command, tmp_path, name):
    make_trial(spot)
    store = spot.store("exp/trial_1")
    store.put(layout.MANIFEST, json.dumps({**json.loads(store.read(layout.MANIFEST)), "format": 9}).encode())
    said = one_sentence(command(*arguments(name, spot.uri("exp/trial_1"), tmp_path)))
    assert said.endswith("this release reads version 1. Install a newer ray-artifact-sync.")


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("uri", ["nonsense://bucket/path", ""])
def test_a_wrong_uri(command, tmp_path, name, uri):
    assert one_sentence(command(*arguments(name, uri, tmp_path)))


@pytest.mark.s3
@pytest.mark.parametrize("name", [*READING, "gc"])
def test_no_access(command, s3_uri, proxy, tmp_path, name):
    proxy.fail(status=403)
    said = one_sentence(command(*arguments(name, s3_uri("exp"), tmp_path)))
    assert "403" in said or "ACCESS_DENIED" in said or "AccessDenied" in said


@pytest.mark.s3
@pytest.mark.parametrize("name", COMMANDS)
def test_credentials_in_a_uri_are_not_shown(command, proxy, tmp_path, name):
    prefix = f"{proxy.endpoint.partition('//')[2]}&scheme=http&region={REGION}"
    there = Spot(
        lambda path="": f"s3://{KEY}:{SECRET}@{BUCKET}/{tmp_path.name}/{path}?endpoint_override={prefix}",
        proxy,
        tmp_path,
    )
    make_trial(there)
    for uri in (there.uri("exp/trial_1"), there.uri("nothing"), there.uri("nothing").replace(BUCKET, "other")):
        for more in ([], ["--json"]):
            ran = command(*arguments(name, uri, tmp_path), *more)
            assert SECRET not in ran.out + ran.err
            assert KEY not in ran.out + ran.err
    assert command(*arguments(name, there.uri("exp/trial_1"), tmp_path)).code == 0


@pytest.mark.s3
def test_no_such_bucket(command, s3_uri, tmp_path):
    uri = s3_uri("exp").replace("s3://test-bucket", "s3://no-such-bucket")
    said = one_sentence(command("ls", uri))
    assert "no-such-bucket" in said


@pytest.mark.s3
@pytest.mark.slow
def test_nobody_answers(command, s3_uri, proxy, tmp_path):
    uri = s3_uri("exp")
    proxy.stop()
    assert "127.0.0.1" in one_sentence(command("ls", uri))


def test_a_directory_that_may_not_be_read(command, tmp_path):
    closed = tmp_path / "closed"
    closed.mkdir()
    closed.chmod(0)
    try:
        if os.access(closed, os.R_OK):
            pytest.skip("root reads everything")
        assert "Permission denied" in one_sentence(command("ls", closed))
    finally:
        closed.chmod(0o700)


def test_a_file_and_a_checkpoint_are_no_places(command, tmp_path):
    make_trial(Spot(lambda path="": str(tmp_path / path), None, tmp_path / "scratch"))
    said = one_sentence(command("ls", tmp_path / "exp/trial_1/log.txt"))
    assert said.endswith("is a file; name the directory of an experiment or of a trial.")
    said = one_sentence(command("ls", tmp_path / "exp/trial_1/checkpoint_000000"))
    assert said.endswith(f"like this: {tmp_path}/exp/trial_1@checkpoint_000000")


@pytest.mark.parametrize("name", COMMANDS)
def test_help_alone_is_enough(command, name):
    ran = command(name, "--help")
    assert ran.code == 0
    assert "Examples:" in ran.out
    assert f"  ray-artifact-sync {name} " in ran.out
    assert "JSON: " in ran.out
    assert "--json" in ran.out
    longest = max(map(len, ran.out.splitlines()))
    assert longest <= 125


# --- read only ----------------------------------------------------------------------------------------


@pytest.mark.s3
@pytest.mark.parametrize("name", READING)
def test_looking_needs_no_write_access(command, s3_uri, proxy, tmp_path, name):
    prefix = tmp_path.name
    spot = Spot(lambda path="": s3_uri(f"{prefix}/{path}"), proxy, tmp_path)
    make_trial(spot)
    for kind in WRITES:
        proxy.fail(kind, status=403)
    proxy.reset_counts()
    ran = command(*arguments(name, spot.uri("exp/trial_1"), tmp_path), "--json")
    assert ran.code == 0, ran.err
    assert not set(proxy.counts) & set(WRITES), proxy.counts
    assert proxy.counts["list"] or proxy.counts["get_object"]
