"""`gc`: takes what nothing refers to, and nothing else; harms no trial, whenever it is killed or a session begins."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ray_artifact_sync import layout
from ray_artifact_sync.commands.garbage import find_garbage, remove_garbage
from ray_artifact_sync.commands.gc import duration
from ray_artifact_sync.errors import ArtifactSyncError, ConfigurationError
from ray_artifact_sync.experiments import find_trials, place_at
from ray_artifact_sync.stores.posix import PosixStore
from tests.support.independent_reader import head_tree, posix_place, snapshots, store_place, tree_of
from tests.support.looking import Spot, everything, files_below, make_trial
from tests.support.sessions import FaultyStore, Killed, abandon, open_session, read_tree, save

NOW = ("--older-than", "0", "--nothing-running")
OLD = 3 * 86400


@pytest.fixture
def disk(tmp_path) -> Spot:
    return Spot(lambda path="": str(tmp_path / "storage" / path), None, tmp_path)


def digest(number: int) -> str:
    return f"{number:064x}"


def garbage_of(token: int) -> dict[str, bytes]:
    """What attempts that were killed leave; nothing refers to any of it."""
    name = layout.make_token(token)
    return {
        layout.object_path(name, digest(1)): b"an old version",
        layout.object_path(layout.make_token(0), digest(2)): b"one that the driver preserved",
        f"{layout.LAYERS}/{name}-000007.json": b"{}",
        f"{layout.STATE_DIR}/doctor-0123456789abcdef/probe": b"probe",
    }


def not_garbage(token: int) -> dict[str, bytes]:
    """What looks like it and is not this library's to take."""
    name = layout.make_token(token)
    newer = layout.make_token(token + 1)
    return {
        layout.object_path(newer, digest(3)): b"of an attempt that has not claimed yet",
        f"{layout.LAYERS}/{newer}-000001.json": b"{}",
        f"{layout.OBJECTS}/{name}/README": b"not one of ours",
        f"{layout.OBJECTS}/{name}/{digest(4).upper().replace('0', 'G')}": b"not one of ours",
        f"{layout.OBJECTS}/{digest(5)}": b"not one of ours",
        f"{layout.LAYERS}/notes.json": b"not one of ours",
        f"{layout.aside_file_path(name, 'a/b.txt')}": b"somebody's file, set aside",
        f"{layout.ASIDE}/{name}/damaged.json": b"kept for people",
        f"{layout.METADATA}/{name}.json": b"{}",
        f"{layout.STATE_DIR}/other.json": b"not one of ours",
        f"{layout.STATE_DIR}/doctor-xyz/probe": b"not one of ours",
        "objects/x": b"an artifact that nobody lists",
        f"checkpoint_000001/{layout.STATE_DIR}/objects/{name}/{digest(6)}": b"not one of ours",
    }


def fill(store, files: dict[str, bytes]) -> None:
    for path, data in files.items():
        store.put(path, data)


def backdate(root, seconds: float = OLD) -> None:
    """As if nothing had been written there for so long."""
    then = time.time() - seconds
    for folder, _, names in os.walk(root):
        for name in names:
            os.utime(os.path.join(folder, name), (then, then))


def check_all_readable(store, trees: dict[str, dict]) -> None:
    place = store_place(store)
    files = {path: data for path, data in head_tree(place).items() if data is not None}
    assert files == trees["newest"]
    for name, path in snapshots(place).items():
        assert {p: d for p, d in tree_of(place, path).items() if d is not None} == trees[name]


# --- what goes and what stays -----------------------------------------------------------------------------


def test_exactly_the_garbage_goes(spot, command):
    trees = make_trial(spot)
    store = spot.store("exp/trial_1")
    fill(store, not_garbage(1))
    before = everything(store)
    fill(store, garbage_of(1))
    uri = spot.uri("exp")
    dry = command("gc", uri, *NOW, "--json")
    assert (dry.code, dry.json["dry_run"]) == (0, True)
    (trial,) = [t for t in dry.json["trials"] if t["garbage"]]
    assert {piece["path"] for piece in trial["garbage"]} == set(garbage_of(1))
    assert everything(store) == {**before, **garbage_of(1)}
    shown = command("gc", uri, *NOW)
    assert "--delete removes them" in shown.out
    assert "2 old versions" in shown.out
    done = command("gc", uri, *NOW, "--delete")
    assert done.code == 0, done.err
    assert "4 files removed" in done.out
    assert everything(store) == before
    check_all_readable(store, trees)
    assert command("gc", uri, *NOW, "--json").json["trials"][0]["garbage"] == []


def test_temporary_files_of_killed_attempts(disk, command, tmp_path):
    make_trial(disk)
    root = tmp_path / "storage/exp/trial_1"
    tmp = root / layout.TMP
    for folder in (layout.make_token(0), layout.make_token(1), "free-12-ab", "gone-ab", layout.make_token(2), "mine"):
        (tmp / folder).mkdir(parents=True, exist_ok=True)
        (tmp / folder / "x").write_bytes(b"half a file")
    (tmp / "append-ab").write_bytes(b"half a proof")
    command("gc", disk.uri("exp"), *NOW, "--delete")
    left = {str(path.relative_to(tmp)) for path in tmp.rglob("*") if path.is_file()}
    assert left == {f"{layout.make_token(2)}/x", "mine/x"}
    assert (tmp / layout.make_token(1)).is_dir()  # without it, the newest attempt could not go on


@pytest.mark.s3
def test_temporary_objects(s3_uri, proxy, tmp_path, command):
    spot = Spot(lambda path="": s3_uri(f"{tmp_path.name}/{path}"), proxy, tmp_path)
    make_trial(spot)
    store = spot.store("exp/trial_1")
    store.put(f"{layout.TMP}/append-0123", b"half a proof")
    store.put(f"{layout.TMP}/free-0123/abc", b"half a file")
    ran = command("gc", spot.uri("exp"), *NOW, "--delete", "--json")
    assert [t["removed"] for t in ran.json["trials"]] == [2]
    assert store.stat(f"{layout.TMP}/append-0123") is None


def test_copies_of_a_driver_that_was_killed(disk, command, tmp_path):
    """It was looking what a path holds that it takes over."""
    make_trial(disk)
    copy = tmp_path / "storage/exp/trial_1" / layout.TAKING / "0123"
    copy.parent.mkdir(parents=True)
    copy.write_bytes(b"what the path held")
    command("gc", disk.uri("exp"), *NOW, "--delete")
    assert not copy.exists()


def test_records_of_restores_before_the_last_one(spot, command, tmp_path):
    trees = make_trial(spot)
    store = spot.store("exp/trial_1")
    head = store.read(layout.MANIFEST)
    for token in (1, 2, 3):
        store.put(layout.aside_path(layout.make_token(token)), head)
    document = json.loads(head)
    document["entries"]["only.txt"] = {"size": 3, "digest": digest(9), "mtime_ns": 1}
    store.put(layout.aside_path(layout.make_token(3)), json.dumps(document).encode())
    document["entries"]["only.txt"]["digest"] = digest(8)
    store.put(f"{layout.EXPLOITS}/{'a' * 32}.json", json.dumps(document).encode())
    for number in (8, 9, 10):
        store.put(layout.object_path(layout.make_token(1), digest(number)), b"abc")
    ran = command("gc", spot.uri("exp"), *NOW, "--delete", "--json")
    assert [piece["path"] for piece in ran.json["trials"][0]["garbage"]] == [
        layout.aside_path(layout.make_token(1)),
        layout.aside_path(layout.make_token(2)),
        layout.object_path(layout.make_token(1), digest(10)),
    ]
    check_all_readable(store, trees)


def test_a_renamed_trial_keeps_its_checkpoints(disk, command, tmp_path):
    """Its snapshots do not count under the new name, and would again under the old one."""
    trees = make_trial(disk)
    os.rename(tmp_path / "storage/exp/trial_1", tmp_path / "storage/exp/renamed")
    ran = command("gc", disk.uri("exp"), *NOW, "--delete", "--json")
    assert [t["removed"] for t in ran.json["trials"]] == [0]
    os.rename(tmp_path / "storage/exp/renamed", tmp_path / "storage/exp/trial_1")
    check_all_readable(PosixStore(disk.uri("exp/trial_1")), trees)


def test_layers_that_are_needed_stay(spot, command, tmp_path):
    working_dir = tmp_path / "work"
    working_dir.mkdir()
    session = open_session(working_dir, spot.store("exp/many"), 1, trial="many")
    for number in range(400):
        (working_dir / f"{number}.txt").write_text(str(number))
    save(session, "checkpoint_000000")
    for number in range(150):
        (working_dir / f"{number}.txt").write_text("changed")
    save(session, "checkpoint_000001")
    abandon(session)
    store = spot.store("exp/many")
    before = everything(store)
    assert any(path.startswith(layout.LAYERS) for path in before)
    orphan = f"{layout.LAYERS}/{layout.make_token(1)}-000099.json"
    store.put(orphan, b"{}")
    command("gc", spot.uri("exp"), *NOW, "--delete")
    assert everything(store) == before


def test_a_part_of_a_ray_train_run(tmp_path, command):
    from pyarrow import fs as pafs

    from tests.unit.test_view import write_part

    run_dir = tmp_path / "storage/run"
    (tmp_path / "rank_0").mkdir()
    write_part(pafs.LocalFileSystem(), str(run_dir), "rank_0", tmp_path / "rank_0", "mine")
    store = PosixStore(run_dir / "artifacts/rank_0")
    fill(store, garbage_of(1))
    (run_dir / "mine/model.bin").write_bytes(b"x")
    assert "model.bin was written" in command("gc", run_dir).out
    backdate(tmp_path / "storage")
    ran = command("gc", run_dir, "--delete", "--json")
    assert [t["removed"] for t in ran.json["trials"]] == [4]
    assert command("verify", run_dir).code == 0


def test_the_drivers_own_layers(tmp_path, command):
    from ray_artifact_sync import ArtifactSyncer

    (tmp_path / "local").mkdir()
    for number in range(200):
        (tmp_path / f"local/{number}.txt").write_text("x")
    syncer = ArtifactSyncer()
    syncer.sync_up(str(tmp_path / "local"), str(tmp_path / "remote"))
    syncer.wait()
    before = files_below(tmp_path / "remote")
    assert any(path.startswith(layout.LAYERS) for path in before)
    PosixStore(tmp_path / "remote").put(f"{layout.LAYERS}/{layout.make_token(5)}-000001.json", b"{}")
    ran = command("gc", tmp_path / "remote", *NOW, "--delete", "--json")
    assert [t["removed"] for t in ran.json["trials"]] == [1]
    assert files_below(tmp_path / "remote") == before


# --- trials that may be running -----------------------------------------------------------------------------


def test_a_trial_that_wrote_anything_lately_is_left_alone(disk, command, tmp_path):
    make_trial(disk)
    root = tmp_path / "storage/exp/trial_1"
    fill(PosixStore(root), garbage_of(1))
    (root / layout.TMP / layout.make_token(1)).mkdir(parents=True, exist_ok=True)
    for path in (
        *("log.txt", "progress.csv", layout.MANIFEST, layout.WRITER, "checkpoint_000001/model.bin"),
        *(layout.object_path(layout.make_token(1), digest(1)), f"{layout.TMP}/{layout.make_token(1)}/x"),
    ):
        backdate(tmp_path / "storage")
        (root / path).touch()
        ran = command("gc", disk.uri("exp"), "--delete")
        assert (ran.code, ran.err) == (0, "")
        assert f"trial_1 is left alone: {path} was written" in ran.out
    backdate(tmp_path / "storage")
    (root.parent / "experiment_state-1.json").touch()
    for uri in (disk.uri("exp"), disk.uri("exp/trial_1"), disk.uri("")):
        assert "experiment_state-1.json was written 0 s ago; a trial may be running" in command("gc", uri).out
    backdate(tmp_path / "storage")
    assert "5 files" in command("gc", disk.uri("exp")).out


def test_a_short_time_must_be_confirmed(disk, command):
    make_trial(disk)
    ran = command("gc", disk.uri("exp"), "--older-than", "30min")
    assert ran.code == 2
    assert "--nothing-running" in ran.err
    assert command("gc", disk.uri("exp"), "--older-than", "1h").code == 0
    assert command("gc", disk.uri("exp"), "--older-than", "soon").code == 2
    assert [duration(text) for text in ("24h", "30min", "7d", "90", "1.5 h", "10s")] == [
        *(86400, 1800, 604800, 90, 5400, 10),
    ]
    for text in ("", "h", "-1h", "1w", "nan"):
        with pytest.raises(ConfigurationError):
            duration(text)


def test_a_wrong_clock_is_no_reason_to_delete(disk, command, tmp_path):
    make_trial(disk)
    fill(PosixStore(disk.uri("exp/trial_1")), garbage_of(1))
    backdate(tmp_path / "storage")
    ahead = time.time() + 3600
    os.utime(tmp_path / "storage/exp/trial_1/log.txt", (ahead, ahead))
    assert "was written in the future" in command("gc", disk.uri("exp"), *NOW).out


def test_an_idle_trial_goes_on_after_it(disk, command, tmp_path):
    """Nothing was written for days, but the session lives; then it goes on as if nothing had happened."""
    working_dir = tmp_path / "work"
    working_dir.mkdir()
    store = disk.store("exp/idle")
    session = open_session(working_dir, store, 1, trial="idle")
    (working_dir / "log.txt").write_text("1\n")
    (working_dir / "rewritten.txt").write_text("first")
    save(session, "checkpoint_000000")
    (working_dir / "rewritten.txt").write_text("second")
    save(session, "checkpoint_000001")
    (tmp_path / "storage/exp/idle" / layout.TMP / layout.make_token(1) / "half").write_bytes(b"half")
    fill(disk.store("exp/idle"), garbage_of(1))
    backdate(tmp_path / "storage")
    ran = command("gc", disk.uri("exp"), "--delete", "--json")
    assert [t["removed"] for t in ran.json["trials"]] == [5]
    (working_dir / "log.txt").write_text("1\n2\n")
    (working_dir / "rewritten.txt").write_text("third")
    save(session, "checkpoint_000002")
    session.close()
    assert command("verify", disk.uri("exp")).code == 0
    trees = {name: tree_of(posix_place(store.root), path) for name, path in snapshots(posix_place(store.root)).items()}
    assert [tree["rewritten.txt"] for tree in trees.values()] == [b"first", b"second", b"third"]


def test_while_a_session_works(disk, command, tmp_path):
    """gc in a loop beside a session that syncs and checkpoints all the time."""
    code = (
        "import sys; from tests.support.looking import *; from tests.support.sessions import *\n"
        "from ray_artifact_sync.stores.posix import PosixStore; from pathlib import Path\n"
        f"work = Path({str(tmp_path / 'work')!r}); work.mkdir()\n"
        f"session = open_session(work, PosixStore({disk.uri('exp/live')!r}), 1, trial='live')\n"
        "for step in range(60):\n"
        "    (work / 'rewritten.txt').write_text(f'version {step}')\n"
        "    with open(work / 'log.txt', 'a') as log: log.write(f'{step}\\n')\n"
        "    save(session, f'checkpoint_{step:06}') if step % 3 == 0 else session.sync()\n"
        "    print(step, flush=True)\n"
        "session.close()\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    process.stdout.readline()
    runs = 0
    while process.poll() is None:
        ran = command("gc", disk.uri("exp"), "--delete", "--older-than", "1h", "--json")
        assert ran.code == 0, ran.err
        assert all(trial["removed"] == 0 for trial in ran.json["trials"])
        runs += 1
    process.stdout.close()
    assert process.returncode == 0
    assert runs > 1
    assert command("verify", disk.uri("exp")).code == 0


@pytest.mark.parametrize("kind", ["claim", "commit"])
def test_a_session_that_begins_meanwhile_stops_it(disk, tmp_path, kind):
    make_trial(disk)
    fill(PosixStore(disk.uri("exp/trial_1")), garbage_of(1))
    store = PosixStore(disk.uri("exp/trial_1"))
    for number in range(20, 600):
        store.put(layout.object_path(layout.make_token(1), digest(number)), b"x")
    (found,) = find_trials(place_at(disk.uri("exp"))).trials
    garbage = find_garbage(found.trial, older_than=-1, signs=())
    assert len(garbage.pieces) == 584
    removing = remove_garbage(found.trial, garbage)
    assert next(removing)[0].kind == "layer"
    assert len(next(removing)) == 500
    before = everything(store)
    working_dir = tmp_path / "new"
    working_dir.mkdir()
    token = 2 if kind == "claim" else 1
    session = open_session(working_dir, store, token, trial="trial_1")
    (working_dir / "a.txt").write_text("a")
    session.sync()
    with pytest.raises(ArtifactSyncError, match="Somebody writes to"):
        next(removing)
    abandon(session)
    gone = before.keys() - everything(store).keys()
    assert not {path for path in gone if path.startswith(layout.OBJECTS)}


# --- what cannot be judged ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path", ["manifest", "snapshot", "layer", "writer", "exploit", "aside", "newer format", "no manifest"]
)
def test_what_cannot_be_judged_is_left_alone(spot, command, tmp_path, path):
    make_trial(spot)
    store = spot.store("exp/trial_1")
    snapshot = next(f.path for f in store.list() if layout.snapshot_token(f.path.rpartition("/")[2]))
    damaged = {
        "manifest": layout.MANIFEST,
        "snapshot": snapshot,
        "writer": layout.WRITER,
        "exploit": f"{layout.EXPLOITS}/{'a' * 32}.json",
        "aside": layout.aside_path(layout.make_token(1)),
    }
    if path == "layer":
        document = json.loads(store.read(snapshot))
        document["layers"] = [{"name": f"{layout.make_token(1)}-000001.json", "digest": digest(1), "count": 1}]
        store.put(snapshot, json.dumps(document).encode())
    elif path == "newer format":
        document = json.loads(store.read(snapshot))
        store.put(snapshot, json.dumps({**document, "format": 2}).encode())
    elif path == "no manifest":
        store.delete([layout.MANIFEST])
    else:
        store.put(damaged[path], b"{ damaged")
    fill(store, garbage_of(1))
    before = everything(store)
    ran = command("gc", spot.uri("exp"), *NOW, "--delete")
    assert everything(store) == before
    assert "Nothing to remove" in ran.out or "0 files removed" in ran.out
    if path == "no manifest":
        assert ran.code == 0
        assert "it has no manifest" in ran.out
    else:
        assert ran.code == 2
        assert ran.err.startswith("ray-artifact-sync: trial_1: ")


@pytest.mark.s3
def test_storage_that_fails_is_told(s3_uri, proxy, tmp_path, command):
    spot = Spot(lambda path="": s3_uri(f"{tmp_path.name}/{path}"), proxy, tmp_path)
    trees = make_trial(spot)
    store = spot.store("exp/trial_1")
    fill(store, garbage_of(1))
    for kind in ("delete", "delete_many"):
        proxy.fail(kind, status=403)
    ran = command("gc", spot.uri("exp"), *NOW, "--delete")
    assert ran.code == 2
    assert "403" in ran.err
    proxy.clear()
    assert command("gc", spot.uri("exp"), *NOW, "--delete").code == 0
    check_all_readable(store, trees)


# --- killed -------------------------------------------------------------------------------------------------


@pytest.mark.s3
@pytest.mark.parametrize("number", [1, 2, 3])
def test_killed_between_two_deletions(s3_uri, proxy, tmp_path, command, number):
    spot = Spot(lambda path="": s3_uri(f"{tmp_path.name}/{path}"), proxy, tmp_path)
    trees = make_trial(spot)
    store = spot.store("exp/trial_1")
    head = store.read(layout.MANIFEST)
    old = json.loads(head)
    old["entries"]["old.txt"] = {"size": 1, "digest": digest(1), "mtime_ns": 1}
    store.put(layout.aside_path(layout.make_token(1)), json.dumps(old).encode())
    store.put(layout.aside_path(layout.make_token(2)), head)
    fill(store, garbage_of(1))
    hangs = [proxy.hang("delete_many", times=1) for _ in range(number)]
    for rule in hangs[:-1]:
        rule.release()
    process = subprocess.Popen(
        [sys.executable, "-m", "ray_artifact_sync", "gc", spot.uri("exp"), *NOW, "--delete"], stderr=subprocess.DEVNULL
    )
    assert hangs[-1].reached.wait(60)
    process.send_signal(signal.SIGKILL)
    process.wait()
    proxy.clear()
    while proxy.in_flight:  # what hung goes to the server now
        time.sleep(0.01)
    # No record outlives what it refers to.
    left = everything(store)
    assert layout.object_path(layout.make_token(1), digest(1)) in left or (
        layout.aside_path(layout.make_token(1)) not in left
    )
    check_all_readable(store, trees)
    assert command("gc", spot.uri("exp"), *NOW, "--delete").code == 0
    assert command("gc", spot.uri("exp"), *NOW, "--json").json["trials"][0]["garbage"] == []
    check_all_readable(store, trees)


def steps():
    """What an attempt does: files that it writes (new content, or one byte more), then a sync or a checkpoint."""
    content = st.one_of(st.none(), st.binary(min_size=1, max_size=2))
    files = st.dictionaries(st.sampled_from(["a.txt", "b.txt", "c.txt"]), content, min_size=1)
    return st.lists(st.tuples(files, st.booleans()), min_size=1, max_size=4)


def kills():
    """At which write, and whether that still lands; None for not at all."""
    return st.one_of(st.none(), st.tuples(st.integers(0, 12), st.booleans()))


attempts = st.lists(st.tuples(st.one_of(st.none(), st.integers(0, 9)), kills(), steps()), min_size=1, max_size=4)


def live(working_dir, storage, lives) -> dict[str, dict]:
    """Attempts one after the other; gives what each checkpoint that was saved must hold."""
    trees: dict[str, dict] = {}
    for token, (restored, kill, work) in enumerate(lives, start=1):
        store = FaultyStore(PosixStore(storage))
        session = open_session(working_dir, store, token, trial="trial")
        with contextlib.suppress(Killed, ArtifactSyncError):
            session.sync()  # the claim is there
            if trees and restored is not None:
                session.restore(sorted(trees)[restored % len(trees)], fresh=True)
            if kill is not None:
                store.arm(kill[0], kill=True, landed=kill[1])
            for files, checkpoint in work:
                for name, content in files.items():
                    path = working_dir / name
                    before = path.read_bytes() if path.exists() else b""
                    path.write_bytes(before + b"+" if content is None else content)
                if checkpoint:
                    name = f"checkpoint_{len(trees) + 100 * token:06}"
                    tree = read_tree(working_dir)
                    save(session, name)
                    trees[name] = tree
                else:
                    session.sync()
        abandon(session)
    return trees


def artifacts_below(storage) -> dict[str, bytes]:
    return {path: data for path, data in files_below(storage).items() if not path.startswith(layout.STATE_DIR)}


@pytest.mark.slow
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lives=attempts, killed_at=st.integers(0, 3), landed=st.booleans(), chosen=st.integers(0, 9))
def test_nothing_that_is_needed_goes_after_any_life(tmp_path, lives, killed_at, landed, chosen):
    """Attempts that write, checkpoint, restore and are killed anywhere; then gc, killed anywhere, then gc again."""
    root = tmp_path / uuid.uuid4().hex
    working_dir, storage = root / "work", root / "storage/exp/trial"
    working_dir.mkdir(parents=True)
    trees = live(working_dir, storage, lives)
    place = posix_place(storage)
    before = {name: tree_of(place, path) for name, path in snapshots(place).items()}
    assert {name: tree for name, tree in before.items() if name in trees} == trees
    newest, artifacts = head_tree(place), artifacts_below(storage)
    (found,) = find_trials(place_at(str(storage))).trials
    for countdown in (killed_at, None):
        store = FaultyStore(PosixStore(storage))
        store.below = PosixStore(storage).below
        found.trial.store = store
        if countdown is not None:
            store.arm(countdown, kill=True, landed=landed)
        garbage = find_garbage(found.trial, older_than=-1, signs=())
        assert not garbage.is_problem
        with contextlib.suppress(Killed):
            list(remove_garbage(found.trial, garbage))
        assert {name: tree_of(place, path) for name, path in snapshots(place).items()} == before
        assert head_tree(place) == newest
        assert artifacts_below(storage) == artifacts
    assert find_garbage(found.trial, older_than=-1, signs=()).pieces == ()
    # A new attempt restores one of the checkpoints, and goes on.
    session = open_session(working_dir, PosixStore(storage), 9, trial="trial")
    if before:
        name = sorted(before)[chosen % len(before)]
        session.restore(name, fresh=True)
        assert read_tree(working_dir) == before[name]
    (working_dir / "a.txt").write_bytes(b"after gc")
    session.sync()
    session.close()
    assert {name: tree_of(place, path) for name, path in snapshots(place).items()} == before
