"""A driver of its own process, to be killed: `python -m tests.integration.driver PLACE.json`."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path

import ray
from pyarrow import fs as pafs
from ray import cloudpickle, tune

from tests.integration import trainables
from tests.integration.places import Place
from tests.integration.runs import tuner
from tests.support.s3_servers import filesystem_at


def place_of(spec: dict) -> Place:
    filesystem: pafs.FileSystem | None = filesystem_at(spec["endpoint"]) if spec.get("endpoint") else None
    return Place(spec["storage_path"], filesystem)


def tuner_of_ray_alone(trainable: type, place: Place, tmp_path: Path, config: dict) -> tune.Tuner:
    markers = tmp_path / "markers"
    markers.mkdir(exist_ok=True)
    run_config = tune.RunConfig(
        name="exp",
        sync_config=tune.SyncConfig(sync_artifacts=True),
        checkpoint_config=tune.CheckpointConfig(checkpoint_frequency=4),
        verbose=0,
        **place.run_options,
    )
    return tune.Tuner(trainable, param_space={**config, "markers": str(markers)}, run_config=run_config)


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text())
    cloudpickle.register_pickle_by_value(trainables)
    ray.init(num_cpus=2, include_dashboard=False, logging_level=logging.ERROR, log_to_driver=False)
    place, tmp_path = place_of(spec), Path(spec["tmp_path"])
    trainable = getattr(trainables, spec["trainable"])
    if spec.get("restore"):
        restored = tune.Tuner.restore(
            spec["restore"],
            trainable,
            storage_filesystem=place.filesystem,
            **spec.get("restore_options", {}),
        )
        results = restored.fit()
    elif spec.get("plain"):
        results = tuner_of_ray_alone(trainable, place, tmp_path, spec["config"]).fit()
    else:
        results = tuner(trainable, place, tmp_path, spec["config"], **spec.get("options", {})).fit()
    print(json.dumps({"path": results[0].path, "error": str(results[0].error or "")}))
    ray.shutdown()


if __name__ == "__main__":
    main()
