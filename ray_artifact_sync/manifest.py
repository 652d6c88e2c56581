"""Manifests as JSON documents, as a stack of layers so that a commit costs what changed. Pure.

A document (head or snapshot) is self-contained while it has few entries. Beyond `INLINE_ENTRIES` changes, they move
into an immutable *layer* file that later documents refer to by name and digest, newest last; layers are merged so that
their sizes fall geometrically (the idea of the log-structured merge tree, O'Neil et al. 1996), which makes the cost of
a commit O(changes * log(entries)) amortised. To read one without this library: start with nothing; for each layer in
order, then for the document itself, take `removed` away and put `entries` on top.

    {"format": 1, "kind": "snapshot", "token": "...", "trial": "...", "checkpoint": "checkpoint_000003",
     "layers": [{"name": "<token>-000001.json", "digest": "<blake3>", "count": 3000}],
     "entries": {"log.txt": {"size": 12, "digest": "<blake3>", "mtime_ns": 1}, "plots": {"dir": true}},
     "removed": ["gone.txt"],
     "digest": "<blake3 of all bytes before this key's comma>"}
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from blake3 import blake3

from ray_artifact_sync import layout
from ray_artifact_sync.entries import FileEntry, Manifest, validate_path
from ray_artifact_sync.errors import InvalidPathError, ManifestError, UnknownFormatError

FORMAT = 1
INLINE_ENTRIES = 128
"""Changes a document holds itself; two documents of this many entries stay below 64 KiB."""
MERGE_RATIO = 4
"""A layer swallows the one below unless that is more than so many times larger."""
MAX_DOCUMENT_BYTES = 64 << 20
"""Larger documents are refused unread; beyond `INLINE_ENTRIES` changes, ours name only what is displaced."""
MAX_LAYER_BYTES = 1 << 30
MAX_ENTRIES = 5_000_000
"""Layers end here; all of a document's together at twice that."""
MAX_LAYERS = 64

_SEAL = re.compile(rb',"digest":"([0-9a-f]{64})"\}\Z')
_SEAL_BYTES = 77
_STRING_OR_OPENING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[{\[]')
_ENTRY_BYTES = 15  # "a":{"dir":true}
_OTHER_CONTAINERS = 100  # the document itself, its lists, its layers


@dataclass(frozen=True, slots=True)
class LayerRef:
    """A layer as a document names it: file name below `layers/`, BLAKE3 of its bytes, number of changes in it."""

    name: str
    digest: str
    count: int


@dataclass(frozen=True, slots=True)
class Changes:
    """What a layer or document puts on top of those below it."""

    entries: Mapping[str, FileEntry] = field(default_factory=dict)
    removed: frozenset[str] = frozenset()

    def __len__(self) -> int:
        return len(self.entries) + len(self.removed)

    def over(self, below: Changes) -> Changes:
        """Both as one, this one on top."""
        entries = {path: entry for path, entry in below.entries.items() if path not in self.removed}
        entries.update(self.entries)
        return Changes(entries, (below.removed - self.entries.keys()) | self.removed)

    def apply(self, entries: dict[str, FileEntry]) -> None:
        """Changes a listing in place."""
        for path in self.removed:
            entries.pop(path, None)
        entries.update(self.entries)


@dataclass(frozen=True, slots=True)
class Document:
    """A decoded head, snapshot or layer.

    Attributes:
        kind: `"manifest"`, `"snapshot"` or `"layer"`.
        token: The attempt that wrote it.
        trial: Trial dir name (snapshots).
        checkpoint: Checkpoint dir name (snapshots).
        layers: Below `changes`, oldest first.
        changes: The document's own.
        displaced: Paths whose listed version is not at the path itself but among the preserved ones (heads that a
            restore committed). Readers need not care; the next writer puts the listed version back at its path.
    """

    kind: str
    token: str
    changes: Changes
    layers: tuple[LayerRef, ...] = ()
    trial: str = ""
    checkpoint: str = ""
    displaced: frozenset[str] = frozenset()


def encode(document: Document) -> bytes:
    """The JSON bytes of a document; keys and entries sorted, so that equal documents are equal bytes."""
    body: dict[str, Any] = {"format": FORMAT, "kind": document.kind, "token": document.token}
    if document.trial:
        body["trial"] = document.trial
    if document.checkpoint:
        body["checkpoint"] = document.checkpoint
    if document.layers:
        body["layers"] = [{"name": ref.name, "digest": ref.digest, "count": ref.count} for ref in document.layers]
    body["entries"] = {path: _encode_entry(entry) for path, entry in sorted(document.changes.entries.items())}
    if document.changes.removed:
        body["removed"] = sorted(document.changes.removed)
    if document.displaced:
        body["displaced"] = sorted(document.displaced)
    return _sealed(json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode("utf-8"))


def _sealed(data: bytes) -> bytes:
    """A JSON object with one more key at its end: the digest of all bytes before it."""
    return data[:-1] + f',"digest":"{blake3(data[:-1]).hexdigest()}"}}'.encode()


def _is_damaged(data: bytes) -> bool:
    """Whether a document is not what its seal says; one without a seal may have been written by hand."""
    seal = _SEAL.search(data, max(0, len(data) - _SEAL_BYTES))
    return seal is not None and blake3(data[: seal.start()]).hexdigest() != seal.group(1).decode()


def _encode_entry(entry: FileEntry) -> dict[str, Any]:
    if entry.is_dir:
        return {"dir": True}
    return {"size": entry.size, "digest": entry.digest, "mtime_ns": entry.mtime_ns}


def decode(data: bytes, *, kind: str, where: str, count: int | None = None) -> Document:
    """Parses and checks a document from storage; nothing in it is trusted.

    Args:
        data: The bytes.
        kind: The kind that it must be.
        where: Its place, for error messages.
        count: The changes that it must have (a layer's).

    Raises:
        ManifestError: It is no valid document of this kind, or of a format version that this release does not know.
    """
    limit = MAX_LAYER_BYTES if kind == "layer" else MAX_DOCUMENT_BYTES
    if len(data) > limit:
        raise ManifestError(f"{where} has {len(data)} bytes; documents end at {limit}.")
    _check_shape(data, where, MAX_ENTRIES if count is None else count)
    try:
        body = json.loads(data, object_pairs_hook=_unique_keys, parse_float=_one_float, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise ManifestError(f"{where} is not valid JSON ({error}). It is damaged or not ours.") from None
    if not isinstance(body, dict) or body.get("kind") != kind:
        raise ManifestError(f"{where} is not a {kind} of ray-artifact-sync.")
    if type(version := body.get("format")) is not int or version != FORMAT:
        raise UnknownFormatError(
            f"{where} has format version {_short(version)}; this release reads version {FORMAT}. "
            "Install a newer ray-artifact-sync."
        )
    if _is_damaged(data):  # after the format: how a newer one is sealed is not known
        raise ManifestError(f"{where} is damaged: its digest is not that of its content.")
    check = _Checker(where)
    document = Document(
        kind=kind,
        token=check.token(body.get("token")),
        changes=Changes(check.entries(body.get("entries", {})), check.removed(body.get("removed", []))),
        layers=check.layers(body.get("layers", [])),
        trial=check.text(body.get("trial", ""), "trial"),
        checkpoint=check.text(body.get("checkpoint", ""), "checkpoint"),
        displaced=check.removed(body.get("displaced", [])),
    )
    if count is not None and len(document.changes) != count:
        raise check.fail(f"has {len(document.changes)} changes, not {count}")
    return document


def _check_shape(data: bytes, where: str, entries: int) -> None:
    """Refuses what cannot be a document before it is parsed: parsed, `[[],[], ...` takes 20 times its bytes.

    Args:
        data: The bytes.
        where: For the message.
        entries: The most entries that it may have; each is one object of at least `_ENTRY_BYTES`.
    """
    most = min(entries, len(data) // _ENTRY_BYTES) + _OTHER_CONTAINERS
    if data.count(b"{") + data.count(b"[") <= most:
        return
    found = 0
    for match in _STRING_OR_OPENING.finditer(data):  # file names may be made of braces
        found += match.end() - match.start() == 1
        if found > most:
            raise ManifestError(f"{where} has more objects and lists than a document has. It is damaged or not ours.")


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; one key twice would mean different things to different readers."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key stands twice in one object")
    return found


def _one_float(_text: str) -> float:
    """Documents have no fractions: the same one for all, so that a list of them takes little memory."""
    return 0.5


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON value")


def _short(value: object) -> str:
    """A value from a document nobody vouches for, for a message."""
    return repr(value)[:100]


@dataclass(frozen=True, slots=True)
class _Checker:
    where: str

    def fail(self, problem: str) -> ManifestError:
        return ManifestError(f"{self.where} {problem}.")

    def text(self, value: object, name: str) -> str:
        if not isinstance(value, str):
            raise self.fail(f"has a {name} that is not text")
        return value

    def token(self, value: object) -> str:
        if not layout.is_token(value):
            raise self.fail(f"has the malformed token {_short(value)}")
        return str(value)

    def path(self, value: str) -> str:
        try:
            validate_path(value)
        except InvalidPathError as error:
            raise self.fail(f"lists a path that must not be: {error}") from None
        if layout.is_reserved(value):
            raise self.fail(f"lists {value!r}, which belongs to this library")
        return value

    def entries(self, value: object) -> dict[str, FileEntry]:
        if not isinstance(value, dict):
            raise self.fail("has entries that are not an object")
        return {path: self.entry(self.path(path), body) for path, body in value.items()}

    def entry(self, path: str, body: object) -> FileEntry:
        if not isinstance(body, dict):
            raise self.fail(f"has a malformed entry for {path!r}")
        if body.get("dir") is True:
            return FileEntry(path, 0, "", is_dir=True)
        size, digest, mtime_ns = body.get("size"), body.get("digest"), body.get("mtime_ns", 0)
        if type(size) is not int or not 0 <= size < 1 << 63:
            raise self.fail(f"has the impossible size {_short(size)} for {path!r}")
        if not isinstance(digest, str) or not layout.is_digest(digest):
            raise self.fail(f"has a malformed digest for {path!r}")
        if type(mtime_ns) is not int or not -1 << 63 <= mtime_ns < 1 << 63:  # before 1970 is odd, not wrong
            raise self.fail(f"has the impossible mtime_ns {_short(mtime_ns)} for {path!r}")
        return FileEntry(path, size, digest, mtime_ns)

    def removed(self, value: object) -> frozenset[str]:
        if not isinstance(value, list) or not all(isinstance(path, str) for path in value):
            raise self.fail("has a malformed list of removed paths")
        return frozenset(value)

    def layers(self, value: object) -> tuple[LayerRef, ...]:
        if not isinstance(value, list) or len(value) > MAX_LAYERS:
            raise self.fail("has a malformed list of layers")
        layers = tuple(self.layer(item) for item in value)
        if sum(ref.count for ref in layers) > 2 * MAX_ENTRIES:
            raise self.fail(f"refers to layers with more than {2 * MAX_ENTRIES} changes")
        return layers

    def layer(self, item: object) -> LayerRef:
        if (
            isinstance(item, dict)
            and isinstance(name := item.get("name"), str)
            and layout.is_layer_name(name)
            and isinstance(digest := item.get("digest"), str)
            and layout.is_digest(digest)
            and type(count := item.get("count")) is int
            and 0 <= count <= MAX_ENTRIES
        ):
            return LayerRef(name, digest, count)
        raise self.fail(f"refers to the malformed layer {_short(item)}")


def check_no_file_is_a_directory(manifest: Manifest, where: str) -> Manifest:
    """Refuses a listing in which one path is a file and a directory at once.

    Raises:
        ManifestError: It is so.
    """
    for path in manifest.entries:
        parent = path
        while (cut := parent.rfind("/")) > 0:
            parent = parent[:cut]
            above = manifest.entries.get(parent)
            if above is not None and not above.is_dir:
                raise ManifestError(f"{where} lists {parent!r} both as a file and as the directory of {path!r}.")
    return manifest


@dataclass(frozen=True, slots=True)
class LayerFile:
    """A layer that must be written before the document that refers to it."""

    ref: LayerRef
    data: bytes


@dataclass(frozen=True, slots=True)
class ManifestStack:
    """A manifest together with the layers that hold most of it.

    Attributes:
        manifest: The whole listing.
        layers: Layers with their content, oldest first.
        inline: What lies on top of the layers.
        displaced: See `Document`.
    """

    manifest: Manifest = field(default_factory=Manifest)
    layers: tuple[tuple[LayerRef, Changes], ...] = ()
    inline: Changes = field(default_factory=Changes)
    displaced: frozenset[str] = frozenset()

    @property
    def refs(self) -> tuple[LayerRef, ...]:
        """The layers as documents name them."""
        return tuple(ref for ref, _ in self.layers)

    def document(self, kind: str, *, token: str, trial: str = "", checkpoint: str = "") -> Document:
        """The head or a snapshot that stores this manifest."""
        return Document(kind, token, self.inline, self.refs, trial, checkpoint, self.displaced)

    def advance(self, manifest: Manifest, *, next_name: Callable[[], str]) -> tuple[ManifestStack, list[LayerFile]]:
        """Moves on to another manifest.

        Args:
            manifest: The new listing; entries that did not change should be the same objects.
            next_name: Gives the file name of a new layer.

        Returns:
            The new stack, and the layers to be written before a document of it.
        """
        inline = _difference(self.manifest.entries, manifest.entries).over(self.inline)
        if len(inline) <= INLINE_ENTRIES:
            return ManifestStack(manifest, self.layers, _without_void(inline, bool(self.layers))), []
        layers = list(self.layers)
        while layers and layers[-1][0].count <= MERGE_RATIO * len(inline):
            inline = inline.over(layers.pop()[1])
        if not layers:
            inline = Changes(dict(manifest.entries))
        document = Document("layer", manifest.token, inline)
        data = encode(document)
        ref = LayerRef(next_name(), blake3(data).hexdigest(), len(inline))
        return ManifestStack(manifest, (*layers, (ref, inline)), Changes()), [LayerFile(ref, data)]


def _difference(old: Mapping[str, FileEntry], new: Mapping[str, FileEntry]) -> Changes:
    entries = {path: entry for path, entry in new.items() if old.get(path) is not entry and old.get(path) != entry}
    return Changes(entries, frozenset(old.keys() - new.keys()))


def _without_void(changes: Changes, has_layers: bool) -> Changes:
    """A removal means nothing where no layer lies below."""
    return changes if has_layers or not changes.removed else Changes(changes.entries)


def assemble(document: Document, layers: Mapping[str, Changes]) -> ManifestStack:
    """Puts a document and its layers (by name) together.

    Raises:
        ManifestError: The result lists one path as file and directory.
    """
    entries: dict[str, FileEntry] = {}
    for ref in document.layers:
        layers[ref.name].apply(entries)
    document.changes.apply(entries)
    manifest = check_no_file_is_a_directory(Manifest(entries, document.token), f"The {document.kind}")
    stack = tuple((ref, layers[ref.name]) for ref in document.layers)
    return ManifestStack(manifest, stack, document.changes, document.displaced)
