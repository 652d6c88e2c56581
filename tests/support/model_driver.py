"""Ray's driver as one more process of the model: it writes a file that no callback declares, and the trial may too."""

from __future__ import annotations

import os

from ray_artifact_sync.concurrency import Deadline
from ray_artifact_sync.directory_sync import DirectorySync
from ray_artifact_sync.driver_files import DriverFiles
from ray_artifact_sync.options import SyncOptions
from ray_artifact_sync.registry import ArtifactRegistry
from tests.support.model import FIXED_NS, ROOT, Attempt

FILE = "flag"
"""What both write."""


class DriverProcess(Attempt):
    """Sends the driver's staging directory; is no attempt, and takes nobody's place."""

    def begin(self) -> None:
        self.opened = True
        self.staging = self.world.working_dir(self.number)
        self.store = self.store_of("experiment")
        self.files = DriverFiles(self.staging, ArtifactRegistry.default(), max_concurrency=1)
        self.files._with_declared.add("t_1")  # it has a declared file as well, which would only add requests
        self.directory = DirectorySync(
            self.staging,
            self.store,
            options=SyncOptions(max_concurrency=1, retries=3),
            verify_remote=False,
            shared=self.files,
        )

    def write(self, path: str, data: bytes, mode: str = "wb") -> None:
        local = os.path.join(self.staging, os.path.basename(ROOT), path)
        os.makedirs(os.path.dirname(local), exist_ok=True)
        with open(local, mode) as file:
            file.write(data)
        os.utime(local, ns=(FIXED_NS, FIXED_NS))

    def sync(self) -> None:
        below = lambda trial: self.store_of(f"experiment/{trial}")  # noqa: E731
        self.directory.forget(self.files.before_sync(below, self.directory.stored, Deadline()))
        self.directory.sync_up(Deadline(), self.files.sync_rule(lambda _path, _is_dir: None))


def writes_once(driver: DriverProcess) -> None:
    driver.write(FILE, b"the driver's")
    driver.sync()


def writes_twice(driver: DriverProcess) -> None:
    driver.write(FILE, b"the driver's")
    driver.sync()
    driver.write(FILE, b"the driver's, newer")
    driver.sync()
