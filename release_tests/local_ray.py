"""Ray on this machine alone, for scenarios that need no nodes with disks of their own."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from release_tests.cluster import ENVIRONMENT


@contextlib.contextmanager
def local_ray(*, cpus: int = 2) -> Iterator[None]:
    """A Ray session whose workers find this repository."""
    import ray

    os.environ.update(ENVIRONMENT)
    ray.init(num_cpus=cpus, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    try:
        yield
    finally:
        ray.shutdown()
