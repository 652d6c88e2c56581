"""A driver that goes on with an experiment through a Ray Client (`ray://`); prints what `restore_tuner` says.

python client_driver.py EXPERIMENT
"""

from __future__ import annotations

import sys

from ray.util.client.ray_client_helpers import ray_start_client_server

from ray_artifact_sync import ConfigurationError, restore_tuner
from tests.integration.trainables import Logging


def main(experiment: str) -> None:
    with ray_start_client_server():  # a cluster and a server of its own, and a connection to it
        try:
            restore_tuner(experiment, Logging)
        except ConfigurationError as error:
            print(error)


if __name__ == "__main__":
    main(sys.argv[1])
