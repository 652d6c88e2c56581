"""Progress: what is counted, and who gets to see a bar."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest

from ray_artifact_sync import layout, progress_bars
from ray_artifact_sync.checkpoint_upload import upload_checkpoint
from ray_artifact_sync.concurrency import Deadline
from ray_artifact_sync.errors import StorageError
from ray_artifact_sync.options import SyncOptions
from ray_artifact_sync.progress import TransferProgress, bar_when_slow, watched_by
from ray_artifact_sync.session import TrialArtifacts
from ray_artifact_sync.stores.posix import PosixStore
from tests.support.s3_servers import uri_at
from tests.support.sessions import WrappedStore
from tests.support.terminals import Terminal

ROOT = Path(__file__).parents[2]
MIB = 1024 * 1024


def watched_session(tmp_path, store, seen, token=1):
    @contextmanager
    def watcher(progress):
        seen.append(progress)
        yield

    session = TrialArtifacts(
        str(tmp_path / "work"),
        store,
        trial="t",
        token=layout.make_token(token),
        options=SyncOptions(sync_period=0, predecessor_wait=0.1),
        watcher=watcher,
    )
    session.begin()
    return session


def counters(progress: TransferProgress):
    return progress.what, progress.files, progress.files_done, progress.bytes, progress.bytes_done_so_far


def test_every_kind_of_transfer_counts(tmp_path):
    seen: list[TransferProgress] = []
    store = PosixStore(tmp_path / "t")
    session = watched_session(tmp_path, store, seen)
    work, model = tmp_path / "work", tmp_path / "model"
    (work / "small.txt").write_bytes(b"x" * 100)
    (work / "large.bin").write_bytes(b"y" * (5 * MIB))
    session.sync()
    with open(work / "large.bin", "ab") as file:
        file.write(b"z" * 1000)
    session.sync()
    session.sync()  # nothing to do: nothing to watch
    model.mkdir()
    (model / "weights").write_bytes(b"w" * (3 * MIB))
    name = "checkpoint_000000"
    session.commit_checkpoint(name, lambda engine: upload_checkpoint(PosixStore(model), engine, name, Deadline()))
    session.close()
    (work / "small.txt").unlink()
    second = watched_session(tmp_path, store, seen, token=2)
    second.restore(name, fresh=True)
    second.close()
    assert [counters(progress) for progress in seen] == [
        ("t", 2, 2, 5 * MIB + 100, 5 * MIB + 100),
        ("t", 1, 1, 1000, 1000),
        ("checkpoint_000000 of t", 1, 1, 3 * MIB, 3 * MIB),
        ("Restoring t", 2, 2, 5 * MIB + 1100, 5 * MIB + 1100),
    ]


def test_bytes_of_a_request_that_failed_are_taken_back(tmp_path):
    class Stumbling(WrappedStore):
        stumbles = 2

        def put(self, path, data, **options):
            if path == "large.bin" and self.stumbles:
                self.stumbles -= 1
                for number, _ in enumerate(data):
                    if number == 1:
                        break
                raise StorageError("reset", retryable=True)
            return self.inner.put(path, data, **options)

    seen: list[TransferProgress] = []
    session = watched_session(tmp_path, Stumbling(PosixStore(tmp_path / "t")), seen)
    (tmp_path / "work/large.bin").write_bytes(b"y" * (12 * MIB))
    session.sync()
    session.close()
    assert [counters(progress) for progress in seen] == [("t", 1, 1, 12 * MIB, 12 * MIB)]


class RecordedBar:
    def __init__(self, progress):
        self.progress = progress
        self.updates: list[int] = []
        self.closed = threading.Event()
        self.updated = threading.Event()

    def update(self):
        self.updates.append(self.progress.bytes_done_so_far)
        self.updated.set()

    def close(self):
        self.closed.set()


def test_only_what_takes_long_has_a_bar():
    bars: list[RecordedBar] = []

    def make(progress):
        bars.append(RecordedBar(progress))
        return bars[-1]

    progress = TransferProgress("x", files=1, bytes=10)
    with bar_when_slow(make, after=60)(progress):
        pass
    assert not bars
    with bar_when_slow(make, after=0, every=0.01)(progress):
        while not bars or not bars[0].updated.wait(10):
            pass
        progress.bytes_done(7)
    assert bars[0].closed.wait(10)
    assert bars[0].updates[0] == 0
    assert bars[0].updates[-1] == 7


def test_a_bar_that_fails_harms_no_transfer(caplog):
    def broken(progress):
        raise RuntimeError("no colours today")

    tried = threading.Event()

    def make(progress):
        tried.set()
        return broken(progress)

    progress = TransferProgress("x", files=1, bytes=10)
    with watched_by(broken, progress):
        pass
    with watched_by(bar_when_slow(make, after=0), progress):
        assert tried.wait(10)
    assert caplog.text.count("no colours today") == 2


SYNC = """
import sys
from ray_artifact_sync import ArtifactSyncer, progress
progress.SHOW_AFTER = 0.0
syncer = ArtifactSyncer({options})
syncer.sync_up(sys.argv[1], sys.argv[2])
syncer.wait()
print("done")
"""


@pytest.fixture
def hanging(proxy, rclone, tmp_path, monkeypatch):
    """A directory whose upload hangs, where to, and the rule that holds it back."""
    for name, value in rclone.env().items():
        monkeypatch.setenv(name, value)
    local = tmp_path / "[red]local"  # no markup
    local.mkdir()
    (local / "big.bin").write_bytes(os.urandom(2 * MIB))
    return local, uri_at(proxy.endpoint, f"progress/{tmp_path.name}"), proxy.hang(path="big")


def command(hanging, options=""):
    local, uri, _ = hanging
    return [sys.executable, "-c", SYNC.format(options=options), str(local), uri]


@pytest.mark.s3
def test_a_slow_upload_shows_a_bar_in_a_terminal(hanging):
    with Terminal(command(hanging), cwd=ROOT) as terminal:
        terminal.wait_for("1 file left")
        assert "[red]local" in terminal.shown
        assert "2.1 MB" in terminal.shown
        hanging[2].release()
        terminal.wait_for("done")
        assert terminal.wait() == 0


@pytest.mark.s3
def test_nothing_is_shown_without_a_terminal(hanging):
    process = subprocess.Popen(command(hanging), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert hanging[2].reached.wait(60)
    hanging[2].release()
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, "done\n")
    assert "left" not in err


@pytest.mark.s3
def test_bars_can_be_switched_off(hanging):
    with Terminal(command(hanging, "progress=False"), cwd=ROOT) as terminal:
        assert hanging[2].reached.wait(60)
        hanging[2].release()
        assert terminal.wait() == 0
        assert "left" not in terminal.shown
        assert "done" in terminal.shown


def test_outside_of_a_worker_only_the_own_terminal_counts(monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False, raising=False)
    for wanted in (None, True, False):
        assert progress_bars.watcher(wanted, driver_has_terminal=True) is None
