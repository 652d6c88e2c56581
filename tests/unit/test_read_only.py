"""Storage that may be read and not written: restores work, what fails is said and counted, nothing hangs."""

from __future__ import annotations

import itertools
import subprocess
import time
from pathlib import Path

import pytest

from ray_artifact_sync.errors import StoragePermissionError
from ray_artifact_sync.stores import open_store
from ray_artifact_sync.stores.posix import PosixStore
from ray_artifact_sync.trial_dir import TrialDir
from tests.support import independent_reader
from tests.support.s3_servers import BUCKET, filesystem_at
from tests.support.sessions import abandon, open_session, read_tree, save

WRITES = (
    "put_object",
    "upload_part",
    "upload_part_copy",
    "create_multipart",
    "complete_multipart",
    "copy_object",
    "delete",
    "delete_many",
)
CHECKPOINT = "checkpoint_000000"
_numbers = itertools.count()


def write(work: Path, text: str) -> None:
    work.mkdir(exist_ok=True)
    (work / "log.txt").write_text(text)
    (work / "rewritten.txt").write_text(f"version {len(text)}")


@pytest.fixture(
    params=["posix", pytest.param("rclone", marks=pytest.mark.s3), pytest.param("moto", marks=pytest.mark.s3)]
)
def place(request, tmp_path):
    """A function that opens the store of one trial dir, and one that takes the right to write away."""
    if request.param == "posix":
        storage = tmp_path / "storage"
        storage.mkdir()

        def lock() -> None:
            done = [
                subprocess.run(["mount", *options, str(storage)], check=False, capture_output=True)
                for options in (["--bind", str(storage)], ["-o", "remount,ro,bind"])
            ]
            if any(step.returncode for step in done):
                pytest.skip(f"cannot mount read-only: {done[0].stderr.decode().strip()}")

        yield lambda name="trial": PosixStore(storage / name), lock
        subprocess.run(["umount", "--lazy", str(storage)], check=False, capture_output=True)
        return
    proxy = request.getfixturevalue("proxy" if request.param == "rclone" else "moto_proxy")
    path = f"{BUCKET}/read-only/{next(_numbers)}"

    def refuse() -> None:
        for kind in WRITES:
            proxy.fail(kind, status=403)

    yield lambda name="trial": open_store(filesystem_at(proxy.endpoint), f"{path}/{name}"), refuse


@pytest.fixture
def stored(place, tmp_path):
    """A trial with a checkpoint, and newer artifacts after it."""
    new_store, lock = place
    first = open_session(tmp_path / "first", new_store(), 1)
    write(tmp_path / "first", "1\n2\n")
    assert save(first, CHECKPOINT)
    write(tmp_path / "first", "1\n2\n3\n")
    first.sync()
    first.close()
    return new_store, lock


def test_reading(stored):
    new_store, lock = stored
    lock()
    trial = TrialDir(new_store(), "trial")
    assert trial.head().manifest.get("log.txt").size == 6
    assert trial.snapshot(CHECKPOINT).manifest.get("log.txt").size == 4
    place = independent_reader.store_place(new_store())
    assert independent_reader.head_tree(place)["log.txt"] == b"1\n2\n3\n"


def test_restoring(stored, tmp_path, caplog):
    """The claim is refused, and the artifacts come back all the same; what follows fails, and says so."""
    new_store, lock = stored
    before = {file.path: file.size for file in new_store().list()}
    lock()
    started = time.monotonic()
    session = open_session(tmp_path / "second", new_store(), 2)
    report = session.restore(CHECKPOINT, fresh=True)
    assert report.exact
    assert read_tree(tmp_path / "second") == {"log.txt": b"1\n2\n", "rewritten.txt": b"version 4"}
    assert session.stats.failed_syncs == 1, "the head that should follow"
    write(tmp_path / "second", "1\n2\nanother 3\n")
    with pytest.raises(StoragePermissionError):
        session.sync()
    failed = session.stats.failed_syncs
    assert failed == 2
    session.close()
    assert session.stats.failed_syncs == failed + 1
    assert time.monotonic() - started < 20
    assert "cannot be written" in caplog.text
    assert "could not be synced" in caplog.text
    assert {file.path: file.size for file in new_store().list()} == before


def test_restoring_twice_and_an_exploit(stored, tmp_path):
    new_store, lock = stored
    lock()
    donor = TrialDir(new_store("donor"), "donor")
    session = open_session(tmp_path / "second", new_store(), 2)
    # Takes over another trial's checkpoint: what this trial had at last. The record of that is refused.
    assert session.restore_foreign(donor, CHECKPOINT, fresh=True).exact
    assert read_tree(tmp_path / "second")["log.txt"] == b"1\n2\n3\n"
    assert session.restore(CHECKPOINT, fresh=False).exact
    assert read_tree(tmp_path / "second")["log.txt"] == b"1\n2\n"
    assert session.restore_foreign(donor, "checkpoint_000007", fresh=False).exact
    assert session.stats.failed_syncs >= 3
    abandon(session)


def test_restoring_by_listing(place, tmp_path):
    new_store, lock = place
    new_store().put("log.txt", b"1\n2\n")
    new_store().put(f"{CHECKPOINT}/model.bin", b"model")
    lock()
    session = open_session(tmp_path / "second", new_store(), 1, registered=0)
    report = session.restore(CHECKPOINT, fresh=True)
    assert not report.exact
    assert read_tree(tmp_path / "second") == {"log.txt": b"1\n2\n"}
    session.close()
    assert session.stats.failed_syncs >= 1
    assert {file.path for file in new_store().list()} == {"log.txt", f"{CHECKPOINT}/model.bin"}
