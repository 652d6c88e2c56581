"""A training whose files survive a failure: fit, fail, restore.

    python examples/quickstart.py
    python examples/quickstart.py --storage-path "s3://bucket/runs"

The trials fail in step 6. `Tuner.restore` continues them at the checkpoint of step 4, with every file as it was then.
"""

import argparse
import json
import os
import tempfile

from ray import tune

from ray_artifact_sync import ArtifactSyncMixin, configure


class Summary(tune.Callback):
    """Runs on the driver and writes into the trial dirs, so it declares its file: no worker touches it."""

    artifact_patterns = ("summary.json",)

    def on_trial_result(self, iteration, trials, trial, result, **info):
        with open(os.path.join(trial.local_path, "summary.json"), "w") as file:
            json.dump({"trial": trial.trial_id, "loss": result["loss"]}, file)


class Training(ArtifactSyncMixin, tune.Trainable):
    """Writes with plain Python into its working dir: a log that grows, a file that is rewritten, a file at the end."""

    fixed = False

    def setup(self, config):
        self.steps_done = 0
        self.log = open("log.txt", "a", buffering=1)  # noqa: SIM115  (open for all of the training)

    def step(self):
        self.steps_done += 1
        loss = self.config["rate"] / self.steps_done
        self.log.write(f"step {self.steps_done}: loss {loss:.3f}\n")
        with open("curve.svg", "w") as file:
            file.write(f"<svg><!-- up to step {self.steps_done} --></svg>\n")
        if self.steps_done == 6 and not self.fixed:
            raise RuntimeError("a bug in step 6")
        return {"loss": loss, "done": self.steps_done == 8}

    def save_checkpoint(self, checkpoint_dir):
        with open(os.path.join(checkpoint_dir, "state.json"), "w") as file:
            json.dump(self.steps_done, file)

    def load_checkpoint(self, checkpoint_dir):
        with open(os.path.join(checkpoint_dir, "state.json")) as file:
            self.steps_done = json.load(file)

    def cleanup(self):
        self.log.close()
        with open("report.txt", "w") as file:
            file.write(f"ended after step {self.steps_done}\n")


def main(storage_path):
    run_config = tune.RunConfig(
        name="quickstart",
        storage_path=storage_path,
        callbacks=[Summary()],
        checkpoint_config=tune.CheckpointConfig(checkpoint_frequency=4),
        verbose=0,
    )
    space = {"rate": tune.grid_search([0.1, 0.2])}
    results = tune.Tuner(Training, param_space=space, run_config=configure(run_config)).fit()
    print(f"First run: {results.num_errors} of {len(results)} trials failed, as they should.")

    Training.fixed = True  # the bug is fixed, and the experiment goes on where it was
    experiment, storage = results.experiment_path, results.filesystem
    results = tune.Tuner.restore(experiment, Training, storage_filesystem=storage, resume_errored=True).fit()
    for result in results:
        print(f"\n{result.path}")
        for name in ("log.txt", "curve.svg", "report.txt", "summary.json"):
            with storage.open_input_stream(f"{result.path}/{name}") as file:
                print(f"--- {name}\n{file.read().decode().rstrip()}")
    return 1 if results.num_errors else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--storage-path", default=None, help="a directory or a URI; a new temporary directory by default"
    )
    raise SystemExit(main(parser.parse_args().storage_path or tempfile.mkdtemp(prefix="quickstart-")))
