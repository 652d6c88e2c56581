"""What else could go wrong in the life of a session: one test for each attack that found something, or might have."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from ray_artifact_sync import layout, local_files
from ray_artifact_sync.errors import ArtifactSyncError, IncompleteSyncError, StorageError
from ray_artifact_sync.stores.posix import PosixStore
from ray_artifact_sync.trial_dir import TrialDir
from tests.support import independent_reader
from tests.support.sessions import Killed, WrappedStore, abandon, open_session, read_tree, save


class Trial:
    """A trial on local storage, over its attempts."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.storage = base / "storage"
        self.work = base / "work"
        self.place = independent_reader.posix_place(self.storage)
        self.token = 0
        self.sessions = []

    def attempt(self, *, work=None, store=None, **options):
        self.token += 1
        session = open_session(work or self.work, store or PosixStore(self.storage), self.token, **options)
        self.sessions.append(session)
        return session

    def kill(self):
        abandon(self.sessions[-1])

    def write(self, path, data=b"x"):
        target = self.work / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)

    def snapshot(self, name):
        return independent_reader.tree_of(self.place, independent_reader.snapshots(self.place)[name])

    def head(self):
        return independent_reader.head_tree(self.place)

    def names(self, prefix):
        return sorted(name for name in self.place.names() if name.startswith(f"{prefix}/"))


@pytest.fixture
def trial(tmp_path):
    trial = Trial(tmp_path)
    yield trial
    for session in trial.sessions:
        abandon(session)


# --- restoring ----------------------------------------------------------------------------------------


def test_hard_links_are_taken_apart(trial, tmp_path):
    """Filling one name in place would change the others, one of which lies outside of the working dir."""
    session = trial.attempt()
    trial.write("a", b"a of the checkpoint")
    trial.write("b", b"b of the checkpoint")
    assert save(session, "checkpoint_000000")
    (trial.work / "a").unlink()
    (trial.work / "b").unlink()
    outside = tmp_path / "dataset"
    outside.write_bytes(b"a of the checkpoint")
    os.link(outside, trial.work / "a")  # right already, so it is kept
    os.link(outside, trial.work / "b")
    assert session.restore("checkpoint_000000", fresh=False).exact
    assert read_tree(trial.work) == {"a": b"a of the checkpoint", "b": b"b of the checkpoint"}
    assert outside.read_bytes() == b"a of the checkpoint"


def test_a_link_that_shows_the_right_content_is_not_kept(trial):
    session = trial.attempt()
    trial.write("best", b"step 1")
    trial.write("last", b"step 2")
    assert save(session, "checkpoint_000000")
    (trial.work / "best").unlink()
    trial.write("last", b"step 1")
    os.symlink("last", trial.work / "best")  # shows what is wanted, for as long as `last` does not change
    assert session.restore("checkpoint_000000", fresh=False).exact
    assert read_tree(trial.work) == {"best": b"step 1", "last": b"step 2"}


def test_a_directory_whose_child_is_named_x(trial):
    """Making a directory once removed an empty directory, or a link, of this name in it."""
    session = trial.attempt()
    (trial.work / "plots" / "x").mkdir(parents=True)
    trial.write("plots/a.png")
    assert save(session, "checkpoint_000000")
    trial.kill()
    session = trial.attempt()
    assert session.restore("checkpoint_000000", fresh=True).exact
    assert read_tree(trial.work) == {"plots/x": None, "plots/a.png": b"x"}


def test_directories_that_came_after_the_checkpoint_go(trial):
    session = trial.attempt()
    trial.write("a")
    assert save(session, "checkpoint_000000")
    trial.write("later/deep/file")
    (trial.work / "empty" / "too").mkdir(parents=True)
    assert session.restore("checkpoint_000000", fresh=False).exact
    assert read_tree(trial.work) == {"a": b"x"}
    session.sync()
    assert trial.head() == {"a": b"x"}


def test_set_aside_files_of_both_kinds(trial):
    """`d` was set aside as a file; now `d/x` must go to the same place."""
    session = trial.attempt()
    assert save(session, "checkpoint_000000")
    for path in ("d", "d/x", "d", "d/x/y"):
        if (trial.work / "d").exists():
            shutil.rmtree(trial.work / "d", ignore_errors=True)
        trial.write(path, path.encode())
        assert session.restore("checkpoint_000000", fresh=False).exact
        assert read_tree(trial.work) == {}
    aside = read_tree(trial.work / layout.SET_ASIDE)
    assert sorted(data for data in aside.values() if data) == [b"d", b"d", b"d/x", b"d/x/y"]


def test_killed_while_setting_aside(trial, monkeypatch):
    """Leftovers spread over two set-aside directories; the restore is exact all the same."""
    session = trial.attempt()
    for name in "abcdef":
        trial.write(name, name.encode() * 10)
    assert save(session, "checkpoint_000000")
    tree = read_tree(trial.work)
    with open(trial.work / "c", "ab") as file:
        file.write(b"newer")
    trial.kill()
    rename = os.rename
    for survivors in (4, 1):
        count = iter(range(100))

        def dying(source, target, count=count, survivors=survivors):
            if next(count) == survivors:
                raise Killed
            rename(source, target)

        monkeypatch.setattr(os, "rename", dying)
        with pytest.raises(Killed):
            trial.attempt()
        monkeypatch.setattr(os, "rename", rename)
    session = trial.attempt()
    report = session.restore("checkpoint_000000", fresh=True)
    assert report.exact
    assert read_tree(trial.work) == tree


def test_killed_while_filling(trial, monkeypatch):
    """The half-written file is set aside by the next attempt, and not taken for what it should be."""
    session = trial.attempt()
    trial.write("big", os.urandom(12_000_000))
    assert save(session, "checkpoint_000000")
    tree = read_tree(trial.work)
    trial.kill()
    shutil.rmtree(trial.work)
    pwrite = os.pwrite

    def dying(fd, data, offset):
        if offset:
            raise Killed
        return pwrite(fd, data, offset)

    second = trial.attempt()
    monkeypatch.setattr(os, "pwrite", dying)
    with pytest.raises(Killed):
        second.restore("checkpoint_000000", fresh=True)
    monkeypatch.setattr(os, "pwrite", pwrite)
    trial.kill()
    third = trial.attempt()
    assert third.restore("checkpoint_000000", fresh=True).exact
    assert read_tree(trial.work) == tree


def test_staging_copies_of_a_killed_sync_go(trial):
    trial.attempt()
    trial.kill()
    leftover = trial.work / layout.STATE_DIR / "staging-abc"
    leftover.mkdir()
    (leftover / "0").write_bytes(b"copy")
    trial.attempt()
    assert not leftover.exists()


def test_a_background_sync_before_the_restore(trial):
    """`setup()` may take longer than `sync_period`: what it wrote must not become what a restore falls back to."""
    session = trial.attempt()
    trial.write("log.txt", b"1 2 3")
    session.sync()
    session.store.put("checkpoint_000000/model.bin", b"a checkpoint without a snapshot")
    trial.kill()
    second = trial.attempt()
    trial.write("log.txt", b"")  # opened by setup()
    second.sync()
    report = second.restore("checkpoint_000000", fresh=True)
    assert not report.exact
    assert read_tree(trial.work) == {"log.txt": b"1 2 3"}


@pytest.fixture
def donor(tmp_path) -> TrialDir:
    """Another trial, with one checkpoint."""
    session = open_session(tmp_path / "donor-work", PosixStore(tmp_path / "donor"), 1, trial="donor")
    assert save(session, "checkpoint_000007")
    abandon(session)
    return TrialDir(PosixStore(tmp_path / "donor"), "donor")


def test_an_exploit_survives_a_background_sync_before_the_restore(trial, donor):
    """PBT: the record of the own artifacts is pinned from the start, not only once it is asked for."""
    first = trial.attempt()
    trial.write("log.txt", b"own 1\n")
    first.restore_foreign(donor, "checkpoint_000007", fresh=False)
    trial.write("log.txt", b"after the exploit\n")
    first.sync()
    trial.kill()
    second = trial.attempt()
    trial.write("log.txt", b"opened by setup()\n")
    second.sync()
    trial.write("log.txt", b"and once more\n")
    second.sync()
    second.restore_foreign(donor, "checkpoint_000007", fresh=True)
    assert read_tree(trial.work) == {"log.txt": b"own 1\n"}


def test_a_checkpoint_that_is_taken_over_twice_stands_for_the_second_time(trial, donor):
    first = trial.attempt()
    for content in (b"own 1", b"own 2"):
        trial.write("log.txt", content)
        first.restore_foreign(donor, "checkpoint_000007", fresh=False)
    trial.write("log.txt", b"after the exploits")
    first.sync()
    trial.kill()
    second = trial.attempt()
    second.restore_foreign(donor, "checkpoint_000007", fresh=True)
    assert read_tree(trial.work) == {"log.txt": b"own 2"}


def test_a_donor_that_goes_on_while_its_artifacts_are_adopted(trial, tmp_path):
    class Moving(PosixStore):
        """The donor overwrites `a` between the listing of its objects and the reading of the path."""

        moves = None

        def list(self, prefix=""):
            found = [*super().list(prefix)]
            if prefix == layout.OBJECTS and self.moves:
                moves, self.moves = self.moves, None
                moves()
            return iter(found)

    donor = open_session(tmp_path / "donor-work", PosixStore(tmp_path / "donor"), 1, trial="donor")
    path = Path(donor.working_dir, "a")
    path.write_bytes(b"at the checkpoint")
    assert save(donor, "checkpoint_000000")

    def moves():
        path.write_bytes(b"later")
        donor.sync()

    store = Moving(tmp_path / "donor")
    store.moves = moves
    session = trial.attempt(adopt_foreign_artifacts=True)
    session.restore_foreign(TrialDir(store, "donor"), "checkpoint_000000", fresh=True)
    assert read_tree(trial.work) == {"a": b"at the checkpoint"}
    abandon(donor)


# --- what is kept and what goes --------------------------------------------------------------------------


def test_dozens_of_checkpoints_keep_what_they_need_and_nothing_more(trial):
    """A toggling flag, a log, files of equal content, with `num_to_keep=2` and an attempt in between."""
    session = trial.attempt()
    kept = {}
    for step in range(60):
        trial.write("flag", b"01"[step % 2 :][:1])
        trial.write("other", b"01"[step // 3 % 2 :][:1])
        with open(trial.work / "log.txt", "ab" if step % 7 else "wb") as file:
            file.write(b"%d\n" % step)
        trial.write("state", b"%d" % (step // 5))
        if step % 4 == 0:
            session.sync()
        name = f"checkpoint_{step:06d}"
        assert save(session, name)
        kept[name] = read_tree(trial.work)
        while len(kept) > 2:
            oldest = min(kept)
            shutil.rmtree(trial.storage / oldest)
            del kept[oldest]
        assert {name: trial.snapshot(name) for name in kept} == kept
        if step in (20, 41):
            trial.kill()
            session = trial.attempt(registered=step)
            assert session.restore(name, fresh=True).exact
    assert save(session, "checkpoint_000060")
    needed = {
        entry["digest"]
        for path in [*independent_reader.snapshots(trial.place).values(), layout.MANIFEST]
        for entry in independent_reader.entries_of(trial.place, path).values()
    }
    held = [name.rpartition("/")[2] for name in trial.names(layout.OBJECTS)]
    found = {"01"[flag] for flag in (0, 1)}  # the head that the attempt found stays pinned while it lives
    assert len(held) <= len(needed) + len(found) + 3
    assert not trial.names(layout.LAYERS)


def test_layers_are_merged_and_old_ones_go(trial):
    """Far more than 128 changes a time: every snapshot stays readable, and the layers do not pile up."""
    session = trial.attempt()
    kept = {}
    for step in range(8):
        for number in range(150):
            trial.write(f"d/{(step * 150 + number) % 500:04d}", b"%d" % (step * 150 + number))
        if step % 3 == 2:
            shutil.rmtree(trial.work / "d")
            (trial.work / "d").mkdir()
        name = f"checkpoint_{step:06d}"
        assert save(session, name)
        kept[name] = read_tree(trial.work)
        while len(kept) > 3:
            oldest = min(kept)
            shutil.rmtree(trial.storage / oldest)
            del kept[oldest]
        assert {name: trial.snapshot(name) for name in kept} == kept
        assert trial.head() == kept[name]
    assert save(session, "checkpoint_000099")
    referenced = {
        ref["name"]
        for path in [*independent_reader.snapshots(trial.place).values(), layout.MANIFEST]
        for ref in json.loads(trial.place.read(path)).get("layers", [])
    }
    assert {name.rpartition("/")[2] for name in trial.names(layout.LAYERS)} == referenced


def test_a_layer_of_a_failed_commit_goes(trial):
    class FailingHead(WrappedStore):
        fails = 2

        def around(self, verb, path, act):
            if verb == "put" and path == layout.MANIFEST and self.fails:
                self.fails -= 1
                raise StorageError("injected", retryable=True)
            return act()

    session = trial.attempt(store=FailingHead(PosixStore(trial.storage)), retries=3)
    for number in range(200):
        trial.write(f"{number}")
    assert save(session, "checkpoint_000000")
    assert len(trial.names(layout.LAYERS)) == 1
    assert len(trial.head()) == 200


def test_a_reused_directory_shows_no_earlier_snapshot(trial):
    """All checkpoints count here, and the artifacts of the second try fail: the first one's must not stand in."""

    class Refusing(WrappedStore):
        refused = ""

        def around(self, verb, path, act):
            if verb == "put" and path == self.refused:
                raise StorageError("injected")
            return act()

    store = Refusing(PosixStore(trial.storage))
    session = trial.attempt(store=store)
    trial.write("a", b"first try")
    assert save(session, "checkpoint_000000")
    trial.write("a", b"second try")
    store.refused = "a"
    assert not save(session, "checkpoint_000000")
    assert independent_reader.snapshots(trial.place) == {}
    store.refused = ""
    assert save(session, "checkpoint_000000")
    assert trial.snapshot("checkpoint_000000") == {"a": b"second try"}


def test_a_snapshot_that_was_never_registered_does_not_come_back(trial):
    """What it listed is not preserved, so it goes with the first checkpoint of the next attempt."""
    session = trial.attempt(registered=-1)
    trial.write("a", b"0")
    assert save(session, "checkpoint_000000")
    trial.write("a", b"1")
    assert save(session, "checkpoint_000001")  # Ray dies before it registers this one
    trial.kill()
    session = trial.attempt(registered=0)
    assert session.restore("checkpoint_000000", fresh=True).exact
    trial.write("a", b"2")
    assert save(session, "checkpoint_000002")
    assert sorted(independent_reader.snapshots(trial.place)) == ["checkpoint_000000", "checkpoint_000002"]
    assert trial.snapshot("checkpoint_000000") == {"a": b"0"}


def test_files_of_others_are_moved_out_of_the_way_not_deleted(trial, caplog):
    session = trial.attempt()
    trial.write("a")
    assert save(session, "checkpoint_000000")
    trial.kill()
    (trial.storage / "notes").mkdir()
    (trial.storage / "notes" / "mine.txt").write_bytes(b"somebody's")
    session = trial.attempt()
    trial.write("notes", b"an artifact")
    session.sync()
    assert trial.head() == {"notes": b"an artifact"}
    assert trial.place.read(layout.aside_file_path(session.token, "notes/mine.txt")) == b"somebody's"
    assert "notes/mine.txt" in caplog.text


def test_a_kind_that_changes_over_two_kills(trial):
    """What an attempt left that was killed right after its restore is listed nowhere, and stands in the way."""
    session = trial.attempt()
    trial.write("d", b"a file")
    assert save(session, "checkpoint_000000")
    (trial.work / "d").unlink()
    trial.write("d/x", b"a file in a directory")
    session.sync()
    trial.kill()
    session = trial.attempt()
    session.restore("checkpoint_000000", fresh=True)  # commits the head: `d` is a file
    trial.kill()
    session = trial.attempt()
    session.restore("checkpoint_000000", fresh=True)
    session.sync()
    assert trial.head() == {"d": b"a file"}
    assert trial.place.read("d") == b"a file"


# --- damage ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", [b"", b"{", b'{"format": 1, "kind": "manifest"}', b"\xff\xfe", b"[]"])
def test_a_damaged_head_does_not_end_the_trial(trial, damage, caplog):
    session = trial.attempt()
    trial.write("a", b"0")
    assert save(session, "checkpoint_000000")
    trial.write("a", b"1")
    session.sync()
    trial.kill()
    (trial.storage / layout.MANIFEST).write_bytes(damage)
    session = trial.attempt()
    assert session.restore("checkpoint_000000", fresh=True).exact
    assert read_tree(trial.work) == {"a": b"0"}
    assert save(session, "checkpoint_000001")
    assert trial.head() == {"a": b"0"}
    assert trial.place.read(f"{layout.ASIDE}/{session.token}/damaged.json") == damage
    assert [record for record in caplog.records if record.levelno == logging.ERROR]


def test_a_head_whose_layer_is_gone(trial):
    session = trial.attempt()
    for number in range(200):
        trial.write(f"{number}")
    session.sync()
    trial.kill()
    shutil.rmtree(trial.storage / layout.LAYERS)
    session = trial.attempt()
    trial.write("a")
    assert save(session, "checkpoint_000000")
    assert trial.head() == {"a": b"x"}


def test_a_head_of_a_newer_release_is_left_alone(trial):
    """It is not damaged. Nothing is synced over it; the checkpoints themselves are still saved."""
    session = trial.attempt()
    trial.write("a")
    session.sync()
    trial.kill()
    newer = (trial.storage / layout.MANIFEST).read_bytes().replace(b'"format":1', b'"format":2')
    (trial.storage / layout.MANIFEST).write_bytes(newer)
    session = trial.attempt()
    trial.write("a", b"y")
    with pytest.raises(ArtifactSyncError, match="newer ray-artifact-sync"):
        session.sync()
    assert not save(session, "checkpoint_000000")
    assert trial.place.read("checkpoint_000000/model.bin")
    assert (trial.storage / layout.MANIFEST).read_bytes() == newer


def test_content_that_is_gone_is_named(trial):
    session = trial.attempt()
    trial.write("a", b"a")
    trial.write("b", b"b")
    assert save(session, "checkpoint_000000")
    trial.kill()
    (trial.storage / "a").unlink()
    session = trial.attempt(work=trial.base / "other", on_error="raise")
    with pytest.raises(IncompleteSyncError) as caught:
        session.restore("checkpoint_000000", fresh=True)
    assert list(caught.value.failures) == ["a"]
    # The working dir is a mix now: it must not become the newest artifacts, neither in the background nor at the end.
    head = trial.place.read(layout.MANIFEST)
    with pytest.raises(ArtifactSyncError, match="did not complete"):
        session.sync()
    with pytest.raises(ArtifactSyncError, match="did not complete"):
        save(session, "checkpoint_000001")  # its own files are uploaded
    with pytest.raises(ArtifactSyncError, match="did not complete"):
        session.close()
    assert trial.place.read(layout.MANIFEST) == head


# --- the node ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("offset_seconds", [-3600, 3600])
def test_a_wall_clock_that_jumps(trial, monkeypatch, offset_seconds):
    """Every change is seen, the same-size ones too, also by a cache filled before the jump."""
    session = trial.attempt()
    trial.write("a", b"0")
    time.sleep(0.1)
    session.sync()
    real = time.time_ns
    monkeypatch.setattr(local_files.time, "time_ns", lambda: real() + offset_seconds * 10**9)
    for step in range(1, 8):
        trial.write("a", b"%d" % step)
        session.sync()
        assert trial.head() == {"a": b"%d" % step}


def test_a_working_dir_that_cannot_be_written(trial, small_disk):
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(OSError, match="Read-only file system"):
        trial.attempt(work=small_disk / "work")
    assert not trial.storage.exists()


def test_a_working_dir_that_turns_read_only(trial, small_disk):
    """A disk with errors is remounted read-only: what it holds is saved all the same."""
    work = small_disk / "work"
    session = trial.attempt(work=work)
    (work / "a").write_bytes(b"1")
    session.sync()
    (work / "a").write_bytes(b"2")
    abandon(session)  # its open lock file would keep the mount busy
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    session.sync()
    assert trial.head() == {"a": b"2"}
    trial.kill()


# --- what people see at the paths ----------------------------------------------------------------------------


class LostAnswers(WrappedStore):
    """Writes of `a` land, and look as if they had failed."""

    lost = False

    def around(self, verb, path, act):
        result = act()
        if self.lost and verb == "put" and path == "a":
            raise StorageError("injected")
        return result


def test_an_upload_that_seemed_to_fail_is_not_mistaken_for_the_old_version(trial):
    store = LostAnswers(PosixStore(trial.storage))
    session = trial.attempt(store=store)
    trial.write("a", b"0")
    session.sync()
    trial.write("a", b"1")
    store.lost = True
    with pytest.raises(IncompleteSyncError):
        session.sync()
    assert (trial.place.read("a"), trial.head()) == (b"1", {"a": b"0"})
    store.lost = False
    trial.write("a", b"0")
    session.sync()
    assert trial.place.read("a") == b"0"


def test_a_version_of_the_same_size_that_was_never_committed_is_not_mistaken(trial):
    store = LostAnswers(PosixStore(trial.storage))
    session = trial.attempt(store=store)
    trial.write("a", b"0")
    assert save(session, "checkpoint_000000")
    trial.write("a", b"1")
    store.lost = True
    with pytest.raises(IncompleteSyncError):
        session.sync()
    trial.kill()
    session = trial.attempt()
    session.restore("checkpoint_000000", fresh=True)
    session.sync()
    assert trial.place.read("a") == b"0"


def test_what_a_replaced_attempt_preserved_after_our_listing_is_found(trial):
    """Without a fence it goes on for as long as its lease: its copy is looked for before content is lost."""
    session = trial.attempt()
    trial.write("a", b"of the checkpoint")
    assert save(session, "checkpoint_000000")
    trial.kill()
    shutil.rmtree(trial.work)
    second = trial.attempt()
    second._run(second._open, "Opening")
    entry = independent_reader.entries_of(trial.place, layout.MANIFEST)["a"]
    second.store.copy("a", layout.object_path(session.token, entry["digest"]))
    second.store.put("a", b"of the old attempt")
    report = second.restore("checkpoint_000000", fresh=True)
    assert report.exact
    assert not report.lost
    assert read_tree(trial.work) == {"a": b"of the checkpoint"}
