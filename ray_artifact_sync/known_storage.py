"""What a session knows of its trial dir on storage, and what of it is garbage. Holds values; asks nobody."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from contextlib import suppress

from ray_artifact_sync import layout
from ray_artifact_sync.driver_note import TakenPaths
from ray_artifact_sync.entries import FileEntry, Manifest, validate_path
from ray_artifact_sync.errors import InvalidPathError
from ray_artifact_sync.manifest import ManifestStack
from ray_artifact_sync.plan import PathState, parents
from ray_artifact_sync.scan import SkipRule
from ray_artifact_sync.sync_up import Mirror
from ray_artifact_sync.trial_dir import Inventory


class KnownStorage:
    """What the session knows of its trial dir."""

    def __init__(
        self,
        *,
        stack: ManifestStack | None = None,
        inventory: Inventory | None = None,
        headless: bool = False,
    ) -> None:
        self.stack = stack or ManifestStack()
        self.found = self.stack  # the head that this attempt found
        self.headless = headless  # it found none: an attempt without this library, or one that never committed
        self.aside_written = False
        self.inventory = inventory or Inventory()
        self.retained: dict[str, ManifestStack] = {}
        self.snapshots = dict(self.inventory.snapshots)  # whether they count or not
        self.uncertain: ManifestStack | None = None  # a head that may have been committed, or not
        self.unregistered: frozenset[str] = frozenset()  # checkpoints whose snapshots were never pinned
        self.in_flight: ManifestStack | None = None
        self.exploits: dict[str, ManifestStack] = {}
        self.outlived: frozenset[str] = frozenset()  # records that a checkpoint was saved after
        self.mirror = Mirror()
        self.trusted: set[str] = set()  # digests whose preserved copies were found at the start

    def outlive_records(self, *, keep_newest: bool) -> None:
        """A checkpoint was saved: from now on, it is what a restore goes back to, once it is registered.

        Args:
            keep_newest: Should the process die before that, the restore goes back to what was recorded last. So these
                records go with the next checkpoint.
        """
        gone = self.outlived if keep_newest else self.exploits.keys()
        self.exploits = {key: stack for key, stack in self.exploits.items() if key not in gone}
        self.outlived = frozenset(self.exploits)

    def stacks(self) -> list[ManifestStack]:
        """Every manifest that must stay readable, the head first."""
        stacks = [self.stack, self.found, *self.retained.values(), *self.exploits.values()]
        return [*stacks, *(stack for stack in (self.in_flight, self.uncertain) if stack is not None)]

    def pinned(self, *, history: bool) -> list[Manifest]:
        """The manifests of `stacks`, each once."""
        if not history:
            return []
        unique = {id(stack.manifest.entries): stack.manifest for stack in self.stacks()}
        return list(unique.values())

    def referenced_digests(self) -> set[str]:
        """Digests of every version that must stay readable."""
        return {entry.digest for manifest in self.pinned(history=True) for entry in manifest}

    def listing(self, rule: SkipRule) -> Manifest:
        """Everything that the trial dir held at the start and that may be an artifact, as far as a listing can tell.

        Checkpoints and this library's own files are not among it. Entries whose digest nobody recorded have none.

        Args:
            rule: Leaves out what belongs to the driver or is excluded.
        """
        entries: dict[str, FileEntry] = {}
        for path, file in self.inventory.files.items():
            with suppress(InvalidPathError):  # an object's key may be anything
                if rule(validate_path(path), False) is None:
                    state = self.mirror.states.get(path, PathState())
                    digest = state.digest if state.digest is not None and state.size == file.size else ""
                    entries[path] = FileEntry(path, file.size, digest, file.mtime_ns or 0)
        directories = {parent for path in entries for parent in parents(path)}
        return Manifest({path: entry for path, entry in entries.items() if path not in directories})

    def learn_contents(self, entries: Iterable[FileEntry]) -> None:
        """Takes over the digests that a restore by listing found out."""
        for entry in entries:
            file = self.inventory.files.get(entry.path)
            if file is not None and not entry.is_dir and file.size == entry.size:
                self.mirror.states[entry.path] = PathState(entry.size, entry.digest, own=False, etag=file.etag)

    def give_up(self, taken: TakenPaths) -> None:
        """From now on, what these paths hold is somebody else's."""
        for path in [path for path in self.mirror.states if path in taken]:
            del self.mirror.states[path]
        self.mirror.unlisted = frozenset(path for path in self.mirror.unlisted if path not in taken)

    def displaced(self, manifest: Manifest) -> frozenset[str]:
        """Paths that do not hold the version that a manifest lists (after a restore, until the next sync)."""
        states = self.mirror.states
        return frozenset(
            path
            for path, entry in manifest.entries.items()
            if not entry.is_dir
            and (state := states.get(path)) is not None
            and not state.holds(entry.size, entry.digest)
        )

    def objects(self, token: str) -> dict[str, tuple[str, ...]]:
        """Digest to the paths of its preserved copies: those found at the start and those made since."""
        objects = dict(self.inventory.objects)
        for digest in self.mirror.preserved - self.trusted:
            place = layout.object_path(token, digest)
            objects[digest] = (place, *(other for other in objects.get(digest, ()) if other != place))
        return objects

    def garbage(self, token: str, layers_written: Collection[str]) -> list[str]:
        """Paths of this library, of tokens up to `token`, that nothing refers to any more."""
        paths: list[str] = []
        objects = self.objects(token)
        if objects:
            referenced = self.referenced_digests()
            for digest, places in objects.items():
                if digest not in referenced:
                    paths.extend(place for place in places if place.split("/")[2] <= token)
        layers = {ref.name for stack in self.stacks() for ref in stack.refs}
        written = self.inventory.layers.union(layers_written)
        paths.extend(f"{layout.LAYERS}/{name}" for name in written - layers if name.split("-")[0] <= token)
        paths.extend(layout.aside_path(old) for old in self.inventory.asides if old < token)
        paths.extend(layout.exploit_path(key) for key in self.inventory.exploits if key not in self.exploits)
        # Nothing that they list was preserved: should such a checkpoint ever count, it must not seem to have artifacts.
        paths.extend(path for name in self.unregistered - self.retained.keys() for path in self.snapshots.get(name, ()))
        return paths

    def distrust(self, paths: Iterable[str]) -> None:
        """Takes paths that are about to be deleted for gone, whatever becomes of that: none is a copy to rely on."""
        digests = {path.rsplit("/", 1)[-1] for path in paths if path.startswith(f"{layout.OBJECTS}/")}
        self.mirror.preserved -= digests
        self.trusted -= digests

    def forget(self, paths: list[str]) -> None:
        """Takes deleted paths out of what is known."""
        gone = set(paths)
        self.inventory = self.inventory.without(gone)
        self.distrust(gone)
        self.snapshots = {name: paths for name, paths in self.snapshots.items() if gone.isdisjoint(paths)}


def state_from_listing(
    inventory: Inventory, path: str, entry: FileEntry | None, head_mtime_ns: int | None
) -> PathState:
    """What a path holds, as far as a listing can tell: what the head says, unless size or time speak against it."""
    file = inventory.files[path]
    newer = file.mtime_ns is not None and head_mtime_ns is not None and file.mtime_ns > head_mtime_ns
    trusted = entry is not None and not entry.is_dir and entry.size == file.size and not newer
    return PathState(file.size, entry.digest if trusted and entry else None, own=False, etag=file.etag)
