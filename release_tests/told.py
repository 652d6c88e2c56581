"""What the library says while a trial runs: its log records, with their fields, collected from all attempts."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

PREFIX = "artifact_sync_"


class Listener(logging.Handler):
    """Writes each record that has an event as a line of JSON; one file a process."""

    def __init__(self, directory: str) -> None:
        super().__init__(logging.INFO)
        self._path = Path(directory, f"told-{os.getpid()}.jsonl")

    def emit(self, record: logging.LogRecord) -> None:
        facts = {name.removeprefix(PREFIX): value for name, value in vars(record).items() if name.startswith(PREFIX)}
        if facts:
            with open(self._path, "a") as file:
                file.write(json.dumps({**facts, "said": record.getMessage()}, default=str) + "\n")


def listen(directory: str) -> None:
    """From now on, for this process."""
    logger = logging.getLogger("ray_artifact_sync")
    for handler in [*logger.handlers]:
        if isinstance(handler, Listener):  # an actor that is used again
            logger.removeHandler(handler)
    logger.addHandler(Listener(directory))


def told(directory: Path, event: str) -> list[dict[str, Any]]:
    """The records of one event, of all processes."""
    lines = [line for file in directory.glob("told-*.jsonl") for line in file.read_text().splitlines()]
    return [record for record in map(json.loads, lines) if record["event"] == event]
