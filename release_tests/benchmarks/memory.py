"""Peak memory of a sync over what the process had before, each in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from release_tests.benchmarks import clients
from release_tests.benchmarks.common import GIB, KIB, MIB, Row, main, make_files, peak_rss, reset_peak, s3, scratch
from release_tests.benchmarks.large_files import _Remote


def measure(directory: str, place: object, name: str) -> int:
    job = json.dumps({"endpoint": place.endpoint, "data": place.server.data, "directory": directory, "name": name})
    done = subprocess.run(
        [sys.executable, "-m", "release_tests.benchmarks.memory", "--child", job],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    used = int(done.stdout.split()[-1])
    print(f"  {name:<28} {used / MIB:8.1f} MiB", flush=True)
    place.remove(f"{name}-warm")
    place.remove(name)
    return used


def child(job: dict[str, str]) -> None:
    place = _Remote(job["endpoint"], job["data"])
    # What is loaded once, whatever is synced, is part of the base.
    warm = make_files(f"{job['directory']}-warm", 40, KIB)
    clients.ours(warm, place)(f"{job['name']}-warm")
    base = reset_peak()
    clients.ours(job["directory"], place)(job["name"])
    print(peak_rss() - base)


def run() -> list[Row]:
    rows = []
    with scratch() as directory, s3() as place:
        small = measure(make_files(f"{directory}/small", 10_000, KIB), place, "small")
        rows.append(
            Row(
                "peak memory over base, 10,000 files of 1 KiB to S3",
                "<= 64 MiB",
                f"{small / MIB:.0f} MiB",
                small <= 64 * MIB,
            )
        )
        os.makedirs(f"{directory}/sparse")
        with open(f"{directory}/sparse/sparse.bin", "wb") as file:
            file.truncate(6 * GIB)
        sparse = measure(f"{directory}/sparse", place, "sparse")
        rows.append(
            Row(
                "peak memory over base, a sparse file of 6 GiB to S3",
                "<= 128 MiB",
                f"{sparse / MIB:.0f} MiB",
                sparse <= 128 * MIB,
            )
        )
    return rows


if __name__ == "__main__":
    if "--child" in sys.argv:
        child(json.loads(sys.argv[-1]))
    else:
        main("memory", run)
