"""Disks without room: a node's under the working directory, storage's, and that of `RemoteUploader`'s copies.

The trial fails for as long as there is no room, with an error that names the place; what was saved before stays exact;
once there is room, Ray's next try goes on, exactly.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ray.train._internal.storage import StorageContext

from ray_artifact_sync import ArtifactSyncer, RemoteUploader, StagingError
from ray_artifact_sync.errors import IncompleteSyncError, StorageError
from release_tests import trials
from release_tests.checks import Storage, check_trial, storage_at
from release_tests.cluster import wait_until
from release_tests.local_ray import local_ray
from release_tests.runs import Accomplice, tuner
from tests.support import independent_reader
from tests.support.small_disk import FILLER, fill, free, mount, small_disk, unmount_below, why_not

NAME = "full disks"
quick = False

NODE_MIB, STORAGE_MIB = 2, 16
STEPS = 5
FULL_AT = 3
FULL = "No space left on device"


class OnSmallDisk(trials.Writer):
    """Its working directory is a disk of its own, which it fills in the middle of training."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        storage = next(value for value in (*args, *kwargs.values()) if isinstance(value, StorageContext))
        disk = Path(storage.trial_working_directory)
        if not os.path.ismount(disk):
            mount(disk, NODE_MIB)
        os.chdir(disk)
        shared = args[0] if args else kwargs["config"]
        trials.mark(shared, "disk", str(disk))
        try:
            super().__init__(*args, **kwargs)
        except OSError as error:
            trials.mark(shared, "refused", str(error))
            raise

    def step(self) -> dict[str, Any]:
        if self.n + 1 == FULL_AT and not Path(self.cfg["shared"], "filled").exists():
            trials.mark(self.cfg, "filled")
            fill(Path())
        return super().step()


def run(workdir: Path, *, quick: bool) -> dict[str, object]:
    if reason := why_not():
        return {"skipped": reason}
    figures = {"copies of an uploader": staging(workdir / "staging")}
    with local_ray():
        figures["working directory"] = working_directory(workdir / "node")
        figures["storage"] = storage(workdir / "storage")
    return figures


def fit(trainable: Any, storage: Storage, config: dict[str, Any]) -> Any:
    syncer = ArtifactSyncer(exclude=[FILLER])
    return tuner(trainable, storage, config, frequency=1, max_failures=30, syncer=syncer).fit()[0]


def prepare(workdir: Path, **more: Any) -> dict[str, Any]:
    (workdir / "shared").mkdir(parents=True)
    return {"shared": str(workdir / "shared"), "steps": STEPS, **more}


def checked(storage: Storage, result: Any, config: dict[str, Any]) -> str:
    assert result.error is None, result.error
    shared = Path(config["shared"])
    assert not (shared / "inexact").exists(), (shared / "inexact").read_text()
    place = storage.look(result.path)
    count = check_trial(place, config, steps=STEPS)
    assert not [name for name in place.names() if "/tmp/" in name], "half-written files were left"
    return f"{len([*shared.glob('started-*')]) - 1} restarts, {count} checkpoints exact"


def check_said(said: str, place: object) -> None:
    """The error must say what is wrong, and where."""
    assert FULL in said, said[-2000:]
    assert str(place) in said, said[-2000:]


def refusal(call: Callable[[], object]) -> str:
    try:
        call()
    except (StagingError, StorageError) as error:
        return str(error)
    raise AssertionError("there was room")


def working_directory(workdir: Path) -> str:
    import ray

    config = prepare(workdir)
    shared = workdir / "shared"
    session = Path(ray._private.worker.global_worker.node.get_session_dir_path())

    def act() -> None:
        wait_until((shared / "refused").exists, 60, what="a start on the full disk")
        free(Path((shared / "disk").read_text()))

    try:
        with storage_at("local", workdir) as storage:
            with Accomplice(act):
                result = fit(OnSmallDisk, storage, config)
            said, disk = (shared / "refused").read_text(), (shared / "disk").read_text()
            check_said(said, disk)
            return checked(storage, result, config)
    finally:
        unmount_below(session)


def storage(workdir: Path) -> str:
    config = prepare(workdir, holds=[FULL_AT])
    shared = workdir / "shared"
    with small_disk(workdir / "disk", STORAGE_MIB) as disk, storage_at("local", disk) as storage:

        def act() -> None:
            wait_until((shared / f"hold-{FULL_AT}-0").exists, 60, what="the step")
            fill(disk)
            trials.mark(config, "released")
            wait_until(lambda: len([*shared.glob("started-*")]) > 2, 60, what="a start with the full storage")
            free(disk)

        with Accomplice(act):
            result = fit(trials.Writer, storage, config)
        said = Path(result.path, "error.txt").read_text()
        check_said(said, f"{disk}/")
        return checked(storage, result, config)


def staging(workdir: Path) -> str:
    """The copies' disk, then that of the files themselves."""
    workdir.mkdir()
    source = workdir / "model.bin"
    source.write_bytes(os.urandom(700_000))
    with small_disk(workdir / "disk", 1) as disk:
        with RemoteUploader(workdir / "remote", staging_dir=disk) as uploader:
            uploader.upload_file_async("first", source).result()
            fill(disk)
            check_said(refusal(lambda: uploader.upload_file_async("second", source)), disk)
            free(disk)
            uploader.upload_file_async("second", source).result()
        assert not [*disk.iterdir()], "copies were left"
        with RemoteUploader(disk / "remote") as uploader:
            uploader.upload_file_async("small", __file__).result()
            fill(disk)
            check_said(refusal(uploader.upload_file_async("large", source).result), disk)
            with contextlib.suppress(IncompleteSyncError):
                uploader.wait()  # says it once more, and forgets it
            free(disk)
            uploader.upload_file_async("large", source).result()
        place = independent_reader.posix_place(disk / "remote")
        assert sorted(place.names()) == ["large", "small"]
        assert place.read("large") == source.read_bytes()
        assert place.read("small") == Path(__file__).read_bytes()
    for name in ("first", "second"):
        assert (workdir / "remote" / name).read_bytes() == source.read_bytes()
    return "two errors, 4 files exact"
