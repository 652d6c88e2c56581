"""A worker that is cut off while its trial is restored elsewhere, and that comes back, on real Ray."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from tests.integration.drivers import end_driver, run_driver, start_driver, wait_for
from tests.integration.places import Place, local_place, s3_place
from tests.integration.runs import check_exact
from tests.support.s3_servers import filesystem_at

pytestmark = pytest.mark.ray

DRIVERS = ("progress.csv", "result.json", "params.", "error.", "events.out.tfevents.")


LOCAL = pytest.param("local", marks=pytest.mark.exhaustive)
MOTO = pytest.param("moto", marks=pytest.mark.s3)
RCLONE = pytest.param("rclone", marks=[pytest.mark.s3, pytest.mark.exhaustive])


@pytest.fixture(params=[LOCAL, MOTO, RCLONE])
def storage(request, tmp_path):
    """A place, and its endpoint. moto refuses writes whose condition does not hold, rclone's server does not."""
    if request.param == "local":
        return local_place(tmp_path), None
    endpoint = request.getfixturevalue("moto_proxy" if request.param == "moto" else "proxy").endpoint
    return s3_place(tmp_path, filesystem_at(endpoint)), endpoint


def of_workers(place: Place, path: str) -> dict[str, bytes]:
    """Everything below a trial dir that is not the driver's."""
    root = place.fetch(path)
    files = {str(file.relative_to(root)): file.read_bytes() for file in root.rglob("*") if file.is_file()}
    return {name: data for name, data in files.items() if not name.startswith(DRIVERS)}


def test_a_stopped_worker_that_comes_back_overwrites_nothing(storage, tmp_path):
    """SIGSTOP, another driver restores the trial and ends it, SIGCONT: a conflict, said, and the trial ends."""
    place, endpoint = storage
    markers = tmp_path / "markers"
    spec = {
        "storage_path": place.storage_path,
        "endpoint": endpoint,
        "trainable": "Stamped",
        "config": {"wait_at": 6},
        "options": {"max_failures": 0},
    }
    first = start_driver(tmp_path, spec, stderr=tmp_path / "said.txt")
    try:
        wait_for(markers / "waiting", first)
        worker = int((markers / "waiting").read_text())
        os.kill(worker, signal.SIGSTOP)
        try:
            (markers / "go_on").touch()
            result = run_driver(tmp_path, {**spec, "restore": f"{place.storage_path}/exp"})
            assert not result["error"]
            check_exact(place.fetch(result["path"]))
            before = of_workers(place, result["path"])
            assert int(before["pid.txt"]) != worker
        finally:
            os.kill(worker, signal.SIGCONT)
        out, _ = first.communicate(timeout=150)
    finally:
        end_driver(first)
    ended = json.loads(out.splitlines()[-1])
    assert "ArtifactConflictError" in ended["error"]
    assert "A newer attempt" in ended["error"]
    assert Path(ended["path"]).name == Path(result["path"]).name, "the same trial"
    assert "ArtifactConflictError" in (tmp_path / "said.txt").read_text()
    check_exact(place.fetch(result["path"]))
    assert of_workers(place, result["path"]) == before
