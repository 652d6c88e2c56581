"""Uploads checkpoints in the background of a plain Python loop, without Ray.

python examples/remote_uploader.py s3://bucket/run-1      (or an absolute local path)
"""

import sys
import tempfile
from pathlib import Path

from ray_artifact_sync import RemoteUploader


def train_step(step: int) -> dict[str, bytes]:
    """Stands for the training: the files of one checkpoint."""
    return {"model.bin": bytes(1024) * step, "optimizer.bin": bytes(2048) * step}


def main(remote_dir: str) -> None:
    scratch = Path(tempfile.mkdtemp())
    # Wrong credentials or a read-only bucket are an error here, not after the first hour.
    with RemoteUploader(remote_dir, max_workers=4) as uploader:
        for step in (1, 2, 3):
            saved = []
            for name, content in train_step(step).items():
                path = scratch / name
                path.write_bytes(content)
                # The file is copied aside first: the next step may write over it at once.
                saved.append(uploader.upload_file_async(f"step-{step}/{name}", path, overwrite=True))
            # `latest` names a step only when all of its files are in storage.
            uploader.publish_after(saved, "latest", f"step-{step}")
            uploader.check_workers()  # raises what has failed so far, without waiting
    # Leaving the block waited for everything; failures would have been raised, all together.
    print(f"Three checkpoints are in {remote_dir}.")


if __name__ == "__main__":
    main(sys.argv[1])
