"""Four workers save one model together, each its own shards, and load it again.

    python examples/sharded.py
    python examples/sharded.py --target "s3://bucket/model"

The workers are plain Ray tasks. With Ray Train, use `ray_artifact_sync.train.artifacts`; with torch.distributed, give
`ShardedUpload` a `ray_artifact_sync.collectives.TorchCollective()`.
"""

import argparse
import os
import tempfile

import ray

from ray_artifact_sync import ArtifactConflictError, ShardedUpload
from ray_artifact_sync.ray_collective import RayCollective

WORLD_SIZE = 4


@ray.remote(num_cpus=0.25)
def work(rank, target):
    with RayCollective("example", rank, WORLD_SIZE) as collective:
        sharded = ShardedUpload(target, collective)

        # Every worker writes into a directory of its own. The set is committed when all of them have uploaded theirs.
        with sharded.store_path(metadata={"step": 100, "rows": {f"shard_{rank}": 1000 + rank}}) as path:
            with open(os.path.join(path, f"shard_{rank}.bin"), "wb") as file:
                file.write(bytes([rank]) * 1000)
            with open(os.path.join(path, "config.json"), "w") as file:
                file.write('{"layers": 12}')  # the same from all: uploaded once

        # One download for each node; this worker asks for its shard.
        own = f"shard_{rank}.bin"
        with sharded.restore_path(selector=own.__eq__) as path, open(os.path.join(path, own), "rb") as file:
            assert file.read() == bytes([rank]) * 1000

        # Two workers that disagree: all of them are told, and the committed set stays.
        try:
            with sharded.store_path() as path, open(os.path.join(path, "config.json"), "w") as file:
                file.write(f'{{"layers": {12 + rank // 3}}}')
        except ArtifactConflictError as error:
            return str(error)
    return "no conflict?"


def main(target):
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    answers = ray.get([work.remote(rank, target) for rank in range(WORLD_SIZE)])
    sharded = ShardedUpload(target)  # this process alone: to look
    print(f"{target} holds:")
    for entry in sharded.manifest():
        print(f"  {entry.path} ({entry.size} bytes)")
    print(f"  metadata: {sharded.metadata()}")
    print(f"Then every worker heard: {answers[0]}")
    assert len(set(answers)) == 1
    ray.shutdown()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default=None, help="a directory or a URI; a new temporary directory by default")
    main(parser.parse_args().target or os.path.join(tempfile.mkdtemp(prefix="sharded-"), "model"))
