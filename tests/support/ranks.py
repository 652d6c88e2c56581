"""Ranks as real processes of this machine, which talk through pipes and can be killed at any step."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

from ray_artifact_sync.errors import WorkerDiedError

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["ray_artifact_sync.sharded_upload", "ray_artifact_sync.stores.resolve", __name__])


@dataclass
class Outcome:
    """How one rank ended.

    Attributes:
        value: What its function returned.
        error: What it raised.
        exitcode: Of the process; negative for a signal.
        seconds: From the start of all to its answer (0 for none).
    """

    value: Any = None
    error: BaseException | None = None
    exitcode: int | None = None
    seconds: float = 0.0


class PipeCollective:
    """The ranks' side. `kill=(rank, step, moment)` ends a rank with SIGKILL before or after a step of `Together`."""

    def __init__(self, pipe: Connection, rank: int, world_size: int, kill: tuple[int, str, str] | None) -> None:
        self.rank = rank
        self.world_size = world_size
        self.steps: list[str] = []
        self.seconds = 0.0
        self._pipe = pipe
        self._kill = kill

    def allgather(self, value):
        step = value[1] if isinstance(value, tuple) and len(value) == 4 else ""
        self.steps.append(step)
        self._die(step, "before")
        started = time.monotonic()
        self._pipe.send_bytes(pickle.dumps(value))
        kind, values = pickle.loads(self._pipe.recv_bytes())
        self.seconds += time.monotonic() - started
        self._die(step, "after")
        if kind == "dead":
            raise WorkerDiedError(f"ranks {values} are gone", ranks=values)
        return [pickle.loads(item) for item in values]

    def broadcast(self, value, root=0):
        return self.allgather(value)[root]

    def barrier(self):
        self.allgather(None)

    def _die(self, step: str, moment: str) -> None:
        if self._kill == (self.rank, step, moment):
            os.kill(os.getpid(), signal.SIGKILL)


def _main(function, pipe, answer, rank, world_size, kill, args) -> None:
    try:
        result = (function(PipeCollective(pipe, rank, world_size, kill), *args), None)
    except BaseException as error:
        traceback.print_exc()
        result = (None, error)
    answer.send_bytes(pickle.dumps(result))


def run_ranks(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    kill: tuple[int, str, str] | None = None,
    timeout: float = 60.0,
) -> list[Outcome]:
    """Runs `function(collective, *args)` in so many processes.

    Raises:
        AssertionError: One of them has not ended in time.
    """
    started = time.monotonic()
    pipes, answers, processes = [], [], []
    for rank in range(world_size):
        here, there = _CONTEXT.Pipe()
        answer, giver = _CONTEXT.Pipe(duplex=False)
        process = _CONTEXT.Process(
            target=_main, args=(function, there, giver, rank, world_size, kill, args), daemon=True
        )
        process.start()
        there.close()
        giver.close()
        pipes.append(here)
        answers.append(answer)
        processes.append(process)
    threading.Thread(target=_hub, args=(pipes,), daemon=True).start()
    outcomes = [Outcome() for _ in processes]
    try:
        for outcome, answer, process in zip(outcomes, answers, processes, strict=True):
            if answer.poll(max(0.0, timeout - (time.monotonic() - started))):
                with contextlib.suppress(EOFError):
                    outcome.value, outcome.error = pickle.loads(answer.recv_bytes())
            outcome.seconds = time.monotonic() - started
            process.join(max(0.1, timeout - (time.monotonic() - started)))
            assert process.exitcode is not None, f"a rank still runs after {timeout} s"
            outcome.exitcode = process.exitcode
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
    return outcomes


def _hub(pipes: list[Connection]) -> None:
    """Gives every rank the values of all, or says who is gone."""
    alive = set(range(len(pipes)))
    waiting: dict[int, bytes] = {}
    while alive:
        for pipe in wait([pipes[rank] for rank in alive]):
            rank = pipes.index(pipe)
            try:
                waiting[rank] = pipe.recv_bytes()
            except (EOFError, OSError):
                alive.discard(rank)
        if len(waiting) == len(pipes):
            _answer(pipes, waiting, ("ok", [waiting[rank] for rank in range(len(pipes))]))
        elif len(alive) < len(pipes):
            _answer(pipes, waiting, ("dead", tuple(sorted(set(range(len(pipes))) - alive))))


def _answer(pipes: list[Connection], waiting: dict[int, bytes], answer) -> None:
    data = pickle.dumps(answer)
    for rank in list(waiting):
        del waiting[rank]
        with contextlib.suppress(OSError):
            pipes[rank].send_bytes(data)
