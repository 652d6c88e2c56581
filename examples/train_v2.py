"""Ray Train V2: two workers, a crash, and logs that go on exactly where the checkpoint was.

    python examples/train_v2.py
    python examples/train_v2.py --storage-path "s3://bucket/runs"

Worker 1 is killed in step 6. Ray restarts both at the checkpoint of step 4; each finds its files as they were then.
"""

import argparse
import json
import os
import signal
import tempfile

os.environ.setdefault("RAY_TRAIN_V2_ENABLED", "1")  # the default from Ray 2.51 on

import ray
import ray.train
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

from ray_artifact_sync import train


def load(checkpoint):
    if checkpoint is None:
        return 0
    with checkpoint.as_directory() as directory, open(os.path.join(directory, "state.json")) as file:
        return json.load(file)


def train_loop_per_worker():
    with train.artifacts() as artifacts:  # a directory of this worker's own: artifacts.path
        start = load(ray.train.get_checkpoint())
        log = open(artifacts.path / "log.txt", "a", buffering=1)  # noqa: SIM115  (open for all of the training)
        for step in range(start + 1, 9):
            log.write(f"step {step}\n")
            (artifacts.path / "curve.svg").write_text(f"<svg><!-- up to step {step} --></svg>\n")
            if step == 6 and start == 0 and artifacts.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            with tempfile.TemporaryDirectory() as directory:
                checkpoint = None
                if step % 4 == 0 and artifacts.rank == 0:
                    with open(os.path.join(directory, "state.json"), "w") as file:
                        json.dump(step, file)
                    checkpoint = Checkpoint.from_directory(directory)
                # In place of ray.train.report: the artifacts of all workers are committed with the checkpoint.
                artifacts.report({"loss": 1 / step}, checkpoint)
        log.write("the end\n")


def main(storage_path):
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    result = DataParallelTrainer(
        train_loop_per_worker,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(name="train_v2", storage_path=storage_path, failure_config=FailureConfig(max_failures=1)),
    ).fit()
    for rank in (0, 1):
        path = f"{result.path}/artifacts/rank_{rank}/log.txt"
        with result.filesystem.open_input_stream(path) as file:
            print(f"--- {path}\n{file.read().decode().rstrip()}")
    ray.shutdown()
    return 0 if result.error is None else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--storage-path", default=None, help="a directory or a URI; a new temporary directory by default"
    )
    raise SystemExit(main(parser.parse_args().storage_path or tempfile.mkdtemp(prefix="train-v2-")))
