"""The demo's trainable, and one run of it on real Ray: the same body with and without this library."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow.fs
from ray import tune

from ray_artifact_sync import ArtifactSyncMixin, configure
from ray_artifact_sync.demo import scenarios
from ray_artifact_sync.demo.counting import Observed
from ray_artifact_sync.demo.scenarios import SCENARIOS, Scenario, content, scenario_named
from ray_artifact_sync.errors import ArtifactSyncError

_STEP_FILE = "step"


class PlainTraining(tune.Trainable):  # type: ignore[misc]  # Ray has no type information here
    """Writes files with plain Python, as any training does; in step 6 it is killed, or raises.

    Config: `scenario` (a name), `witness` (a directory outside of the trial's, for what was seen at the resume).
    """

    def setup(self, config: dict[str, Any]) -> None:
        """Starts at step 0."""
        self.scenario = scenario_named(config["scenario"])
        self.witness = Path(config["witness"], self.scenario.name)
        self.step_number = 0

    def step(self) -> dict[str, Any]:
        """Appends to the log, rewrites files, and comes to grief in step 6."""
        self.step_number += 1
        with open(scenarios.LOG, "a", encoding="utf-8") as log:
            log.write(f"{scenarios.line(self.step_number)}\n")
        for name in scenarios.REWRITTEN:
            _write(name, self.step_number)
        if self.step_number == scenarios.CRASH_AT:
            self._crash()
        return {"step": self.step_number, "done": self.step_number >= scenarios.STEPS}

    def _crash(self) -> None:
        if not self.scenario.kills:
            _write(scenarios.ERROR_REPORT, self.step_number)
            raise RuntimeError("The demo's step raises.")
        try:
            (self.witness / "killed").touch(exist_ok=False)
        except FileExistsError:
            return
        if self.scenario.wipes:
            shutil.rmtree(self.logdir)
        os.kill(os.getpid(), signal.SIGKILL)

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Saves the step."""
        Path(checkpoint_dir, _STEP_FILE).write_text(str(self.step_number), encoding="utf-8")

    def load_checkpoint(self, checkpoint_dir: str) -> None:
        """Continues after the step that was saved; notes what the working dir looks like at this moment."""
        self.step_number = int(Path(checkpoint_dir, _STEP_FILE).read_text(encoding="utf-8"))
        for name in scenarios.REWRITTEN:
            target = self.witness / "at_resume" / name
            target.parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileNotFoundError):
                shutil.copyfile(name, target)
        (self.witness / "resumed_from").write_text(str(self.step_number), encoding="utf-8")

    def cleanup(self) -> None:
        """Writes what is only known at the end."""
        for name in scenarios.AT_STOP:
            _write(name, self.step_number)


class SyncedTraining(ArtifactSyncMixin, PlainTraining):
    """The same with this library."""


def run_side(storage_path: str, witness: Path, *, synced: bool) -> dict[str, Observed]:
    """Runs all scenarios once; those in which Ray restores the trial are one experiment, the others a second one.

    Args:
        storage_path: Where to; a directory or a URI.
        witness: A new directory for what is seen at the resume.
        synced: With this library; else with Ray's own `sync_artifacts=True`.

    Returns:
        What each scenario's trial left.

    Raises:
        ArtifactSyncError: A trial did not come to the point: Ray did not restore it.
    """
    killed = [scenario for scenario in SCENARIOS if scenario.kills]
    failing = [scenario for scenario in SCENARIOS if not scenario.kills]
    return {
        **_run("killed", killed, storage_path, witness, synced=synced, max_failures=1),
        **_run("failing", failing, storage_path, witness, synced=synced, max_failures=0),
    }


def _run(
    name: str, trials: list[Scenario], storage_path: str, witness: Path, *, synced: bool, max_failures: int
) -> dict[str, Observed]:
    for scenario in trials:
        (witness / scenario.name).mkdir(parents=True)
    run_config = tune.RunConfig(
        name=name,
        storage_path=storage_path,
        sync_config=tune.SyncConfig(sync_artifacts=True),
        checkpoint_config=tune.CheckpointConfig(checkpoint_frequency=scenarios.CHECKPOINT_EVERY),
        failure_config=tune.FailureConfig(max_failures=max_failures),
        verbose=0,
    )
    results = tune.Tuner(
        SyncedTraining if synced else PlainTraining,
        param_space={"scenario": tune.grid_search([scenario.name for scenario in trials]), "witness": str(witness)},
        tune_config=tune.TuneConfig(trial_dirname_creator=_trial_dir_name),
        run_config=configure(run_config) if synced else run_config,
    ).fit()
    observed = {}
    for scenario in trials:
        seen = witness / scenario.name
        if scenario.kills and not (seen / "resumed_from").exists():
            raise ArtifactSyncError(
                f"The trial {scenario.name!r} was never restored from a checkpoint: {list(results.errors)}"
            )
        observed[scenario.name] = _observe(results.filesystem, f"{results.experiment_path}/{scenario.name}", seen)
    return observed


def _trial_dir_name(trial: Any) -> str:
    return str(trial.config["scenario"])


def _observe(filesystem: pyarrow.fs.FileSystem, trial_dir: str, witness: Path) -> Observed:
    names = (*scenarios.AT_STOP, scenarios.ERROR_REPORT)
    resumed_from = witness / "resumed_from"
    return Observed(
        log=_read(filesystem, f"{trial_dir}/{scenarios.LOG}"),
        at_stop={name: _read(filesystem, f"{trial_dir}/{name}") for name in names},
        resumed_from=int(resumed_from.read_text(encoding="utf-8")) if resumed_from.exists() else None,
        at_resume=_read_all(witness / "at_resume"),
    )


def _read_all(directory: Path) -> Mapping[str, str | None]:
    local = pyarrow.fs.LocalFileSystem()
    return {name: _read(local, str(directory / name)) for name in scenarios.REWRITTEN}


def _read(filesystem: pyarrow.fs.FileSystem, path: str) -> str | None:
    try:
        with filesystem.open_input_stream(path) as stream:
            return bytes(stream.read()).decode(errors="replace")
    except FileNotFoundError:
        return None


def _write(name: str, step: int) -> None:
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content(name, step), encoding="utf-8")
