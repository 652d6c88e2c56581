"""`verify`: finds whatever is missing or wrong, says nothing where all is right, also while a trial is running."""

from __future__ import annotations

import json
import threading

import pytest

from ray_artifact_sync import layout
from ray_artifact_sync.commands.verification import Verifier
from ray_artifact_sync.experiments import find_trials, place_at
from ray_artifact_sync.progress import TransferProgress
from ray_artifact_sync.stores.posix import PosixStore
from ray_artifact_sync.trial_reader import TrialReader
from tests.support.looking import BIG, Spot, make_trial
from tests.support.sessions import WrappedStore, open_session, save


@pytest.fixture
def disk(tmp_path) -> Spot:
    return Spot(lambda path="": str(tmp_path / "storage" / path), None, tmp_path)


def problems(ran) -> list[tuple]:
    return [(p["kind"], p["path"], *p["listed_by"]) for trial in ran.json["trials"] for p in trial["problems"]]


def test_all_is_right(spot, command):
    make_trial(spot, "trial_1", big=True)
    make_trial(spot, "trial_2")
    ran = command("verify", spot.uri("exp"), "--json")
    assert (ran.code, ran.err) == (0, "")
    assert ran.json["ok"] is True
    first = ran.json["trials"][0]
    # log.txt 3, rewritten.txt 3, gone.txt 1, plot 1, big.bin 2; the empty file needs no bytes
    assert (first["listings"], first["versions"], first["contents"]) == (3, 10, 10)
    shown = command("verify", spot.uri("exp"))
    assert shown.out.startswith("0 problems in 18 versions of files that 6 manifests of 2 trials list; ")


def test_each_content_is_read_once(spot, command):
    make_trial(spot, big=True)
    ran = command("verify", spot.uri("exp/trial_1"), "--json")
    # Both versions of big.bin, once each; the three of the growing log by reading it once.
    assert ran.json["trials"][0]["bytes_read"] == BIG + BIG + 1 + 6 + (5 + 10 + 5) + 4 + 4


def test_as_of_one_checkpoint(spot, command):
    make_trial(spot)
    spot.store("exp/trial_1").put("rewritten.txt", b"other")
    assert command("verify", spot.uri("exp/trial_1")).code == 1
    ran = command("verify", spot.at("exp/trial_1", "checkpoint_000000"), "--json")
    assert ran.code == 0
    assert ran.json["trials"][0]["listings"] == 1


def test_wrong_bytes(spot, command):
    make_trial(spot)
    spot.store("exp/trial_1").put("log.txt", b"1\n2\n4\n")
    ran = command("verify", spot.uri("exp"), "--json")
    assert ran.code == 1
    assert ran.json["ok"] is False
    assert problems(ran) == [("wrong", "log.txt", "newest")]  # its beginning is still that of the checkpoints
    shown = command("verify", spot.uri("exp"))
    assert shown.code == 1
    assert "WRONG" in shown.out
    assert "trial_1/log.txt" in shown.out


def test_a_file_that_is_too_short(spot, command):
    make_trial(spot)
    spot.store("exp/trial_1").put("log.txt", b"1\n")
    assert problems(command("verify", spot.uri("exp"), "--json")) == [
        ("wrong", "log.txt", "checkpoint_000001"),
        ("wrong", "log.txt", "newest"),
    ]


def test_missing_files(spot, command):
    make_trial(spot)
    store = spot.store("exp/trial_1")
    store.delete(["log.txt", *(file.path for file in store.list(layout.OBJECTS))])
    assert problems(command("verify", spot.uri("exp"), "--json")) == [
        ("missing", "log.txt", "checkpoint_000000"),
        ("missing", "log.txt", "checkpoint_000001"),
        ("missing", "log.txt", "newest"),
        ("wrong", "rewritten.txt", "checkpoint_000000"),
        ("wrong", "rewritten.txt", "checkpoint_000001"),
    ]


def test_a_damaged_copy(spot, command):
    make_trial(spot)
    store = spot.store("exp/trial_1")
    (copy, *_) = store.list(layout.OBJECTS)
    store.put(copy.path, b"x" * copy.size)
    ran = command("verify", spot.uri("exp"), "--json")
    assert ran.code == 1
    assert [p[:2] for p in problems(ran)] == [("wrong", "rewritten.txt")]


def test_damaged_listings(spot, command):
    make_trial(spot)
    store = spot.store("exp/trial_1")
    (snapshot,) = [f.path for f in store.list("checkpoint_000000") if layout.snapshot_token(f.path.rpartition("/")[2])]
    store.put(snapshot, b"{")
    store.put(layout.MANIFEST, b"{")
    ran = command("verify", spot.uri("exp"), "--json")
    assert ran.code == 1
    assert problems(ran) == [
        ("manifest", layout.MANIFEST, "newest"),
        ("manifest", snapshot, "checkpoint_000000"),
    ]


def test_a_missing_layer_is_a_damaged_listing(disk, command, tmp_path):
    working_dir = tmp_path / "work"
    working_dir.mkdir()
    session = open_session(working_dir, disk.store("exp/trial_1"), 1, trial="trial_1")
    for number in range(200):
        (working_dir / f"{number}.txt").write_text(str(number))
    save(session, "checkpoint_000000")
    session.close()
    assert command("verify", disk.uri("exp")).code == 0
    store = disk.store("exp/trial_1")
    store.delete([file.path for file in store.list(layout.LAYERS)])
    ran = command("verify", disk.uri("exp"), "--json")
    assert ran.code == 1
    assert [p[0] for p in problems(ran)] == ["manifest", "manifest"]


@pytest.mark.s3
def test_what_cannot_be_read_is_told(s3_uri, proxy, tmp_path, command):
    spot = Spot(lambda path="": s3_uri(f"{tmp_path.name}/{path}"), proxy, tmp_path)
    make_trial(spot)
    proxy.fail("get_object", "log.txt", status=403)
    ran = command("verify", spot.uri("exp"), "--json")
    assert ran.code == 1
    assert {p[:2] for p in problems(ran)} == {("unreadable", "log.txt")}
    assert "403" in ran.json["trials"][0]["problems"][0]["detail"]


@pytest.mark.s3
def test_a_flipped_bit_on_the_way_is_seen(s3_uri, proxy, tmp_path, command):
    spot = Spot(lambda path="": s3_uri(f"{tmp_path.name}/{path}"), proxy, tmp_path)
    make_trial(spot, big=True)
    proxy.corrupt("get_object", "/trial_1/big.bin", after=7_000_000)
    ran = command("verify", spot.uri("exp"), "--json")
    assert problems(ran) == [("wrong", "big.bin", "newest")]
    proxy.clear()
    assert command("verify", spot.uri("exp")).code == 0


# --- while a trial is running ---------------------------------------------------------------------------


class StoreThatIsWrittenTo(WrappedStore):
    """Calls `meanwhile` when the first content is read: the listings were read before."""

    def __init__(self, inner, meanwhile) -> None:
        super().__init__(inner)
        self._meanwhile = meanwhile
        self._lock = threading.Lock()

    def around(self, verb, path, act):
        if verb == "read" and not layout.is_reserved(path) and not path.startswith("checkpoint_"):
            with self._lock:
                meanwhile, self._meanwhile = self._meanwhile, None
            if meanwhile:
                meanwhile()
        return act()

    def below(self, path):
        return self.inner.below(path)


def test_a_running_trial_is_not_called_damaged(disk, tmp_path):
    make_trial(disk)
    working_dir = tmp_path / "work/exp/trial_1"

    def go_on() -> None:
        session = open_session(working_dir, disk.store("exp/trial_1"), 2, trial="trial_1", set_aside=False)
        for name in ("log.txt", "rewritten.txt", "sub dir/plot [1].png"):
            (working_dir / name).write_bytes(b"quite another content of " + name.encode())
        session.sync()
        save(session, "checkpoint_000002")
        session.close()

    (found,) = find_trials(place_at(disk.uri("exp"))).trials
    found.trial.store = StoreThatIsWrittenTo(found.trial.store, go_on)
    verifier = Verifier(TrialReader("trial_1", found.trial))
    verifier.prepare()
    verifier.run(TransferProgress("", files=0, bytes=0))
    assert verifier.result.problems == []
    assert json.loads(PosixStore(disk.uri("exp/trial_1")).read(layout.WRITER))["token"] == layout.make_token(2)
