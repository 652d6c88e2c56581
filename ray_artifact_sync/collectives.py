"""How ranks talk to each other: one small protocol, and what it is for a single process and for torch.distributed.

`ray_artifact_sync.ray_collective` has the one for Ray tasks, actors and Ray Train workers.
"""

from __future__ import annotations

import datetime as dt
import os
import socket
import uuid
from typing import Any, Protocol, TypeVar, runtime_checkable

from ray_artifact_sync.errors import ConfigurationError, WorkerDiedError

Value = TypeVar("Value")

DEFAULT_TIMEOUT = 1800.0
"""Seconds that a rank waits for the others. They may be hashing or uploading meanwhile."""


@runtime_checkable
class Collective(Protocol):
    """A group of ranks that all make the same calls in the same order.

    A call returns when every rank has made it. If a rank has died, or does not come within the time that the
    implementation allows, the call raises on all others: `WorkerDiedError`, `SyncTimeoutError`, or whatever the
    implementation has. Values are picklable; all ranks trust each other.

    Attributes:
        rank: This one's number, from 0.
        world_size: How many there are.

    Example:
        ```python
        from ray_artifact_sync.collectives import Collective, SingleProcess

        collective = SingleProcess()
        assert isinstance(collective, Collective)
        assert collective.allgather("here") == ["here"]
        ```
    """

    @property
    def rank(self) -> int: ...  # noqa: D102

    @property
    def world_size(self) -> int: ...  # noqa: D102

    def allgather(self, value: Any) -> list[Any]:
        """Gives every rank the values of all, in the order of ranks."""
        ...

    def broadcast(self, value: Value, root: int = 0) -> Value:
        """Gives every rank the value of one."""
        ...

    def barrier(self) -> None:
        """Waits until all ranks are here."""
        ...


class SingleProcess:
    """The collective of a process that is alone."""

    rank = 0
    world_size = 1

    def allgather(self, value: Any) -> list[Any]:
        """See `Collective`."""
        return [value]

    def broadcast(self, value: Value, root: int = 0) -> Value:
        """See `Collective`."""
        assert root == 0
        return value

    def barrier(self) -> None:
        """See `Collective`."""


class TorchCollective:
    """torch.distributed over gloo, on CPU tensors, whatever backend the training itself uses.

    To be made by all ranks at the same time, after `torch.distributed.init_process_group`.

    Args:
        ranks: Global ranks that take part; None for all.
        timeout: Seconds that one call waits for the other ranks. One that dies is noticed at once: its connection
            ends.

    Raises:
        ConfigurationError: torch is missing, torch.distributed is not initialised, or has no gloo.

    Example:
        ```python
        from ray_artifact_sync import ConfigurationError
        from ray_artifact_sync.collectives import TorchCollective

        try:
            collective = TorchCollective()  # after torch.distributed.init_process_group()
        except ConfigurationError as error:
            print(error)
        ```
    """

    def __init__(self, ranks: list[int] | None = None, *, timeout: float = DEFAULT_TIMEOUT) -> None:
        try:
            import torch.distributed as dist  # noqa: PLC0415  (optional, heavy)
        except ImportError:
            raise ConfigurationError("TorchCollective needs PyTorch, which is not installed.") from None
        if not dist.is_available() or not dist.is_initialized() or not dist.is_gloo_available():
            raise ConfigurationError("TorchCollective needs torch.distributed.init_process_group() first, and gloo.")
        self._dist = dist
        # A group of its own: its calls never mix with those of the training, and it has its own time limit.
        self._group = dist.new_group(ranks, timeout=dt.timedelta(seconds=timeout), backend="gloo")
        self._ranks = sorted(ranks) if ranks is not None else list(range(dist.get_world_size()))
        self.rank: int = dist.get_rank(self._group)
        self.world_size: int = dist.get_world_size(self._group)

    def allgather(self, value: Any) -> list[Any]:
        """See `Collective`."""
        values: list[Any] = [None] * self.world_size
        self._call(self._dist.all_gather_object, values, value)
        return values

    def broadcast(self, value: Value, root: int = 0) -> Value:
        """See `Collective`."""
        values = [value]
        self._call(self._dist.broadcast_object_list, values, src=self._ranks[root])
        return values[0]

    def barrier(self) -> None:
        """See `Collective`."""
        self._call(self._dist.barrier)

    def _call(self, function: Any, *args: Any, **kwargs: Any) -> None:
        try:
            function(*args, group=self._group, **kwargs)
        except RuntimeError as error:  # gloo's: connection closed by peer, timeout
            raise WorkerDiedError(f"torch.distributed cannot reach all ranks any more: {error}") from error


def node_id() -> str:
    """What identifies this machine's running kernel: ranks with another one are on another node."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return f"{socket.gethostname()}-{uuid.getnode()}"


def directory_id(path: str) -> tuple[str, int, int]:
    """What identifies a directory: equal for two ranks that see the same one.

    Raises:
        OSError: There is no such directory.
    """
    found = os.stat(path)
    return node_id(), found.st_dev, found.st_ino
