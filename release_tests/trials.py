"""Trials whose artifacts are a function of the step: what each checkpoint must bring back is known without them.

Each step appends to a log, rewrites two files (one of them large, if told so) and adds one. Workers import this module
(the cluster's nodes have the repository on their path).
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from ray import tune

from ray_artifact_sync import ArtifactSyncMixin

STEPS = 8
FREQUENCY = 2
"""Steps between two checkpoints."""
BLOCK = 1024 * 1024


def big_block(n: int) -> bytes:
    return hashlib.sha256(f"big {n}".encode()).digest() * (BLOCK // 32)


def write_big(path: str, n: int, size: int) -> None:
    block = big_block(n)
    with open(path, "wb") as file:
        file.writelines(block[: min(BLOCK, size - start)] for start in range(0, size, BLOCK))


def plot(n: int) -> bytes:
    return hashlib.sha256(f"plot {n}".encode()).digest() * 100


def write_step(n: int, config: dict, rank: int = 0, between=lambda: None) -> None:
    """The artifacts of step `n`, in the working directory; `between` is called in the middle of it."""
    os.makedirs("plots", exist_ok=True)
    with open("log.txt", "a") as log:
        log.write(f"{n} {rank}\n")
    between()
    Path("rewritten.txt").write_text(f"version {n} of {rank}\n")
    Path(f"plots/{n}.bin").write_bytes(plot(n))
    if config.get("big"):
        write_big("big.bin", n, config["big"])


def expected(n: int, config: dict, rank: int = 0) -> dict[str, str]:
    """Artifact path to SHA-256 after step `n`."""
    tree = {
        "log.txt": "".join(f"{step} {rank}\n" for step in range(1, n + 1)).encode(),
        "rewritten.txt": f"version {n} of {rank}\n".encode(),
        **{f"plots/{step}.bin": plot(step) for step in range(1, n + 1)},
    }
    digests = {path: hashlib.sha256(data).hexdigest() for path, data in tree.items()}
    if config.get("big"):
        hasher, block = hashlib.sha256(), big_block(n)
        for start in range(0, config["big"], BLOCK):
            hasher.update(block[: min(BLOCK, config["big"] - start)])
        digests["big.bin"] = hasher.hexdigest()
    return digests


def mark(config: dict, name: str, text: str = "") -> None:
    """Leaves a note that other processes can see, complete or not at all."""
    path = Path(config["shared"], name)
    temporary = path.with_name(f".{name}.{os.getpid()}")
    temporary.write_text(text)
    temporary.replace(path)


def node_id() -> str:
    import ray

    return ray.get_runtime_context().get_node_id()


def hold(config: dict, n: int, rank: int = 0) -> None:
    """Stands still in some steps, the first time that they come, until `released` is there: to be killed, or frozen."""
    name = f"hold-{n}-{rank}"
    if n not in config.get("holds", ()) or Path(config["shared"], name).exists():
        return
    mark(config, name, node_id())
    while not Path(config["shared"], "released").exists():
        time.sleep(0.02)


def wait_before(config: dict, n: int, rank: int = 0) -> None:
    """Waits before some steps for the mark `go-<step>`: until what is to happen to the step has been prepared."""
    if n not in config.get("waits", ()):
        return
    mark(config, f"before-{n}-{rank}", node_id())
    while not Path(config["shared"], f"go-{n}").exists():
        time.sleep(0.02)


def check_restored(config: dict, n: int, rank: int = 0) -> None:
    """Compares the working directory with what it was after step `n`, and says so to the others if it differs."""
    digests = {}
    for folder, dirs, files in os.walk("."):
        dirs[:] = [name for name in dirs if not name.startswith(".ray_artifact_sync")]
        for name in files:
            path = os.path.join(folder, name)
            digests[os.path.relpath(path)] = hashlib.sha256(Path(path).read_bytes()).hexdigest()
    if digests != expected(n, config, rank):
        mark(config, "inexact", f"rank {rank} restored as of step {n}: {sorted(digests)}")
        raise RuntimeError("the artifacts are not what they were")
    mark(config, f"restored-{time.time_ns()}", str(n))


class Counting(tune.Trainable):
    """Knows which step it is in; that is what its checkpoints hold."""

    def setup(self, config: dict) -> None:
        self.n = 0

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        Path(checkpoint_dir, "n").write_text(str(self.n))

    def load_checkpoint(self, checkpoint_dir: str) -> None:
        self.n = int(Path(checkpoint_dir, "n").read_text())


class WriterBody(Counting):
    def setup(self, config: dict) -> None:
        super().setup(config)
        self.cfg = config
        mark(config, f"started-{time.time_ns()}", node_id())

    def step(self) -> dict:
        self.n += 1
        wait_before(self.cfg, self.n)
        write_step(self.n, self.cfg, between=lambda: hold(self.cfg, self.n))
        mark(self.cfg, f"step-{self.n}", node_id())
        time.sleep(self.cfg.get("pause", 0))
        return {"n": self.n, "done": self.n >= self.cfg.get("steps", STEPS)}

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        mark(self.cfg, f"saving-{self.n}", node_id())
        super().save_checkpoint(checkpoint_dir)


class Writer(ArtifactSyncMixin, WriterBody):
    """With this library."""

    def restore(self, checkpoint_path):
        mark(self.cfg, f"restoring-{time.time_ns()}", node_id())
        restored = super().restore(checkpoint_path)
        check_restored(self.cfg, self.n)
        return restored


def function_body(config: dict) -> None:
    """The same as a function."""
    run_function(config, on_restored=lambda n: None)


def function(config: dict) -> None:
    """With this library; to be wrapped in `with_artifacts`."""
    run_function(config, on_restored=lambda n: check_restored(config, n))


def run_function(config: dict, on_restored: Callable[[int], None]) -> None:
    checkpoint = tune.get_checkpoint()
    start = 0
    if checkpoint is not None:
        with checkpoint.as_directory() as directory:
            start = int(Path(directory, "n").read_text())
        on_restored(start)
    for n in range(start + 1, config.get("steps", STEPS) + 1):
        wait_before(config, n)
        write_step(n, config, between=lambda n=n: hold(config, n))
        mark(config, f"step-{n}", node_id())
        with tempfile.TemporaryDirectory() as directory:
            saved = None
            if n % FREQUENCY == 0:
                mark(config, f"saving-{n}", node_id())
                Path(directory, "n").write_text(str(n))
                saved = tune.Checkpoint.from_directory(directory)
            tune.report({"n": n}, checkpoint=saved)


def train_loop(config: dict) -> None:
    """A rank of Ray Train; each one has artifacts of its own."""
    import ray.train

    from ray_artifact_sync import train

    with train.artifacts(chdir=True) as artifacts:
        rank, start = artifacts.rank, 0
        checkpoint = ray.train.get_checkpoint()
        if checkpoint is not None:
            with checkpoint.as_directory() as directory:
                start = int(Path(directory, "n").read_text())
            check_restored(config, start, rank)
        for n in range(start + 1, config.get("steps", STEPS) + 1):
            wait_before(config, n, rank)
            write_step(n, config, rank, between=lambda n=n: hold(config, n, rank))
            mark(config, f"step-{n}-{rank}", node_id())
            with tempfile.TemporaryDirectory() as directory:
                saved = None
                if n % FREQUENCY == 0:
                    Path(directory, "n" if rank == 0 else f"rank_{rank}").write_text(str(n))
                    saved = ray.train.Checkpoint.from_directory(directory)
                artifacts.report({"n": n}, saved)


def plain_train_loop(config: dict) -> None:
    """What a rank does without this library: its files lie where Ray lets it work."""
    import ray.train

    context = ray.train.get_context()
    directory = Path(f"rank_{context.get_world_rank()}")
    directory.mkdir()
    os.chdir(directory)
    for n in range(1, config.get("steps", STEPS) + 1):
        write_step(n, config, context.get_world_rank())
        ray.train.report({"n": n})
