from __future__ import annotations

import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ray_artifact_sync import cli
from tests.support.looking import Ran, Spot
from tests.support.small_disk import mount, unmount


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    place = tmp_path / "small"
    try:
        mount(place, 1)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"cannot mount a tmpfs ({error})")
    yield place
    unmount(place)


@pytest.fixture(params=["local", pytest.param("s3", marks=pytest.mark.s3)])
def spot(request, tmp_path) -> Spot:
    if request.param == "local":
        return Spot(lambda path="": str(tmp_path / "storage" / path), None, tmp_path)
    prefix = uuid.uuid4().hex
    s3_uri = request.getfixturevalue("s3_uri")
    return Spot(lambda path="": s3_uri(f"{prefix}/{path}".rstrip("/")), request.getfixturevalue("proxy"), tmp_path)


@pytest.fixture
def command(monkeypatch, capsys) -> Callable[..., Ran]:
    """Runs `ray-artifact-sync ...` in this process."""

    def run(*arguments: object) -> Ran:
        monkeypatch.setattr(sys, "argv", ["ray-artifact-sync", *map(str, arguments)])
        capsys.readouterr()
        try:
            cli.main()
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
        out, err = capsys.readouterr()
        return Ran(code, out, err)

    return run
