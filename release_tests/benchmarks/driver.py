"""What a snapshot of the experiment costs the driver: 1,000 trials with 5 files each, 10 of them changed.

Both syncers are used as Ray's driver uses them: `sync_up` of the whole staging directory, then `wait`.
"""

from __future__ import annotations

import os
import time

from ray.train._internal.storage import _FilesystemSyncer

from ray_artifact_sync import ArtifactRegistry, ArtifactSyncer
from release_tests.benchmarks import clients
from release_tests.benchmarks.common import Place, Row, main, medians, s3, scratch, times

ROUNDS = int(os.environ.get("ROUNDS", "5"))
TRIALS = int(os.environ.get("TRIALS", "1000"))
CHANGED = 10
FILES = {
    "progress.csv": b"time,loss\n" + b"1.0,0.5\n" * 100,
    "result.json": b'{"loss": 0.5, "time": 1.0}\n' * 100,
    "params.json": b'{"lr": 0.1}',
    "params.pkl": os.urandom(200),
    "events.out.tfevents.1": os.urandom(2_000),
}
TIMES_FASTER = 50


def make_staging(directory: str) -> str:
    for trial in range(TRIALS):
        for name, body in FILES.items():
            path = f"{directory}/trial_{trial:05d}/{name}"
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "wb") as file:
                file.write(b"%d " % trial + body)
    return directory


def change(directory: str, number: int) -> None:
    """Half of the changes are a line more, as the loggers write; the others rewrite a file."""
    for index in range(CHANGED):
        trial = f"{directory}/trial_{(number * CHANGED + index) % TRIALS:05d}"
        if index % 2:
            with open(f"{trial}/result.json", "ab") as file:
                file.write(b'{"loss": 0.4, "time": 2.0}\n')
        else:
            with open(f"{trial}/params.json", "wb") as file:
                file.write(b'{"lr": %d}' % number)
    time.sleep(0.06)  # beyond the clock's tick, as in life: a file written a moment ago is hashed twice


def run_snapshots(directory: str, place: Place) -> Row:
    filesystem = clients.filesystem_at(place.endpoint)
    ours = ArtifactSyncer().bind(filesystem, sync_period=300, sync_timeout=1800, registry=ArtifactRegistry.default())
    rays = _FilesystemSyncer(storage_filesystem=filesystem, sync_period=300, sync_timeout=1800)
    place.directory("rays")

    def sync(syncer: object, name: str) -> float:
        started = time.perf_counter()
        assert syncer.sync_up(directory, f"{place.bucket}/{name}")
        syncer.wait()
        return time.perf_counter() - started

    seconds: dict[str, list[float]] = {"ours": [], "nothing changed": [], "Ray": []}
    first = sync(ours, "ours")
    print(f"  first: ours {first:.1f} s", flush=True)
    most, idle, of_ray = 0, 0, 0
    for number in range(ROUNDS):
        change(directory, number)
        requests = place.count(lambda: seconds["ours"].append(sync(ours, "ours")))
        most = max(most, sum(requests.values()))
        requests = place.count(lambda: seconds["nothing changed"].append(sync(ours, "ours")))
        idle = max(idle, sum(requests.values()))
        if not number:  # minutes, and it sends everything each time
            of_ray = sum(place.count(lambda: seconds["Ray"].append(sync(rays, "rays"))).values())
        print(f"  ours {seconds['ours'][-1]:.3f} s, Ray {seconds['Ray'][0]:.1f} s", flush=True)
    ours.close()
    found = medians(seconds)
    faster = found["Ray"] / found["ours"]
    return Row(
        f"experiment snapshot of the driver: {TRIALS:,} trials x {len(FILES)} files, {CHANGED} changed, S3 at 20 ms",
        f">= {TIMES_FASTER}x Ray's syncer; requests = changes + at most 10",
        f"{faster:.0f}x Ray's; {most} requests, {idle} with no change, Ray {of_ray:,} ({times(seconds)})",
        faster >= TIMES_FASTER and most <= CHANGED + 10,
        seconds,
        f"Ray's is measured once only; our first snapshot, which sends everything, takes {first:.1f} s",
    )


def run() -> list[Row]:
    with scratch() as directory, s3(0.02) as place:
        return [run_snapshots(make_staging(f"{directory}/staging"), place)]


if __name__ == "__main__":
    main("driver", run)
