"""Population based training: each trial keeps its own log, whoever's model it trains on; or takes the log along.

    python examples/pbt.py

Two trials train. Every 4 steps the worse one takes over the better one's model. The log of a trial is its own history,
so by default it stays; with `adopt_foreign_artifacts=True` it is the donor's from then on.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path

from ray import tune
from ray.tune.schedulers import PopulationBasedTraining

from ray_artifact_sync import ArtifactSyncer, ArtifactSyncMixin, configure


class Training(ArtifactSyncMixin, tune.Trainable):
    def setup(self, config):
        self.steps_done, self.model = 0, config["talent"]

    def step(self):
        self.steps_done += 1
        with open("log.txt", "a") as log:
            log.write(f"{self.trial_id} {self.steps_done} {self.model}\n")
        return {"score": self.model + self.steps_done, "done": self.steps_done >= 8}

    def save_checkpoint(self, checkpoint_dir):
        Path(checkpoint_dir, "model").write_text(f"{self.steps_done} {self.model}")

    def load_checkpoint(self, checkpoint_dir):
        self.steps_done, self.model = map(int, Path(checkpoint_dir, "model").read_text().split())


def logs(storage_path, *, adopt):
    """Trains; returns each trial's log, as lines of words (trial, step, model), and who the trial is."""
    name = "adopt" if adopt else "keep"
    scheduler = PopulationBasedTraining(
        time_attr="training_iteration",
        metric="score",
        mode="max",
        perturbation_interval=4,
        quantile_fraction=0.5,
        resample_probability=0.0,
        hyperparam_mutations={"rate": [0.1, 0.2]},
        synch=True,
    )
    run_config = tune.RunConfig(name=name, storage_path=storage_path, verbose=0)
    results = tune.Tuner(
        Training,
        param_space={"talent": tune.grid_search([0, 100]), "rate": 0.1},
        tune_config=tune.TuneConfig(scheduler=scheduler),
        run_config=configure(run_config, syncer=ArtifactSyncer(adopt_foreign_artifacts=adopt)),
    ).fit()
    return {
        result.metrics["trial_id"]: [line.split() for line in Path(result.path, "log.txt").read_text().splitlines()]
        for result in results
    }


def main(storage_path):
    kept = logs(os.path.join(storage_path, "keep"), adopt=False)
    own = all({line[0] for line in lines} == {trial} for trial, lines in kept.items())
    models = max(len({line[2] for line in lines}) for lines in kept.values())
    print(f"By default, every line of a log is by its own trial: {own}; one trained on {models} models.")

    adopted = logs(os.path.join(storage_path, "adopt"), adopt=True)
    both = [trial for trial, lines in adopted.items() if {line[0] for line in lines} == set(adopted)]
    unique = all(len(lines) == len({tuple(line) for line in lines}) for lines in adopted.values())
    print(f"Adopted: trial {both} has the donor's log and then its own; no line is there twice: {unique}.")
    return 0 if own and models == 2 and both and unique else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--storage-path", default=None, help="a local directory; a new temporary one by default")
    sys.exit(main(parser.parse_args().storage_path or tempfile.mkdtemp(prefix="pbt-")))
