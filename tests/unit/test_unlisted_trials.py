"""Trial dirs that no manifest describes: what is restored is found by listing, and nothing of it gets lost."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest

from ray_artifact_sync import layout
from ray_artifact_sync.errors import IncompleteSyncError
from ray_artifact_sync.registry import ArtifactRegistry
from ray_artifact_sync.stores import open_store
from ray_artifact_sync.stores.posix import PosixStore
from ray_artifact_sync.trial_dir import TrialDir
from tests.support import independent_reader
from tests.support.s3_servers import BUCKET, filesystem_at
from tests.support.sessions import WrappedStore, abandon, open_session, read_tree, save

CHECKPOINT = "checkpoint_000000"
ARTIFACTS = {"log.txt": b"1\n2\n3\n4\n", "sub/plot.png": b"plot" * 1000, "empty": b""}
OTHERS = {
    "progress.csv": b"the driver's",
    "result.json": b"the driver's",
    "events.out.tfevents.1": b"the driver's",
    "wandb/run/x": b"the driver's",
    "predictions/1.txt": b"declared",
    "scratch.tmp": b"excluded",
    f"{CHECKPOINT}/model.bin": b"model",
}
_numbers = itertools.count()


@pytest.fixture(
    params=["posix", pytest.param("rclone", marks=pytest.mark.s3), pytest.param("moto", marks=pytest.mark.s3)]
)
def new_store(request, tmp_path):
    """A function that opens the store of one trial dir, in which a run without this library left its files."""
    if request.param == "posix":
        new = lambda: PosixStore(tmp_path / "storage")  # noqa: E731
    else:
        proxy = request.getfixturevalue("proxy" if request.param == "rclone" else "moto_proxy")
        path = f"{BUCKET}/unlisted/{next(_numbers)}"
        new = lambda: open_store(filesystem_at(proxy.endpoint), path)  # noqa: E731
    store = new()
    for name, data in {**ARTIFACTS, **OTHERS}.items():
        store.put(name, data)
    return new


def attempt(work, store, token, **options):
    from ray_artifact_sync.patterns import Selection

    options.setdefault("registered", 0)
    return open_session(
        work,
        store,
        token,
        registry=ArtifactRegistry.default().with_owner("Predictions", "predictions/"),
        selection=Selection.of(exclude=["*.tmp"]),
        **options,
    )


def others_are_there(store) -> bool:
    return all(store.read(name) == data for name, data in OTHERS.items())


@pytest.mark.parametrize("registered", [0, None], ids=["said", "not-said"])
def test_artifacts_are_found_by_listing(new_store, tmp_path, caplog, registered):
    (tmp_path / "work/sub").mkdir(parents=True)
    (tmp_path / "work/log.txt").write_text("leftover of this node\n")
    (tmp_path / "work/sub/later").write_text("leftover of this node\n")
    session = attempt(tmp_path / "work", new_store(), 1, registered=registered)
    report = session.restore(CHECKPOINT, fresh=True)
    assert read_tree(tmp_path / "work") == ARTIFACTS
    assert not report.exact
    assert (report.files_read, report.files_local) == (3, 0)
    assert [record.levelname for record in caplog.records if "up to now" in record.message] == ["WARNING"]
    assert "The 3 files that its trial dir holds are restored" in caplog.text
    assert independent_reader.head_tree(independent_reader.store_place(new_store())) == ARTIFACTS
    session.close()
    assert others_are_there(new_store())


def test_the_same_again_after_the_next_crash(new_store, tmp_path):
    """What was restored for the checkpoint stands, although newer artifacts were committed since."""
    first = attempt(tmp_path / "one", new_store(), 1)
    first.restore(CHECKPOINT, fresh=True)
    with open(tmp_path / "one/log.txt", "a") as file:
        file.write("5\n6\n")
    Path(tmp_path / "one/sub/plot.png").write_bytes(b"another plot")
    first.sync()
    abandon(first)
    second = attempt(tmp_path / "two", new_store(), 2)
    report = second.restore(CHECKPOINT, fresh=True)
    assert not report.exact
    assert read_tree(tmp_path / "two") == ARTIFACTS
    with open(tmp_path / "two/log.txt", "a") as file:
        file.write("5 again\n")
    assert save(second, "checkpoint_000001")
    abandon(second)
    third = attempt(tmp_path / "three", new_store(), 3, registered=1)
    assert third.restore("checkpoint_000001", fresh=True).exact
    assert read_tree(tmp_path / "three") == {**ARTIFACTS, "log.txt": b"1\n2\n3\n4\n5 again\n"}
    abandon(third)
    assert others_are_there(new_store())


def test_a_checkpoint_without_a_snapshot_stands_for_the_same_twice(new_store, tmp_path):
    """The same where there is a head, and only the checkpoint's own sync had failed."""
    store = new_store()
    first = attempt(tmp_path / "one", store, 1, registered=-1)
    (tmp_path / "one/log.txt").write_bytes(b"1\n")
    first.sync()
    store.put(f"{CHECKPOINT}/model.bin", b"model")  # saved without artifacts
    abandon(first)
    for token in (2, 3):
        session = attempt(tmp_path / str(token), new_store(), token)
        assert not session.restore(CHECKPOINT, fresh=True).exact
        assert read_tree(tmp_path / str(token)) == {"log.txt": b"1\n"}
        (tmp_path / str(token) / "log.txt").write_bytes(b"1\n2\n")
        session.sync()
        abandon(session)


def test_a_background_sync_before_the_restore_replaces_nothing(new_store, tmp_path):
    """`setup()` opens the log: an empty file, which a slow `setup()` gives the time to be uploaded."""
    session = attempt(tmp_path / "work", new_store(), 1)
    handle = open(tmp_path / "work/log.txt", "a")
    session._submit(session._background_sync, "A background sync").wait()
    assert new_store().read("log.txt") == ARTIFACTS["log.txt"]
    session.restore(CHECKPOINT, fresh=True)
    handle.write("5\n")
    handle.close()
    session._submit(session._background_sync, "A background sync").wait()
    assert new_store().read("log.txt") == ARTIFACTS["log.txt"] + b"5\n"
    abandon(session)


@pytest.mark.parametrize("steps", [False, True])
def test_without_a_restore_background_syncs_begin_with_the_first_step(new_store, tmp_path, steps):
    session = attempt(tmp_path / "work", new_store(), 1)
    (tmp_path / "work/log.txt").write_text("written by setup()")
    if steps:
        session.proceed()
    session._submit(session._background_sync, "A background sync").wait()
    session.close()  # without a step: `setup()` has failed
    assert (new_store().read("log.txt") == b"written by setup()") is steps


def test_nothing_is_deleted_where_kinds_change(new_store, tmp_path):
    session = attempt(tmp_path / "work", new_store(), 1)
    session.restore(CHECKPOINT, fresh=True)
    (tmp_path / "work/log.txt").unlink()
    (tmp_path / "work/log.txt").mkdir()
    (tmp_path / "work/log.txt/1").write_text("x")
    session.sync()
    store = new_store()
    assert store.read("log.txt/1") == b"x"
    kept = [file.path for file in store.list(layout.STATE_DIR) if file.size == len(ARTIFACTS["log.txt"])]
    assert [store.read(path) for path in kept] == [ARTIFACTS["log.txt"]] * len(kept)
    assert kept
    abandon(session)


@pytest.mark.parametrize("fresh", [True, False])
def test_setup_files_in_the_way(new_store, tmp_path, fresh):
    session = attempt(tmp_path / "work", new_store(), 1)
    (tmp_path / "work/sub").write_text("a file where a directory must be")
    (tmp_path / "work/mine.txt").write_text("not in storage")
    session.restore(CHECKPOINT, fresh=fresh)
    tree = read_tree(tmp_path / "work")
    assert tree == {**ARTIFACTS, **({"mine.txt": b"not in storage"} if fresh else {})}
    abandon(session)


def test_an_exploit_keeps_the_trials_own(new_store, tmp_path):
    """PBT: the first thing that this library sees of the trial is that it takes over another's checkpoint."""
    donor = TrialDir(PosixStore(tmp_path / "donor"), "donor")
    session = attempt(tmp_path / "work", new_store(), 1)
    assert session.restore_foreign(donor, CHECKPOINT, fresh=True).exact
    assert read_tree(tmp_path / "work") == ARTIFACTS
    (tmp_path / "work/log.txt").write_bytes(b"newer")
    session.sync()
    abandon(session)
    again = attempt(tmp_path / "again", new_store(), 2)
    again.restore_foreign(donor, CHECKPOINT, fresh=True)
    assert read_tree(tmp_path / "again") == ARTIFACTS
    abandon(again)


class Moving(WrappedStore):
    """Somebody goes on writing: what is read is longer than what was listed."""

    def read_chunks(self, path, **options):
        chunks = list(super().read_chunks(path, **options))
        return iter([*chunks, b"5\n"] if path == "log.txt" else chunks)


@pytest.mark.parametrize("on_error", ["warn", "raise"])
def test_a_file_that_somebody_still_writes(new_store, tmp_path, caplog, on_error):
    session = attempt(tmp_path / "work", Moving(new_store()), 1, on_error=on_error)
    if on_error == "raise":
        with pytest.raises(IncompleteSyncError, match=r"log\.txt.*10 bytes were read, but 8 are listed"):
            session.restore(CHECKPOINT, fresh=True)
    else:
        report = session.restore(CHECKPOINT, fresh=True)
        assert report.lost == ("log.txt",)
        assert "log.txt" not in report.manifest.entries
        assert read_tree(tmp_path / "work") == {**ARTIFACTS, "log.txt": b"1\n2\n3\n4\n5\n"}
        session.sync()
        assert session.trial.head().manifest.get("log.txt").size == 10
    abandon(session)


class Vanishing(WrappedStore):
    """Somebody deletes a file between listing and reading."""

    def read_chunks(self, path, **options):
        if path == "log.txt":
            self.inner.delete([path])
        return super().read_chunks(path, **options)


def test_a_file_that_vanishes(new_store, tmp_path):
    session = attempt(tmp_path / "work", Vanishing(new_store()), 1)
    report = session.restore(CHECKPOINT, fresh=True)
    assert report.lost == ("log.txt",)
    assert read_tree(tmp_path / "work") == {name: data for name, data in ARTIFACTS.items() if name != "log.txt"}
    abandon(session)


def test_nothing_there_but_the_checkpoint(tmp_path):
    store = PosixStore(tmp_path / "storage")
    store.put(f"{CHECKPOINT}/model.bin", b"model")
    session = attempt(tmp_path / "work", store, 1)
    report = session.restore(CHECKPOINT, fresh=True)
    assert (report.exact, len(report.manifest)) == (False, 0)
    assert read_tree(tmp_path / "work") == {}
    abandon(session)


@pytest.mark.s3
def test_keys_that_no_directory_can_hold(moto_proxy, tmp_path):
    """Object stores have more names than file systems: `a` beside `a/b`, and what leaves the directory."""
    path = f"{BUCKET}/unlisted/{next(_numbers)}"
    filesystem = filesystem_at(moto_proxy.endpoint)
    for name in ("a", "a/b", "fine"):
        with filesystem.open_output_stream(f"{path}/{name}") as stream:
            stream.write(name.encode())
    session = attempt(tmp_path / "deep/work", open_store(filesystem, path), 1)
    session.restore(CHECKPOINT, fresh=True)
    assert read_tree(tmp_path / "deep/work") == {"a/b": b"a/b", "fine": b"fine"}
    assert sorted(os.listdir(tmp_path / "deep")) == ["work"]
    abandon(session)


def test_a_hostile_listing_stays_below_the_working_dir(tmp_path):
    class Hostile(WrappedStore):
        def list(self, prefix=""):
            from ray_artifact_sync.stores.base import StoredFile

            return iter([*super().list(prefix), StoredFile("../evil", 4), StoredFile("/evil", 4)])

    store = PosixStore(tmp_path / "storage")
    store.put("fine", b"fine")
    session = attempt(tmp_path / "deep/work", Hostile(store), 1)
    session.restore(CHECKPOINT, fresh=True)
    assert read_tree(tmp_path / "deep/work") == {"fine": b"fine"}
    abandon(session)


def test_a_damaged_head_does_not_cost_a_checkpoint_without_snapshot_its_artifacts(tmp_path):
    store = PosixStore(tmp_path / "storage")
    first = attempt(tmp_path / "one", store, 1, registered=-1)
    (tmp_path / "one/log.txt").write_bytes(b"1\n")
    first.sync()
    store.put(f"{CHECKPOINT}/model.bin", b"model")
    store.put(layout.MANIFEST, b"{")
    abandon(first)
    second = attempt(tmp_path / "two", store, 2)
    assert not second.restore(CHECKPOINT, fresh=True).exact
    assert read_tree(tmp_path / "two") == {"log.txt": b"1\n"}
    abandon(second)
