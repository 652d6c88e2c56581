"""`ArtifactView`: the artifacts of an experiment or a trial, to look at and to read. Needs no Ray, only read access."""

from __future__ import annotations

import html
import io
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from typing import IO, Any, TypeAlias

from ray_artifact_sync import layout
from ray_artifact_sync.artifact_file import open_artifact
from ray_artifact_sync.entries import FileEntry, Manifest
from ray_artifact_sync.errors import ArtifactNotFoundError, ArtifactSyncError, ConfigurationError
from ray_artifact_sync.experiments import Found, Place, find_trials, place_at, split_checkpoint
from ray_artifact_sync.patterns import Selection
from ray_artifact_sync.trial_reader import TrialReader, load_all, request

HTML_ROWS = 200
"""Rows that a notebook shows."""


@dataclass(frozen=True, slots=True)
class Artifact:
    """One file in a listing.

    Attributes:
        trial: Name of its trial, relative to the place of the view.
        path: Artifact path.
        size: Bytes.
        mtime_ns: When it was written, ns since the epoch: on the trial's node, for a driver's file in storage. None
            where nobody knows.
        digest: BLAKE3 of the content, hex; None for files of the driver.
        checkpoint: The first of the present checkpoints that has this very version; None if it is newer than all.
        owner: The driver component that writes it; None for artifacts.
    """

    trial: str
    path: str
    size: int
    mtime_ns: int | None
    digest: str | None
    checkpoint: str | None
    owner: str | None = None

    @property
    def time(self) -> datetime | None:
        """`mtime_ns` as a time in UTC."""
        return time_of(self.mtime_ns)


Artifacts: TypeAlias = list[Artifact]


@dataclass(frozen=True, slots=True)
class Version:
    """One version of a file over the checkpoints.

    Attributes:
        trial: Name of the trial.
        path: Artifact path.
        size: Bytes.
        digest: BLAKE3, hex.
        mtime_ns: When it was written, on the trial's node, ns since the epoch.
        checkpoints: Those that have this version, the oldest first.
        is_newest: Whether the newest artifacts have it.
        place: Path in the trial dir where its bytes lie, as far as a listing can tell; None if nowhere.
    """

    trial: str
    path: str
    size: int
    digest: str
    mtime_ns: int
    checkpoints: tuple[str, ...]
    is_newest: bool
    place: str | None


class ArtifactView:
    """The artifacts of one trial, or of all trials of an experiment.

        view = ArtifactView("s3://bucket/runs/experiment")
        for artifact in view.list():
            print(artifact.trial, artifact.path, artifact.size, artifact.checkpoint)
        with view.open("trial_00000/log.txt", "r") as file: ...
        view["trial_00000"].at("checkpoint_000003").read_text("log.txt")

    Paths are those of artifacts. Where the view has several trials, the trial's name stands before them. What storage
    holds is listed when it is first asked for and then kept; `refresh` looks again.

    Args:
        source: A URI (`s3://bucket/path?endpoint_override=...`, also with `@checkpoint_000003` at the end), a path, a
            path on `storage_filesystem`, or what Ray gives: a `Result`, a `ResultGrid`, a `Checkpoint`.
        storage_filesystem: A pyarrow or fsspec file system.

    Raises:
        ArtifactNotFoundError: There is nothing of this library.
        ConfigurationError: The source cannot be understood.
        StorageError: Storage cannot be read.

    Example:
        ```python
        import time
        from ray_artifact_sync import ArtifactView, TrialArtifacts
        from ray_artifact_sync.layout import make_token
        from ray_artifact_sync.stores import open_uri

        # Stands for a trial of an experiment:
        store = open_uri("s3://bucket/view/trial")
        session = TrialArtifacts("viewed", store, trial="trial", token=make_token(time.time_ns()))
        session.begin()
        with open("viewed/log.txt", "w") as log:
            log.write("step 1")
        session.close()

        view = ArtifactView("s3://bucket/view/trial")
        assert [(artifact.path, artifact.size) for artifact in view.list()] == [("log.txt", 6)]
        assert view.read_text("log.txt") == "step 1"
        ```
    """

    def __init__(self, source: Any, *, storage_filesystem: Any = None) -> None:
        place, checkpoint = _place_of(source, storage_filesystem)
        found = find_trials(place)
        readers = {one.name: TrialReader(one.name, one.trial, driver_files=one.driver_files) for one in found.trials}
        self._set_up(found, readers, single=found.single, checkpoint=None)
        if checkpoint is not None:
            self._become(self.at(checkpoint))

    def _set_up(
        self, found: Found, readers: Mapping[str, TrialReader], *, single: bool, checkpoint: str | None
    ) -> ArtifactView:
        self.found = found
        self.readers = readers
        self.checkpoint = checkpoint
        self._single = single
        return self

    def _become(self, other: ArtifactView) -> None:
        self._set_up(other.found, other.readers, single=other._single, checkpoint=other.checkpoint)

    def _like(
        self, readers: Mapping[str, TrialReader], *, checkpoint: str | None, single: bool | None = None
    ) -> ArtifactView:
        view = object.__new__(ArtifactView)
        return view._set_up(
            self.found, readers, single=self._single if single is None else single, checkpoint=checkpoint
        )

    # --- what there is ------------------------------------------------------------------------------

    @property
    def uri(self) -> str:
        """The place, as it was named."""
        return self.found.place.uri

    @property
    def is_single(self) -> bool:
        """Whether the view is of one trial, and its paths have no trial's name before them."""
        return self._single

    def path_of(self, artifact: Artifact) -> str:
        """The path that `open` takes for an artifact of this view's listing."""
        return artifact.path if self._single else f"{artifact.trial}/{artifact.path}"

    @property
    def trials(self) -> tuple[str, ...]:
        """Names of the trials, sorted."""
        return tuple(self.readers)

    @property
    def checkpoints(self) -> tuple[str, ...]:
        """Checkpoints with a snapshot of the artifacts, of any trial, the oldest first."""
        self._load()
        names: dict[str, None] = {}
        for reader in self.readers.values():
            names.update(dict.fromkeys(reader.checkpoints))
        if all(layout.is_checkpoint_dir(name) for name in names):
            return tuple(sorted(names, key=layout.checkpoint_index))
        return tuple(names)

    def __getitem__(self, trial: str) -> ArtifactView:
        """The view of one trial.

        Raises:
            KeyError: There is no such trial.
        """
        return self._like({trial: self.readers[trial]}, checkpoint=self.checkpoint, single=True)

    def at(self, checkpoint: str) -> ArtifactView:
        """The artifacts as of a checkpoint, of the trials that have it.

        Args:
            checkpoint: Checkpoint dir name, such as `"checkpoint_000003"`.

        Raises:
            ArtifactNotFoundError: No trial has it, with a snapshot of the artifacts.
        """
        self._load()
        having = {name: reader for name, reader in self.readers.items() if checkpoint in reader.checkpoints}
        if not having:
            if len(self.readers) == 1:
                next(iter(self.readers.values())).manifest(checkpoint)  # says more about it
            raise ArtifactNotFoundError(f"No trial at {self.uri} has a {checkpoint} with a snapshot of its artifacts.")
        return self._like(having, checkpoint=checkpoint)

    def list(self, *, include: str | Iterable[str] = (), exclude: str | Iterable[str] = ()) -> Artifacts:
        """The artifacts and, unless as of a checkpoint, the driver's files, by trial and path.

        Args:
            include: Gitignore-style patterns of artifact paths; none means all.
            exclude: Patterns of what to leave out; wins over `include`.

        Raises:
            ManifestError: The manifest of a trial is damaged, or of a newer release.
        """
        self._load()
        selection = Selection.of(include=include, exclude=exclude)
        return [
            artifact
            for name in self.readers
            for artifact in list_trial(self.readers[name], self.checkpoint)
            if selection.reason_to_skip(artifact.path) is None
        ]

    def __iter__(self) -> Iterator[Artifact]:
        return iter(self.list())

    def versions(self, path: str) -> tuple[Version, ...]:
        """The versions of one file that the present checkpoints and the newest artifacts have, the oldest first.

        Raises:
            ArtifactNotFoundError: None of them lists it.
        """
        reader, path = self._reader_of(path)
        found = versions_of(reader, path)
        if not found:
            raise ArtifactNotFoundError(f"No checkpoint of {reader.name} lists {path!r}, nor do its newest artifacts.")
        return found

    def refresh(self) -> None:
        """Looks at storage again when it is next asked."""
        for reader in self.readers.values():
            reader.refresh()

    # --- reading ------------------------------------------------------------------------------------

    def open(self, path: str, mode: str = "rb", *, encoding: str | None = None, newline: str | None = None) -> IO[Any]:
        """Opens a file for reading: an artifact (as of the checkpoint, if the view is), or a file of the driver.

        A file of up to 8 MiB is verified before anything of it is given out; the digest of a larger one is verified
        when it is read from its beginning to its end, and the last block is refused if it is wrong.

        Args:
            path: Artifact path, with the trial's name before it where the view has several.
            mode: `"rb"`, or `"r"` for text.
            encoding: Of text; UTF-8 by default.
            newline: Of text, as in Python's `open`.

        Returns:
            A file; it can seek.

        Raises:
            ArtifactNotFoundError: There is no such file.
            IntegrityError: Its content is nowhere any more.
        """
        if mode not in ("r", "rt", "rb"):
            raise ConfigurationError(f"Artifacts are opened for reading: mode 'rb' or 'r', not {mode!r}.")
        reader, path = self._reader_of(path)
        entry = self._entry(reader, path)
        file = open_artifact(reader, entry) if entry else io.BytesIO(self._driver_file(reader, path))
        if mode == "rb":
            return file
        return io.TextIOWrapper(file, encoding=encoding or "utf-8", newline=newline)

    def read_bytes(self, path: str) -> bytes:
        """The whole content of a file; that of an artifact is verified. See `open`."""
        with self.open(path) as file:
            data: bytes = file.read()
            return data

    def read_text(self, path: str, encoding: str = "utf-8") -> str:
        """The whole content of a text file. See `read_bytes`."""
        return self.read_bytes(path).decode(encoding)

    def _reader_of(self, path: str) -> tuple[TrialReader, str]:
        if self._single:
            return next(iter(self.readers.values())), path
        for name in sorted(self.readers, key=len, reverse=True):
            if path.startswith(f"{name}/"):
                return self.readers[name], path[len(name) + 1 :]
        raise ArtifactNotFoundError(
            f"{path!r} does not begin with the name of a trial at {self.uri}, such as {next(iter(self.readers))!r}."
        )

    def _entry(self, reader: TrialReader, path: str) -> FileEntry | None:
        """What the manifest lists at a path; None for a file that is there and that no manifest lists."""
        entry = reader.manifest(self.checkpoint).get(path)
        if entry is not None and entry.is_dir:
            raise ArtifactNotFoundError(f"{path!r} of {reader.name} is an empty directory.")
        if entry is None and (self.checkpoint is not None or path not in reader.contents.inventory.files):
            as_of = f" as of {self.checkpoint}" if self.checkpoint else ""
            raise ArtifactNotFoundError(f"There is no artifact {path!r} in {reader.name}{as_of}.")
        return entry

    def _driver_file(self, reader: TrialReader, path: str) -> bytes:
        return request(lambda: reader.trial.store.read(path), f"Reading {path}")

    # --- for notebooks --------------------------------------------------------------------------------

    def to_pandas(self) -> Any:
        """The listing as a `pandas.DataFrame`: one row a file, the columns of `Artifact`, and `time` (UTC).

        Raises:
            ArtifactSyncError: pandas is not installed.
        """
        try:
            import pandas as pd  # noqa: PLC0415  (only whoever asks needs it)
        except ImportError:
            raise ArtifactSyncError("to_pandas() needs pandas: pip install pandas") from None
        columns = [*Artifact.__dataclass_fields__, "time"]
        rows = [{**asdict(artifact), "time": artifact.time} for artifact in self.list()]
        frame = pd.DataFrame(rows, columns=columns)
        frame["time"] = pd.to_datetime(frame["time"], utc=True)
        return frame

    def __repr__(self) -> str:
        as_of = f" as of {self.checkpoint}" if self.checkpoint else ""
        return f"ArtifactView({self.uri!r}{as_of}, {len(self.readers)} trial{'s' * (len(self.readers) != 1)})"

    def _repr_html_(self) -> str:
        """A table for notebooks; everything in it is escaped."""
        artifacts = self.list()
        head = "".join(f"<th>{name}</th>" for name in ("trial", "path", "bytes", "written", "checkpoint", "owner"))
        rows = "".join(
            "<tr>"
            + "".join(
                f"<td>{html.escape(cell)}</td>"
                for cell in (
                    artifact.trial,
                    artifact.path,
                    f"{artifact.size:,}",
                    show_time(artifact.mtime_ns),
                    artifact.checkpoint or "",
                    artifact.owner or "",
                )
            )
            + "</tr>"
            for artifact in artifacts[:HTML_ROWS]
        )
        more = len(artifacts) - HTML_ROWS
        note = f"<p>and {more} more files</p>" if more > 0 else ""
        table = f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
        return f"<p>{html.escape(repr(self))}</p>{table}{note}"

    def _load(self) -> None:
        """Loads all trials at once, rather than one after the other."""
        failures = load_all(self.readers)
        if failures:
            raise next(iter(failures.values()))


def list_trial(reader: TrialReader, checkpoint: str | None = None) -> Artifacts:
    """The artifacts of one trial, by path; the driver's files too, unless as of a checkpoint."""
    manifest = reader.manifest(checkpoint)
    found = [
        Artifact(reader.name, entry.path, entry.size, entry.mtime_ns, entry.digest, reader.first_checkpoint(entry))
        for entry in manifest
        if not entry.is_dir
    ]
    if checkpoint is None:
        found += [
            Artifact(reader.name, file.path, file.size, file.mtime_ns, None, None, owner)
            for file, owner in reader.other_files()
            if owner is not None
        ]
    return sorted(found, key=lambda artifact: artifact.path)


def versions_of(reader: TrialReader, path: str) -> tuple[Version, ...]:
    """The versions of one file, the oldest first; nothing if no manifest lists it."""
    found: dict[tuple[int, str], tuple[FileEntry, list[str]]] = {}
    newest = reader.head.get(path)
    named: list[tuple[str, Manifest]] = [(saved.name, saved.manifest) for saved in reader.checkpoints.values()]
    for name, manifest in [*named, ("", reader.head)]:
        entry = manifest.get(path)
        if entry is not None and not entry.is_dir:
            _, names = found.setdefault((entry.size, entry.digest), (entry, []))
            if name:
                names.append(name)
    return tuple(
        Version(
            reader.name,
            path,
            entry.size,
            entry.digest,
            entry.mtime_ns,
            tuple(names),
            entry.same_content(newest),
            _listed_place(reader, entry),
        )
        for entry, names in found.values()
    )


def _listed_place(reader: TrialReader, entry: FileEntry) -> str | None:
    """Where a listing says that a version is."""
    preserved = reader.contents.inventory.objects.get(entry.digest)
    if preserved:
        return preserved[0]
    file = reader.contents.inventory.files.get(entry.path)
    return entry.path if entry.size == 0 or (file is not None and file.size >= entry.size) else None


def _place_of(source: Any, storage_filesystem: Any) -> tuple[Place, str | None]:
    """The place that a source names, and the checkpoint."""
    is_checkpoint = hasattr(source, "to_directory")  # a path-like, but only to say that it is none
    if isinstance(source, str | os.PathLike) and not is_checkpoint:
        uri, checkpoint = split_checkpoint(os.fspath(source))
        return place_at(uri, storage_filesystem), checkpoint
    # Told by what they have: Ray's classes move between releases, and need not be imported here.
    filesystem = storage_filesystem or getattr(source, "filesystem", None)
    path = getattr(source, "experiment_path", None) or getattr(source, "path", None)
    if filesystem is None or not isinstance(path, str):
        raise ConfigurationError(
            f"An ArtifactView is made from a URI, a path, or a Result, ResultGrid or Checkpoint of Ray, not from "
            f"{type(source).__name__}."
        )
    parent, _, name = path.rstrip("/").rpartition("/")
    if is_checkpoint:
        return place_at(parent, filesystem), name
    return place_at(path, filesystem), None


def time_of(ns: int | None) -> datetime | None:
    """A time in UTC; None for what no calendar has."""
    try:
        return None if ns is None else datetime.fromtimestamp(ns / 1e9, timezone.utc)
    except (OverflowError, ValueError, OSError):
        return None


def show_time(ns: int | None) -> str:
    """A time for people, in UTC; empty where there is none."""
    time = time_of(ns)
    return "" if time is None else f"{time:%Y-%m-%d %H:%M:%S}"
