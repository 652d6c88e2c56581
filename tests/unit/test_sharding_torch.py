"""ShardedUpload over torch.distributed (gloo), where PyTorch is installed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ray_artifact_sync.collectives import TorchCollective
from ray_artifact_sync.errors import ConfigurationError
from tests.support.independent_reader import head_tree, posix_place
from tests.support.s3_servers import free_port

torch = pytest.importorskip("torch", reason="pip install '.[torch]'")

ROOT = str(Path(__file__).resolve().parents[2])
RANK = """
import os, signal, sys, time
import torch.distributed as dist
from ray_artifact_sync import ShardedUpload, ArtifactConflictError, WorkerDiedError
from ray_artifact_sync.collectives import TorchCollective
rank, world, store, target, victim = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4], int(sys.argv[5])
dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world)
collective = TorchCollective(timeout=60)
assert collective.broadcast(rank, root=1) == 1
collective.barrier()
sharded = ShardedUpload(target, collective)
with sharded.store_path() as path:
    open(os.path.join(path, f"shard_{rank}"), "w").write(str(rank))
if victim < 0:
    with sharded.restore_path() as path:
        assert len(os.listdir(path)) == world
    dist.destroy_process_group()
    sys.exit(0)
if rank == victim:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    with sharded.store_path() as path:
        open(os.path.join(path, "second"), "w").write("same")
except WorkerDiedError as error:
    os._exit(7)
"""


def run_ranks(world_size, tmp_path, victim=-1):
    address = f"tcp://127.0.0.1:{free_port()}"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(world_size), address, str(tmp_path / "target"), str(victim)],
            env={**os.environ, "PYTHONPATH": ROOT, "OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world_size)
    ]
    ends = time.monotonic() + 100
    answers = []
    for process in processes:
        _, errors = process.communicate(timeout=max(1.0, ends - time.monotonic()))
        answers.append((process.returncode, errors))
    return answers


def test_four_ranks(tmp_path):
    answers = run_ranks(4, tmp_path)
    assert [code for code, _ in answers] == [0] * 4, answers
    assert head_tree(posix_place(tmp_path / "target")) == {f"shard_{n}": str(n).encode() for n in range(4)}


def test_a_killed_rank_fails_the_others_and_the_set_stays(tmp_path):
    started = time.monotonic()
    answers = run_ranks(3, tmp_path, victim=2)
    assert [code for code, _ in answers] == [7, 7, -signal.SIGKILL], answers
    assert time.monotonic() - started < 60
    assert sorted(head_tree(posix_place(tmp_path / "target"))) == ["shard_0", "shard_1", "shard_2"]


def test_without_a_process_group():
    with pytest.raises(ConfigurationError, match="init_process_group"):
        TorchCollective()
