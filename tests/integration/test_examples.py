"""The examples run as they are."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.slow]

QUICKSTART = Path(__file__).resolve().parents[2] / "examples/quickstart.py"


def run_quickstart(storage_path: str) -> str:
    done = subprocess.run(
        [sys.executable, str(QUICKSTART), "--storage-path", storage_path],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def check(output: str) -> None:
    assert "2 of 2 trials failed, as they should" in output
    _, *trials = output.split("--- log.txt\n")
    assert len(trials) == 2
    for trial in trials:
        log = trial.partition("--- ")[0].split("\n\n")[0].splitlines()
        assert [line.partition(":")[0] for line in log if line.startswith("step")] == [f"step {n}" for n in range(1, 9)]
        assert "up to step 8" in trial
        assert "ended after step 8" in trial
        assert '"loss": 0.0' in trial


def test_quickstart_on_a_local_directory(tmp_path):
    check(run_quickstart(str(tmp_path / "runs")))


@pytest.mark.exhaustive
@pytest.mark.s3
def test_quickstart_on_s3(s3_uri):
    check(run_quickstart(s3_uri("quickstart/runs")))


def run_example(name: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, str(QUICKSTART.with_name(name)), *arguments],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_sharded(tmp_path):
    output = run_example("sharded.py", "--target", str(tmp_path / "model"))
    for rank in range(4):
        assert f"shard_{rank}.bin (1000 bytes)" in output
    assert "'shard_3': 1003" in output
    assert "'config.json' has different bytes from ranks 0, 1, 2 and 3" in output


def test_train_v2(tmp_path):
    output = run_example("train_v2.py", "--storage-path", str(tmp_path / "runs"))
    _, *logs = output.split("--- ")
    assert len(logs) == 2
    for log in logs:
        assert log.splitlines()[1:] == [*(f"step {n}" for n in range(1, 9)), "the end"]


def test_remote_uploader(tmp_path):
    target = tmp_path / "run"
    assert "Three checkpoints are in" in run_example("remote_uploader.py", str(target))
    assert (target / "latest").read_text() == "step-3"
    assert (target / "step-3/model.bin").stat().st_size == 3 * 1024


def test_function_trainable(tmp_path):
    output = run_example("function_trainable.py", "--storage-path", str(tmp_path / "runs"))
    assert "Every step is in the log once: True. What `finally:` wrote is there: True." in output


def test_callbacks(tmp_path):
    output = run_example("callbacks.py", "--storage-path", str(tmp_path / "runs"))
    assert "sub/summary.json   by the worker" in output


def test_pbt(tmp_path):
    output = run_example("pbt.py", "--storage-path", str(tmp_path / "runs"))
    assert "one trained on 2 models" in output


def test_restore_after_crash(tmp_path):
    output = run_example("restore_after_crash.py", "--storage-path", str(tmp_path / "runs"))
    assert "Resumed at step 4. Every step is in the log once: True" in output


@pytest.mark.s3
def test_s3():
    assert "Every step is in the log once: True" in run_example("s3.py")


def test_read_results(tmp_path):
    output = run_example("read_results.py", "--storage-path", str(tmp_path / "runs"))
    assert "As of checkpoint_000000:" in output


def test_train_torch(tmp_path):
    output = run_example("train_torch.py", "--storage-path", str(tmp_path / "runs"))
    if "skipped" in output:
        pytest.skip(output.strip())
    assert "Every epoch is in both logs once: True" in output


def test_train_lightning(tmp_path):
    output = run_example("train_lightning.py", "--storage-path", str(tmp_path / "runs"))
    if "skipped" in output:
        pytest.skip(output.strip())
    assert "Every epoch is in the log once: True" in output


def test_every_example_is_tested():
    examples = {path.name for path in QUICKSTART.parent.glob("*.py")}
    text = Path(__file__).read_text(encoding="utf-8")
    assert not {name for name in examples if f'"{name}"' not in text} - {QUICKSTART.name}
