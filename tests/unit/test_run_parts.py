"""Parts of a Ray Train run as trial dirs: sessions on them, and readers that know nothing of the library."""

from __future__ import annotations

import shutil
import uuid

import pyarrow.fs
import pytest

from ray_artifact_sync import layout
from ray_artifact_sync.run_parts import open_part
from tests.support.independent_reader import head_tree, store_place, tree_of
from tests.support.s3_servers import BUCKET, filesystem_at
from tests.support.sessions import abandon, open_session, read_tree, save

NAME = "checkpoint_2026-11-30_13-14-58.178767"


@pytest.fixture(params=["local", pytest.param("s3", marks=pytest.mark.s3)])
def run(request, tmp_path):
    """A file system, and the run's directory on it."""
    if request.param == "local":
        return pyarrow.fs.LocalFileSystem(), str(tmp_path / "storage/run")
    return filesystem_at(request.getfixturevalue("moto").endpoint), f"{BUCKET}/{uuid.uuid4().hex}/run"


def session_on(run, tmp_path, part, token):
    directory = open_part(*run, part)
    return open_session(tmp_path / part, directory.store, token, trial=directory), directory


def commit(session, directory, name):
    with directory.part_store.open_checkpoint(name):
        assert save(session, name)


def test_a_checkpoint_of_two_parts(run, tmp_path):
    for part in ("rank_0", "rank_1"):
        session, directory = session_on(run, tmp_path, part, 1)
        for step in range(3):
            (tmp_path / part / "log.txt").write_text(f"{part} {step}")
            (tmp_path / part / "plots").mkdir(exist_ok=True)
            (tmp_path / part / f"plots/{step}.txt").write_text(str(step))
            commit(session, directory, f"{NAME}{step}")
        session.close()
    for part in ("rank_0", "rank_1"):
        place = store_place(open_part(*run, part).store)
        assert head_tree(place)["log.txt"] == f"{part} 2".encode()
        for step in range(3):
            path = f"{NAME}{step}/{layout.snapshot_name(layout.make_token(1))}"
            tree = tree_of(place, path)
            assert tree["log.txt"] == f"{part} {step}".encode()
            assert len(tree) == step + 2
    filesystem, root = run
    info = filesystem.get_file_info(f"{root}/{NAME}1/model.bin")
    assert info.type == pyarrow.fs.FileType.File, "the checkpoint's own files are where Ray looks"


def test_an_artifact_below_the_name_of_a_checkpoint_that_is_over(run, tmp_path):
    """What a user writes to `epoch_1/` after a report of that name is an artifact, not the checkpoint's file."""
    session, directory = session_on(run, tmp_path, "rank_0", 1)
    commit(session, directory, "epoch_1")
    (tmp_path / "rank_0/epoch_1").mkdir()
    (tmp_path / "rank_0/epoch_1/model.bin").write_text("an evaluation")
    session.sync()
    session.close()
    filesystem, root = run
    with filesystem.open_input_stream(f"{root}/epoch_1/model.bin") as file:
        assert file.read() == b"model of epoch_1"
    assert head_tree(store_place(open_part(*run, "rank_0").store)) == {"epoch_1/model.bin": b"an evaluation"}


def test_restore_as_of_a_checkpoint(run, tmp_path):
    session, directory = session_on(run, tmp_path, "rank_0", 1)
    for step in range(4):
        (tmp_path / "rank_0/log.txt").write_text("x" * step + str(step))
        commit(session, directory, f"epoch_{step}")
    abandon(session)
    shutil.rmtree(tmp_path / "rank_0")
    session, directory = session_on(run, tmp_path, "rank_0", 2)
    report = session.restore("epoch_1", fresh=True)
    assert report.exact
    assert read_tree(tmp_path / "rank_0") == {"log.txt": b"x1"}
    commit(session, directory, "epoch_1b")
    session.close()


def test_garbage_goes_with_the_checkpoints(run, tmp_path):
    session, directory = session_on(run, tmp_path, "rank_0", 1)
    for step in range(3):
        (tmp_path / "rank_0/log.txt").write_text(f"version {step}")
        commit(session, directory, f"epoch_{step}")
    store = directory.store
    assert len(list(store.list(layout.OBJECTS))) == 2
    run[0].delete_dir(f"{run[1]}/epoch_0")
    run[0].delete_dir(f"{run[1]}/epoch_1")
    commit(session, directory, "epoch_3")
    session.close()
    assert list(store.list(layout.OBJECTS)) == []


def test_the_world_size_of_a_checkpoint(run, tmp_path):
    store = open_part(*run, "rank_0").part_store
    assert store.world_size_of(NAME) is None
    store.write_world_size(NAME, 3)
    assert open_part(*run, "rank_7").part_store.world_size_of(NAME) == 3
    assert list(store.list()) == [], "no artifact of any part"
