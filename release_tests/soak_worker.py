"""One process of a soak's trial: does what it is told, a line of JSON each, and answers with one. May be killed.

Usage: python -m release_tests.soak_worker. Commands: see `soak.Worker`.
"""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path
from typing import Any

from ray_artifact_sync import trial_dir
from ray_artifact_sync.errors import ArtifactConflictError
from ray_artifact_sync.session import TrialArtifacts
from ray_artifact_sync.trial_dir import TrialDir
from tests.support.sessions import open_session, save
from tests.support.victim import digests, store_of


def content(seed: int, size: int) -> bytes:
    return random.Random(seed).randbytes(size)


class Attempts:
    """The attempts that this process makes, one after the other."""

    def __init__(self) -> None:
        self.session: TrialArtifacts | None = None
        self.root = Path()

    def open(self, *, working_dir: str, storage: Any, trial: str, token: int, registered: int) -> None:
        self.root = Path(working_dir)
        self.session = open_session(
            working_dir, store_of(storage), token, trial=trial, registered=registered, sync_period=0.05, retries=5
        )

    def change(self, *, operations: list[dict[str, Any]]) -> None:
        for operation in operations:
            path = self.root / operation["path"]
            kind = operation["kind"]
            if kind in ("write", "append"):
                path.parent.mkdir(exist_ok=True)
                with open(path, "wb" if kind == "write" else "ab") as file:
                    file.write(content(operation["seed"], operation["size"]))
            elif kind == "rename":
                goal = self.root / operation["goal"]
                goal.parent.mkdir(exist_ok=True)
                path.replace(goal)
            elif kind == "delete":
                path.unlink()
            else:
                os.truncate(path, operation["size"])

    def sync(self) -> None:
        self.session.sync()

    def save(self, *, name: str) -> bool:
        return save(self.session, name, {"model": name.encode() * 100, "sub/more": b"x"})

    def restore(self, *, name: str, fresh: bool) -> list[Any]:
        report = self.session.restore(name, fresh=fresh)
        return [report.exact, digests(self.root)]

    def exploit(self, *, storage: Any, donor: str, name: str, fresh: bool) -> list[Any]:
        report = self.session.restore_foreign(TrialDir(store_of(storage), donor), name, fresh=fresh)
        return [report.exact, digests(self.root)]

    def close(self) -> None:
        self.session.close()


def main() -> None:
    # A new attempt waits for so long where nothing else stops the old one; the kills are to come later than that.
    trial_dir.LEASE_SECONDS = 0.1
    attempts = Attempts()
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer = {"result": getattr(attempts, command.pop("do"))(**command)}
        except ArtifactConflictError as error:
            answer = {"conflict": str(error)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
