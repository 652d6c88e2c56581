"""Artifacts inside the workers of Ray Train, V2 and V1.

    def train_loop_per_worker(config):
        with ray_artifact_sync.train.artifacts() as artifacts:
            start = load(ray.train.get_checkpoint())
            log = open(artifacts.path / "log.txt", "a")
            for step in range(start, 100):
                ...
                artifacts.report({"loss": loss}, checkpoint)

By default each rank has a directory of its own, which lies at `<run dir>/artifacts/rank_<rank>/` in storage. Inside the
block, its files are what they were at the checkpoint that `ray.train.get_checkpoint()` returns.
"""

from __future__ import annotations

import inspect
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.fs
import ray.train
from blake3 import blake3

from ray_artifact_sync import layout
from ray_artifact_sync.checkpoint_upload import upload_checkpoint
from ray_artifact_sync.collectives import Collective, SingleProcess, TorchCollective
from ray_artifact_sync.concurrency import Deadline
from ray_artifact_sync.entries import Manifest
from ray_artifact_sync.errors import ArtifactSyncError, ConfigurationError
from ray_artifact_sync.metrics import SyncMetrics
from ray_artifact_sync.ray_collective import RayCollective
from ray_artifact_sync.registry import ArtifactRegistry
from ray_artifact_sync.run_parts import MERGED, RunPartDir, open_part, rank_part
from ray_artifact_sync.session import TrialArtifacts
from ray_artifact_sync.sharded_trial import ShardedTrial, Together, agree_on_token
from ray_artifact_sync.sharding import ON_CONFLICT, OnConflict
from ray_artifact_sync.stores import open_store
from ray_artifact_sync.sync_down import RestoreReport
from ray_artifact_sync.syncer import ArtifactSyncer
from ray_artifact_sync.transfer import TransferEngine

logger = logging.getLogger(__name__)

_NOT_HERE = (
    "ray_artifact_sync.train.artifacts() works inside the train_loop_per_worker of a Ray Train trainer. In a function "
    "for Ray Tune, use with_artifacts."
)

LOCAL_STORAGE = "~/ray_results"
"""Where Ray puts runs without a `storage_path`; used in local mode, where Ray has no storage."""


@contextmanager
def artifacts(
    *,
    merged: bool = False,
    on_conflict: OnConflict = "error",
    syncer: ArtifactSyncer | None = None,
    local_dir: str | os.PathLike[str] | None = None,
    chdir: bool = False,
    local_storage_path: str | os.PathLike[str] | None = None,
    dead_after: float = 30.0,
) -> Iterator[WorkerArtifacts]:
    """The artifacts of this worker, for the time of the block. All ranks enter it.

    On entering, the directory is what it was when the checkpoint that `ray.train.get_checkpoint()` returns was reported
    by this rank; empty without a checkpoint. What an earlier attempt left on this node is set aside, not destroyed. On
    leaving, also through an exception, what was written last is uploaded; a worker that Ray kills uploads nothing more,
    and nothing depends on it.

    The number of workers may change between attempts and runs: a rank that did not take part in saving the checkpoint
    starts empty, the files of ranks that are gone stay in storage as they are.

    Args:
        merged: All ranks' files are one set, at `<run dir>/artifacts/merged/`, checked for conflicts at each `report`
            with a checkpoint and at the end. After a restore every rank has the whole set; a file that a rank does not
            change gives way to one that another rank changes. There are no background syncs then, and a block that
            ends with an exception uploads nothing.
        on_conflict: With `merged`: see `ShardedUpload`.
        syncer: How to sync; its patterns, concurrency, retries, period and `on_error` count.
        local_dir: Where the directories of the ranks are made on each node; beside Ray's working directory by default.
        chdir: Make it the current directory for the time of the block.
        local_storage_path: Where runs are stored in local mode (`num_workers=0`), for which Ray has no storage.
            `~/ray_results` by default.
        dead_after: Seconds without a sign of life after which a rank counts as dead. Ray Train itself is quicker.

    Example:
        ```python
        from ray_artifact_sync import train


        def train_loop_per_worker(config):
            with train.artifacts() as artifacts:
                with open(artifacts.path / "log.txt", "a") as log:
                    print("one step", file=log)
                artifacts.report({"loss": 1.0}, checkpoint=None)
        ```

    Yields:
        The directory, and how to report.

    Raises:
        ConfigurationError: Not in a worker of Ray Train; or an option makes no sense.
        IncompleteSyncError: What the checkpoint's artifacts were cannot be read.
        SyncTimeoutError: Not all ranks came.
        ArtifactSyncError: The last upload failed, with `on_error="raise"`.
    """
    if on_conflict not in ON_CONFLICT:
        raise ConfigurationError(f"on_conflict must be one of {', '.join(ON_CONFLICT)}, not {on_conflict!r}.")
    place = _find_place(local_storage_path)
    collective = _collective(place, dead_after)
    syncer = syncer or ArtifactSyncer()
    try:
        worker = _open_worker(
            place,
            Together(collective),
            merged=merged,
            on_conflict=on_conflict,
            syncer=syncer,
            base=os.fspath(local_dir) if local_dir is not None else place.local_base,
        )
        with _working_in(worker.path if chdir else None):
            try:
                yield worker
            except BaseException:
                worker._close(failed=True)  # noqa: SLF001  (one module)
                raise
            worker._close(failed=False)  # noqa: SLF001  (one module)
    finally:
        if isinstance(collective, RayCollective):
            collective.close()


class WorkerArtifacts:
    """What `artifacts()` gives: one rank's directory, and how its content is committed.

    Attributes:
        path: The directory. Whatever is written into it is an artifact.
        rank: This worker's world rank.
        world_size: How many workers there are.
        restored: What was restored on entering; None without a checkpoint.

    Example:
        ```python
        from ray_artifact_sync import train


        def train_loop_per_worker(config):
            with train.artifacts() as artifacts:
                (artifacts.path / f"notes_{artifacts.rank}.txt").write_text(f"one of {artifacts.world_size}")
                artifacts.sync()  # now; otherwise with the next checkpoint, in the background, and at the end
        ```
    """

    def __init__(self, place: _Place, together: Together, session: TrialArtifacts, part: RunPartDir) -> None:
        self.path = Path(session.working_dir)
        self.rank = place.rank
        self.world_size = place.world_size
        self.restored: RestoreReport | None = None
        self._place = place
        self._together = together
        self._session = session
        self._part = part

    def report(self, metrics: Mapping[str, Any], checkpoint: Any = None, **options: Any) -> None:
        """`ray.train.report`, with the artifacts committed along with the checkpoint. All ranks call it.

        If any rank reports a checkpoint, then, in this order: the artifacts of every rank are in storage, its part of
        the checkpoint's files is, the snapshot of the artifacts is inside the checkpoint, Ray registers the checkpoint.
        Killed at any moment before that, the run goes on from the checkpoint before. Without a checkpoint, this is
        `ray.train.report`.

        Args:
            metrics: For Ray.
            checkpoint: A `ray.train.Checkpoint`, or None.
            **options: What `ray.train.report` of the installed Ray takes: `checkpoint_dir_name`,
                `checkpoint_upload_fn(checkpoint, name)`, `checkpoint_upload_mode`, `validation` ...

        Raises:
            ArtifactConflictError: Ranks contradict each other (`merged`), or a newer attempt took over.
            ConfigurationError: The upload mode is ASYNC: the snapshot would be of another moment than the checkpoint.
            IncompleteSyncError: The checkpoint's own files were refused. There is no checkpoint.
            ArtifactSyncError: The artifacts could not be saved, with `on_error="raise"`. Otherwise that is logged, and
                the checkpoint has no snapshot.
        """
        mode = getattr(options.get("checkpoint_upload_mode"), "name", "SYNC")
        if mode == "ASYNC" and checkpoint is not None:
            raise ConfigurationError(
                "artifacts.report() cannot upload a checkpoint with checkpoint_upload_mode=ASYNC: the artifacts would "
                "not be as of the checkpoint. Use the default mode."
            )
        name = self._checkpoint_name(checkpoint, options, mode)
        if name is None:
            ray.train.report(dict(metrics), checkpoint=None, **options)
            return
        self._check_name(name)
        with self._part.part_store.open_checkpoint(name):
            persisted = self._commit(name, checkpoint, options, mode)
        self._report_to_ray(dict(metrics), checkpoint, persisted, name, options=options, mode=mode)

    def sync(self) -> None:
        """Brings storage up to date now, between checkpoints. With `merged`, all ranks call it.

        Raises:
            ArtifactSyncError: See `TrialArtifacts.sync`.
        """
        self._session.sync()

    def metrics(self) -> dict[str, float]:
        """Totals of this rank's syncs, for results."""
        return self._session.metrics()

    # --- one report ---------------------------------------------------------------------------------

    def _checkpoint_name(self, checkpoint: Any, options: Mapping[str, Any], mode: str) -> str | None:
        """The checkpoint directory's name, known to all ranks; None if no rank has a checkpoint."""

        def propose() -> str | None:
            if checkpoint is None:
                return None
            if mode == "NO_UPLOAD":
                return str(checkpoint.path).rstrip("/").rpartition("/")[2]
            own_name = options.get("checkpoint_dir_name") if self._place.names_checkpoints else None
            return own_name or self._place.next_checkpoint_name()

        proposed = [name for name in self._together.all("report", propose) if name is not None]
        return proposed[0] if proposed else None

    def _check_name(self, name: str) -> None:
        if "/" in name or name in ("artifacts", layout.STATE_DIR) or os.path.lexists(self.path / name):
            raise ConfigurationError(
                f"{name!r} cannot be the name of a checkpoint: it has a slash, is one of this library's, or there is "
                "an artifact of this name."
            )

    def _commit(self, name: str, checkpoint: Any, options: Mapping[str, Any], mode: str) -> Any:
        place = self._place
        persisted: list[Any] = []

        def upload(engine: TransferEngine) -> None:
            if place.rank == 0:
                store = self._part.part_store
                engine.call("Noting the ranks", lambda: store.write_world_size(name, place.world_size), Deadline())
            if checkpoint is None:
                return
            user_function = options.get("checkpoint_upload_fn")
            if mode == "NO_UPLOAD":
                persisted.append(checkpoint)
            elif user_function is not None:
                persisted.append(user_function(checkpoint, name))
            else:
                upload_checkpoint(open_store(checkpoint.filesystem, checkpoint.path), engine, name, Deadline())
                target = f"{place.run_dir}/{name}"
                persisted.append(checkpoint.__class__(filesystem=place.filesystem, path=target))

        self._session.commit_checkpoint(name, upload)
        return persisted[0] if persisted else None

    def _report_to_ray(
        self,
        metrics: dict[str, Any],
        checkpoint: Any,
        persisted: Any,
        name: str,
        *,
        options: dict[str, Any],
        mode: str,
    ) -> None:
        if checkpoint is None:
            ray.train.report(metrics, checkpoint=None, **{**options, **self._name_option(name)})
        elif self._place.is_local:
            ray.train.report(metrics, checkpoint=persisted, **options)
        elif mode == "NO_UPLOAD":
            ray.train.report(metrics, checkpoint=checkpoint, **options)
        elif "checkpoint_upload_fn" in _report_parameters():
            named = {**options, **self._name_option(name), "checkpoint_upload_fn": lambda *_: persisted}
            ray.train.report(metrics, checkpoint=checkpoint, **named)
        else:
            # All files are in place: Ray has nothing more to copy, and must not copy the directory onto itself.
            others = {key: value for key, value in options.items() if key != "checkpoint_upload_fn"}
            with tempfile.TemporaryDirectory() as empty:
                stand_in = checkpoint.__class__.from_directory(empty)
                ray.train.report(metrics, checkpoint=stand_in, **{**others, **self._name_option(name)})
            self._check_landed(name)

    def _name_option(self, name: str) -> dict[str, str]:
        return {"checkpoint_dir_name": name} if self._place.names_checkpoints else {}

    def _check_landed(self, name: str) -> None:
        landed = ray.train.get_checkpoint()
        if landed is not None and landed.path.rstrip("/").rpartition("/")[2] != name:
            raise ArtifactSyncError(
                f"Ray registered checkpoint {landed.path}, but its files were uploaded to {name}. Report checkpoints "
                "through artifacts.report() only."
            )

    # --- begin and end --------------------------------------------------------------------------------

    def _restore(self) -> None:
        checkpoint = ray.train.get_checkpoint()
        paths = self._together.all("checkpoint to restore", lambda: checkpoint.path if checkpoint is not None else None)
        if checkpoint is None:
            if any(path is not None for path in paths) and isinstance(self._session, ShardedTrial):
                raise ArtifactSyncError("Ray gave some ranks a checkpoint to resume from, and this one none.")
            return
        parent, _, name = checkpoint.path.rstrip("/").rpartition("/")
        own = parent.strip("/") == self._place.run_dir.strip("/")
        part = self._part if own else open_part(checkpoint.filesystem, parent, self._part.part_store.part)
        ranks = part.part_store.world_size_of(name)
        if ranks is not None and self.rank >= ranks and not isinstance(self._session, ShardedTrial):
            logger.info("%s was saved by %d ranks; rank %d begins without artifacts.", name, ranks, self.rank)
            self.restored = RestoreReport(Manifest(), exact=True)
        elif own:
            self.restored = self._session.restore(name, fresh=True)
        else:
            self.restored = self._session.restore_foreign(part, name, fresh=True)

    def _close(self, *, failed: bool) -> None:
        # A merged set can only be committed by all ranks, and after a failure they do not all come.
        self._session.close(flush=not (failed and isinstance(self._session, ShardedTrial)))


def _open_worker(
    place: _Place, together: Together, *, merged: bool, on_conflict: OnConflict, syncer: ArtifactSyncer, base: str
) -> WorkerArtifacts:
    part = open_part(place.filesystem, place.run_dir, MERGED if merged else rank_part(place.rank))
    options = syncer.options(registry=ArtifactRegistry())
    token = agree_on_token(together, part, options)
    directory = os.path.join(base, rank_part(place.rank))
    observer = SyncMetrics(place.run_dir.rstrip("/").rpartition("/")[2]) if _counts(syncer, place) else None
    session: TrialArtifacts
    if merged:
        session = ShardedTrial(
            directory,
            part.store,
            together=together,
            trial=part,
            token=token,
            options=options,
            on_conflict=on_conflict,
            own_dir=True,
            skip_checkpoints=True,
            observer=observer,
            watcher=syncer.watcher(),
        )
    else:
        session = TrialArtifacts(
            directory,
            part.store,
            trial=part,
            token=token,
            options=options,
            observer=observer,
            watcher=syncer.watcher(),
        )
    session.begin(set_aside=True)
    worker = WorkerArtifacts(place, together, session, part)
    try:
        worker._restore()  # noqa: SLF001  (one module)
        together.all("restored", lambda: None)
    except BaseException:
        session.close(flush=False)
        raise
    return worker


def _counts(syncer: ArtifactSyncer, place: _Place) -> bool:
    """Whether Ray's metrics are there to count in: not in local mode, which needs no cluster."""
    return syncer.report_metrics and not place.is_local


@contextmanager
def _working_in(directory: Path | None) -> Iterator[None]:
    if directory is None:
        yield
        return
    before = os.getcwd()
    os.chdir(directory)
    try:
        yield
    finally:
        with suppress(OSError):
            os.chdir(before)


# --- where we are -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Place:
    """What is known of this worker and its run.

    Attributes:
        rank: World rank.
        world_size: Number of workers.
        filesystem: Of the storage.
        run_dir: The run's directory on it.
        local_base: Where the ranks' directories are made on this node.
        next_checkpoint_name: Names the next checkpoint.
        names_checkpoints: Ray takes the name from us.
        is_local: Local mode: Ray stores nothing by itself.
    """

    rank: int
    world_size: int
    filesystem: Any
    run_dir: str
    local_base: str
    next_checkpoint_name: Callable[[], str]
    names_checkpoints: bool
    is_local: bool = False


def _find_place(local_storage_path: str | os.PathLike[str] | None) -> _Place:
    try:
        context = ray.train.get_context()
        rank, world_size = context.get_world_rank(), context.get_world_size()
    except Exception as error:
        raise ConfigurationError(f"{_NOT_HERE} (Ray says: {error})") from error
    if rank is None or world_size is None:
        raise ConfigurationError("This is a Ray Tune trial and no worker of Ray Train: use with_artifacts.")
    try:
        storage = context.get_storage()
    except NotImplementedError:
        return _local_place(context, rank, world_size, local_storage_path)
    if storage is None:  # Train V1 outside of a session
        raise ConfigurationError(_NOT_HERE)
    if getattr(storage, "trial_dir_name", None):  # Train V1
        return _Place(
            rank,
            world_size,
            storage.storage_filesystem,
            storage.trial_fs_path,
            f"{storage.trial_working_directory}.artifacts",
            lambda: f"checkpoint_{storage.current_checkpoint_index + 1:06d}",
            names_checkpoints=False,
        )
    working_dir = getattr(storage, "local_working_directory", None) or os.getcwd()
    return _Place(
        rank,
        world_size,
        storage.storage_filesystem,
        storage.experiment_fs_path,
        f"{str(working_dir).rstrip('/')}.artifacts",
        _timestamp_name,
        names_checkpoints=True,
    )


def _local_place(context: Any, rank: int, world_size: int, local_storage_path: str | os.PathLike[str] | None) -> _Place:
    storage = os.path.abspath(os.path.expanduser(os.fspath(local_storage_path or LOCAL_STORAGE)))
    run_dir = os.path.join(storage, context.get_experiment_name() or "local_run")
    logger.info("Local mode: Ray has no storage; artifacts and checkpoints are stored in %s.", run_dir)
    return _Place(
        rank,
        world_size,
        pyarrow.fs.LocalFileSystem(),
        run_dir,
        os.path.join(tempfile.gettempdir(), "ray_artifact_sync", blake3(run_dir.encode()).hexdigest()[:16]),
        _timestamp_name,
        names_checkpoints=True,
        is_local=True,
    )


def _timestamp_name() -> str:
    """What Ray Train V2 names checkpoints like."""
    now = time.time()
    return time.strftime("checkpoint_%Y-%m-%d_%H-%M-%S", time.localtime(now)) + f".{int(now % 1 * 1e6):06d}"


def _collective(place: _Place, dead_after: float) -> Collective:
    if place.world_size == 1:
        return SingleProcess()
    if place.is_local:  # several processes under torchrun
        return TorchCollective()
    name = blake3(f"{place.run_dir}\n{ray.get_runtime_context().get_job_id()}".encode()).hexdigest()[:32]
    return RayCollective(f"train-{name}", place.rank, place.world_size, dead_after=dead_after)


def _report_parameters() -> set[str]:
    return set(inspect.signature(ray.train.report).parameters)
