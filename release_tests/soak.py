"""Trials that do anything at any time, each against a model in plain Python, which is the parent of their processes.

The model knows the files of the working directory, and what every registered checkpoint must bring back. Processes are
killed and stopped in the middle of what they do; what was under way then is lost or not, but never half.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from blake3 import blake3

from release_tests.cluster import ROOT
from release_tests.soak_worker import content
from tests.support import independent_reader
from tests.support.victim import store_of

PATHS = ("log.txt", "state", "events/a", "events/b", "plots/1", "plots/2", "plots/3", "deep/x")
SIZES = (0, 5, 3000, 70_000, 400_000)
KEPT = 3
PATIENCE = 120.0


class Worker:
    """A process of `soak_worker`."""

    def __init__(self, log: Path) -> None:
        self.log = log
        with open(log, "ab") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "release_tests.soak_worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                cwd=ROOT,
                text=True,
            )
        self._answers: queue.Queue[str] = queue.Queue()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def _listen(self) -> None:
        for line in self.process.stdout:
            self._answers.put(line)
        self._answers.put("")

    def send(self, do: str, **arguments: Any) -> None:
        self.process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self.process.stdin.flush()

    def answer(self, seconds: float = PATIENCE) -> dict[str, Any]:
        """The next answer.

        Raises:
            queue.Empty: None came in time.
        """
        line = self._answers.get(timeout=seconds)
        if not line:
            raise AssertionError(f"a worker ended: {self.log.read_text(errors='replace')[-3000:]}")
        return json.loads(line)

    def ask(self, do: str, **arguments: Any) -> Any:
        self.send(do, **arguments)
        answer = self.answer()
        assert "result" in answer, f"{do} {arguments}: {answer}"
        return answer["result"]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self._listener.join(10)
        for stream in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):
                stream.close()


class Model:
    """A working directory."""

    def __init__(self, tree: dict[str, bytes | None] | None = None) -> None:
        self.files = {path: data for path, data in (tree or {}).items() if data is not None}
        self.folders = {path.rpartition("/")[0] for path in self.files} | (tree or {}).keys() - self.files.keys()
        self.folders.discard("")

    def tree(self) -> dict[str, bytes | None]:
        full = {path.rpartition("/")[0] for path in self.files}
        return {**self.files, **dict.fromkeys(self.folders - full)}

    def put(self, path: str, data: bytes) -> None:
        self.files[path] = data
        self.folders |= {path.rpartition("/")[0]} - {""}


def digests_of(tree: dict[str, bytes | None]) -> dict[str, str | None]:
    return {path: None if data is None else blake3(data).hexdigest() for path, data in tree.items()}


class SoakTrial:
    """One trial over all of its attempts.

    Args:
        base: For its working directories and logs.
        storage: As in `tests.support.victim`.
        place: The same for the reader.
        seed: Of all that is random.
        violent: Its processes may be killed.
        stoppable: They may be stopped too, while another takes over: only where a fence makes that safe.
        is_quiet: Whether no request of a dead process is under way.
    """

    def __init__(
        self,
        name: str,
        base: Path,
        storage: Any,
        place: independent_reader.Place,
        *,
        seed: int,
        violent: bool,
        stoppable: bool,
        is_quiet: Callable[[], bool] = lambda: True,
    ) -> None:
        self.name, self.base, self.storage, self.place, self.seed = name, base, storage, place, seed
        self.violent, self.stoppable, self.is_quiet = violent, stoppable, is_quiet
        self.dice = random.Random(seed)
        self.model = Model()
        self.registered: dict[str, dict[str, bytes | None]] = {}
        self.newest = -1
        self.restore_point: tuple[dict[str, Any], dict[str, bytes | None]] | None = None
        self.token = self.node = 0
        self.did: Counter[str] = Counter()
        self.last: deque[str] = deque(maxlen=15)
        self.worker: Worker | None = None
        self.store = store_of(storage)
        self.start()

    def __str__(self) -> str:
        return f"{self.name} (seed {self.seed}; {', '.join(self.last)})"

    # --- attempts ---------------------------------------------------------------------------------

    def start(self) -> None:
        """The next attempt, restored as Ray would restore it; in a new process unless the old one lives."""
        if self.worker is None:
            self.worker = Worker(self.base / f"{self.name}.log")
        if self.dice.random() < 0.3:
            self.node += 1
        self.token += 1
        self.worker.ask(
            "open",
            working_dir=str(self.base / f"{self.name}-{self.node}"),
            storage=self.storage,
            trial=self.name,
            token=self.token,
            registered=self.newest,
        )
        self.model = Model()
        if self.restore_point is not None:
            self.bring_back(*self.restore_point, fresh=True)

    def bring_back(self, command: dict[str, Any], tree: dict[str, bytes | None], *, fresh: bool) -> None:
        exact, held = self.worker.ask(**command, fresh=fresh)
        assert exact, f"{self}: {command} was not exact"
        assert held == digests_of(tree), f"{self}: {command} brought back {sorted(held)}"
        self.model = Model(tree)
        self.did["restore"] += 1

    # --- what it does -----------------------------------------------------------------------------

    def act(self, others: list[SoakTrial]) -> None:
        self.change()
        kinds = ["sync", "save", "save", "save", "rewind", "pause", "exploit"]
        kinds += ["kill", "kill"] * self.violent + ["stop"] * self.stoppable
        kind = self.dice.choice(kinds)
        self.last.append(kind)
        getattr(self, kind)(*([others] if kind == "exploit" else []))
        self.did[kind] += 1

    def change(self) -> None:
        operations = []
        for _ in range(self.dice.randint(0, 6)):
            path = self.dice.choice(PATHS)
            kind = self.dice.choice(["write", "append", "append", "rename", "delete", "truncate"])
            operation = {"kind": kind, "path": path, "seed": self.dice.getrandbits(32), "size": self.dice.choice(SIZES)}
            old = self.model.files.get(path)
            if kind in ("write", "append"):
                new = content(operation["seed"], operation["size"])
                self.model.put(path, new if kind == "write" else (old or b"") + new)
            elif old is None:
                continue
            elif kind == "rename":
                operation["goal"] = self.dice.choice(PATHS)
                self.model.put(operation["goal"], self.model.files.pop(path))
            elif kind == "delete":
                del self.model.files[path]
            else:
                operation["size"] = len(old) // 2
                self.model.files[path] = old[: len(old) // 2]
            operations.append(operation)
        self.worker.ask("change", operations=operations)

    @property
    def next_checkpoint(self) -> str:
        return f"checkpoint_{self.newest + 1:06d}"

    def sync(self) -> None:
        self.worker.ask("sync")
        tree = independent_reader.head_tree(self.place)
        assert tree == self.model.tree(), f"{self}: the head is not the working directory"

    def save(self) -> None:
        name = self.next_checkpoint
        assert self.worker.ask("save", name=name), f"{name} of {self.name} has no snapshot"
        self.register(name)

    def register(self, name: str) -> None:
        self.registered[name] = self.model.tree()
        self.newest += 1
        self.restore_point = {"do": "restore", "name": name}, self.registered[name]
        while len(self.registered) > KEPT:
            old = min(self.registered)
            del self.registered[old]
            self.store.delete([file.path for file in self.store.list(old)])

    def rewind(self) -> None:
        """Restored within the attempt, as PBT does with a trial's own checkpoint."""
        if self.registered:
            name = self.dice.choice(sorted(self.registered))
            self.bring_back({"do": "restore", "name": name}, self.registered[name], fresh=False)

    def pause(self) -> None:
        self.worker.ask("close")
        tree = independent_reader.head_tree(self.place)
        assert tree == self.model.tree(), f"{self}: closed, and the head is something else"
        self.start()

    def exploit(self, others: list[SoakTrial]) -> None:
        """Another trial's checkpoint; the own artifacts stay, and are what the next attempt begins with."""
        donor = self.dice.choice(others)
        if not donor.registered:
            return
        name = max(donor.registered)
        command = {"do": "exploit", "storage": donor.storage, "donor": donor.name, "name": name}
        self.bring_back(command, self.model.tree(), fresh=False)
        self.restore_point = command, self.model.tree()

    def kill(self) -> None:
        """In the middle of something."""
        if self.dice.random() < 0.6:
            self.worker.send("save", name=self.next_checkpoint)
        else:
            self.worker.send("sync")
        time.sleep(self.dice.uniform(0.0, 0.15))  # the moment is what is random
        self.worker.kill()
        self.worker = None
        while not self.is_quiet():
            time.sleep(0.01)
        self.check()
        self.start()

    def stop(self) -> None:
        """Another attempt takes over while this one stands still; then it goes on, and must do no harm."""
        old = self.worker
        old.send("save", name=self.next_checkpoint)
        time.sleep(self.dice.uniform(0.0, 0.1))
        os.kill(old.process.pid, signal.SIGSTOP)
        self.worker = None
        self.start()
        self.change()
        self.save()
        os.kill(old.process.pid, signal.SIGCONT)
        with contextlib.suppress(queue.Empty):
            old.answer(10.0)  # refused, or it was over before
        old.kill()
        self.check()

    # --- what must hold ---------------------------------------------------------------------------

    def check(self) -> int:
        """Reads all checkpoints; their number."""
        found = independent_reader.snapshots(self.place)
        for name, tree in self.registered.items():
            stored = independent_reader.tree_of(self.place, found[name])
            assert stored == tree, f"{self}: {name} is not what it was"
            assert self.place.read(f"{name}/model") == name.encode() * 100, name
        independent_reader.head_tree(self.place)
        return len(self.registered)

    def end(self) -> None:
        self.worker.ask("close")
        self.worker.kill()
        assert independent_reader.head_tree(self.place) == self.model.tree(), self.name


class Usage:
    """Memory and open files of a process."""

    def __init__(self, pid: int) -> None:
        status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        self.rss = int(status["VmRSS"].split()[0]) * 1024
        self.threads = int(status["Threads"])
        self.descriptors = len(os.listdir(f"/proc/{pid}/fd"))

    def __str__(self) -> str:
        return f"{self.rss / 1e6:.0f} MB, {self.descriptors} files, {self.threads} threads"


def forget(directory: Path, keep: set[str]) -> None:
    """Removes the working directories of nodes that are gone."""
    for path in directory.iterdir():
        if path.is_dir() and path.name not in keep:
            shutil.rmtree(path, ignore_errors=True)
