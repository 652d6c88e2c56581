"""Bytes that are wrong when they are read: on the way once, or for good."""

from __future__ import annotations

import json
import logging
import os

import pytest

from ray_artifact_sync import layout, trial_dir
from ray_artifact_sync.errors import ManifestError
from ray_artifact_sync.manifest import INLINE_ENTRIES, decode, encode
from ray_artifact_sync.stores import open_store
from tests.support.s3_servers import BUCKET, filesystem_at
from tests.support.sessions import abandon, open_session, read_tree, save

CHECKPOINT = "checkpoint_000000"


# --- documents -----------------------------------------------------------------------------------


def test_a_document_with_one_wrong_bit_is_no_document():
    body = {
        "format": 1,
        "kind": "snapshot",
        "token": layout.make_token(3),
        "trial": "trial",
        "checkpoint": CHECKPOINT,
        "entries": {"log.txt": {"size": 4, "digest": "ab" * 32, "mtime_ns": 17}, "void": {"dir": True}},
        "removed": ["gone.txt"],
    }
    document = decode(json.dumps(body).encode(), kind="snapshot", where="x")  # without a seal: written by hand
    data = encode(document)
    assert decode(data, kind="snapshot", where="x") == document
    assert json.loads(data)["entries"] == body["entries"], "plain JSON, seal and all"
    refused = 0
    for position in range(len(data)):
        for bit in (0, 4):
            wrong = bytearray(data)
            wrong[position] ^= 1 << bit
            try:
                found = decode(bytes(wrong), kind="snapshot", where="x")
            except ManifestError:
                refused += 1
            else:
                assert found == document, f"byte {position} made another document of it"
    assert refused > len(data)


# --- a trial on S3 -------------------------------------------------------------------------------


@pytest.fixture
def new_store(proxy, tmp_path):
    return lambda: open_store(filesystem_at(proxy.endpoint), f"{BUCKET}/wrong/{tmp_path.name}")


@pytest.fixture
def trial(new_store, tmp_path):
    """A trial with a checkpoint and newer artifacts; what the artifacts were at the checkpoint."""
    session = open_session(tmp_path / "work", new_store(), 1)
    for number in range(INLINE_ENTRIES + 1):  # so that there is a layer
        _write(session.working_dir, f"many/{number}", b"%d" % number)
    _write(session.working_dir, "log.txt", b"1")
    _write(session.working_dir, "rewritten.bin", b"old content")
    assert save(session, CHECKPOINT)
    tree = read_tree(session.working_dir)
    _write(session.working_dir, "rewritten.bin", b"new content!")
    session.sync()
    abandon(session)
    return tree


@pytest.fixture(autouse=True)
def _no_lease(monkeypatch):
    monkeypatch.setattr(trial_dir, "LEASE_SECONDS", -1.0)  # the claim is looked at before each write


def _write(root, path, data):
    target = os.path.join(root, path)
    os.makedirs(os.path.dirname(target), exist_ok=True)
    with open(target, "wb") as file:
        file.write(data)


TOKEN_DIGIT = len('{"format": 1, "kind": "writer", "token": "') + 10
PLACES = {
    "claim, another token": ("writer.json", TOKEN_DIGIT),
    "claim, no JSON": ("writer.json", 0),
    "snapshot": (f"{CHECKPOINT}/.ray_artifact_sync-", 100),
    "head": (f"{layout.STATE_DIR}/manifest.json", 100),
    "layer": (f"{layout.LAYERS}/", 1000),
    "content": ("/log.txt", 0),
    "content kept aside": (f"{layout.OBJECTS}/", 5),
}


@pytest.mark.s3
@pytest.mark.parametrize("place", PLACES)
def test_wrong_bytes_on_the_way_once_change_nothing(place, proxy, trial, new_store, tmp_path, caplog):
    path, position = PLACES[place]
    rule = proxy.corrupt("get_object", path, after=position, times=1)
    session = open_session(tmp_path / "other", new_store(), 2)
    report = session.restore(CHECKPOINT, fresh=True)
    assert rule.hits == 1
    assert report.exact
    assert report.lost == ()
    assert read_tree(session.working_dir) == trial
    _write(session.working_dir, "more.txt", b"more")
    session.sync()
    assert not [record for record in caplog.records if record.levelno > logging.WARNING]
    abandon(session)


@pytest.mark.s3
@pytest.mark.parametrize("place", ["snapshot", "content", "content kept aside"])
def test_wrong_bytes_for_good_are_never_called_exact(place, proxy, trial, new_store, tmp_path):
    path, position = PLACES[place]
    proxy.corrupt("get_object", path, after=position)
    session = open_session(tmp_path / "other", new_store(), 2)
    report = session.restore(CHECKPOINT, fresh=True)
    assert not report.exact
    if place == "snapshot":
        assert read_tree(session.working_dir) == {**trial, "rewritten.bin": b"new content!"}
    else:
        assert report.lost == (("log.txt",) if place == "content" else ("rewritten.bin",))
    proxy.clear()
    abandon(session)
    # Nothing of it was lost in storage.
    after = open_session(tmp_path / "third", new_store(), 3)
    assert after.restore(CHECKPOINT, fresh=True).exact
    assert read_tree(after.working_dir) == trial
    abandon(after)


@pytest.mark.s3
def test_a_newer_claim_is_still_believed(proxy, trial, new_store, tmp_path):
    old = open_session(tmp_path / "old", new_store(), 2)
    old.restore(CHECKPOINT, fresh=True)
    new = open_session(tmp_path / "new", new_store(), 3)
    new.sync()
    _write(old.working_dir, "late.txt", b"late")
    with pytest.raises(trial_dir.ArtifactConflictError):
        old.sync()
    abandon(old)
    abandon(new)
