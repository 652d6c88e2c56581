"""Trainables that misbehave on command; pickled by value, so that Ray's workers need not import the tests."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
from pathlib import Path

from ray import tune

from ray_artifact_sync import ArtifactSyncMixin


def once(marker: str) -> bool:
    """True the first time that anybody asks about this marker (a file outside of the trial's directories)."""
    try:
        Path(marker).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


class Logging(ArtifactSyncMixin, tune.Trainable):
    """Eight steps; writes a line a step, binary files, and a file that is rewritten.

    Config: `crash_at` (step), `crash` ("kill", "raise", "kill_before_step" ...), `wipe` (remove the working dir with
    the crash, as when the trial moves to another node), `markers` (directory for once-only files), `open_in_setup`.
    """

    steps = 8

    def setup(self, config: dict) -> None:
        self.cfg = config
        self.n = 0
        self.log = open("log.txt", "a", buffering=1) if config.get("open_in_setup") else None
        Path("setup.txt").write_text("written in setup\n")

    def write_line(self) -> None:
        if self.log is not None:
            self.log.write(f"{self.n}\n")
            self.log.flush()
        else:
            with open("log.txt", "a") as file:
                file.write(f"{self.n}\n")

    def step(self) -> dict:
        self.n += 1
        self.write_line()
        Path("rewritten.txt").write_text(f"version {self.n}\n")
        os.makedirs("plots", exist_ok=True)
        Path(f"plots/{self.n}.bin").write_bytes(hashlib.sha256(str(self.n).encode()).digest() * 1000)
        print(f"printed in step {self.n}", flush=True)
        if self.n == self.cfg.get("crash_at") and once(f"{self.cfg['markers']}/crash"):
            self.crash()
        return {"n": self.n, "done": self.n >= self.cfg.get("steps", self.steps)}

    def crash(self) -> None:
        if self.cfg.get("sync_first"):
            self.artifacts.sync()
        if self.cfg.get("crash") == "raise":
            Path("raised.txt").write_text(f"written in the step that raised: {self.n}\n")
            raise RuntimeError("crash on command")
        if self.cfg.get("wipe"):
            shutil.rmtree(self.logdir)
        os.kill(os.getpid(), signal.SIGKILL)

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        Path(checkpoint_dir, "n").write_text(str(self.n))

    def load_checkpoint(self, checkpoint_dir: str) -> None:
        self.n = int(Path(checkpoint_dir, "n").read_text())
        seen = Path("log.txt").read_text() if Path("log.txt").exists() else ""
        Path(f"{self.cfg['markers']}/log_at_restore").write_text(seen)
        shutil.copyfile("rewritten.txt", f"{self.cfg['markers']}/rewritten_at_restore")

    def cleanup(self) -> None:
        Path("cleanup.txt").write_text("written in cleanup\n")
        if self.log is not None:
            self.log.close()
