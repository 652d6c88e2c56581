"""The machine of the driver goes down: driver and worker are killed at once, and `Tuner.restore` goes on.

    python examples/restore_after_crash.py
    python examples/restore_after_crash.py --storage-path "s3://bucket/runs"

A first process trains and is killed in step 6, the worker with it. This process then restores the experiment.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from ray import tune

from ray_artifact_sync import ArtifactSyncMixin, configure


class Training(ArtifactSyncMixin, tune.Trainable):
    def setup(self, config):
        self.steps_done = self.resumed_at = 0
        self.log = open("log.txt", "a", buffering=1)  # noqa: SIM115  (open for all of the training)

    def step(self):
        self.steps_done += 1
        self.log.write(f"step {self.steps_done}\n")
        if self.steps_done == 6 and not self.resumed_at:
            # Ray's driver writes down which checkpoint to resume at a moment after it was saved.
            while tune.ExperimentAnalysis(self.config["experiment"]).trials[0].checkpoint is None:
                time.sleep(0.2)
            os.kill(self.config["driver"], signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
        return {"done": self.steps_done == 8, "resumed_at": self.resumed_at}

    def save_checkpoint(self, checkpoint_dir):
        Path(checkpoint_dir, "steps_done").write_text(str(self.steps_done))

    def load_checkpoint(self, checkpoint_dir):
        self.steps_done = self.resumed_at = int(Path(checkpoint_dir, "steps_done").read_text())


def below(place, name):
    """A path below a directory or a URI, which may have options."""
    directory, query, options = place.partition("?")
    return f"{directory}/{name}{query}{options}"


def train(storage_path):
    os.environ["TUNE_GLOBAL_CHECKPOINT_S"] = "0"  # Ray's driver saves its state all the time
    checkpoint_config = tune.CheckpointConfig(checkpoint_frequency=4)
    run_config = tune.RunConfig(name="crash", storage_path=storage_path, checkpoint_config=checkpoint_config, verbose=0)
    config = {"driver": os.getpid(), "experiment": below(storage_path, "crash")}
    tune.Tuner(Training, param_space=config, run_config=configure(run_config)).fit()


def main(storage_path):
    command = [sys.executable, __file__, "--storage-path", storage_path, "--train"]
    killed = subprocess.run(command, check=False).returncode == -signal.SIGKILL
    result = tune.Tuner.restore(below(storage_path, "crash"), Training).fit()[0]
    with result.filesystem.open_input_stream(f"{result.path}/log.txt") as file:
        lines = file.read().decode().splitlines()
    print(f"--- {result.path}/log.txt", *lines, sep="\n")
    exact = lines == [f"step {step}" for step in range(1, 9)]
    resumed_at = result.metrics["resumed_at"]
    print(f"Killed: {killed}. Resumed at step {resumed_at}. Every step is in the log once: {exact}")
    return 0 if killed and resumed_at == 4 and exact else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--storage-path", default=None, help="a directory or a URI; a new temporary one by default")
    parser.add_argument("--train", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    place = arguments.storage_path or tempfile.mkdtemp(prefix="restore-after-crash-")
    raise SystemExit(train(place) if arguments.train else main(place))
