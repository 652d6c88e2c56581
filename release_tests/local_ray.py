"""Ray on this machine alone, for scenarios that need no nodes with disks of their own."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from release_tests.cluster import ROOT


@contextlib.contextmanager
def local_ray(*, cpus: int = 2) -> Iterator[None]:
    """A Ray session whose workers find this repository."""
    import ray

    os.environ.update(
        {
            "RAY_AIR_NEW_OUTPUT": "0",
            "RAY_USAGE_STATS_ENABLED": "0",
            "PYTHONPATH": str(ROOT),
            "AWS_REQUEST_CHECKSUM_CALCULATION": "when_required",
        }
    )
    ray.init(num_cpus=cpus, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    try:
        yield
    finally:
        ray.shutdown()
