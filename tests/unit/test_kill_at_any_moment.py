"""SIGKILL at random moments of a trial that syncs all the time; an independent reader looks at what is left.

After each kill: every registered checkpoint that was not deleted has a snapshot, everything that it lists is readable
and is what the working dir held when it was saved; the head names nothing that is not readable. The next victim goes on
in the same trial dir, from the newest registered checkpoint, and must find exactly that.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from blake3 import blake3

from tests.support import independent_reader
from tests.support.s3_servers import BUCKET

FEW = 15
MANY = int(os.environ.get("KILLS", "60"))
few_or_many = pytest.mark.parametrize("kills", [FEW, pytest.param(MANY, id="many", marks=pytest.mark.exhaustive)])


class Trial:
    """What Ray's driver knows: the checkpoints that were registered, and what each must bring back."""

    def __init__(self, base, storage, place: independent_reader.Place, seed: int) -> None:
        self.base, self.storage, self.place = str(base), storage, place
        self.dice = random.Random(seed)
        self.seed = seed
        self.attempts = 0
        self.node = 0
        self.registered: dict[str, dict[str, str | None]] = {}
        self.newest = -1
        self.kills_in_restore = 0

    def run_and_kill(self, seconds: float) -> None:
        """One attempt, killed `seconds` after its start-up (that may be in the middle of its restore)."""
        self.attempts += 1
        if self.dice.random() < 0.3:
            self.node += 1
        restore = max(self.registered) if self.registered else None
        job = {
            "working_dir": os.path.join(self.base, f"node-{self.node}"),
            "storage": self.storage,
            "token": self.attempts,
            "registered": self.newest,
            "kept": sorted(self.registered),
            "restore": restore,
            "seed": self.seed * 1000 + self.attempts,
        }
        log_path = os.path.join(self.base, "victim.log")
        with open(log_path, "wb") as log:
            victim = subprocess.Popen(
                [sys.executable, "-m", "tests.support.victim", json.dumps(job)], stdout=subprocess.PIPE, stderr=log
            )
        lines: list[str] = []
        started = threading.Event()

        def listen() -> None:
            for line in victim.stdout:
                lines.append(line.decode())
                started.set()

        listener = threading.Thread(target=listen, daemon=True)
        listener.start()
        try:
            # Counted from the first line where there is a restore to disturb only now and then.
            if restore is None or self.dice.random() < 0.7:
                assert started.wait(60), Path(log_path).read_text()[-3000:]
            else:
                time.sleep(0.6)
            time.sleep(seconds)
            assert victim.poll() is None, Path(log_path).read_text()[-3000:]
        finally:
            victim.kill()
            victim.wait()
            listener.join(10)
            victim.stdout.close()
        self.learn(lines, restore)

    def learn(self, lines: list[str], restore: str | None) -> None:
        words = [line.rstrip("\n").split(" ", 1) for line in lines if line.endswith("\n")]
        if "running" not in [word for word, _ in words]:
            self.kills_in_restore += 1
        for word, text in words:
            if word == "registered":
                name, held = json.loads(text)
                self.registered[name] = held
                self.newest = int(name.rpartition("_")[2])
            elif word == "deleted":
                self.registered.pop(text, None)
            elif word == "restored":
                assert json.loads(text) == [restore, True]
            elif word == "holds":
                assert json.loads(text) == self.registered[restore]

    def check(self, is_quiet=lambda: True) -> int:
        """Reads everything; the number of files that were looked at."""
        while not is_quiet():  # requests that the dead process had sent in full
            time.sleep(0.01)
        found = independent_reader.snapshots(self.place)
        looked = 0
        for name, held in self.registered.items():
            tree = independent_reader.tree_of(self.place, found[name])
            digests = {path: None if data is None else blake3(data).hexdigest() for path, data in tree.items()}
            assert digests == held, name
            looked += len(tree)
        return looked + len(independent_reader.head_tree(self.place))


def live_through(trial: Trial, kills: int, longest: float, is_quiet=lambda: True) -> None:
    looked = 0
    for _ in range(kills):
        trial.run_and_kill(trial.dice.uniform(0.0, longest))
        looked += trial.check(is_quiet)
    assert looked > kills  # it did get somewhere
    before = trial.kills_in_restore
    print(f"{kills} kills ({before} before the restore was over), checkpoint {trial.newest}, {looked} files read")


@few_or_many
def test_local_storage_survives_kill_9(tmp_path, kills):
    storage = tmp_path / "storage"
    storage.mkdir()
    trial = Trial(tmp_path, str(storage), independent_reader.posix_place(storage), seed=1)
    live_through(trial, kills, longest=0.5)


@pytest.mark.s3
@few_or_many
def test_s3_survives_kill_9(tmp_path, rclone, proxy, kills):
    """`rclone` keeps objects as files, so that the reader needs no client. 5 ms a request widen the windows."""
    proxy.latency = 0.005
    prefix = f"kills/{tmp_path.name}"
    storage = os.path.join(rclone.data, BUCKET, prefix)
    os.makedirs(storage)
    trial = Trial(
        tmp_path, {"endpoint": proxy.endpoint, "prefix": prefix}, independent_reader.posix_place(storage), seed=2
    )
    live_through(trial, kills, longest=1.5, is_quiet=lambda: proxy.in_flight == 0)
    shutil.rmtree(storage, ignore_errors=True)
