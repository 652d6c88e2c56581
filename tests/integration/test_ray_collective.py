"""Ranks that are plain Ray tasks and actors."""

from __future__ import annotations

import os
import signal
import time

import pytest
import ray

from ray_artifact_sync import ShardedUpload
from ray_artifact_sync.errors import ArtifactSyncError, SyncTimeoutError, WorkerDiedError
from ray_artifact_sync.ray_collective import RayCollective
from tests.support.independent_reader import head_tree, posix_place

pytestmark = pytest.mark.ray


def remote(function, **options):
    return ray.remote(function).options(num_cpus=0.1, max_retries=0, **options)


def test_tasks_upload_one_set(ray_cluster, tmp_path):
    def work(rank, target):
        with RayCollective("upload", rank, 4) as collective:
            assert collective.allgather(rank) == [0, 1, 2, 3]
            assert collective.broadcast({"from": rank}, root=2) == {"from": 2}
            collective.barrier()
            sharded = ShardedUpload(target, collective)
            with sharded.store_path() as path, open(os.path.join(path, f"shard_{rank}"), "w") as file:
                file.write(str(rank))

    for _ in range(2):  # the name is free again
        ray.get([remote(work).remote(rank, str(tmp_path / "target")) for rank in range(4)], timeout=120)
    assert head_tree(posix_place(tmp_path / "target")) == {f"shard_{n}": str(n).encode() for n in range(4)}


@pytest.mark.parametrize("victim", [0, 2])
def test_a_killed_rank_makes_the_others_fail_soon(ray_cluster, victim):
    def work(rank, victim):
        collective = RayCollective(f"death-{victim}", rank, 3, dead_after=3)
        collective.barrier()
        if rank == victim:
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)
        started = time.monotonic()
        try:
            collective.allgather(rank)
        except Exception as error:
            return type(error), time.monotonic() - started
        return None

    refs = [remote(work).remote(rank, victim) for rank in range(3)]
    for rank, ref in enumerate(refs):
        if rank != victim:
            error, seconds = ray.get(ref, timeout=120)
            assert error is WorkerDiedError
            assert seconds < 20


def test_a_rank_that_does_not_come(ray_cluster):
    def late(rank):
        with RayCollective("late", rank, 2, timeout=2) as collective:
            if rank == 0:
                collective.barrier()
            else:
                time.sleep(6)

    refs = [remote(late).remote(rank) for rank in range(2)]
    with pytest.raises(SyncTimeoutError, match=r"Ranks \[1\] did not come"):
        ray.get(refs[0], timeout=60)
    ray.get(refs[1], timeout=60)

    def alone(rank):
        RayCollective("alone", rank, 2, join_timeout=2)

    with pytest.raises(SyncTimeoutError, match="did not meet"):
        ray.get(remote(alone).remote(1), timeout=60)


def test_ranks_that_disagree_on_their_number(ray_cluster):
    def work(rank, world_size):
        RayCollective("numbers", rank, world_size, join_timeout=10)

    zero = remote(work).remote(0, 2)
    with pytest.raises(ArtifactSyncError, match="do not fit together"):
        ray.get(remote(work).remote(1, 3), timeout=60)
    with pytest.raises(SyncTimeoutError):
        ray.get(zero, timeout=60)


def test_rank_that_left_is_missed(ray_cluster):
    def work(rank):
        with RayCollective("left", rank, 2) as collective:
            collective.barrier()
            if rank == 0:
                collective.barrier()

    refs = [remote(work).remote(rank) for rank in range(2)]
    ray.get(refs[1], timeout=60)
    with pytest.raises(WorkerDiedError):
        ray.get(refs[0], timeout=60)
