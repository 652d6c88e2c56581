"""PyTorch Lightning in Ray Train on one CPU: a crash, and a log that goes on exactly at the checkpoint.

    python examples/train_lightning.py
    python examples/train_lightning.py --storage-path "s3://bucket/runs"

Needs torch and lightning; says so and ends without an error where they are missing.
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
    import lightning
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    class Model(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def training_step(self, batch):
            return torch.nn.functional.mse_loss(self.layer(batch[0]), batch[0].sum(dim=1, keepdim=True))

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    class Report(lightning.Callback):
        """Writes the log, and reports every third epoch with a checkpoint."""

        def __init__(self, artifacts):
            self.artifacts = artifacts

        def on_train_epoch_end(self, trainer, model):
            epoch = trainer.current_epoch + 1
            with open(self.artifacts.path / "log.txt", "a") as log:
                print(f"epoch {epoch}", file=log)
            if epoch == 4 and self.artifacts.restored is None:
                raise RuntimeError("fails once, in epoch 4")
            with tempfile.TemporaryDirectory() as directory:
                trainer.save_checkpoint(os.path.join(directory, "model.ckpt"))
                self.artifacts.report(
                    {"epoch": epoch}, Checkpoint.from_directory(directory) if epoch % 3 == 0 else None
                )

    data = DataLoader(TensorDataset(torch.randn(64, 4, generator=torch.Generator().manual_seed(0))), batch_size=16)
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    with train.artifacts() as artifacts:
        trainer = lightning.Trainer(max_epochs=EPOCHS, accelerator="cpu", callbacks=[Report(artifacts)], **quiet)
        checkpoint = ray.train.get_checkpoint()
        if checkpoint is None:
            trainer.fit(Model(), data)
        else:
            with checkpoint.as_directory() as directory:
                trainer.fit(Model(), data, ckpt_path=os.path.join(directory, "model.ckpt"))


def main(storage_path):
    if missing := [name for name in ("torch", "lightning") if importlib.util.find_spec(name) is None]:
        print(f"This example needs {' and '.join(missing)}, not installed: skipped.")
        return 0
    from ray.train.torch import TorchTrainer

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    result = TorchTrainer(
        train_loop_per_worker,
        scaling_config=ScalingConfig(num_workers=1),
        run_config=RunConfig(name="lightning", storage_path=storage_path, failure_config=FailureConfig(max_failures=1)),
    ).fit()
    with result.filesystem.open_input_stream(f"{result.path}/artifacts/rank_0/log.txt") as file:
        lines = file.read().decode().splitlines()
    print(*lines, sep="\n")
    exact = result.error is None and lines == [f"epoch {n}" for n in range(1, EPOCHS + 1)]
    print(f"Every epoch is in the log once: {exact}")
    return 0 if exact else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--storage-path", default=None, help="a directory or a URI; a new temporary one by default")
    sys.exit(main(parser.parse_args().storage_path or tempfile.mkdtemp(prefix="train-lightning-")))
