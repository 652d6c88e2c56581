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


class LoggingBody(tune.Trainable):
    """Writes a line a step, binary files, and a file that is rewritten.

    Config: `crash_at`, `crash_again_at` (steps) and `crash` ("kill" or "raise"), `wipe` (remove the working dir with
    the crash, as when the trial moves to another node), `sync_first` (sync before the crash, as a periodic sync would),
    `markers` (directory for once-only files), `open_in_setup`, `steps`, `wait_at` (step; waits there for the file
    `markers/go_on`), `await_period` (before the crash, wait until a background sync has come by), `kill_in_save` (n:
    die at the end of the n-th save, after everything was uploaded).
    """

    steps = 8

    def setup(self, config: dict) -> None:
        self.cfg = config
        self.n = 0
        self.saves = 0
        self.log = open("log.txt", "a", buffering=1) if config.get("open_in_setup") else None
        Path("setup.txt").write_text("written in setup\n")

    def mark(self, name: str, text: str = "") -> None:
        # At once: who waits for it reads it when it is there.
        temporary = Path(self.cfg["markers"], f".{name}.{os.getpid()}")
        temporary.write_text(text)
        temporary.replace(temporary.with_name(name))

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
        for name in ("crash", "crash_again"):
            if self.n == self.cfg.get(f"{name}_at") and once(f"{self.cfg['markers']}/{name}"):
                self.crash()
        if self.n == self.cfg.get("wait_at"):
            self.wait_for_go_on()
        return {"n": self.n, "done": self.n >= self.cfg.get("steps", self.steps)}

    def sync_now(self) -> None:
        """What a periodic sync would do; the same call with and without this library."""
        self._storage.persist_artifacts(force=True)

    def wait_for_go_on(self) -> None:
        import time

        self.sync_now()
        self.mark("waiting", str(os.getpid()))
        while not Path(self.cfg["markers"], "go_on").exists():
            time.sleep(0.02)

    def crash(self) -> None:
        import time

        if self.cfg.get("sync_first"):
            self.sync_now()
        while self.cfg.get("await_period") and not self.synced(f"plots/{self.n}.bin"):
            time.sleep(0.02)
        if self.cfg.get("crash") == "raise":
            Path("raised.txt").write_text(f"written in the step that raised: {self.n}\n")
            raise RuntimeError("crash on command")
        self.die()

    def synced(self, path: str) -> bool:
        """Whether a sync that brought this file has ended, and with it all files that it brought."""
        head = self.artifacts.trial.head()
        return head is not None and path in head.manifest.entries

    def die(self) -> None:
        if self.cfg.get("wipe"):
            shutil.rmtree(self.logdir)
        os.kill(os.getpid(), signal.SIGKILL)

    def save(self, *args, **kwargs):
        saved = super().save(*args, **kwargs)
        self.saves += 1
        if self.saves == self.cfg.get("kill_in_save") and once(f"{self.cfg['markers']}/kill_in_save"):
            self.die()
        return saved

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        Path(checkpoint_dir, "n").write_text(str(self.n))

    def load_checkpoint(self, checkpoint_dir: str) -> None:
        self.n = int(Path(checkpoint_dir, "n").read_text())
        self.mark("log_at_restore", Path("log.txt").read_text() if Path("log.txt").exists() else "")
        self.mark("rewritten_at_restore", Path("rewritten.txt").read_text() if Path("rewritten.txt").exists() else "")
        self.mark("files_at_restore", "\n".join(sorted(os.listdir("."))))

    def reset_config(self, new_config: dict) -> bool:
        if self.log is not None:
            self.log.close()
        self.setup(new_config)
        return True

    def cleanup(self) -> None:
        Path("cleanup.txt").write_text("written in cleanup\n")
        if self.log is not None:
            self.log.close()


class Logging(ArtifactSyncMixin, LoggingBody):
    """With this library."""


class StampedBody(LoggingBody):
    """Each step leaves the id of its process."""

    def step(self) -> dict:
        Path("pid.txt").write_text(f"{os.getpid()}\n")
        return super().step()


class Stamped(ArtifactSyncMixin, StampedBody):
    """With this library."""


class SummarizingBody(LoggingBody):
    """Writes a file that a callback writes, too; dies in the step `die_at`, when storage holds the driver's version."""

    def step(self) -> dict:
        import time

        result = super().step()
        Path("summary.json").write_text(f"worker {self.n}")
        if self.n == self.cfg.get("die_at") and once(f"{self.cfg['markers']}/died"):
            while not self.stored().startswith("driver"):
                self.sync_now()
                time.sleep(0.02)
            self.die()
        return result

    def stored(self) -> str:
        storage = self._storage
        try:
            with storage.storage_filesystem.open_input_stream(f"{storage.trial_fs_path}/summary.json") as stream:
                return stream.read().decode()
        except FileNotFoundError:
            return ""

    def load_checkpoint(self, checkpoint_dir: str) -> None:
        super().load_checkpoint(checkpoint_dir)
        self.mark("summary_at_restore", Path("summary.json").read_text() if Path("summary.json").exists() else "none")


class Summarizing(ArtifactSyncMixin, SummarizingBody):
    """With this library."""


class Summaries(tune.Callback):
    """Writes a file into the trial dir on the driver, and declares nothing.

    Args:
        begin: The step from which on.
    """

    def __init__(self, begin: int) -> None:
        self.begin = begin

    def on_trial_result(self, iteration, trials, trial, result, **info):
        if result["n"] >= self.begin:
            Path(trial.local_path, "summary.json").write_text(f"driver {result['n']}")


class ReusableBody(LoggingBody):
    """Writes a file that names the trial; its actor is used for several trials."""

    steps = 3

    def setup(self, config: dict) -> None:
        super().setup(config)
        Path("who.txt").write_text(f"{config['who']}\n")
        Path(f"only_{config['who']}.txt").write_text("x")


class Reusable(ArtifactSyncMixin, ReusableBody):
    """With this library."""


class ExploitedBody(tune.Trainable):
    """For PBT: the trial with the low score is told to take over the other's checkpoint."""

    def setup(self, config: dict) -> None:
        self.cfg = config
        self.n = 0
        self.model = str(config["score"])

    def step(self) -> dict:
        self.n += 1
        with open("own.txt", "a") as file:
            file.write(f"{self.trial_id} {self.n} {self.model}\n")
        # PBT gives the loser the winner's config too; what it was born with is in its own artifacts.
        born = Path("own.txt").read_text().split()[2]
        if self.cfg.get("crash_after_exploit") and self.model != born and once(f"{self.cfg['markers']}/crash"):
            self._storage.persist_artifacts(force=True)
            os.kill(os.getpid(), signal.SIGKILL)
        return {"score": self.cfg["score"] + self.n, "n": self.n, "done": self.n >= 12}

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        Path(checkpoint_dir, "model").write_text(f"{self.n} {self.model}")

    def load_checkpoint(self, checkpoint_dir: str) -> None:
        n, self.model = Path(checkpoint_dir, "model").read_text().split()
        self.n = int(n)

    def reset_config(self, new_config: dict) -> bool:
        self.setup(new_config)
        return True


class Exploited(ArtifactSyncMixin, ExploitedBody):
    """With this library."""


class Plain(tune.Trainable):
    """No mixin: what `SyncConfig(syncer=...)` alone gives."""

    def setup(self, config: dict) -> None:
        self.n = 0

    def step(self) -> dict:
        self.n += 1
        with open("log.txt", "a") as file:
            file.write(f"{self.n}\n")
        return {"n": self.n, "done": self.n >= 3}

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        Path(checkpoint_dir, "n").write_text(str(self.n))

    def load_checkpoint(self, checkpoint_dir: str) -> None:
        self.n = int(Path(checkpoint_dir, "n").read_text())


def function(config: dict) -> None:
    """The function twin of `Logging`: appends a line a step; reports a checkpoint every fourth."""
    import tempfile
    import time

    markers = Path(config["markers"])
    start = 0
    checkpoint = tune.get_checkpoint()
    if checkpoint:
        with checkpoint.as_directory() as directory:
            start = int(Path(directory, "n").read_text())
        (markers / "log_at_restore").write_text(Path("log.txt").read_text())
        (markers / "rewritten_at_restore").write_text(Path("rewritten.txt").read_text())
    elif Path("log.txt").exists():
        (markers / "not_clean").write_text(Path("log.txt").read_text())
    try:
        for n in range(start + 1, config.get("steps", 8) + 1):
            with open("log.txt", "a") as log:
                log.write(f"{n}\n")
            Path("rewritten.txt").write_text(f"version {n}\n")
            os.makedirs("plots", exist_ok=True)
            Path(f"plots/{n}.bin").write_bytes(hashlib.sha256(str(n).encode()).digest() * 1000)
            if n == config.get("crash_at") and once(f"{markers}/crash"):
                if config.get("crash") == "raise":
                    raise RuntimeError("crash on command")
                if config.get("wipe"):
                    shutil.rmtree(os.getcwd())
                os.kill(os.getpid(), signal.SIGKILL)
            if n % config.get("frequency", 4) == 0:
                with tempfile.TemporaryDirectory() as directory:
                    Path(directory, "n").write_text(str(n))
                    tune.report({"n": n}, checkpoint=tune.Checkpoint.from_directory(directory))
            else:
                tune.report({"n": n})
    finally:
        time.sleep(config.get("slow_finally", 0))
        Path("cleanup.txt").write_text("written in cleanup\n")
        if config.get("who"):
            Path(f"only_{config['who']}.txt").write_text("x")


class ManyFilesBody(tune.Trainable):
    """Writes many files in its last step, which the driver (not the trainable) decides is the last."""

    def setup(self, config: dict) -> None:
        self.n = 0

    def step(self) -> dict:
        self.n += 1
        if self.n == 2:
            for number in range(60):
                Path(f"{number}.txt").write_text(f"{number}\n")
        return {"n": self.n}

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        Path(checkpoint_dir, "n").write_text(str(self.n))

    def load_checkpoint(self, checkpoint_dir: str) -> None:
        self.n = int(Path(checkpoint_dir, "n").read_text())


class ManyFiles(ArtifactSyncMixin, ManyFilesBody):
    """With this library."""
