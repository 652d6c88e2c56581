"""A driver in a terminal, with a trial whose upload is slow: `python -m tests.integration.watched_driver SPEC`."""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path

import ray
from ray import cloudpickle, tune

from ray_artifact_sync import ArtifactSyncer, ArtifactSyncMixin
from tests.integration.places import Place
from tests.integration.runs import tuner
from tests.support.s3_servers import filesystem_at


class Slow(ArtifactSyncMixin, tune.Trainable):
    """Writes one file; every transfer counts as slow."""

    def setup(self, config: dict) -> None:
        from ray_artifact_sync import progress

        progress.SHOW_AFTER = 0.0

    def step(self) -> dict:
        Path("big.bin").write_bytes(os.urandom(2_000_000))
        return {"done": True}

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        pass

    def load_checkpoint(self, checkpoint_dir: str) -> None:
        pass


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text())
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    ray.init(num_cpus=1, include_dashboard=False, logging_level=logging.ERROR, log_to_driver=True)
    place = Place(spec["storage_path"], filesystem_at(spec["endpoint"]))
    syncer = ArtifactSyncer(**spec.get("syncer", {}))
    results = tuner(
        Slow, place, Path(spec["tmp_path"]), {}, syncer=syncer, checkpoint={}, **spec.get("options", {})
    ).fit()
    print("ended with", results[0].error, flush=True)
    ray.shutdown()


if __name__ == "__main__":
    main()
