"""Reads the artifacts of all trials of an experiment into one pandas table, the newest and as of a checkpoint.

    python examples/read_results.py
    python examples/read_results.py --storage-path "s3://bucket/runs"

Each trial writes a CSV of its own. `ArtifactView` reads them from storage, without a download.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import pandas as pd
from ray import tune

from ray_artifact_sync import ArtifactSyncMixin, ArtifactView, configure


class Training(ArtifactSyncMixin, tune.Trainable):
    def setup(self, config):
        self.steps_done = 0

    def step(self):
        self.steps_done += 1
        loss = self.config["rate"] / self.steps_done
        with open("losses.csv", "a") as file:
            if self.steps_done == 1:
                file.write("step,loss\n")
            file.write(f"{self.steps_done},{loss}\n")
        return {"loss": loss, "done": self.steps_done == 4}

    def save_checkpoint(self, checkpoint_dir):
        Path(checkpoint_dir, "steps_done").write_text(str(self.steps_done))

    def load_checkpoint(self, checkpoint_dir):
        self.steps_done = int(Path(checkpoint_dir, "steps_done").read_text())


def table(view):
    """The CSVs of all trials of a view as one table."""
    frames = []
    for trial in view.trials:
        with view[trial].open("losses.csv", "r") as file:
            frames.append(pd.read_csv(file).assign(trial=trial.split("_")[2]))
    return pd.concat(frames)


def main(storage_path):
    run_config = tune.RunConfig(
        name="read_results",
        storage_path=storage_path,
        checkpoint_config=tune.CheckpointConfig(checkpoint_frequency=2),
        verbose=0,
    )
    space = {"rate": tune.grid_search([0.1, 0.2])}
    results = tune.Tuner(Training, param_space=space, run_config=configure(run_config)).fit()

    view = ArtifactView(results)
    print(view.to_pandas()[["path", "size", "checkpoint", "owner"]].to_string())
    newest = table(view).pivot_table(index="step", columns="trial", values="loss")
    print(f"The newest:\n{newest}")
    first = view.checkpoints[0]
    then = table(view.at(first)).pivot_table(index="step", columns="trial", values="loss")
    print(f"As of {first}:\n{then}")
    return 0 if list(newest.index) == [1, 2, 3, 4] and list(then.index) == [1, 2] and newest.shape[1] == 2 else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--storage-path", default=None, help="a directory or a URI; a new temporary one by default")
    sys.exit(main(parser.parse_args().storage_path or tempfile.mkdtemp(prefix="read-results-")))
