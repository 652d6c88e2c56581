"""A function trainable whose files survive a failure: what `finally:` writes, and a log that goes on exactly.

    python examples/function_trainable.py
    python examples/function_trainable.py --storage-path "s3://bucket/runs"

The function raises in step 6. Ray starts it again at the checkpoint of step 4, with the log as it was then.
"""

import argparse
import json
import os
import tempfile

from ray import tune

from ray_artifact_sync import configure, with_artifacts

STEPS = 8


@with_artifacts
def train(config):
    start = 0
    checkpoint = tune.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as directory, open(os.path.join(directory, "state.json")) as file:
            start = json.load(file)
    log = open("log.txt", "a", buffering=1)  # noqa: SIM115  (open for all of the training)
    try:
        for step in range(start + 1, STEPS + 1):
            log.write(f"step {step}\n")
            if step == 6 and start == 0:
                raise RuntimeError("this happens once")
            with tempfile.TemporaryDirectory() as directory:
                with open(os.path.join(directory, "state.json"), "w") as file:
                    json.dump(step, file)
                saved = tune.Checkpoint.from_directory(directory) if step % 4 == 0 else None
                tune.report({"loss": config["rate"] / step}, checkpoint=saved)
    finally:
        with open("end.txt", "w") as file:
            file.write(f"ended after step {step}\n")


def main(storage_path):
    run_config = tune.RunConfig(
        name="function_trainable",
        storage_path=storage_path,
        failure_config=tune.FailureConfig(max_failures=1),
        verbose=0,
    )
    tuner = tune.Tuner(train, param_space={"rate": 0.1}, run_config=configure(run_config))
    result = tuner.fit()[0]
    contents = {}
    for name in ("log.txt", "end.txt"):
        with result.filesystem.open_input_stream(f"{result.path}/{name}") as file:
            contents[name] = file.read().decode()
        print(f"--- {result.path}/{name}\n{contents[name].rstrip()}")
    exact = contents["log.txt"].splitlines() == [f"step {step}" for step in range(1, STEPS + 1)]
    ended = contents["end.txt"] == f"ended after step {STEPS}\n"
    print(f"Every step is in the log once: {exact}. What `finally:` wrote is there: {ended}.")
    return 0 if exact and ended else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--storage-path", default=None, help="a directory or a URI; a new temporary directory by default"
    )
    raise SystemExit(main(parser.parse_args().storage_path or tempfile.mkdtemp(prefix="function-trainable-")))
