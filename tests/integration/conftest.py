from __future__ import annotations

import logging

import pytest
import ray
from ray import cloudpickle


@pytest.fixture(scope="session")
def ray_cluster():
    from tests.integration import trainables

    cloudpickle.register_pickle_by_value(trainables)
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        logging_level=logging.WARNING,
        log_to_driver=False,
        runtime_env={"env_vars": {"RAY_AIR_NEW_OUTPUT": "0"}},
    )
    yield
    ray.shutdown()


@pytest.fixture(autouse=True)
def _quiet(monkeypatch):
    monkeypatch.setenv("RAY_AIR_NEW_OUTPUT", "0")
    monkeypatch.setenv("TUNE_DISABLE_AUTO_CALLBACK_LOGGERS", "0")
