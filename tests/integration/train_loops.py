"""Training loops for real Ray Train workers; sent to them by value."""

from __future__ import annotations

import json
import os
import signal
import tempfile
from pathlib import Path


def load_step(checkpoint) -> int:
    if checkpoint is None:
        return 0
    with checkpoint.as_directory() as directory:
        return json.loads((Path(directory) / "state.json").read_text())


def note(markers, name, text) -> None:
    temporary = Path(markers) / f".{name}.{os.getpid()}"
    temporary.write_text(text)
    temporary.replace(temporary.with_name(name))


def loop(config):
    """Six steps, a checkpoint every second; a rank dies in step `kill_at` of the first attempt.

    On Train V2, a checkpoint is registered for certain only when the next report has returned.
    """
    import ray.train

    from ray_artifact_sync import train

    options = config.get("artifacts", {})
    markers = config["markers"]
    with train.artifacts(chdir=True, **options) as artifacts:
        rank = artifacts.rank
        merged = options.get("merged", False)
        name = f"log_{rank}.txt" if merged else "log.txt"
        start = load_step(ray.train.get_checkpoint())
        assert Path.cwd().resolve() == artifacts.path.resolve()
        listed = sorted(path.name for path in artifacts.path.iterdir() if path.name[0] != ".")
        note(markers, f"files_{start}_{rank}", " ".join(listed))
        if start:
            note(markers, f"log_{start}_{rank}", Path(name).read_text() if Path(name).exists() else "")
            assert artifacts.restored.exact
        log = open(name, "a", buffering=1)
        for step in range(start + 1, config.get("steps", 6) + 1):
            log.write(f"{step}\n")
            Path(f"rewritten_{rank}.txt").write_text(f"version {step}")
            Path("same.txt").write_text(f"equal on all ranks in step {step // 2}")
            if config.get("conflict") == step:
                Path("conflict.txt").write_text(f"rank {rank}")
            if step == config.get("kill_at") and not start:
                Path(f"too_new_{rank}.txt").write_text("written after the last checkpoint")
                artifacts.sync()
                if rank == config.get("victim", 1):
                    os.kill(os.getpid(), signal.SIGKILL)
            save(artifacts, step, config)
        log.write("end\n")


def save(artifacts, step, config) -> None:
    from ray.train import Checkpoint

    reporting = config.get("reporting", "rank_0")
    if step % 2:
        artifacts.report({"step": step})
        return
    options = {}
    if config.get("upload_fn"):
        options["checkpoint_upload_fn"] = upload_fn
    if config.get("named"):
        options["checkpoint_dir_name"] = f"epoch_{step}"
    with tempfile.TemporaryDirectory() as directory:
        checkpoint = None
        if reporting == "all" or artifacts.rank == 0:
            (Path(directory) / f"part_{artifacts.rank}.bin").write_text(str(step))
            if artifacts.rank == 0:
                (Path(directory) / "state.json").write_text(json.dumps(step))
            checkpoint = Checkpoint.from_directory(directory)
        artifacts.report({"step": step}, checkpoint, **options)


def upload_fn(checkpoint, name):
    """A user's own way to upload."""
    import pyarrow.fs
    import ray.train

    storage = ray.train.get_context().get_storage()
    target = f"{storage.experiment_fs_path}/{name}"
    storage.storage_filesystem.create_dir(target)
    pyarrow.fs.copy_files(
        checkpoint.path, target, source_filesystem=checkpoint.filesystem,
        destination_filesystem=storage.storage_filesystem,
    )  # fmt: skip
    with storage.storage_filesystem.open_output_stream(f"{target}/by_user") as stream:
        stream.write(b"yes")
    return ray.train.Checkpoint(filesystem=storage.storage_filesystem, path=target)


def raising_loop(config):
    from ray_artifact_sync import train

    with train.artifacts() as artifacts:
        (artifacts.path / "why.txt").write_text(f"rank {artifacts.rank}")
        raise ValueError("a bug")


def tune_function(config):
    """Launches a trainer from a Tune trial, as Train V2 wants it."""
    from ray import tune
    from ray.train import RunConfig, ScalingConfig
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

    name = f"inner-{config['who']}"
    markers = Path(config["markers"]) / config["who"]
    markers.mkdir(exist_ok=True)
    result = DataParallelTrainer(
        loop,
        train_loop_config={"markers": str(markers), "steps": 2},
        scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 0.25}),
        run_config=RunConfig(name=name, storage_path=config["storage"]),
    ).fit()
    tune.report({"path": result.path})
