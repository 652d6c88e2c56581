"""Orders of requests that broke a promise once, each found by the exploration in `test_protocol_model.py`."""

from __future__ import annotations

import pytest

from ray_artifact_sync import layout
from tests.support.model import LOST, World, new_disk, quiet, small_limits
from tests.support.sessions import save


class Order:
    """Two attempts, led by hand. The world is checked after each step."""

    def __init__(self, store, lives, **options) -> None:
        self.world = World(new_disk(store), lives, **options)

    def until(self, number: int, verb: str = "", path: str = "", *, times: int = 1) -> None:
        """Lets an attempt go on until it is about to make a request, or to its end."""
        while number - 1 in self.world.enabled():
            pending = self.world.attempts[number - 1].pending
            if verb and pending[0] == verb and path in pending[1]:
                times -= 1
                if not times:
                    return
            self.world.step(number - 1)
        assert not verb, f"attempt {number} never came to {verb} {path}"

    def step(self, number: int, *, answer_lost: bool = False) -> None:
        self.world.step(number - 1 + LOST * answer_lost)

    def outcome(self, number: int) -> str:
        return self.world.attempts[number - 1].outcome


@pytest.fixture
def ordered():
    """A function that begins an order of some attempts' requests; its world ends with the test."""
    orders = []

    def begin(store, *lives, **options):
        order = Order(store, list(lives), **options)
        order.world.__enter__()
        orders.append(order)
        return order

    with quiet(), small_limits():
        yield begin
        for order in orders:
            order.world.__exit__(None, None, None)


def writes_twice(attempt):
    attempt.write("flag", b"0")
    attempt.save(keep=1)
    attempt.write("flag", b"1")
    attempt.sync()


def overwrites(attempt):
    attempt.write("flag", b"2")
    attempt.sync()


def saves_over_it(attempt):
    attempt.write("flag", b"2")
    attempt.save(keep=1)


@pytest.mark.parametrize("store", ["conditional", "plain"])
def test_a_commit_under_way_when_the_next_attempt_looks_around(ordered, store):
    """It landed after the look, and named a version that the next attempt, which did not know of it, replaced."""
    order = ordered(store, writes_twice, overwrites)
    order.until(1, "put", layout.MANIFEST, times=2)
    order.until(2, "put", "flag") if store == "conditional" else order.until(2, "sleep")
    order.step(1)
    order.until(2)
    order.until(1)
    assert order.outcome(1) in ("replaced", "done")


def test_files_that_came_after_the_listing_but_before_the_head_was_read(ordered):
    """The head lists what the listing does not: nothing was known of its path, so nothing was preserved."""
    order = ordered("conditional", writes_twice, overwrites)
    order.until(1, "put", "flag")
    order.until(2, "read", layout.MANIFEST)
    order.until(1)
    order.until(2)
    assert order.outcome(2) == "done"


def test_a_refused_write_that_looks_again_when_it_is_no_writer_any_more(ordered):
    """Confirmed first, looked second: the look saw the newer attempt's file, and the write replaced that."""
    order = ordered("conditional", writes_twice, overwrites)
    order.until(1, "put", "flag", times=2)
    order.world.disk.write("experiment/t_1/flag", b"of somebody else")
    order.step(1)  # refused
    order.step(1)  # the first of a look at the file and one at the claim
    order.until(2)
    order.until(1)
    assert order.outcome(1) == "replaced"
    assert order.world.place().read("flag") == b"2"


def test_a_file_that_an_older_attempt_writes_between_look_and_write(ordered):
    """The writer that counts was refused twice, and gave up."""
    order = ordered("conditional", saves_over_it, saves_over_it)
    order.until(1, "put", "checkpoint_000000/model")
    order.until(2, "put", "checkpoint_000000/model")
    order.world.disk.write("experiment/t_1/checkpoint_000000/model", b"of an attempt before")
    order.step(2)
    order.until(2, "put", "checkpoint_000000/model")
    order.world.disk.write("experiment/t_1/checkpoint_000000/model", b"late, of an attempt before")
    order.until(2)
    assert order.outcome(2) == "done"


def test_a_first_commit_after_the_claim_of_another(ordered):
    """It asked for the head's tag when the newer attempt had committed, and replaced that commit."""
    order = ordered("conditional", writes_twice, overwrites)
    order.until(1, "put", layout.MANIFEST)
    order.until(2)
    order.until(1)
    assert order.outcome(1) == "replaced"
    assert order.world.place().read("flag") == b"2"


@pytest.mark.parametrize("store", ["conditional", "fence"])
def test_a_claim_made_while_another_first_claim_is_under_way(ordered, store):
    """Both saw no claim; the second to write took itself for the first attempt of all, and looked at nothing."""
    order = ordered(store, writes_twice, overwrites)
    order.until(1, "put", layout.WRITER)
    order.until(2, "read", layout.WRITER)
    order.step(2)
    order.until(1)
    order.until(2)
    assert order.outcome(2) == "done"


def test_what_an_attempt_sees_that_was_replaced_before_it_looked(ordered):
    """With the tags of its successor's files, its writes were let through for as long as it trusted its claim."""
    order = ordered("conditional", writes_twice, overwrites, saves_over_it)
    order.until(1)
    order.until(2, "list")
    order.until(3)
    order.until(2)
    assert order.outcome(2) == "replaced"


def test_a_claim_whose_answer_is_lost_does_not_forget_what_the_store_can(ordered):
    """Tried again, it found itself; commits were then made as on a store without preconditions."""
    order = ordered("conditional", writes_twice, overwrites, lost_answers=1)
    order.until(1, "put", layout.WRITER)
    order.step(1, answer_lost=True)
    order.until(1, "put", layout.MANIFEST, times=2)
    order.until(2)
    order.until(1)
    assert order.outcome(1) == "replaced"


def test_a_claim_whose_answer_is_lost_waits_for_the_predecessor(ordered):
    """Tried again, it found itself, and did not wait until the one before trusts nothing any more."""
    order = ordered("plain", writes_twice, overwrites, lost_answers=1)
    order.until(1, "list_dirs")
    order.until(2, "put", layout.WRITER)
    order.step(2, answer_lost=True)
    order.until(2, "sleep")


def test_a_claim_that_an_older_one_overwrote_waits_again(ordered):
    """Without preconditions: the older attempt may trust that it read itself."""
    order = ordered("plain", writes_twice, overwrites)
    order.until(1, "put", "flag")
    order.until(2, "sleep")
    order.step(2)
    claim = order.world.disk.files["experiment/t_1/" + layout.WRITER].data
    old = claim.replace(layout.make_token(2).encode(), layout.make_token(1).encode())
    order.world.disk.write("experiment/t_1/" + layout.WRITER, old)
    order.until(2, "put", layout.WRITER)
    order.step(2)
    order.until(2, "sleep")
    order.until(2)
    assert order.outcome(2) == "done"


def test_a_copy_is_not_made_twice(ordered):
    """A second try, after an answer was lost, put the newer attempt's content in the place of the preserved one."""
    order = ordered("conditional", writes_twice, overwrites, lost_answers=1)
    order.until(1, "copy")
    order.step(1, answer_lost=True)
    order.until(2)
    order.until(1)
    assert order.outcome(2) == "done"


def test_what_a_foreign_checkpoint_stands_for_outlives_the_next_own_one(ordered):
    """Killed after its snapshot was written, before Ray registered it: the restore goes back to the exploit."""

    def life(attempt):
        attempt.write("flag", b"0")
        attempt.save(keep=2)
        attempt.write("flag", b"1")
        attempt.take_over_a_foreign_checkpoint()
        attempt.write("flag", b"2")
        assert save(attempt.session, "checkpoint_000001")  # nobody has told Ray yet when the process is killed

    def next_life(attempt):
        assert attempt.tree == {"flag": b"1"}
        attempt.save(keep=2)

    order = ordered("fence", life, next_life)
    order.until(1)
    order.until(2)
    assert order.outcome(2) == "done", order.outcome(2)
