"""Storage for real Ray runs: local and S3 behind one face."""

from __future__ import annotations

import os
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyarrow import fs as pafs

from tests.support.azure_server import CONTAINER
from tests.support.s3_servers import BUCKET


@dataclass
class Place:
    """A storage path for a RunConfig, and a way to look into it."""

    storage_path: str
    filesystem: Any = None
    scratch: Path = Path()

    @property
    def run_options(self) -> dict:
        return {"storage_path": self.storage_path, "storage_filesystem": self.filesystem}

    def fetch(self, path: str) -> Path:
        """A local directory with all files below a path of the storage."""
        if self.filesystem is None:
            return Path(path)
        target = self.scratch / uuid.uuid4().hex
        for info in self.filesystem.get_file_info(pafs.FileSelector(path, recursive=True)):
            if info.type == pafs.FileType.File:
                local = target / os.path.relpath(info.path, path)
                local.parent.mkdir(parents=True, exist_ok=True)
                with self.filesystem.open_input_stream(info.path) as stream:
                    local.write_bytes(stream.read())
        return target


def local_place(tmp_path: Path) -> Place:
    return Place(str(tmp_path / "storage"))


def s3_place(tmp_path: Path, filesystem: Any) -> Place:
    return Place(f"{BUCKET}/{uuid.uuid4().hex}", filesystem, tmp_path / "fetched")


def azure_place(tmp_path: Path, filesystem: Any) -> Place:
    return Place(f"{CONTAINER}/{uuid.uuid4().hex}", filesystem, tmp_path / "fetched")
