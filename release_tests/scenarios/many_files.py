"""One trial with 100,000 artifacts: a checkpoint costs what changed, a killed worker comes back exactly."""

from __future__ import annotations

import hashlib
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

NAME = "100,000 files"
quick = False
TIMEOUT = 900

FILES = int(os.environ.get("MANY_FILES", "100000"))
FOLDER = 1000
STEPS = 4
KILLED_IN = 4
CHANGED = 5
"""Files that each step after the first changes."""


def path_of(number: int) -> str:
    return f"data/{number // FOLDER:03d}/{number:06d}.txt"


def version(number: int, n: int) -> int:
    """The step that wrote a file last, as of step `n`."""
    last = number % (STEPS * FOLDER) + 1  # the files 1, 2, 3 ... of some folders belong to the steps 2, 3, 4 ...
    return last if 1 < last <= n and number // (STEPS * FOLDER) < CHANGED else 1


def content(number: int, n: int) -> bytes:
    return f"file {number}, version {version(number, n)}\n".encode()


def written_in(n: int) -> list[int]:
    return [number for number in range(FILES) if n == 1 or version(number, n) == n]


def digest_of(n: int) -> str:
    hasher = hashlib.sha256()
    for number in range(FILES):
        hasher.update(content(number, n))
    return hasher.hexdigest()


class Many(ArtifactSyncMixin, trials.Counting):
    def setup(self, config: dict[str, Any]) -> None:
        super().setup(config)
        self.shared = Path(config["shared"])

    def step(self) -> dict[str, Any]:
        self.n += 1
        for number in written_in(self.n):
            os.makedirs(os.path.dirname(path_of(number)), exist_ok=True)
            Path(path_of(number)).write_bytes(content(number, self.n))
        if self.n == KILLED_IN and not (self.shared / "killed").exists():
            (self.shared / "killed").touch()
            os._exit(1)
        return {"n": self.n, "done": self.n == STEPS}

    def save(self, *args: Any, **kwargs: Any) -> Any:
        before = self.artifacts.stats.files_sent
        started = time.monotonic()
        saved = super().save(*args, **kwargs)
        cost = {"seconds": time.monotonic() - started, "files": self.artifacts.stats.files_sent - before}
        (self.shared / f"saved-{self.n}.json").write_text(json.dumps(cost))
        return saved

    def restore(self, checkpoint_path: Any) -> Any:
        started = time.monotonic()
        restored = super().restore(checkpoint_path)
        seconds = time.monotonic() - started
        hasher = hashlib.sha256()
        for number in range(FILES):
            hasher.update(Path(path_of(number)).read_bytes())
        exact = hasher.hexdigest() == digest_of(self.n)
        (self.shared / "restored.json").write_text(json.dumps({"seconds": seconds, "n": self.n, "exact": exact}))
        return restored


def run(workdir: Path, *, quick: bool) -> dict[str, object]:
    shared = workdir / "shared"
    shared.mkdir()
    with local_ray(), storage_at("local", workdir) as storage:
        result = tuner(Many, storage, {"shared": str(shared)}, frequency=1, max_failures=1).fit()[0]
        assert result.error is None, result.error
        place = storage.look(result.path)
        newest = independent_reader.entries_of(place, ".ray_artifact_sync/manifest.json")
        files = {path: entry for path, entry in newest.items() if not entry.get("dir")}
        assert files.keys() == {path_of(number) for number in range(FILES)}
        for number in range(FILES):
            assert place.read(path_of(number)) == content(number, STEPS), path_of(number)
        for name, snapshot in independent_reader.snapshots(place).items():
            check_changed(place, snapshot, int(place.read(f"{name}/n")))
    restored = json.loads((shared / "restored.json").read_text())
    assert restored["exact"], restored
    saved = {n: json.loads((shared / f"saved-{n}.json").read_text()) for n in range(1, STEPS + 1)}
    for n in (2, 3):
        assert saved[n]["files"] == CHANGED, saved
    return {
        "files": FILES,
        "first checkpoint": f"{saved[1]['seconds']:.1f} s",
        f"with {CHANGED} changed": f"{saved[2]['seconds']:.1f} s",
        "restore": f"{restored['seconds']:.1f} s",
    }


def check_changed(place: independent_reader.Place, snapshot: str, n: int) -> None:
    """Reads of a snapshot what ever changed; the rest is at its path, as was seen."""
    names = [name for name in place.names() if "/objects/" in name]
    entries = independent_reader.entries_of(place, snapshot)
    for number in [number for step in range(2, STEPS + 1) for number in written_in(step)]:
        path = path_of(number)
        assert independent_reader.content_of(place, names, path, entries[path]) == content(number, n), (snapshot, path)
    assert sum(not entry.get("dir") for entry in entries.values()) == FILES
