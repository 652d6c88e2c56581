"""`doctor`: says what a storage does, by trying it out, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid

import pytest

from ray_artifact_sync import layout
from ray_artifact_sync.commands import diagnosis
from ray_artifact_sync.experiments import Place
from ray_artifact_sync.stores import open_uri
from ray_artifact_sync.stores.posix import PosixStore
from tests.support.looking import Spot, everything, make_trial
from tests.support.s3_servers import BUCKET, filesystem_at, uri_at


def checks(ran) -> dict[str, str]:
    return {check["check"]: check["status"] for check in ran.json["checks"] if check["check"] != "trap"}


def text(ran, name: str) -> str:
    return next(check["text"] for check in ran.json["checks"] if check["check"] == name)


def test_a_good_place(spot, command):
    make_trial(spot)
    store = spot.store("exp")
    before = everything(store)
    ran = command("doctor", spot.uri("exp"), "--json")
    assert (ran.code, ran.err) == (0, "")
    assert ran.json["ok"] is True
    found = checks(ran)
    assert {name for name, status in found.items() if status == "ok"} >= {
        *("versions", "client", "credentials", "write access", "latency", "clock", "copies"),
    }
    assert set(ran.json["latency_ms"]) == {"look", "write", "read"}
    assert all(ms > 0 for ms in ran.json["latency_ms"].values())
    assert ran.json["versions"]["ray"].count(".") == 2
    assert everything(store) == before
    if spot.proxy is None:
        assert found["append"] == found["conditions"] == "ok"
        assert "kernel" not in text(ran, "client")
    else:
        assert "(obstore)" in text(ran, "client")
        assert found["conditions"] == "note"  # this server does not enforce them
        assert found["append"] == "note"
        assert found["Ray's client"] == "ok"
        assert any("copy_files" in check["text"] for check in ran.json["checks"])
    shown = command("doctor", spot.uri("exp"))
    assert shown.out.splitlines()[-1] == "Nothing is wrong."
    assert shown.out.startswith("ok    versions: python 3.")


def test_a_place_that_does_not_exist_yet(spot, command, tmp_path):
    assert command("doctor", spot.uri("new/deep/place")).code == 0
    assert list(spot.store("").list()) == []
    assert not (tmp_path / "storage").exists()


@pytest.mark.s3
def test_conditional_writes_are_seen(moto, command, monkeypatch):
    for name, value in moto.env().items():
        monkeypatch.setenv(name, value)
    uri = uri_at(moto.endpoint, f"doctor-{uuid.uuid4().hex}")
    ran = command("doctor", uri, "--json")
    assert ran.code == 0, ran.out
    assert checks(ran)["conditions"] == "ok"
    assert list(open_uri(uri).list()) == []


@pytest.mark.s3
def test_appends_are_seen(juicefs, command, monkeypatch):
    for name, value in juicefs.env().items():
        monkeypatch.setenv(name, value)
    uri = uri_at(juicefs.endpoint, f"doctor-{uuid.uuid4().hex}")
    ran = command("doctor", uri, "--json")
    assert checks(ran)["append"] == "ok", text(ran, "append")
    assert "what it grew by is sent" in text(ran, "append")
    assert list(open_uri(uri).list()) == []


@pytest.mark.s3
def test_no_write_access(s3_uri, proxy, command):
    for kind in ("put_object", "upload_part", "create_multipart", "copy_object"):
        proxy.fail(kind, status=403)
    ran = command("doctor", s3_uri("exp"), "--json")
    assert ran.code == 1
    assert ran.json["ok"] is False
    assert checks(ran)["write access"] == "wrong"
    assert "Looking at artifacts works (ls, pull, diff, history, verify, ArtifactView)" in text(ran, "write access")
    assert command("doctor", s3_uri("exp")).out.splitlines()[-1] == "1 thing is wrong."


@pytest.mark.s3
def test_no_access_at_all(s3_uri, proxy, command):
    proxy.fail(status=403)
    ran = command("doctor", s3_uri("exp"), "--json")
    assert ran.code == 1
    assert checks(ran)["credentials"] == "wrong"
    assert "The credentials are refused" in text(ran, "credentials")


@pytest.mark.s3
@pytest.mark.slow
def test_nobody_answers(s3_uri, proxy, command):
    uri = s3_uri("exp")
    proxy.stop()
    ran = command("doctor", uri, "--json")
    assert ran.code == 1
    assert checks(ran)["credentials"] == "wrong"


@pytest.mark.s3
def test_a_storage_that_loses_bytes(s3_uri, proxy, command):
    proxy.corrupt("get_object", "/doctor-", after=10)
    ran = command("doctor", s3_uri("exp"), "--json")
    assert ran.code == 1
    assert "gives back other bytes than were written" in text(ran, "write access")


@pytest.mark.s3
def test_copies_that_are_refused(s3_uri, proxy, command):
    proxy.fail("copy_object", status=403)
    ran = command("doctor", s3_uri("exp"), "--json")
    assert ran.code == 1
    assert checks(ran)["copies"] == "wrong"


@pytest.mark.s3
def test_slow_requests_are_told(s3_uri, proxy, command, monkeypatch):
    monkeypatch.setattr(diagnosis, "LATENCY_REQUESTS", 1)
    monkeypatch.setattr(diagnosis, "SLOW_MS", 50.0)
    proxy.latency = 0.06
    ran = command("doctor", s3_uri("exp"), "--json")
    assert ran.code == 0
    assert checks(ran)["latency"] == "note"
    assert all(ms >= 60 for ms in ran.json["latency_ms"].values())


@pytest.mark.s3
def test_rays_client_is_tried(proxy, rclone, tmp_path):
    """A server that knows no chunked uploads answers pyarrow with 411, and obstore not."""
    place = Place("s3", filesystem_at(proxy.endpoint), f"{BUCKET}/{tmp_path.name}")
    proxy.fail("put_object", "/ray", status=411)
    proxy.fail("create_multipart", "/ray", status=411)
    found = {finding.check: finding for finding in diagnosis.diagnose(place).findings}
    assert found["write access"].status == "ok"
    assert found["Ray's client"].status == "wrong"
    assert "Ray's own client (pyarrow) cannot write there" in found["Ray's client"].text


def test_a_read_only_directory_is_told(tmp_path, command):
    place = tmp_path / "closed"
    place.mkdir()
    place.chmod(0o500)
    try:
        if os.access(place, os.W_OK):
            pytest.skip("root writes everywhere")
        assert checks(command("doctor", place, "--json"))["write access"] == "wrong"
    finally:
        place.chmod(0o700)


def test_a_wrong_clock_is_told(tmp_path, command, monkeypatch):
    real = PosixStore.stat

    def late(store, path):
        found = real(store, path)
        return found and type(found)(found.path, found.size, found.etag, found.mtime_ns - 120 * 10**9)

    monkeypatch.setattr(PosixStore, "stat", late)
    ran = command("doctor", tmp_path, "--json")
    assert ran.code == 1
    assert "The storage's clock is -120 s from this machine's" in text(ran, "clock")


def test_an_old_ray_is_told(tmp_path, command, monkeypatch):
    real = diagnosis.importlib.metadata.version
    versions = {"ray": "2.10.0"}
    monkeypatch.setattr(diagnosis.importlib.metadata, "version", lambda name: versions.get(name) or real(name))
    ran = command("doctor", tmp_path, "--json")
    assert ran.code == 1
    assert "Ray 2.10.0 is too old: 2.43 or newer is needed" in text(ran, "versions")
    assert diagnosis._numbers("2.60.0rc1") == (2, 60)


@pytest.mark.s3
def test_what_a_killed_doctor_left_is_garbage(s3_uri, proxy, tmp_path, command):
    spot = Spot(lambda path="": s3_uri(f"{tmp_path.name}/{path}"), proxy, tmp_path)
    make_trial(spot)
    store = spot.store("exp/trial_1")
    before = everything(store)
    hang = proxy.hang("copy_object", times=1)
    process = subprocess.Popen([sys.executable, "-m", "ray_artifact_sync", "doctor", spot.uri("exp/trial_1")])
    assert hang.reached.wait(60)
    process.send_signal(signal.SIGKILL)
    process.wait()
    proxy.clear()
    while proxy.in_flight:
        time.sleep(0.01)
    left = everything(store).keys() - before.keys()
    assert {path.rpartition("-")[0] for path in left} == {f"{layout.STATE_DIR}/doctor"}
    ran = command("gc", spot.uri("exp"), "--older-than", "0", "--nothing-running", "--delete", "--json")
    assert {piece["kind"] for piece in ran.json["trials"][0]["garbage"]} == {"probe"}
    assert everything(store) == before
