"""What one checkpoint costs as the history grows: requests, bytes and seconds for each of 500, of which Ray keeps 3.

    python -m release_tests.benchmarks.history       measures, draws plots/history.png, writes results/history.json

Drawing needs `pip install -e '.[plots]'`. Each checkpoint has a log that grew, two rewritten files and a new one; the
number of files stays the same, so that only the history can make it dearer.
"""

from __future__ import annotations

import os
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

from ray_artifact_sync.stores import open_store
from release_tests.benchmarks.common import Row, Server, main, scratch
from tests.support.fault_proxy import FaultProxy
from tests.support.s3_servers import BUCKET, filesystem_at
from tests.support.sessions import open_session, save

PLOTS = Path(__file__).with_name("plots")
CHECKPOINTS = int(os.environ.get("CHECKPOINTS", "500"))
KEPT = 3
FILES = 20
WARM_UP = 20
"""Checkpoints at the start that differ: fewer are kept, and not all files are there."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One checkpoint.

    Attributes:
        requests: All that were made, by whoever: the artifacts, the checkpoint's own file, bookkeeping, the journal.
        sent: Bytes of their bodies.
        received: Bytes of the answers' bodies.
        seconds: From begin to end.
    """

    requests: int
    sent: int
    received: int
    seconds: float


def write_artifacts(work: Path, n: int) -> None:
    """Few, and as many in each step."""
    with open(work / "log.txt", "a") as log:
        log.write(f"step {n}\n")
    (work / "metrics.json").write_text(f'{{"step": {n}, "loss": {1 / (n + 1)}}}')
    (work / "state.bin").write_bytes(n.to_bytes(4, "big") * 2500)
    plots = work / "plots"
    plots.mkdir(exist_ok=True)
    (plots / f"{n}.txt").write_text(f"plot {n}\n" * 50)
    if n >= FILES:
        (plots / f"{n - FILES}.txt").unlink()


def measure(count: int = CHECKPOINTS) -> list[Sample]:
    """On S3, through a proxy that counts; deletions of old checkpoints, Ray's own work, go past it."""
    samples: list[Sample] = []
    with scratch() as directory, Server() as server, FaultProxy(server.endpoint) as proxy:
        work = Path(directory, "work")
        session = open_session(work, open_store(filesystem_at(proxy.endpoint), f"{BUCKET}/history/trial"), 1)
        behind = open_store(filesystem_at(server.endpoint), f"{BUCKET}/history/trial")
        for n in range(count):
            write_artifacts(work, n)
            time.sleep(0.02)  # beyond the clock's tick, as in life: a file written a moment ago is hashed twice
            proxy.reset_counts()
            started = time.perf_counter()
            assert save(session, f"checkpoint_{n:06d}", {"model.bin": b"m" * 1000})
            seconds = time.perf_counter() - started
            while not session._thread.idle() or proxy.in_flight:
                time.sleep(0.001)  # the journal, for which nobody waits
            samples.append(
                Sample(sum(proxy.counts.values()), sum(proxy.bytes_in.values()), sum(proxy.bytes_out.values()), seconds)
            )
            if n >= KEPT:
                behind.delete([file.path for file in behind.list(f"checkpoint_{n - KEPT:06d}")])
        session.close()
    return samples


def thirds(values: list[float]) -> tuple[float, float]:
    """Means of the first and of the last third, after the warm-up."""
    settled = values[WARM_UP:]
    size = len(settled) // 3
    return statistics.mean(settled[:size]), statistics.mean(settled[-size:])


def growth(values: list[float]) -> float:
    """What a straight line through the values, after the warm-up, gains from the first to the last."""
    settled = values[WARM_UP:]
    return statistics.linear_regression(range(len(settled)), settled).slope * (len(settled) - 1)


def check_flat(samples: list[Sample]) -> str:
    """Whether the requests of a checkpoint do not depend on how many there were before; in words.

    Raises:
        AssertionError: They do.
    """
    requests = [float(sample.requests) for sample in samples]
    first, last = thirds(requests)
    gained = growth(requests)
    assert abs(gained) < 1.0, f"from {first:.1f} requests to {last:.1f}: {gained:.2f} more over the history"
    return f"{first:.1f} in the first third, {last:.1f} in the last"


def draw(samples: list[Sample], path: Path) -> None:
    """Three plots, one above the other."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(3, 1, sharex=True, figsize=(8, 8), constrained_layout=True)
    columns = (
        ("requests", [sample.requests for sample in samples]),
        ("kB sent", [sample.sent / 1e3 for sample in samples]),
        ("seconds", [sample.seconds for sample in samples]),
    )
    for axis, (name, values) in zip(axes, columns, strict=True):
        axis.plot(values, ".", markersize=3, color="tab:blue")
        window = [statistics.median(values[max(0, n - 15) : n + 16]) for n in range(len(values))]
        axis.plot(window, color="tab:orange", label="median of 31")
        axis.set_ylabel(name)
        axis.set_ylim(0, 1.15 * max(values))
        axis.grid(alpha=0.3)
    axes[0].legend(loc="lower right")
    axes[0].set_title(f"One checkpoint's cost, {FILES + 3} files, {KEPT} checkpoints kept, S3 server on this machine")
    axes[-1].set_xlabel("checkpoint")
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def rows(samples: list[Sample]) -> list[Row]:
    sent = thirds([float(sample.sent) for sample in samples])
    seconds = thirds([sample.seconds for sample in samples])
    return [
        Row(
            f"{len(samples)} checkpoints, {KEPT} kept: requests of one",
            "the same at the end as at the start",
            check_flat(samples),
            ok=True,
            seconds={"first third": [seconds[0]], "last third": [seconds[1]]},
            note=f"bytes sent, first and last third: {sent[0]:.0f} and {sent[1]:.0f} (the log grows); seconds: "
            f"{seconds[0]:.3f} and {seconds[1]:.3f}. Plot: plots/history.png",
        )
    ]


def run() -> list[Row]:
    samples = measure()
    try:
        draw(samples, PLOTS / "history.png")
    except ImportError:
        print("No plot: it needs `pip install -e '.[plots]'`.")
    return rows(samples)


if __name__ == "__main__":
    main("history", run)
