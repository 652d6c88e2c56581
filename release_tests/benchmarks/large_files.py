"""One file of 1 GiB to S3 and back: time, and peak memory of each client in a process of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from release_tests.benchmarks import clients
from release_tests.benchmarks.common import (
    BUCKET,
    GIB,
    MIB,
    Place,
    Row,
    main,
    make_large,
    medians,
    ratio,
    rounds,
    s3,
    scratch,
    times,
)
from release_tests.benchmarks.proxy import Proxy

ROUNDS = int(os.environ.get("ROUNDS", "3"))
SIZE = int(os.environ.get("LARGE_MIB", "1024")) * MIB


def up(directory: str, path: str, place: Place) -> Row:
    raw = clients.RawHttp(place)

    def raw_parts(prefix: str) -> None:
        place.directory(prefix)
        raw.parts(path, f"{prefix}/large.bin")

    contestants = {
        "ours": clients.ours(directory, place),
        "obstore": clients.obstore_multipart(path, place),
        "rclone": clients.rclone(directory, place),
        "s3fs": clients.fsspec_s3(directory, place),
        "Ray": clients.rays(directory, place),
        "raw HTTP": raw_parts,
    }
    seconds = rounds(contestants, ROUNDS, tidy=place.remove, warm_up=False)
    memory = {name: child_memory("up", name, place, directory) for name in ("ours", "Ray", "obstore", "s3fs")}
    return verdict("up", seconds, memory)


def down(directory: str, path: str, place: Place, scratch_dir: str) -> Row:
    clients.our_directory_sync(directory, place)("given")
    checkpoint = "checkpoint_000000"
    store = clients.open_store(clients.filesystem_at(place.endpoint), f"{place.bucket}/trial")
    artifacts = clients.session(directory, store)
    artifacts.commit_checkpoint(checkpoint, lambda engine: None)
    artifacts.close(flush=False)
    shutil.rmtree(os.path.join(directory, ".ray_artifact_sync"))
    raw = clients.RawHttp(place)

    def raw_ranges(target: str) -> None:
        os.makedirs(target)
        raw.get("given/large.bin", os.path.join(target, "large.bin"))

    def to(run):
        return lambda name: run(os.path.join(scratch_dir, name))

    contestants = {
        "ours": to(clients.ours_down(place, "given")),
        "ours (restore)": to(clients.our_restore(place, "trial", checkpoint)),
        "obstore": to(clients.obstore_down(place, "given/large.bin")),
        "rclone": to(clients.rclone_down(place, "given")),
        "pyarrow": to(clients.arrow_down(place, "given")),
        "Ray": to(clients.rays_down(place, "given")),
        "raw HTTP": to(raw_ranges),
    }

    def tidy(name: str) -> None:
        shutil.rmtree(os.path.join(scratch_dir, name), ignore_errors=True)

    seconds = rounds(contestants, ROUNDS, tidy=tidy, warm_up=False)
    memory = {name: child_memory("down", name, place, scratch_dir) for name in ("ours", "ours (restore)", "Ray")}
    return verdict("down", seconds, memory)


def verdict(way: str, seconds: dict[str, list[float]], memory: dict[str, int]) -> Row:
    found = medians(seconds)
    others = {name: value for name, value in found.items() if not name.startswith(("ours", "raw"))}
    fastest = min(others, key=others.get)
    slower = ratio(seconds, "ours", fastest)
    share = memory["ours"] / max(1, memory["Ray"])
    used = ", ".join(f"{name} {value / MIB:.0f}" for name, value in memory.items())
    return Row(
        f"1 file of {SIZE / GIB:g} GiB to S3, {way}",
        "no slower than the fastest client (10%), at most 1/4 of Ray's memory",
        f"{slower:.2f}x the time of {fastest}, {share:.2f} of Ray's memory ({times(seconds)}; MiB over base: {used})",
        slower <= 1.1 and share <= 0.25,
        seconds,
        note="raw HTTP (signed beforehand, nothing hashed, no retries) is the limit, no client",
    )


def child_memory(way: str, name: str, place: Place, directory: str) -> int:
    """Peak memory over what the process had before it began, in bytes."""
    job = json.dumps(
        {"way": way, "name": name, "endpoint": place.endpoint, "data": place.server.data, "directory": directory}
    )
    done = subprocess.run(
        [sys.executable, "-m", "release_tests.benchmarks.large_files", "--child", job],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    print(f"  memory  {name:<28} {int(done.stdout.split()[-1]) / MIB:8.0f} MiB", flush=True)
    return int(done.stdout.split()[-1])


class _Remote:
    """Another process's place."""

    proxy = None
    latency = 0.0

    def __init__(self, endpoint: str, data: str) -> None:
        self.endpoint = endpoint
        self.bucket = BUCKET
        self.data = data

    def directory(self, prefix: str) -> str:
        path = os.path.join(self.data, self.bucket, prefix)
        os.makedirs(path, exist_ok=True)
        return path


def child(job: dict[str, str]) -> None:
    from release_tests.benchmarks.common import peak_rss, reset_peak

    place = _Remote(job["endpoint"], job["data"])
    directory = job["directory"]
    target = "memory-" + job["name"].replace(" ", "-")
    if job["way"] == "up":
        run = {
            "ours": clients.ours(directory, place),
            "Ray": clients.rays(directory, place),
            "obstore": clients.obstore_multipart(os.path.join(directory, "large.bin"), place),
            "s3fs": clients.fsspec_s3(directory, place),
        }[job["name"]]
        base = reset_peak()
        run(target)
    else:
        run = {
            "ours": clients.ours_down(place, "given"),
            "ours (restore)": clients.our_restore(place, "trial", "checkpoint_000000"),
            "Ray": clients.rays_down(place, "given"),
        }[job["name"]]
        base = reset_peak()
        run(os.path.join(directory, target))
        shutil.rmtree(os.path.join(directory, target))
    print(peak_rss() - base)


def run() -> list[Row]:
    with scratch() as directory, s3() as place, Proxy(place.endpoint) as ranges:
        path = make_large(f"{directory}/large/large.bin", SIZE)
        os.makedirs(f"{directory}/down")
        return [
            up(f"{directory}/large", path, place),
            down(f"{directory}/large", path, Place(place.server, ranges), f"{directory}/down"),
        ]


if __name__ == "__main__":
    if "--child" in sys.argv:
        child(json.loads(sys.argv[-1]))
    else:
        main("large_files", run)
