"""What Ray shows of the syncs: its metrics, and bars of workers on the driver's terminal."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
import threading
import time
import urllib.request
import uuid
from pathlib import Path

import pytest
import ray

from ray_artifact_sync import ArtifactSyncer
from ray_artifact_sync.journal_files import read_journal
from ray_artifact_sync.stores.posix import PosixStore
from tests.integration.places import local_place
from tests.integration.runs import tuner
from tests.integration.trainables import Logging
from tests.support.s3_servers import BUCKET
from tests.support.terminals import Terminal

pytestmark = pytest.mark.ray

ROOT = Path(__file__).parents[2]


@pytest.fixture
def running(ray_cluster, tmp_path):
    """A function that runs a trial up to a point where it waits, with everything synced; it goes on at the end."""
    threads = []

    def start(**options):
        run = tuner(
            Logging, local_place(tmp_path), tmp_path, {"wait_at": 6}, syncer=ArtifactSyncer(**options.pop("syncer", {}))
        )
        results = []
        thread = threading.Thread(target=lambda: results.append(run.fit()), daemon=True)
        thread.start()
        threads.append(thread)
        ends = time.monotonic() + 120
        while not (tmp_path / "markers/waiting").exists():
            assert thread.is_alive(), results
            assert time.monotonic() < ends
            time.sleep(0.05)
        return results

    yield start
    (tmp_path / "markers").mkdir(exist_ok=True)
    (tmp_path / "markers/go_on").touch()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()


def exported() -> bool:
    """Whether this Ray has what its metrics agent needs (`ray[default]`)."""
    return all(map(importlib.util.find_spec, ("prometheus_client", "opencensus", "aiohttp_cors", "colorful")))


@pytest.mark.skipif(not exported(), reason="Ray exports no metrics without the packages of ray[default]")
def test_ray_exports_what_was_sent(running, tmp_path):
    running()
    (trial,) = [path for path in (tmp_path / "storage/exp").iterdir() if (path / ".ray_artifact_sync").exists()]
    sent = sum(record.bytes_sent for record in read_journal(PosixStore(trial)).records)
    assert sent > 100_000
    port = ray.nodes()[0]["MetricsExportPort"]
    ends = time.monotonic() + 90
    while (found := samples(port)).get("bytes_sent_total") != sent:
        assert time.monotonic() < ends, found
        time.sleep(0.5)
    assert found["files_sent_total"] >= 8
    assert found["seconds_count"] >= 2
    assert 0 < found["seconds_sum"] < 600
    assert "failed_syncs_total" not in found


def samples(port: int) -> dict[str, float]:
    """What Ray's metrics agent exports of this library's metrics, summed over workers."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    found: dict[str, float] = {}
    for name, labels, value in re.findall(r"^ray_artifact_sync_(\w+)\{(.*)\} (\S+)$", text, re.MULTILINE):
        if 'experiment="exp"' in labels and not name.endswith("_bucket"):
            found[name] = found.get(name, 0.0) + float(value)
    return found


def test_metrics_can_be_switched_off_and_do_no_harm_where_nothing_is_exported(running, tmp_path):
    results = running(syncer={"report_metrics": False})
    (tmp_path / "markers/go_on").touch()
    while not results:
        time.sleep(0.05)
    assert results[0][0].error is None
    assert not [name for name in results[0][0].metrics if name.startswith("artifact_sync/")]


def test_metric_objects_exist_where_results_carry_metrics(ray_cluster):
    @ray.remote
    def count():
        from ray_artifact_sync.journal import JournalRecord
        from ray_artifact_sync.metrics import SyncMetrics

        metrics = SyncMetrics("some experiment")
        metrics(JournalRecord(kind="sync", t=0.0, bytes_sent=7, files_sent=1, seconds=0.5))
        metrics(JournalRecord(kind="failure", t=0.0, error="down"))
        return metrics._failed, {name: metric.info for name, metric in metrics._metrics.items()}

    failed, infos = ray.get(count.remote())
    assert not failed
    assert set(infos) == {"bytes_sent", "files_sent", "retries", "failed_syncs", "seconds"}
    assert all(info["tag_keys"] == ("experiment",) for info in infos.values())
    assert infos["bytes_sent"]["name"] == "artifact_sync_bytes_sent"


@pytest.mark.parametrize(
    ("wanted", "driver_has_terminal", "bars"),
    [(None, True, True), (None, False, False), (True, False, True), (False, True, False)],
)
def test_who_gets_bars_in_a_worker(ray_cluster, wanted, driver_has_terminal, bars):
    @ray.remote
    def ask():
        from ray_artifact_sync import progress_bars

        return progress_bars.watcher(wanted, driver_has_terminal=driver_has_terminal) is not None

    assert ray.get(ask.remote()) is bars


def spec(tmp_path, proxy, **more):
    file = tmp_path / "spec.json"
    place = {"storage_path": f"{BUCKET}/{uuid.uuid4().hex}", "endpoint": proxy.endpoint, "tmp_path": str(tmp_path)}
    file.write_text(json.dumps({**place, **more}))
    return [sys.executable, "-m", "tests.integration.watched_driver", str(file)]


@pytest.mark.s3
def test_a_slow_upload_of_a_worker_shows_a_bar_on_the_drivers_terminal(proxy, tmp_path):
    rule = proxy.hang("put_object", "big.bin")
    environment = {**os.environ, "RAY_AIR_NEW_OUTPUT": "0"}
    with Terminal(spec(tmp_path, proxy), cwd=ROOT, env=environment) as terminal:
        terminal.wait_for("1 file left")
        assert "Slow_" in terminal.shown  # whose files
        rule.release()
        terminal.wait_for("ended with None")
        assert terminal.wait() == 0


@pytest.mark.s3
def test_a_bar_never_becomes_an_artifact(proxy, tmp_path):
    """With `log_to_file`, what a worker prints is a file of the trial's."""
    rule = proxy.hang("put_object", "big.bin")
    environment = {**os.environ, "RAY_AIR_NEW_OUTPUT": "0"}
    command = spec(tmp_path, proxy, syncer={"progress": True}, options={"log_to_file": True})
    with Terminal(command, cwd=ROOT, env=environment) as terminal:
        ends = time.monotonic() + 120
        while not rule.reached.is_set():
            assert time.monotonic() < ends, terminal.shown
            terminal._read(time.monotonic() + 0.1)
        rule.release()
        terminal.wait_for("ended with None")
        assert "file left" not in terminal.shown
