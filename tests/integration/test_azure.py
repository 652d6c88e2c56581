"""A real run whose storage is Azure's Blob storage."""

from __future__ import annotations

import pytest

from tests.integration.places import azure_place
from tests.integration.runs import LINES, check_exact, trial_dir, tuner
from tests.integration.trainables import Logging

pytestmark = [pytest.mark.ray, pytest.mark.azure]


def test_killed_and_resumed_on_another_node(ray_cluster, azurite, tmp_path):
    place = azure_place(tmp_path, azurite.filesystem())
    results = tuner(Logging, place, tmp_path, {"crash_at": 6, "wipe": True}).fit()
    check_exact(trial_dir(place, results[0]))
    assert (tmp_path / "markers/log_at_restore").read_text().split() == LINES[:4]
