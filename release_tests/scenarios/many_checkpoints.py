"""A trial of 500 checkpoints of which 3 are kept: each costs as many requests as those before it, and no rest piles up.

On real Ray and a local directory for what is left at the end; on S3, through a proxy that counts, for what each costs.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from ray_artifact_sync import ArtifactSyncMixin
from release_tests import trials
from release_tests.checks import storage_at
from release_tests.local_ray import local_ray
from release_tests.runs import tuner
from tests.support import independent_reader

NAME = "500 checkpoints, 3 kept"
quick = False
TIMEOUT = 900

CHECKPOINTS = int(os.environ.get("CHECKPOINTS", "500"))
KEPT = 3


def artifacts(n: int) -> dict[str, bytes]:
    """After step `n`."""
    return {
        "log.txt": "".join(f"{step}\n" for step in range(1, n + 1)).encode(),
        "state.bin": n.to_bytes(4, "big") * 2500,
        **{f"plots/{step % 10}.txt": f"plot {step}\n".encode() * 50 for step in range(max(1, n - 9), n + 1)},
    }


class Saving(ArtifactSyncMixin, trials.Counting):
    def step(self) -> dict[str, Any]:
        self.n += 1
        Path("plots").mkdir(exist_ok=True)
        with open("log.txt", "a") as log:
            log.write(f"{self.n}\n")
        Path("state.bin").write_bytes(artifacts(self.n)["state.bin"])
        Path(f"plots/{self.n % 10}.txt").write_bytes(artifacts(self.n)[f"plots/{self.n % 10}.txt"])
        return {"n": self.n, "done": self.n == CHECKPOINTS}


def run(workdir: Path, *, quick: bool) -> dict[str, object]:
    from release_tests.benchmarks import history  # moves temporary files to memory, for the whole process

    return {**on_ray(workdir), "S3: requests a checkpoint": history.check_flat(history.measure(CHECKPOINTS))}


def on_ray(workdir: Path) -> dict[str, object]:
    started = time.monotonic()
    with local_ray(), storage_at("local", workdir) as storage:
        result = tuner(Saving, storage, {}, keep=KEPT, frequency=1, max_failures=0).fit()[0]
        assert result.error is None, result.error
        place = storage.look(result.path)
        assert independent_reader.head_tree(place) == artifacts(CHECKPOINTS)
        found = independent_reader.snapshots(place)
        kept = sorted(int(place.read(f"{name}/n")) for name in found)
        assert kept == [*range(CHECKPOINTS - KEPT + 1, CHECKPOINTS + 1)], kept
        for name, snapshot in found.items():
            assert independent_reader.tree_of(place, snapshot) == artifacts(int(place.read(f"{name}/n"))), name
        left = left_behind(place)
        return {"checkpoints": CHECKPOINTS, "left behind": left, "run": f"{time.monotonic() - started:.0f} s"}


def left_behind(place: independent_reader.Place) -> str:
    """What the library keeps for itself must depend on what is retained, not on the history."""
    names = [*place.names()]
    objects = [name for name in names if "/objects/" in name]
    layers = [name for name in names if "/layers/" in name]
    needed = {
        entry["digest"]
        for name in independent_reader.snapshots(place).values()
        for entry in independent_reader.entries_of(place, name).values()
        if not entry.get("dir")
    }
    spare = [name for name in objects if name.rpartition("/")[2] not in needed]
    assert not spare, f"{len(spare)} objects that no checkpoint needs"
    named = {
        layer["name"]
        for name in [*independent_reader.snapshots(place).values(), ".ray_artifact_sync/manifest.json"]
        for layer in json.loads(place.read(name)).get("layers", [])
    }
    assert {name.rpartition("/")[2] for name in layers} <= named, "layers that no manifest names"
    ours = [name for name in names if name.startswith(".ray_artifact_sync/")]
    return f"{len(objects)} objects, {len(layers)} layers, {len(ours)} files of ours"
