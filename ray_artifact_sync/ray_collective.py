"""`RayCollective`: ranks that are Ray tasks, actors or Ray Train workers meet at a small named actor.

The actor belongs to the process of rank 0: when that dies, it goes too, and the others notice at once. Every other
rank sends a sign of life every few seconds from a daemon thread, so that a rank that was killed is noticed although it
does nothing at the moment.
"""

from __future__ import annotations

import asyncio
import logging
import pickle
import threading
import time
import uuid
from contextlib import suppress
from typing import Any, TypeVar

import ray

from ray_artifact_sync.collectives import DEFAULT_TIMEOUT
from ray_artifact_sync.errors import ArtifactSyncError, SyncTimeoutError, WorkerDiedError

logger = logging.getLogger(__name__)

Value = TypeVar("Value")

DEAD_AFTER_SECONDS = 30.0
"""A rank without a sign of life for so long is dead."""
JOIN_TIMEOUT_SECONDS = 300.0

_LOOK_SECONDS = 0.5


class _Rendezvous:
    """The actor: collects one value of each rank per round. Runs on one asyncio loop."""

    def __init__(self, world_size: int, dead_after: float) -> None:
        self._world_size = world_size
        self._dead_after = dead_after
        self._members: dict[int, str] = {}
        self._seen: dict[int, float] = {}
        self._left: set[int] = set()
        self._rounds: dict[int, dict[int, bytes]] = {}
        self._taken: dict[int, int] = {}
        self._broken: list[int] | None = None
        self._changed = asyncio.Condition()

    async def join(self, rank: int, world_size: int, member: str, seconds: float) -> str:
        """Waits until all ranks are there.

        Returns:
            `"ok"`, or why not.
        """
        if world_size != self._world_size:
            return f"rank {rank} has a world size of {world_size}, rank 0 one of {self._world_size}"
        if self._members.setdefault(rank, member) != member:
            return "stale"  # another process of this rank was here: an earlier attempt's actor
        async with self._changed:
            self._seen[rank] = time.monotonic()
            self._changed.notify_all()
            ends = time.monotonic() + seconds
            while len(self._members) < self._world_size:
                if time.monotonic() > ends:
                    missing = sorted(set(range(self._world_size)) - self._members.keys())
                    return f"ranks {missing} did not come within {seconds:g} s"
                self._seen[rank] = time.monotonic()  # it waits here, so it lives
                await self._wait()
        return "ok"

    async def exchange(self, rank: int, number: int, value: bytes, seconds: float) -> tuple[str, Any]:
        """Gives a rank's value for a round; returns `("ok", all values)`, `("dead", ranks)` or `("late", ranks)`."""
        ends = time.monotonic() + seconds
        async with self._changed:
            present = self._rounds.setdefault(number, {})
            present[rank] = value
            self._changed.notify_all()
            while len(present) < self._world_size:
                missing = [other for other in range(self._world_size) if other not in present]
                self._look_for_dead(missing)
                if self._broken is not None:
                    return "dead", self._broken
                if time.monotonic() > ends:
                    return "late", missing
                await self._wait()
            self._taken[number] = self._taken.get(number, 0) + 1
            if self._taken[number] == self._world_size:
                del self._rounds[number], self._taken[number]
        return "ok", [present[other] for other in range(self._world_size)]

    async def beat(self, rank: int) -> None:
        """A sign of life."""
        self._seen[rank] = time.monotonic()

    async def leave(self, rank: int) -> None:
        """A rank is done. The last one ends the actor."""
        async with self._changed:
            self._left.add(rank)
            self._changed.notify_all()
        if len(self._left) == self._world_size:
            ray.actor.exit_actor()

    def _look_for_dead(self, missing: list[int]) -> None:
        if self._broken is None:
            oldest = time.monotonic() - self._dead_after
            gone = [rank for rank in missing if rank in self._left or self._seen.get(rank, oldest) < oldest]
            self._broken = gone or None

    async def _wait(self) -> None:
        with suppress(asyncio.TimeoutError, TimeoutError):
            await asyncio.wait_for(self._changed.wait(), _LOOK_SECONDS)


class RayCollective:
    """A group of ranks anywhere in one Ray cluster. Made by all of them at about the same time; `close` it after use.

    Args:
        name: The group's; every rank gives the same, and no other group of the same Ray namespace at the same time.
        rank: This one's number, from 0.
        world_size: How many there are.
        timeout: Seconds that one call waits for ranks that are alive.
        join_timeout: Seconds in which all ranks must have come here.
        dead_after: Seconds without a sign of life after which a rank counts as dead.

    Raises:
        SyncTimeoutError: Not all ranks came.

    Example:
        ```python
        import ray
        from ray_artifact_sync.ray_collective import RayCollective


        @ray.remote(num_cpus=0.5)
        def work(rank, world_size):
            with RayCollective("example", rank, world_size) as collective:
                return collective.allgather(rank * 10)


        assert ray.get([work.remote(rank, 2) for rank in range(2)]) == [[0, 10], [0, 10]]
        ```
    """

    def __init__(
        self,
        name: str,
        rank: int,
        world_size: int,
        *,
        timeout: float = DEFAULT_TIMEOUT,
        join_timeout: float = JOIN_TIMEOUT_SECONDS,
        dead_after: float = DEAD_AFTER_SECONDS,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self._timeout = timeout
        self._name = f"ray_artifact_sync/{name}"
        self._member = uuid.uuid4().hex
        self._round = 0
        self._closed = threading.Event()
        self._actor = self._join(join_timeout, dead_after)
        threading.Thread(target=self._beat, args=(dead_after / 6,), name="artifact-sync-alive", daemon=True).start()

    def allgather(self, value: Any) -> list[Any]:
        """See `Collective`.

        Raises:
            WorkerDiedError: A rank is gone.
            SyncTimeoutError: A rank is alive, but did not come.
        """
        return [pickle.loads(data) for data in self._exchange(pickle.dumps(value))]  # noqa: S301  (our own ranks)

    def broadcast(self, value: Value, root: int = 0) -> Value:
        """See `Collective`. Raises what `allgather` does."""
        data = self._exchange(pickle.dumps(value) if self.rank == root else b"")[root]
        result: Value = pickle.loads(data)  # noqa: S301  (our own ranks)
        return result

    def barrier(self) -> None:
        """See `Collective`. Raises what `allgather` does."""
        self._exchange(b"")

    def close(self) -> None:
        """Says that this rank is done; others that wait for it from now on fail. Does not wait."""
        if not self._closed.is_set():
            self._closed.set()
            with suppress(Exception):
                self._actor.leave.remote(self.rank)

    def _exchange(self, data: bytes) -> list[bytes]:
        self._round += 1
        try:
            result, values = ray.get(
                self._actor.exchange.remote(self.rank, self._round, data, self._timeout), timeout=self._timeout + 15
            )
        except ray.exceptions.GetTimeoutError as error:
            raise SyncTimeoutError(f"No answer from the other ranks within {self._timeout:g} s.") from error
        except ray.exceptions.RayError as error:
            raise WorkerDiedError(f"Rank 0, where the ranks meet, is gone: {error}", ranks=(0,)) from error
        if result == "dead":
            raise WorkerDiedError(f"Ranks {values} ended in the middle of a common operation.", ranks=tuple(values))
        if result == "late":
            raise SyncTimeoutError(
                f"Ranks {values} did not come within {self._timeout:g} s to an operation that all must take part in.",
                ranks=tuple(values),
            )
        return list(values)

    def _join(self, seconds: float, dead_after: float) -> Any:
        ends = time.monotonic() + seconds
        answer = "nobody is there"
        while (left := ends - time.monotonic()) > 0:
            try:
                actor = self._meeting_place(dead_after)
                answer = ray.get(actor.join.remote(self.rank, self.world_size, self._member, left), timeout=left + 15)
            except (ValueError, ray.exceptions.RayError) as error:  # not there yet, or an earlier one that is ending
                answer = str(error)
            else:
                if answer == "ok":
                    return actor
                if answer.startswith("rank "):
                    raise ArtifactSyncError(f"The ranks of {self._name!r} do not fit together: {answer}.")
                if answer != "stale":
                    break
            time.sleep(min(0.2, max(0.0, left)))
        raise SyncTimeoutError(f"The ranks of {self._name!r} did not meet within {seconds:g} s: {answer}.")

    def _meeting_place(self, dead_after: float) -> Any:
        if self.rank != 0:
            return ray.get_actor(self._name)
        with suppress(ValueError):
            # What an earlier attempt left; its other ranks are told by its end.
            ray.kill(ray.get_actor(self._name))
        options = {"num_cpus": 0, "name": self._name, "max_concurrency": 10_000, "scheduling_strategy": "DEFAULT"}
        return ray.remote(_Rendezvous).options(**options).remote(self.world_size, dead_after)

    def _beat(self, seconds: float) -> None:
        while not self._closed.wait(seconds):
            with suppress(Exception):
                self._actor.beat.remote(self.rank)

    def __enter__(self) -> RayCollective:  # noqa: PYI034  (Self is not in 3.10)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
