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

_STORAGE = "storage"
_MESSAGES = "ray_messages.log"
_TABLE_WIDTH = 110
EXACT, NOT_EXACT, CANNOT_RUN = range(3)

PLAIN, SYNCED = "Ray alone", "with ray-artifact-sync"
SIDES = {PLAIN: "ray-alone", SYNCED: "with-artifact-sync"}
"""The two sides, with the names of their directories."""

_ENVIRONMENT = {"RAY_AIR_NEW_OUTPUT": "0", "RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}


Counts = dict[str, dict[str, TrialCount]]
"""Side to scenario name to what was counted."""


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
            counts = measure(root, s3=s3, console=console)
            exact = is_exact(counts)
            table = Console(file=sys.stdout, highlight=False, width=max(console.width, _TABLE_WIDTH))
            console.print()
            table.print(side_by_side(counts))
            _explain(console, counts, exact=exact)
            if keep:
                _say_where(console, _files(root, s3=s3), root / _MESSAGES)
    except ArtifactSyncError as error:
        Console(stderr=True, highlight=False, soft_wrap=True).print(f"The demo cannot run: {error}", markup=False)
        return CANNOT_RUN
    return EXACT if exact else NOT_EXACT


def measure(root: Path, *, s3: bool = False, console: Console | None = None) -> Counts:
    """Runs both sides and counts.

    Args:
        root: An empty directory for everything.
        s3: Store on an S3 server that is started for this.
        console: Where progress is told; nowhere if None.

    Raises:
        ArtifactSyncError: It cannot run, and why.
    """
    console = console or Console(quiet=True)
    with _storage(root, console, s3=s3) as place, _ray(root / _MESSAGES):
        return {title: _count(_run(title, place(name), root, console)) for title, name in SIDES.items()}


def is_exact(counts: Counts) -> bool:
    """Whether nothing is lost, twice, or of another time with this library."""
    return all(count.exact for count in counts[SYNCED].values())


def _run(title: str, storage_path: str, root: Path, console: Console) -> dict[str, Observed]:
    """One side; prints how long it took."""
    from ray_artifact_sync.demo.experiment import run_side  # noqa: PLC0415  (imports Ray, after its variables are set)

    started = time.monotonic()
    with console.status(f"{title}: running {len(scenarios.SCENARIOS)} trials ..."):
        observed = run_side(storage_path, root / "seen_at_resume" / SIDES[title], synced=title == SYNCED)
    console.print(f"{title}: {len(observed)} trials in {time.monotonic() - started:.0f} s.")
    return observed


def _count(observed: dict[str, Observed]) -> dict[str, TrialCount]:
    return {
        scenario.name: count_trial(scenario, observed[scenario.name], resumes_from=scenarios.CHECKPOINT_EVERY)
        for scenario in scenarios.SCENARIOS
    }


def _explain(console: Console, counts: Counts, *, exact: bool) -> None:
    lost, twice, right, expected = (
        sum(trial.lines.lost for trial in counts[PLAIN].values()),
        sum(trial.lines.duplicated for trial in counts[PLAIN].values()),
        sum(trial.at_stop.right for trial in counts[PLAIN].values()),
        sum(trial.at_stop.expected for trial in counts[PLAIN].values()),
    )
    console.print(
        f"\nBoth sides ran the same training: a checkpoint every {scenarios.CHECKPOINT_EVERY} steps, trouble in step "
        f"{scenarios.CRASH_AT}. Ray restored the trials that were killed."
    )
    console.print(
        f"With Ray alone (sync_artifacts=True), {lost} lines are lost, {twice} are there twice, and {right} of "
        f"{expected} files of the end arrived."
    )
    if exact:
        console.print("With this library, every line is there once, and every file is the one that it should be.")
    else:
        console.print("With this library, something is NOT exact: a bug, please report it.", style="bold red")


def _say_where(console: Console, files: Path, messages: Path) -> None:
    places = [files / name for name in SIDES.values()]
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
def _storage(root: Path, console: Console, *, s3: bool) -> Iterator[Callable[[str], str]]:
    """Yields a function from a name to a storage path for Ray."""
    if s3:
        with local_s3.local_s3(root / _STORAGE) as server, _environment(server.environment):
            console.print(f"Storage: {server.uri()} (rclone's S3 server, started for this demo).", markup=False)
            yield server.uri
    else:
        yield lambda name: str(root / _STORAGE / name)


def _files(root: Path, *, s3: bool) -> Path:
    """Where the files of `_storage` can be looked at."""
    return root / _STORAGE / local_s3.BUCKET if s3 else root / _STORAGE


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
            import ray.tune  # noqa: PLC0415
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
