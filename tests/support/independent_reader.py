"""Reads a trial dir straight from the documented format, with nothing of the library: what a stranger would write.

A place is a pair of functions: `names()` gives all file paths of the trial dir, `read(path)` the bytes of one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from blake3 import blake3

STATE = ".ray_artifact_sync"


@dataclass(frozen=True)
class Place:
    names: Callable[[], Iterable[str]]
    read: Callable[[str], bytes]


def posix_place(root) -> Place:
    def names():
        for folder, _, files in os.walk(root):
            for name in files:
                yield os.path.relpath(os.path.join(folder, name), root)

    def read(path):
        with open(os.path.join(root, path), "rb") as file:
            return file.read()

    return Place(names, read)


def store_place(store) -> Place:
    return Place(lambda: [file.path for file in store.list()], store.read)


def entries_of(place: Place, path: str) -> dict[str, dict]:
    """The listing of a head or snapshot."""
    document = json.loads(place.read(path))
    assert document["format"] == 1
    entries: dict[str, dict] = {}
    changes = []
    for ref in document.get("layers", []):
        data = place.read(f"{STATE}/layers/{ref['name']}")
        assert blake3(data).hexdigest() == ref["digest"], f"{path}: layer {ref['name']} is damaged"
        changes.append(json.loads(data))
    for change in [*changes, document]:
        for gone in change.get("removed", []):
            entries.pop(gone, None)
        entries.update(change["entries"])
    return entries


def content_of(place: Place, names: Iterable[str], path: str, entry: dict) -> bytes | None:
    """The first `size` bytes at the path, else any preserved copy; None if no place has the right digest."""
    if entry["size"] == 0:
        return b""  # the first 0 bytes of anything; nothing is kept for it
    places = [
        path,
        *(name for name in names if name.startswith(f"{STATE}/objects/") and name.endswith(entry["digest"])),
    ]
    for candidate in places:
        try:
            data = place.read(candidate)[: entry["size"]]
        except OSError:
            continue
        if len(data) == entry["size"] and blake3(data).hexdigest() == entry["digest"]:
            return data
    return None


def tree_of(place: Place, path: str) -> dict[str, bytes | None]:
    """Artifact path to bytes (None for an empty directory), as a head or snapshot lists them.

    Raises:
        AssertionError: Something that it lists is nowhere to be read.
    """
    names = list(place.names())
    tree: dict[str, bytes | None] = {}
    for name, entry in entries_of(place, path).items():
        if entry.get("dir"):
            tree[name] = None
            continue
        tree[name] = content_of(place, names, name, entry)
        assert tree[name] is not None, f"{path} lists {name} ({entry['size']} bytes, {entry['digest'][:8]}): unreadable"
    return tree


def snapshots(place: Place) -> dict[str, str]:
    """Checkpoint name to the path of its snapshot that counts: the newest token."""
    found: dict[str, str] = {}
    for name in sorted(place.names()):
        folder, _, file = name.rpartition("/")
        ours = folder.startswith("checkpoint_") and "/" not in folder and file.startswith(f"{STATE}-")
        if ours and json.loads(place.read(name))["checkpoint"] == folder:
            found[folder] = name
    return found


def head_tree(place: Place) -> dict[str, bytes | None]:
    """The newest artifacts; empty before the first commit."""
    if f"{STATE}/manifest.json" not in set(place.names()):
        return {}
    return tree_of(place, f"{STATE}/manifest.json")
