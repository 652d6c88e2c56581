"""The demo from start to end: storage, Ray, both runs, the table, the exit code."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console

from ray_artifact_sync.demo import local_s3, scenarios
from ray_artifact_sync.demo.counting import Observed, TrialCount, count_trial
from ray_artifact_sync.demo.table import side_by_side
from ray_artifact_sync.errors import ArtifactSyncError

_MESSAGES = "ray_messages.log"
_TABLE_WIDTH = 110
EXACT, NOT_EXACT, CANNOT_RUN = range(3)

_PLAIN, _SYNCED = "Ray alone", "with ray-artifact-sync"
_NAMES = {_PLAIN: "ray-alone", _SYNCED: "with-artifact-sync"}
_ENVIRONMENT = {"RAY_AIR_NEW_OUTPUT": "0", "RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}


def run_demo(*, directory: Path | None = None, s3: bool = False, keep: bool = True) -> int:
    """Runs the demo and prints what it finds.

    Args:
        directory: Where everything is put, new or empty; a new temporary directory if None.
        s3: Store on an S3 server that is started for the demo.
        keep: Leave the files there.

    Returns:
        The exit code: 0 if everything is exact with this library, 1 if it is not, 2 if the demo cannot run.
    """
    console = Console(file=sys.stdout, highlight=False, soft_wrap=True)  # Ray prints to another stdout, below
    try:
        with _workspace(directory, keep=keep) as root:
            with _storage(root, s3=s3) as (place, files), _ray(root / _MESSAGES):
                sides = {title: _run(title, place(_NAMES[title]), root, console) for title in (_PLAIN, _SYNCED)}
            counts = {title: _count(observed) for title, observed in sides.items()}
            table = Console(file=sys.stdout, highlight=False, width=max(console.width, _TABLE_WIDTH))
            console.print()
            table.print(side_by_side(counts))
            exact = all(count.exact for count in counts[_SYNCED].values())
            _explain(console, counts, exact=exact)
            if keep:
                _say_where(console, files, root / _MESSAGES)
    except ArtifactSyncError as error:
        Console(stderr=True, highlight=False, soft_wrap=True).print(f"The demo cannot run: {error}", markup=False)
        return CANNOT_RUN
    return EXACT if exact else NOT_EXACT


def _run(title: str, storage_path: str, root: Path, console: Console) -> dict[str, Observed]:
    """One side; prints how long it took."""
    from ray_artifact_sync.demo.experiment import run_side  # noqa: PLC0415  (imports Ray, after its variables are set)

    started = time.monotonic()
    with console.status(f"{title}: running {len(scenarios.SCENARIOS)} trials ..."):
        observed = run_side(storage_path, root / "seen_at_resume" / _NAMES[title], synced=title == _SYNCED)
    console.print(f"{title}: {len(observed)} trials in {time.monotonic() - started:.0f} s.")
    return observed


def _count(observed: dict[str, Observed]) -> dict[str, TrialCount]:
    return {
        scenario.name: count_trial(scenario, observed[scenario.name], resumes_from=scenarios.CHECKPOINT_EVERY)
        for scenario in scenarios.SCENARIOS
    }


def _explain(console: Console, counts: dict[str, dict[str, TrialCount]], *, exact: bool) -> None:
    lost, twice, right, expected = (
        sum(trial.lines.lost for trial in counts[_PLAIN].values()),
        sum(trial.lines.duplicated for trial in counts[_PLAIN].values()),
        sum(trial.at_stop.right for trial in counts[_PLAIN].values()),
        sum(trial.at_stop.expected for trial in counts[_PLAIN].values()),
    )
    console.print(
        f"\nBoth sides ran the same training: a checkpoint every {scenarios.CHECKPOINT_EVERY} steps, trouble in step "
        f"{scenarios.CRASH_AT}; then Ray restored the trial."
    )
    console.print(
        f"With Ray alone (sync_artifacts=True), {lost} lines are lost, {twice} are there twice, and {right} of "
        f"{expected} files of the end arrived."
    )
    if exact:
        console.print("With this library, every file is exactly what an undisturbed training would have left.")
    else:
        console.print("[bold red]With this library, something is NOT exact. This is a bug; please report it.[/bold red]")


def _say_where(console: Console, files: Path, messages: Path) -> None:
    places = [files / name for name in _NAMES.values()]
    console.print("\n".join(f"  {place}" for place in ("The files lie in", *places)).strip(), markup=False)
    console.print(f"What Ray printed: {messages}", markup=False)


# --- surroundings --------------------------------------------------------------------------------


@contextlib.contextmanager
def _workspace(directory: Path | None, *, keep: bool) -> Iterator[Path]:
    try:
        if directory is None:
            root = Path(tempfile.mkdtemp(prefix="ray-artifact-sync-demo-"))
        else:
            root = directory.expanduser().resolve()
            root.mkdir(parents=True, exist_ok=True)
            if any(root.iterdir()):
                raise ArtifactSyncError(f"{root} is not empty; name a new directory.")
    except OSError as error:
        raise ArtifactSyncError(f"No directory to put the files into: {error}") from error
    try:
        yield root
    finally:
        if not keep:
            shutil.rmtree(root, ignore_errors=True)


@contextlib.contextmanager
def _storage(root: Path, *, s3: bool) -> Iterator[tuple[Callable[[str], str], Path]]:
    """Yields a function from a name to a storage path for Ray, and where its files can be looked at."""
    files = root / "storage"
    if not s3:
        yield lambda name: str(files / name), files
        return
    with local_s3.local_s3(files) as server, _environment(server.environment):
        yield server.uri, files / local_s3.BUCKET


@contextlib.contextmanager
def _ray(messages: Path) -> Iterator[None]:
    """A quiet Ray of the demo's own; what it prints about killed workers goes into a file."""
    with (
        open(messages, "w", encoding="utf-8") as file,
        contextlib.redirect_stdout(file),
        contextlib.redirect_stderr(file),
        _environment(_ENVIRONMENT),
    ):
        try:
            import ray  # noqa: PLC0415  (reads the variables)
            import ray.tune  # noqa: PLC0415, F401
        except ImportError as error:
            raise ArtifactSyncError(f"Ray Tune cannot be imported: {error}. `pip install 'ray[tune]'`.") from error
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                ray.init(
                    address="local",
                    num_cpus=2,
                    include_dashboard=False,
                    logging_level=logging.CRITICAL,  # trials that fail are the point
                    log_to_driver=False,
                )
            except Exception as error:
                raise ArtifactSyncError(f"Ray does not start: {error}") from error
            try:
                yield
            finally:
                ray.shutdown()


@contextlib.contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """Sets variables for this process and those that it starts."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
