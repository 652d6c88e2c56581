"""Ray Train with torch on two CPUs: a crash, and per-worker logs and plots that go on exactly at the checkpoint.

    python examples/train_torch.py
    python examples/train_torch.py --storage-path "s3://bucket/runs"

Needs torch; says so and ends without an error where it is missing.
"""

import argparse
import importlib.util
import os
import sys
import tempfile

os.environ.setdefault("RAY_TRAIN_V2_ENABLED", "1")  # the default from Ray 2.51 on

import ray
import ray.train
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig

from ray_artifact_sync import train

EPOCHS = 6


def train_loop_per_worker():
    import torch
    from ray.train.torch import prepare_model

    torch.manual_seed(0)
    model = prepare_model(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with train.artifacts() as artifacts:
        start = 0
        if (checkpoint := ray.train.get_checkpoint()) is not None:
            with checkpoint.as_directory() as directory:
                state = torch.load(os.path.join(directory, "state.pt"))
            model.module.load_state_dict(state["model"])
            start = state["epoch"]
        log = open(artifacts.path / "log.txt", "a", buffering=1)  # noqa: SIM115  (open for all of the training)
        for epoch in range(start + 1, EPOCHS + 1):
            inputs = torch.randn(64, 4, generator=torch.Generator().manual_seed(epoch))
            loss = torch.nn.functional.mse_loss(model(inputs), inputs.sum(dim=1, keepdim=True))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            log.write(f"epoch {epoch}: loss {loss.item():.4f}\n")
            if epoch == 4 and start == 0 and artifacts.rank == 1:
                raise RuntimeError("worker 1 fails in epoch 4")
            with tempfile.TemporaryDirectory() as directory:
                saved = None
                if epoch % 3 == 0 and artifacts.rank == 0:
                    state = {"epoch": epoch, "model": model.module.state_dict()}
                    torch.save(state, os.path.join(directory, "state.pt"))
                    saved = Checkpoint.from_directory(directory)
                artifacts.report({"loss": loss.item()}, saved)


def main(storage_path):
    if importlib.util.find_spec("torch") is None:
        print("This example needs torch, which is not installed: skipped.")
        return 0
    from ray.train.torch import TorchTrainer

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    result = TorchTrainer(
        train_loop_per_worker,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(name="torch", storage_path=storage_path, failure_config=FailureConfig(max_failures=1)),
    ).fit()
    exact = result.error is None
    for rank in (0, 1):
        with result.filesystem.open_input_stream(f"{result.path}/artifacts/rank_{rank}/log.txt") as file:
            lines = file.read().decode().splitlines()
        print(f"--- worker {rank}", *lines, sep="\n")
        exact &= [line.partition(":")[0] for line in lines] == [f"epoch {n}" for n in range(1, EPOCHS + 1)]
    print(f"Every epoch is in both logs once: {exact}")
    return 0 if exact else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--storage-path", default=None, help="a directory or a URI; a new temporary one by default")
    sys.exit(main(parser.parse_args().storage_path or tempfile.mkdtemp(prefix="train-torch-")))
