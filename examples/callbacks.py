"""A callback and a trainable that write files of the same names, and how the two are kept apart.

    python examples/callbacks.py

The callback runs on the driver and declares its files, so workers leave them alone. Everything else is an artifact.
"""

import argparse
import json
import os
import tempfile

from ray import tune

from ray_artifact_sync import ArtifactRegistry, ArtifactSyncMixin, configure


class Summary(tune.Callback):
    """Declares what it writes into trial dirs."""

    artifact_patterns = ("summary.json", "reports/")

    def on_trial_result(self, iteration, trials, trial, result, **info):
        os.makedirs(os.path.join(trial.local_path, "reports"), exist_ok=True)
        for name in ("summary.json", f"reports/{result['training_iteration']}.json"):
            with open(os.path.join(trial.local_path, name), "w") as file:
                json.dump({"by": "driver", "step": result["training_iteration"]}, file)


class Stranger(tune.Callback):
    """Stands for somebody else's callback, which declares nothing."""

    def on_trial_result(self, iteration, trials, trial, result, **info):
        with open(os.path.join(trial.local_path, "stranger.json"), "w") as file:
            json.dump({"by": "driver"}, file)


ArtifactRegistry.declare(Stranger, "stranger.json")


class Training(ArtifactSyncMixin, tune.Trainable):
    def step(self):
        for name in ("summary.json", "stranger.json", "notes.json", "sub/summary.json"):
            os.makedirs(os.path.dirname(name) or ".", exist_ok=True)
            with open(name, "w") as file:
                json.dump({"by": "worker"}, file)
        return {"done": self.iteration == 3}

    def save_checkpoint(self, checkpoint_dir):
        pass


def main(storage_path):
    run_config = tune.RunConfig(
        name="callbacks", storage_path=storage_path, callbacks=[Summary(), Stranger()], verbose=0
    )
    result = tune.Tuner(Training, run_config=configure(run_config)).fit()[0]
    expected = {
        "summary.json": "driver",
        "reports/4.json": "driver",
        "stranger.json": "driver",
        "notes.json": "worker",
        "sub/summary.json": "worker",
    }
    found = {}
    for name in expected:
        with open(os.path.join(result.path, name)) as file:
            found[name] = json.load(file)["by"]
        print(f"{name:18} by the {found[name]}")
    return 0 if found == expected else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--storage-path", default=None, help="a local directory; a new temporary one by default")
    raise SystemExit(main(parser.parse_args().storage_path or tempfile.mkdtemp(prefix="callbacks-")))
