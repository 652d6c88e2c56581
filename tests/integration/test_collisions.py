"""A callback that declares nothing and a trainable write the same file of a trial, on real Ray."""

from __future__ import annotations

import pytest

from tests.integration.runs import check_exact, trial_dir, tuner
from tests.integration.trainables import Summaries, Summarizing

pytestmark = pytest.mark.ray


@pytest.mark.parametrize("begin", [1, 3], ids=["driver-first", "worker-first"])
def test_the_drivers_stays_and_the_workers_is_refused(ray_cluster, place, tmp_path, monkeypatch, caplog, begin):
    monkeypatch.setenv("TUNE_GLOBAL_CHECKPOINT_S", "0")
    results = tuner(
        Summarizing,
        place,
        tmp_path,
        {"die_at": 4},
        callbacks=[Summaries(begin)],
        checkpoint={"checkpoint_frequency": 2},
        log_to_file=True,
    ).fit()
    directory = trial_dir(place, results[0])
    check_exact(directory)
    assert (directory / "summary.json").read_text() == "driver 8"
    said = (directory / "stderr").read_text()
    assert said.count("summary.json in the working dir of") == 1, said
    assert "the driver writes summary.json of this trial too" in said
    assert caplog.text.count("The driver writes summary.json into trial dirs") == 1
    at_restore = (tmp_path / "markers/summary_at_restore").read_text()
    if begin == 3:
        # It was the worker's alone when the checkpoint was saved; the driver has replaced it since.
        assert at_restore == "worker 2"
        assert caplog.text.count("is written by the driver and by the trainable") == 1
    else:
        assert at_restore in ("worker 2", "none")
