"""1,000 short trials in actors that are used again and again; every one has its own five artifacts, and no other's."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from ray import tune

from ray_artifact_sync import ArtifactSyncMixin, configure
from release_tests.checks import storage_at
from release_tests.local_ray import local_ray
from tests.support import independent_reader

NAME = "1,000 trials, reused actors"
quick = False
TIMEOUT = 900

TRIALS = int(os.environ.get("MANY_TRIALS", "1000"))


def artifacts(number: int) -> dict[str, bytes]:
    return {
        "log.txt": f"trial {number}\n".encode(),
        **{f"out/{part}.txt": f"part {part} of {number}\n".encode() * (number % 50 + 1) for part in range(4)},
    }


class Short(ArtifactSyncMixin, tune.Trainable):
    def setup(self, config: dict[str, Any]) -> None:
        self.number = config["number"]
        self.log = open("log.txt", "w", buffering=1)  # noqa: SIM115

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        self.cleanup()
        self.setup(new_config)
        return True

    def step(self) -> dict[str, Any]:
        self.log.write(f"trial {self.number}\n")
        os.makedirs("out", exist_ok=True)
        for path, data in artifacts(self.number).items():
            if path.startswith("out/"):
                Path(path).write_bytes(data)
        return {"done": True, "pid": os.getpid(), "number": self.number}

    def cleanup(self) -> None:
        self.log.close()


def run(workdir: Path, *, quick: bool) -> dict[str, object]:
    os.environ["TUNE_DISABLE_AUTO_CALLBACK_LOGGERS"] = "1"
    with local_ray(), storage_at("local", workdir) as storage:
        started = time.monotonic()
        results = tune.Tuner(
            Short,
            param_space={"number": tune.grid_search([*range(TRIALS)])},
            tune_config=tune.TuneConfig(reuse_actors=True, max_concurrent_trials=2),
            run_config=configure(
                tune.RunConfig(
                    name="exp",
                    checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),
                    failure_config=tune.FailureConfig(fail_fast=True),
                    verbose=0,
                    **storage.run_options,
                )
            ),
        ).fit()
        seconds = time.monotonic() - started
        assert not results.errors, results.errors[0]
        assert len(results) == TRIALS
        for result in results:
            found = independent_reader.head_tree(storage.look(result.path))
            assert found == artifacts(result.metrics["number"]), f"{result.path}: {found}"
        processes = len({result.metrics["pid"] for result in results})
        assert processes <= max(4, TRIALS / 10), f"{processes} processes: the actors were not used again"
    return {"trials exact": TRIALS, "processes": processes, "trials a second": f"{TRIALS / seconds:.1f}"}
