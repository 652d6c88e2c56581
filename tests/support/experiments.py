"""An experiment on disk that looks like one of real life: files, checkpoints, pictures, and journals over hours."""

from __future__ import annotations

import math
import os
import random
import struct
import time
import zlib
from pathlib import Path

from ray_artifact_sync import layout
from ray_artifact_sync.journal import JournalRecord, SentFile, SkipNote
from ray_artifact_sync.journal_files import JournalWriter
from ray_artifact_sync.stores.posix import PosixStore
from tests.support.sessions import open_session, save


def png(width: int, height: int, pixel) -> bytes:
    """A picture; `pixel(x, y)` gives red, green, blue."""
    lines = b"".join(b"\0" + bytes(value for x in range(width) for value in pixel(x, y)) for y in range(height))

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(lines)) + chunk(b"IEND", b"")


def heat(seed: int) -> bytes:
    """A picture like a confusion matrix."""
    rng = random.Random(seed)
    cells = [[rng.random() * (1 if row == column else 0.3) for column in range(8)] for row in range(8)]

    def pixel(x: int, y: int) -> tuple[int, int, int]:
        value = cells[y // 10][x // 10]
        return int(250 - 200 * value), int(250 - 150 * value), int(255 - 60 * value)

    return png(80, 80, pixel)


def curve(seed: int, steps: int = 60) -> bytes:
    """A loss curve."""
    rng = random.Random(seed)
    points = [(30 + 5 * n, 20 + 180 * (1 - math.exp(-n / (8 + seed % 7))) - 8 * rng.random()) for n in range(steps)]
    line = " ".join(f"{x:.0f},{y:.1f}" for x, y in points)
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 360 240"><rect width="360" height="240" fill="#fff"/>'
        '<path d="M30 10v200h320" fill="none" stroke="#888"/>'
        f'<polyline points="{line}" fill="none" stroke="#c2410c" stroke-width="2.5"/>'
        '<text x="36" y="230" font-size="13" fill="#555">step</text></svg>'
    ).encode()


def make_trial(directory: Path, work: Path, number: int, *, events: int = 60, journal: bool = True) -> None:
    """One trial: real artifacts and checkpoints through a session, and a journal of a run that took hours."""
    rng = random.Random(number)
    store = PosixStore(directory)
    work.mkdir(parents=True)
    session = open_session(work, store, number * 100 + 1, trial=directory.name, set_aside=False, journal=False)
    (work / "plots").mkdir()
    (work / "plots/confusion.png").write_bytes(heat(number))
    (work / "plots/loss.svg").write_bytes(curve(number))
    (work / "config.json").write_text('{"lr": 0.01,\n "layers": [64, 64]}\n')
    for index in range(3):
        with open(work / "train.log", "a") as log:
            log.writelines(
                f"step {n:5d}  loss {math.exp(-n / 60) + rng.random() / 9:.4f}\n"
                for n in range(index * 50, index * 50 + 50)
            )
        rows = "".join(f"{n},{rng.random():.4f},{rng.choice(['cat', 'dog'])}\n" for n in range(40 * (index + 1)))
        (work / "predictions.csv").write_text("id,score,label\n" + rows)
        save(session, f"checkpoint_{index:06d}")
    session.close()
    if journal:
        write_journal(store, number, rng, events)


def write_journal(store: PosixStore, number: int, rng: random.Random, events: int) -> None:
    attempts = 1 + number % 3
    t = time.time() - attempts * (events * 46 + 100) - rng.random() * 3600
    stored = 40_000_000
    for attempt in range(attempts):
        writer = JournalWriter(store, layout.make_token(number * 100 + attempt + 1))
        writer.add(JournalRecord(kind="begin", t=t, host=f"node-{1 + (number + attempt) % 4}"))
        if attempt:
            t += 4
            restored = JournalRecord(
                kind="restore",
                t=t,
                seconds=2.5,
                checkpoint=f"checkpoint_{attempt * 3:06d}",
                files_read=40,
                bytes_read=stored,
                files_local=2,
            )
            writer.add(restored)
        for step in range(events):
            t += 20 + rng.random() * 40
            writer.add(_sync(rng, t, step, stored))
            stored += 200_000
            if step % 9 == 8:
                t += 2
                writer.add(
                    JournalRecord(
                        kind="checkpoint",
                        t=t,
                        seconds=1.5 + rng.random(),
                        checkpoint=f"checkpoint_{attempt * 3 + step // 9:06d}",
                        files=60,
                        bytes=stored,
                    )
                )
            if rng.random() < 0.006:
                writer.add(JournalRecord(kind="failure", t=t + 5, error="StorageError: 503 SlowDown: reduce your rate"))
        if attempt == attempts - 1:
            writer.add(JournalRecord(kind="close", t=t + 1, files=60, bytes=stored))
        t += 90
        writer.write()


def _sync(rng: random.Random, t: float, step: int, stored: int) -> JournalRecord:
    changed = int(rng.lognormvariate(12, 1.6))
    first = step == 0
    return JournalRecord(
        kind="sync",
        t=t,
        seconds=0.2 + changed / 4e7,
        files=60,
        bytes=stored,
        files_sent=60 if first else rng.randrange(1, 8),
        bytes_sent=stored if first else int(changed * (1 + rng.random())),
        bytes_changed=stored if first else changed,
        requests=8,
        retries=int(rng.random() < 0.05),
        skipped=3 if first else 0,
        skips=(
            SkipNote("scratch/batch.tmp", "excluded", "matches exclude '*.tmp'"),
            SkipNote("progress.csv", "owned", "CSVLoggerCallback on the driver owns 'progress.csv'"),
            SkipNote("data", "unsupported", "a symbolic link out of the working directory"),
        )
        if first
        else (),
        sent=(
            SentFile("train.log", 30 + step * 20, 20),
            SentFile("predictions.csv", 20 + step * 9, 9),
        ),
    )


def make_experiment(root: Path, trials: int, *, events: int = 60) -> Path:
    """An experiment; gives its directory."""
    experiment = root / "experiment"
    for number in range(1, trials + 1):
        name = f"train_resnet_{number:05d}_lr=0.{number % 9 + 1},depth={18 + number % 3 * 16}_2026-05-28_20-26-40"
        make_trial(experiment / name, root / "work" / str(number), number, events=events)
    return experiment


def size_of(directory: Path) -> int:
    return sum(os.path.getsize(os.path.join(folder, name)) for folder, _, names in os.walk(directory) for name in names)
