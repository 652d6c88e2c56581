"""What the report page shows, as plain values: read from manifests, checkpoints and journals. Only reads.

What is embedded (pictures, texts) has a budget; what was left out is said.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from ray_artifact_sync import layout
from ray_artifact_sync.concurrency import Deadline, run_all
from ray_artifact_sync.entries import FileEntry, Manifest
from ray_artifact_sync.errors import ArtifactSyncError
from ray_artifact_sync.experiments import Place
from ray_artifact_sync.journal import Journal
from ray_artifact_sync.journal_files import read_journal
from ray_artifact_sync.trial_reader import LOADING_THREADS, TrialReader, load_all, request

MAX_EMBEDDED = 40
"""Pictures, and texts, of one trial."""
MAX_PICTURE_BYTES = 4 * 1024 * 1024
MAX_TEXT_BYTES = 1024 * 1024

PICTURES = {"png": "image/png", "jpg": "image/jpeg", "jpeg": "image/jpeg", "svg": "image/svg+xml"}
TABLES = {"csv", "tsv"}
TEXTS = {"txt", "log", "json", "jsonl", "yaml", "yml", "md", "toml", "ini", "cfg", "py", "out", "err"}
TEXT_NAMES = {"stdout", "stderr", "readme"}

Sort = Literal["picture", "table", "text"]

# Names and messages come from storage, where anybody may have written them: what a reader cannot see is spelled out.
_UNSEEN = re.compile(r"[\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]")


def visible(text: str) -> str:
    """Text with everything that would not be seen, or would reorder what is, as escapes."""
    return _UNSEEN.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


@dataclass(slots=True)
class Embedded:
    """A file whose content is in the page.

    Attributes:
        path: Artifact path.
        size: Bytes.
        sort: How it is shown.
        mime: Of a picture.
        data: The content; None where it is left out.
        left_out: Why.
    """

    path: str
    size: int
    sort: Sort
    mime: str = ""
    data: bytes | None = None
    left_out: str = ""


@dataclass(slots=True)
class TrialReport:
    """One trial.

    Attributes:
        name: Of the trial.
        error: Why it cannot be read; then the rest is empty.
        head: The newest artifacts.
        checkpoints: Name, time (Unix seconds or None) and manifest of each checkpoint with a snapshot, oldest first.
        journal: What the sessions wrote; None if there is none, or it cannot be read.
        note: What is to be said about it.
        damaged: The list of the newest artifacts cannot be read.
        embedded: Files whose content is in the page, or could be.
    """

    name: str
    error: str = ""
    head: Manifest = field(default_factory=Manifest)
    checkpoints: list[tuple[str, float | None, Manifest]] = field(default_factory=list)
    journal: Journal | None = None
    note: str = ""
    damaged: bool = False
    embedded: list[Embedded] = field(default_factory=list)


@dataclass(slots=True)
class ExperimentReport:
    """An experiment, a trial, or a run.

    Attributes:
        uri: As it was named; without credentials.
        name: For the title.
        made: When, Unix seconds.
        trials: By name.
    """

    uri: str
    name: str
    made: float
    trials: list[TrialReport]


def collect(
    place: Place,
    readers: Mapping[str, TrialReader],
    *,
    embed_bytes: int,
    on_trial: Callable[[], None] = lambda: None,
) -> ExperimentReport:
    """Reads what the page shows.

    Args:
        place: What was named.
        readers: Its trials.
        embed_bytes: Content of files that may be embedded, in all.
        on_trial: Called when one more trial was read.
    """
    failures = load_all(readers)
    trials = {name: TrialReport(visible(name)) for name in readers}

    def read(name: str) -> None:
        try:
            if name in failures:
                trials[name].error = _reason(failures[name])
            else:
                _read_trial(readers[name], trials[name])
        except (ArtifactSyncError, OSError) as error:
            trials[name].error = _reason(error)
        on_trial()

    run_all(readers, read, workers=LOADING_THREADS, deadline=Deadline())
    _embed(readers, trials, embed_bytes)
    return ExperimentReport(
        visible(place.uri), visible(place.name) or visible(place.uri), time.time(), list(trials.values())
    )


def _reason(error: BaseException) -> str:
    return visible(str(error) or type(error).__name__)


def _read_trial(reader: TrialReader, trial: TrialReport) -> None:
    contents = reader.contents
    if isinstance(contents.head, Manifest):
        trial.head = contents.head
    elif contents.head is not None:
        trial.damaged = True
        trial.note = f"The newest artifacts are not known: {_reason(contents.head)}"
    trial.checkpoints = [
        (name, saved.saved_ns / 1e9 if saved.saved_ns else None, saved.manifest)
        for name, saved in contents.checkpoints.items()
    ]
    if any(path.startswith(f"{layout.JOURNAL}/") for path in contents.listing):
        try:
            trial.journal = request(lambda: read_journal(reader.trial.store), f"Reading the journal of {reader.name}")
        except (ArtifactSyncError, OSError) as error:
            trial.note = f"The journal cannot be read: {_reason(error)}"
    elif not trial.note:
        trial.note = (
            "No journal: an older release wrote this trial, or none of its syncs has ended yet. Only what its "
            "checkpoints and manifests say is shown."
        )


# --- pictures and texts -------------------------------------------------------------------------------


def sort_of(path: str) -> tuple[Sort, str] | None:
    """How a file is shown, and the media type of a picture; None if only its name is."""
    name = path.rpartition("/")[2].lower()
    extension = name.rpartition(".")[2] if "." in name else ""
    if extension in PICTURES:
        return "picture", PICTURES[extension]
    if extension in TABLES:
        return "table", ""
    return ("text", "") if extension in TEXTS or name in TEXT_NAMES else None


def _candidates(head: Manifest) -> Iterator[tuple[FileEntry, Embedded]]:
    """Files that can be shown, pictures first, of each sort the newest first."""
    newest = sorted((entry for entry in head if not entry.is_dir), key=lambda entry: (-entry.mtime_ns, entry.path))
    for wanted in ("picture", "other"):
        count = 0
        for entry in newest:
            found = sort_of(entry.path)
            if found is None or (found[0] == "picture") != (wanted == "picture"):
                continue
            count += 1
            if count > MAX_EMBEDDED:
                break
            yield entry, Embedded(visible(entry.path), entry.size, *found)


def _embed(readers: Mapping[str, TrialReader], trials: Mapping[str, TrialReport], budget: int) -> None:
    """Reads contents within the budget: one file of each trial, then a second of each, and so on."""
    chosen: list[tuple[TrialReader, FileEntry, Embedded]] = []
    queues = {name: _candidates(trial.head) for name, trial in trials.items()}
    left = budget
    while queues:
        for name in list(queues):
            following = next(queues[name], None)
            if following is None:
                del queues[name]
                continue
            entry, item = following
            trials[name].embedded.append(item)
            limit = MAX_PICTURE_BYTES if item.sort == "picture" else MAX_TEXT_BYTES
            if entry.size > limit:
                item.left_out = f"larger than {limit // 1024**2} MiB"
            elif entry.size > left:
                item.left_out = "the page would become too large (--max-embed-mb)"
            else:
                left -= entry.size
                chosen.append((readers[name], entry, item))

    def read(one: tuple[TrialReader, FileEntry, Embedded]) -> None:
        reader, entry, item = one
        try:
            data = reader.read(entry)
        except (ArtifactSyncError, OSError) as error:
            item.left_out = _reason(error)
            return
        if item.sort == "picture" and not _is_picture(data, item.mime):
            item.left_out = "it is not what its name says"
        else:
            item.data = data

    run_all(chosen, read, workers=LOADING_THREADS, deadline=Deadline())


def _is_picture(data: bytes, mime: str) -> bool:
    if mime == "image/png":
        return data.startswith(b"\x89PNG\r\n\x1a\n")
    if mime == "image/jpeg":
        return data.startswith(b"\xff\xd8\xff")
    return b"<svg" in data[:4096]
