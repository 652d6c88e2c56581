"""Deadlines, bounded work and pacing."""

from __future__ import annotations

import threading
import time

import pytest

from ray_artifact_sync.concurrency import OperationThread, Pacer


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
