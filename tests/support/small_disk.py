"""File systems of a few MiB, to be filled to the last byte. Mounting needs root."""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

FILLER = "filler"


def mount(directory: Path, mib: int) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={mib}m", "tmpfs", str(directory)], check=True, capture_output=True
    )


def unmount(directory: Path) -> None:
    subprocess.run(["umount", "--lazy", str(directory)], check=True)  # whoever has files open keeps them


@contextlib.contextmanager
def small_disk(directory: Path, mib: int) -> Iterator[Path]:
    mount(directory, mib)
    try:
        yield directory
    finally:
        unmount(directory)


def why_not() -> str:
    """Why there can be none here; empty if there can."""
    with tempfile.TemporaryDirectory() as directory:
        try:
            with small_disk(Path(directory), 1):
                return ""
        except (OSError, subprocess.CalledProcessError) as error:
            return f"cannot mount a tmpfs ({error})"


def unmount_below(directory: Path) -> None:
    """Everything that is mounted there."""
    for line in Path("/proc/mounts").read_text().splitlines():
        place = Path(line.split()[1].replace("\\040", " "))
        if place.is_relative_to(directory):
            unmount(place)


def fill(directory: Path) -> None:
    """Takes all the room that there is."""
    with open(directory / FILLER, "ab", buffering=0) as file, contextlib.suppress(OSError):
        for size in (1024 * 1024, 4096, 1):
            with contextlib.suppress(OSError):
                while file.write(bytes(size)) == size:
                    pass


def free(directory: Path) -> None:
    """Gives it back, wherever it was moved to meanwhile."""
    for file in directory.rglob(FILLER):
        file.unlink()
