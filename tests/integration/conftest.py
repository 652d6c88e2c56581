from __future__ import annotations

import logging

import pytest
import ray
from ray import cloudpickle

from tests.integration.places import local_place, s3_place
from tests.support.s3_servers import filesystem_at

ON_S3_TOO = (
    "test_killed_after_a_checkpoint[s3-other-node-opened-each-time]",
    "test_drivers_files_stay_the_drivers[s3]",
    "test_results_can_be_looked_at[s3]",
    "test_results_can_be_read[s3]",
    "test_function_that_raises[s3]",
)
"""What the others show is Ray's doing, whatever the storage: on S3 they are exhaustive."""


@pytest.hookimpl(tryfirst=True)  # before `-m` is looked at
def pytest_collection_modifyitems(items):
    for item in items:
        on_s3 = hasattr(item, "callspec") and item.callspec.params.get("place") == "s3"
        if on_s3 and item.name not in ON_S3_TOO:
            item.add_marker(pytest.mark.exhaustive)


@pytest.fixture(scope="session")
def ray_cluster():
    from tests.integration import trainables

    cloudpickle.register_pickle_by_value(trainables)
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        logging_level=logging.WARNING,
        log_to_driver=False,
    )
    yield
    ray.shutdown()


@pytest.fixture(autouse=True)
def _old_output(monkeypatch):
    """Ray's new console output writes to the terminal whatever pytest captures."""
    monkeypatch.setenv("RAY_AIR_NEW_OUTPUT", "0")


@pytest.fixture(params=["local", pytest.param("s3", marks=pytest.mark.s3)])
def place(request, tmp_path):
    """Where a run stores: this machine's disk, and a real S3 server (through the proxy)."""
    if request.param == "local":
        return local_place(tmp_path)
    return s3_place(tmp_path, filesystem_at(request.getfixturevalue("proxy").endpoint))
