"""The demo on an S3 server (`rclone serve s3`)."""

from pathlib import Path

from release_tests.scenarios import demo

NAME = "demo, S3"
quick = False


def run(workdir: Path, *, quick: bool) -> dict[str, object]:
    return demo.run(workdir, quick=quick, s3=True)
