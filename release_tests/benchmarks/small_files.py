"""Many small files to S3, without and with latency: time, and requests."""

from __future__ import annotations

import os

from release_tests.benchmarks import clients
from release_tests.benchmarks.common import KIB, MIB, Place, Row, main, make_files, ratio, rounds, s3, scratch, times

ROUNDS = int(os.environ.get("ROUNDS", "5"))


def no_latency(directory: str, place: Place) -> Row:
    raw, prepare = clients.RawHttp(place).files(directory)
    contestants = {
        "ours": clients.ours(directory, place),
        "bare obstore": clients.bare_obstore(directory, place),
        "raw HTTP": raw,
        "ours (DirectorySync)": clients.our_directory_sync(directory, place),
        "rclone": clients.rclone(directory, place),
        "s3fs": clients.fsspec_s3(directory, place),
        "pyarrow": clients.arrow(directory, place),
        "Ray": clients.rays(directory, place),
    }
    seconds = rounds(
        contestants, ROUNDS, prepare=lambda name, prefix: name == "raw HTTP" and prepare(prefix), tidy=place.remove
    )
    ray, bare, http = (
        ratio(seconds, "Ray", "ours"),
        ratio(seconds, "ours", "bare obstore"),
        ratio(seconds, "ours", "raw HTTP"),
    )
    rclone = ratio(seconds, "rclone", "ours")
    return Row(
        "2,000 files of 4 KiB to S3, no latency",
        ">= 4x Ray's, faster than rclone, <= 1.2x a bare obstore loop, <= 1.5x raw HTTP",
        f"{ray:.1f}x Ray's, {rclone:.1f}x rclone's, {bare:.2f}x obstore's time, {http:.2f}x raw HTTP's "
        f"({times(seconds)})",
        ray >= 4 and rclone > 1 and bare <= 1.2 and http <= 1.5,
        seconds,
    )


def with_latency(directory: str, place: Place) -> Row:
    requests: dict[str, int] = {}

    def counted(prefix: str) -> None:
        requests.clear()
        requests.update(place.count(lambda: clients.ours(directory, place)(prefix)))

    contestants = {
        "ours": counted,
        "bare obstore": clients.bare_obstore(directory, place),
        "rclone": clients.rclone(directory, place),
        "s3fs": clients.fsspec_s3(directory, place),
        "Ray": clients.rays(directory, place),
    }
    seconds = rounds(contestants, min(ROUNDS, 5), tidy=place.remove, warm_up=False)
    ray = ratio(seconds, "Ray", "ours")
    total, files = sum(requests.values()), len(os.listdir(directory))
    return Row(
        "500 files of 4 KiB to S3 at 20 ms",
        ">= 30x Ray's; requests = files + at most 10",
        f"{ray:.1f}x Ray's; {total} requests ({times(seconds)})",
        ray >= 30 and total <= files + 10,
        seconds,
        note=f"requests: {requests}",
    )


def medium(directory: str, place: Place, target: float) -> Row:
    contestants = {
        "ours": clients.ours(directory, place),
        "bare obstore": clients.bare_obstore(directory, place),
        "rclone": clients.rclone(directory, place),
        "pyarrow": clients.arrow(directory, place),
        "Ray": clients.rays(directory, place),
    }
    seconds = rounds(contestants, ROUNDS, tidy=place.remove, warm_up=not place.latency)
    ray = ratio(seconds, "Ray", "ours")
    latency = f"at {place.latency * 1000:.0f} ms" if place.latency else "no latency"
    return Row(
        f"200 files of 1 MiB to S3, {latency}",
        f">= {target:g}x Ray's",
        f"{ray:.1f}x Ray's ({times(seconds)})",
        ray >= target,
        seconds,
    )


def run() -> list[Row]:
    rows = []
    with scratch() as directory:
        small = make_files(f"{directory}/small", 2_000, 4 * KIB)
        few = make_files(f"{directory}/few", 500, 4 * KIB)
        large = make_files(f"{directory}/medium", 200, MIB)
        with s3() as place:
            rows.append(no_latency(small, place))
            rows.append(medium(large, place, 1.5))
        with s3(0.02) as place:
            rows.append(with_latency(few, place))
            rows.append(medium(large, place, 10))
    return rows


if __name__ == "__main__":
    main("small_files", run)
