"""Bars for transfers that take long: rich's in a terminal, Ray's tqdm in a worker whose driver has one."""

from __future__ import annotations

import importlib.util
import itertools
import sys
import threading
from typing import Any

from ray_artifact_sync.progress import Bar, TransferProgress, Watcher, bar_when_slow


def watcher(wanted: bool | None, *, driver_has_terminal: bool) -> Watcher | None:
    """Who shows progress in this process; None for nobody.

    Args:
        wanted: True: in a worker always; False: nowhere; None: where somebody looks at a terminal.
        driver_has_terminal: Whether the driver would show what workers say.
    """
    if wanted is False:
        return None
    if in_worker():
        return bar_when_slow(_bar_in_worker, every=1.0) if wanted or driver_has_terminal else None
    return bar_when_slow(RichBar) if sys.stderr.isatty() else None


def terminal_here() -> bool:
    """Whether this process, a driver, shows bars: it has a terminal, and what Ray needs to draw on it."""
    return sys.stderr.isatty() and importlib.util.find_spec("tqdm") is not None


def in_worker() -> bool:
    """Whether this process is a worker of Ray's; does not import Ray."""
    ray = sys.modules.get("ray")
    worker = getattr(getattr(getattr(ray, "_private", None), "worker", None), "global_worker", None)
    return ray is not None and worker is not None and worker.mode == ray.WORKER_MODE


class _NoBar:
    def update(self) -> None:
        pass

    def close(self) -> None:
        pass


def _bar_in_worker(progress: TransferProgress) -> Bar:
    if type(sys.stdout).__name__ == "Tee":
        # What is printed goes into a file of the trial's (`log_to_file`): a bar would write into an artifact.
        return _NoBar()
    return RayBar(progress)


def _files_left(progress: TransferProgress) -> str:
    left = progress.files - progress.files_done
    return f"{left:,} file{'' if left == 1 else 's'} left"


class RayBar:
    """A bar that Ray draws on the driver's terminal.

    Args:
        progress: What it shows.
    """

    _lock = threading.Lock()
    _positions: set[int] = set()  # noqa: RUF012  (of this process's bars)

    def __init__(self, progress: TransferProgress) -> None:
        from ray.experimental.tqdm_ray import tqdm  # noqa: PLC0415  (only in a process of Ray)

        self._progress = progress
        self._shown = 0
        with self._lock:
            self._position = next(number for number in itertools.count() if number not in self._positions)
            self._positions.add(self._position)
        self._bar = tqdm(
            desc=self._description(), total=progress.bytes, unit="B", position=self._position, flush_interval_s=0.0
        )

    def update(self) -> None:
        """See `progress.Bar`."""
        self._bar.set_description(self._description())
        done = self._progress.bytes_done_so_far
        self._bar.update(done - self._shown)
        self._shown = done

    def close(self) -> None:
        """See `progress.Bar`."""
        self._bar.close()
        with self._lock:
            self._positions.discard(self._position)

    def _description(self) -> str:
        return f"{self._progress.what}, {_files_left(self._progress)}"


class RichBar:
    """A line of the one display that rich allows in a process: bytes, rate, time and files left.

    Args:
        progress: What it shows.
    """

    _lock = threading.Lock()
    _display: Any = None
    _bars = 0

    def __init__(self, progress: TransferProgress) -> None:
        self._progress = progress
        with self._lock:
            if RichBar._display is None:
                RichBar._display = _make_display()
                RichBar._display.start()
            RichBar._bars += 1
            self._task = RichBar._display.add_task(progress.what, total=progress.bytes, left=_files_left(progress))

    def update(self) -> None:
        """See `progress.Bar`."""
        RichBar._display.update(
            self._task, completed=self._progress.bytes_done_so_far, left=_files_left(self._progress)
        )

    def close(self) -> None:
        """See `progress.Bar`."""
        with self._lock:
            RichBar._display.remove_task(self._task)
            RichBar._bars -= 1
            if not RichBar._bars:
                RichBar._display.stop()
                RichBar._display = None


def _make_display() -> Any:
    from rich import progress as bars  # noqa: PLC0415  (only in a terminal)
    from rich.console import Console  # noqa: PLC0415

    return bars.Progress(
        bars.TextColumn("{task.description}", markup=False),
        bars.BarColumn(),
        bars.DownloadColumn(),
        bars.TransferSpeedColumn(),
        bars.TimeRemainingColumn(),
        bars.TextColumn("{task.fields[left]}", markup=False),
        console=Console(stderr=True),
        transient=True,
    )
