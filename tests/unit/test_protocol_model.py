"""The protocol of attempts that crash, overlap and wake up too late, state by state; see `tests.support.model`.

Two attempts: all orders of their requests, so that the first may be stopped before any of them and go on after any of
the second's. Crashes: before and after every request that changes storage, several attempts deep. After each step:
every checkpoint that Ray keeps reads back byte for byte, the newest manifest names nothing that is not there, what an
attempt has synced stays what it is until that attempt does something else, nobody else's file was touched, and no
attempt that counts ever fails. Restores are exact.

`MODEL_RUNS` bounds each exploration (the default takes a sample).
"""

from __future__ import annotations

import os

import pytest
from obstore.store import MemoryStore

from ray_artifact_sync.stores.cloud import CloudStore
from ray_artifact_sync.stores.posix import PosixStore
from tests.support import model, model_driver, model_lives
from tests.support.model import World, every_crash, every_order, new_disk, quiet, small_limits

RUNS = int(os.environ.get("MODEL_RUNS", "60"))
STORES = ["fence", "conditional", "plain"]


@pytest.mark.parametrize("store", [*STORES, "conditional by content"])
@pytest.mark.parametrize("lives", model_lives.PAIRS.values(), ids=model_lives.PAIRS.keys())
def test_two_attempts_in_every_order(store, lives):
    explored = every_order(lambda: World(new_disk(store), list(lives), prompt=store == "plain"), limit=RUNS)
    assert explored.states > 100
    assert "replaced, done" in explored.outcomes or explored.runs == RUNS, explored


@pytest.mark.parametrize("store", ["fence", "conditional"])
def test_no_proof_is_trusted(store):
    """The lease has run out whenever somebody looks: each write asks first."""
    lives = model_lives.PAIRS["overwrite"]
    every_order(lambda: World(new_disk(store), list(lives), clock_step=10.0), limit=RUNS)


@pytest.mark.parametrize("store", STORES)
def test_answers_that_get_lost(store):
    """Any two requests take effect although they seem to fail."""
    lives = [model_lives.everything]
    explored = every_order(lambda: World(new_disk(store), lives, lost_answers=2), limit=RUNS)
    assert set(explored.outcomes) == {"done"}


@pytest.mark.parametrize("store", STORES)
def test_an_answer_that_gets_lost_while_two_overlap(store):
    lives = list(model_lives.PAIRS["overwrite"])
    every_order(lambda: World(new_disk(store), lives, lost_answers=1, prompt=store == "plain"), limit=RUNS)


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("life", [model_lives.everything, model_lives.exploit])
def test_any_crashes(store, life):
    explored = every_crash(store, life, attempts=3, limit=max(25, RUNS // 4))
    assert set(explored.outcomes) == {"done"}
    assert explored.states > 40


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("life", [model_lives.rewrites, model_lives.grows])
@pytest.mark.parametrize("drivers", [model_driver.writes_once, model_driver.writes_twice])
def test_a_file_that_trial_and_driver_write_in_every_order(store, life, drivers):
    """The trial may be killed at any moment: what it lists is readable at each."""
    explored = every_order(lambda: shared_file(store, life, drivers), limit=RUNS)
    assert set(explored.outcomes) == {"done, done"}


def shared_file(store, life, drivers) -> World:
    return World(
        new_disk(store), [life, drivers], process=model_driver.DriverProcess, taken=frozenset({model_driver.FILE})
    )


# --- the model itself --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["posix", "cloud"])
def test_the_model_store_is_like_the_real_one(kind, tmp_path, monkeypatch):
    """The same life leaves the same files on both."""
    real = PosixStore(tmp_path) if kind == "posix" else CloudStore(MemoryStore())
    disk = new_disk("fence" if kind == "posix" else "conditional")
    with quiet(), small_limits(), World(disk, [model_lives.everything]) as world:
        while world.enabled():
            world.step(0)
        assert world.attempts[0].outcome == "done"
    for path, data in model.FOREIGN.items():
        real.put(path, data)

    def store_of(attempt, root):
        store = real.below(root)
        store.open_file = None
        attempt.world.disk = Live(real)  # the driver deletes there, too
        return store

    monkeypatch.setattr(model.Attempt, "store_of", store_of)
    with quiet(), small_limits(), World(new_disk("plain"), [model_lives.everything]) as world:
        world.check = lambda: None
        while world.enabled():  # the start, and what the driver deletes
            world.step(0)
        assert world.attempts[0].outcome == "done", world.attempts[0].outcome
    found = {file.path: real.read(file.path) for file in real.list()}
    assert found == {path: node.data for path, node in disk.files.items()}


class Live:
    """A real store in the place of a `ModelDisk`."""

    changes = 0

    def __init__(self, real) -> None:
        self.real = real

    @property
    def files(self):
        return [file.path for file in self.real.list()]

    def unlink(self, path) -> None:
        self.real.delete([path])


def test_a_broken_protocol_is_noticed(monkeypatch):
    """Without preserving before overwriting, the model finds the order that shows it."""
    from ray_artifact_sync.plan import _Planner

    monkeypatch.setattr(_Planner, "preserve_what_is_lost", lambda *_args: None)
    with pytest.raises(model.Violation, match="After these requests"):
        every_crash("conditional", model_lives.everything, attempts=2)


def test_a_broken_claim_is_noticed(monkeypatch):
    """Without asking who the writer is, an attempt that was replaced writes over its successor's manifest."""
    from ray_artifact_sync.trial_dir import TrialWriter

    monkeypatch.setattr(TrialWriter, "confirm", lambda _self: None)
    lives = list(model_lives.PAIRS["overwrite"])
    with pytest.raises(model.Violation, match="After these requests"):
        every_order(lambda: World(new_disk("conditional"), lives))


@pytest.mark.parametrize("store", ["conditional", "plain"])
def test_a_driver_that_is_not_looked_for_is_noticed(monkeypatch, store):
    """Without the look before a commit, or the condition on the driver's write, what is listed gets lost."""
    from ray_artifact_sync.session import TrialArtifacts
    from ray_artifact_sync.transfer import TransferEngine

    if store == "plain":
        monkeypatch.setattr(TrialArtifacts, "_leave_out_taken", lambda _self, report, _deadline: report)
    else:
        monkeypatch.setattr(TransferEngine, "is_guarded", lambda self, _path: self._confirm_writer is not None)
    with pytest.raises(model.Violation, match="unreadable"):
        every_order(lambda: shared_file(store, model_lives.rewrites, model_driver.writes_once), limit=1000)
