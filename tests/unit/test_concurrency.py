"""Deadlines, bounded work and pacing."""

from __future__ import annotations

import threading
import time

import pytest

from ray_artifact_sync.concurrency import Deadline, OperationThread, Pacer, run_all
from ray_artifact_sync.errors import ArtifactSyncError, SyncTimeoutError


def burn(seconds):
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def test_work_beyond_its_share_rests():
    started = time.monotonic()
    pacer = Pacer(0.1)
    pacer.call(burn, 0.02)
    assert time.monotonic() - started >= 0.19


def test_nothing_rests_once_somebody_waits():
    pacer = Pacer(1e-9)
    pacer.hurry()
    done = []
    pacer.call(done.append, 1)  # would rest for days
    assert done == [1]


def test_what_rests_goes_on_when_somebody_waits():
    pacer = Pacer(1e-9)
    thread = threading.Thread(target=pacer.call, args=(burn, 0.001), daemon=True)
    thread.start()
    thread.join(0.05)
    assert thread.is_alive()
    pacer.hurry()
    thread.join(10)
    assert not thread.is_alive()


def test_an_error_passes_and_is_paced_too():
    pacer = Pacer(0.5)
    pacer.hurry()

    def fail(_item):
        raise KeyError

    with pytest.raises(KeyError):
        pacer.call(fail, None)


@pytest.mark.parametrize("workers", [1, 2, 8])
def test_work_that_is_left_undone_is_an_error(workers):
    """However soon the threads notice: a return means that all was done."""
    over = Deadline(60)
    over.cancel()
    done = []
    with pytest.raises(SyncTimeoutError):
        run_all(range(8), done.append, workers=workers, deadline=over)
    assert not done


def test_a_deadline_that_passes_between_two_items():
    deadline = Deadline(60)
    done = []

    def work(number):
        done.append(number)
        if number == 3:
            deadline.cancel()

    with pytest.raises(SyncTimeoutError):
        run_all(range(100), work, workers=2, deadline=deadline)
    assert len(done) < 10


@pytest.mark.parametrize("there", [0, 1, 3])
def test_a_limit_on_threads_leaves_fewer(monkeypatch, there):
    left = there
    start = threading.Thread.start

    def limited(thread):
        nonlocal left
        if not left:
            raise RuntimeError("can't start new thread")
        left -= 1
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    done = []
    run_all(range(100), done.append, workers=8, deadline=Deadline(60))
    assert sorted(done) == [*range(100)]


def test_an_operation_without_a_thread_is_an_error_of_this_library(monkeypatch):
    def refuse(_thread):
        raise RuntimeError("can't start new thread")

    thread = OperationThread("test")
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(ArtifactSyncError, match="The sync cannot begin: can't start new thread"):
            thread.submit(lambda _deadline: 1, seconds=10, what="The sync")
    assert thread.submit(lambda _deadline: 2, seconds=10, what="The sync").wait() == 2
    thread.close()


def test_who_waits_late_does_not_wait_anew():
    """The deadline counts from the start of an operation, not from the first look at it."""
    thread = OperationThread("test")
    release = threading.Event()
    operation = thread.submit(lambda _deadline: release.wait(60), seconds=2.0, what="The sync")
    operation.wait_done(1.9)
    started = time.monotonic()
    with pytest.raises(SyncTimeoutError):
        operation.wait()
    assert time.monotonic() - started < 2.0
    release.set()
    thread.close()


def test_a_thread_says_what_waits():
    thread = OperationThread("test")
    started, release = threading.Event(), threading.Event()

    def hold(_deadline):
        started.set()
        release.wait(10)

    first = thread.submit(hold, seconds=None, what="first")
    assert started.wait(10)
    assert not thread.waiting()
    second = thread.submit(lambda _deadline: None, seconds=None, what="second")
    assert thread.waiting()
    release.set()
    first.wait()
    second.wait()
    assert not thread.waiting()
    thread.close()
