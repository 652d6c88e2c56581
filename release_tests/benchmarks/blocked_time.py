"""How long a CPU-bound Python loop is blocked by a background sync (by the GIL, that is).

Blocked is the wall time of the looping thread, less its CPU time, less its time in the kernel's run queue (both from
/proc/thread-self/schedstat): what other processes on the same cores take is not held against anybody.
"""

from __future__ import annotations

import os
import shutil
import threading
import time

from ray_artifact_sync.stores import open_store
from release_tests.benchmarks import clients
from release_tests.benchmarks.common import KIB, MIB, Place, Row, main, make_files, make_large, s3, scratch
from tests.support.s3_servers import filesystem_at

ROUNDS = int(os.environ.get("ROUNDS", "3"))


def blocked_share(run: object, *, least: float = 1.0) -> tuple[float, float]:
    """(share of the time that the loop was blocked, seconds), while `run` runs in another thread."""
    thread = threading.Thread(target=run, daemon=True)
    with open("/proc/thread-self/schedstat") as file:
        thread.start()
        started = time.perf_counter_ns()
        cpu, waited = (int(value) for value in file.read().split()[:2])
        value = 0
        while thread.is_alive() or time.perf_counter_ns() - started < least * 1e9:
            for _ in range(10_000):
                value = (value * 1_103_515_245 + 12_345) & 0x7FFFFFFF
            if not thread.is_alive():
                break
        wall = time.perf_counter_ns() - started
        file.seek(0)
        cpu_after, waited_after = (int(value) for value in file.read().split()[:2])
    thread.join()
    return max(0.0, wall - (cpu_after - cpu) - (waited_after - waited)) / wall, wall / 1e9


def measure(work: str, contestants: dict[str, clients.Run], place: Place) -> Row:
    shares: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(ROUNDS):
        for name, run in contestants.items():
            prefix = f"{name.replace(' ', '-')}-{number}"
            place.directory(prefix)
            share, seconds = blocked_share(lambda run=run, prefix=prefix: run(prefix))
            place.remove(prefix)
            shares[name].append(share)
            print(f"  {number} {name:<24} {share:6.1%} of {seconds:.2f} s", flush=True)
    middle = {name: sorted(values)[len(values) // 2] for name, values in shares.items()}
    return Row(
        f"a CPU-bound Python loop while a background sync uploads {work}",
        "blocked <= 5% of the time",
        ", ".join(f"{name} {share:.1%}" for name, share in middle.items()),
        middle["ours"] <= 0.05,
        note="shares of the time in which the loop was blocked; median",
    )


def in_background(directory: str, place: Place) -> clients.Run:
    """A session whose periodic sync sends everything."""
    count = len(os.listdir(directory))

    def run(prefix: str) -> None:
        store = open_store(filesystem_at(place.endpoint), f"{place.bucket}/{prefix}")
        artifacts = clients.session(directory, store, sync_period=0.05)
        while artifacts.stats.files_sent < count or len(artifacts.trial.head() or ()) < count:
            time.sleep(0.1)
        artifacts.close(flush=False)
        shutil.rmtree(os.path.join(directory, ".ray_artifact_sync"))

    return run


def run() -> list[Row]:
    with scratch() as directory, s3() as place:
        large = make_large(f"{directory}/large/large.bin", 1024 * MIB)
        small = make_files(f"{directory}/small", 2_000, 4 * KIB)
        folder = os.path.dirname(large)
        return [
            measure("1 GiB", {"ours": in_background(folder, place), "Ray": clients.rays(folder, place)}, place),
            measure(
                "2,000 files of 4 KiB",
                {
                    "ours": in_background(small, place),
                    "ours (at a checkpoint)": clients.ours(small, place),
                    "bare obstore": clients.bare_obstore(small, place),
                    "Ray": clients.rays(small, place),
                },
                place,
            ),
        ]


if __name__ == "__main__":
    main("blocked_time", run)
