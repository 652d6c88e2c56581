"""A run on S3 in which much goes wrong: the secret key is in nothing that is stored, logged or left on the node.

Except where Ray itself pickles the file system that it was given: `tuner.pkl` and other `.pkl` files, and the pickles
inside of `experiment_state-*.json`.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest
import ray

from tests.integration.places import s3_place
from tests.integration.runs import tuner
from tests.integration.trainables import Logging
from tests.support.s3_servers import KEY, SECRET, filesystem_at

pytestmark = [pytest.mark.ray, pytest.mark.s3]

OF_RAY = ("experiment_state-", "searcher-state-", "search_gen_state-", "basic-variant-state-", "callback-states-")


def test_a_run_tells_no_secret(ray_cluster, tmp_path, proxy, caplog):
    caplog.set_level(logging.DEBUG)
    proxy.fail("put_object", "plots/2.bin", status=403)
    proxy.fail("put_object", "plots/3.bin", status=403, code="SignatureDoesNotMatch", times=2)
    proxy.fail("put_object", "rewritten.txt", status=503, times=3)
    proxy.reset("put_object", "log.txt", times=2)
    proxy.fail("copy_object", status=500, times=2)
    place = s3_place(tmp_path, filesystem_at(proxy.endpoint))
    session_dir = Path(ray._private.worker._global_node.get_session_dir_path())
    results = tuner(Logging, place, tmp_path, {"crash_at": 6, "sync_first": True}, log_to_file=True).fit()
    assert results[0].error is None
    stored = place.fetch(os.path.dirname(results[0].path))
    assert (stored / Path(results[0].path).name / ".ray_artifact_sync" / "manifest.json").exists()
    texts = {"the driver's log": caplog.text.encode()}
    logs = [path for path in (session_dir / "logs").rglob("*") if path.is_file()]
    assert b"could not be sent" in b"".join(path.read_bytes() for path in logs), "nothing went wrong"
    for root in (stored, tmp_path / "markers", session_dir / "logs", session_dir / "artifacts"):
        for path in root.rglob("*"):
            if path.is_file() and path.suffix != ".pkl" and not path.name.startswith(OF_RAY):
                texts[str(path)] = path.read_bytes()
    assert len(texts) > 20
    for secret in (SECRET, KEY):
        assert [name for name, data in texts.items() if secret.encode() in data] == []
