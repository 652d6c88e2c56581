"""Any sequence of file changes, syncs, checkpoints, faults, kills and restores, against a model in plain Python.

After each commit and each restore: every registered checkpoint that has a snapshot reads back byte for byte (by a
reader that shares no code with the library), every entry of the head is readable with the right digest, and a restored
working dir equals the model exactly. A kill may come before or after any single write to storage.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from obstore.store import MemoryStore

from ray_artifact_sync import layout
from ray_artifact_sync.errors import ArtifactSyncError
from ray_artifact_sync.stores.cloud import CloudStore
from ray_artifact_sync.stores.posix import PosixStore
from tests.support import independent_reader
from tests.support.sessions import FaultyStore, Killed, abandon, open_session, read_tree, save

EXAMPLES = int(os.environ.get("PROPERTY_EXAMPLES", "40"))
STEPS = int(os.environ.get("PROPERTY_STEPS", "15"))
PHASES = [
    phase
    for phase in Phase
    if phase not in (Phase.explain, *([Phase.shrink] if os.environ.get("PROPERTY_NO_SHRINK") else []))
]

BIG = 64 * 1024 + 7  # from here on, content that storage holds already is copied there
POOL = ["a", "b #%20?", "d", "d/x", "d/e/z"]
CHANGES = [
    *("write", "append", "truncate", "rewrite_in_place", "delete", "copy", "rename"),
    *("write", "append", "touch", "mkdir", "pause"),
]
BLOBS = {"": b"", "0": b"0", "1": b"1", "A": b"A" * BIG, "B": b"B" * BIG, "AA": b"A" * (2 * BIG)}


def blob(name: str) -> bytes:
    return BLOBS[name]


contents = st.one_of(st.sampled_from(sorted(BLOBS)).map(blob), st.binary(max_size=12))
changes = st.lists(
    st.tuples(st.sampled_from(CHANGES), st.sampled_from(POOL), contents, st.integers(0, 255)), max_size=4
)
faults = st.fixed_dictionaries({"countdown": st.integers(0, 6), "landed": st.booleans()})


class Model:
    """A working dir as two plain collections."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.dirs: set[str] = set()

    def tree(self) -> dict[str, bytes | None]:
        taken = {*self.files, *self.dirs}
        empty = {path for path in self.dirs if not any(other.startswith(f"{path}/") for other in taken)}
        return {**self.files, **dict.fromkeys(empty)}

    @classmethod
    def of(cls, tree: dict[str, bytes | None]) -> Model:
        model = cls()
        for path, data in tree.items():
            if data is None:
                model.mkdir(path)
            else:
                model.write(path, data)
        return model

    def remove(self, path: str) -> None:
        for known in [*self.files]:
            if known == path or known.startswith(f"{path}/"):
                del self.files[known]
        self.dirs = {known for known in self.dirs if known != path and not known.startswith(f"{path}/")}

    def parents(self, path: str) -> None:
        parts = path.split("/")
        for count in range(1, len(parts)):
            parent = "/".join(parts[:count])
            self.files.pop(parent, None)
            self.dirs.add(parent)

    def mkdir(self, path: str) -> None:
        self.parents(f"{path}/x")

    def write(self, path: str, data: bytes) -> None:
        self.parents(path)
        if path in self.dirs:
            self.remove(path)
        self.files[path] = data


class Trial(RuleBasedStateMachine):
    """One trial over its attempts; subclasses say what it is stored in."""

    def __init__(self) -> None:
        super().__init__()
        self.base = tempfile.mkdtemp(prefix="session-properties-")
        self.node = 0
        self.token = 0
        self.model = Model()
        self.retained: dict[str, dict[str, bytes | None]] = {}  # registered, and its snapshot counts
        self.unsaved: set[str] = set()  # registered without a snapshot: its artifacts could not be saved
        self.newest = -1
        self.session = None
        self.store: FaultyStore | None = None

    # --- where -------------------------------------------------------------------------------------

    def new_store(self):
        raise NotImplementedError

    def delete_checkpoint(self, name: str) -> None:
        raise NotImplementedError

    def place(self) -> independent_reader.Place:
        raise NotImplementedError

    # --- the working dir ---------------------------------------------------------------------------

    @property
    def root(self) -> str:
        return os.path.join(self.base, f"node-{self.node}")

    def local(self, path: str) -> str:
        return os.path.join(self.root, path)

    def make_way(self, path: str) -> None:
        """On disk, what `Model.write` does: files give way to directories and the other way round."""
        parts = path.split("/")
        for count in range(1, len(parts)):
            parent = self.local("/".join(parts[:count]))
            if os.path.isfile(parent):
                os.unlink(parent)
            os.makedirs(parent, exist_ok=True)
        if os.path.isdir(self.local(path)):
            shutil.rmtree(self.local(path))

    def write(self, path, data, _number):
        self.model.write(path, data)
        self.make_way(path)
        with open(self.local(path), "wb") as file:
            file.write(data)

    def append(self, path, data, _number):
        if path in self.model.files:
            self.model.files[path] += data
            with open(self.local(path), "ab") as file:
                file.write(data)

    def truncate(self, path, _data, share):
        if path in self.model.files:
            size = len(self.model.files[path]) * share // 256
            self.model.files[path] = self.model.files[path][:size]
            os.truncate(self.local(path), size)

    def rewrite_in_place(self, path, _data, byte):
        if self.model.files.get(path):
            old = os.stat(self.local(path))
            data = bytes([byte]) * len(self.model.files[path])
            self.model.files[path] = data
            with open(self.local(path), "r+b") as file:
                file.write(data)
            if byte % 2:  # nobody can tell by mtime and size
                os.utime(self.local(path), ns=(old.st_atime_ns, old.st_mtime_ns))

    def touch(self, path, _data, _number):
        if path in self.model.files:
            os.utime(self.local(path))

    def delete(self, path, _data, _number):
        self.model.remove(path)
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            if os.path.isdir(self.local(path)):
                shutil.rmtree(self.local(path))
            else:
                os.unlink(self.local(path))

    def mkdir(self, path, _data, _number):
        self.model.mkdir(path)
        if not os.path.isdir(self.local(path)):
            self.make_way(f"{path}/x")

    def copy(self, path, _data, number):
        self.copy_or_rename(path, POOL[number % len(POOL)], keep=True)

    def rename(self, path, _data, number):
        self.copy_or_rename(path, POOL[number % len(POOL)], keep=False)

    def copy_or_rename(self, source, goal, *, keep):
        data = self.model.files.get(source)
        if data is None or source == goal or goal.startswith(f"{source}/") or source.startswith(f"{goal}/"):
            return
        self.model.write(goal, data)
        self.make_way(goal)
        if keep:
            shutil.copy2(self.local(source), self.local(goal))
        else:
            del self.model.files[source]
            os.replace(self.local(source), self.local(goal))

    def pause(self, _path, _data, _number):
        time.sleep(0.06)  # from now on the digests of files at rest come from the cache

    # --- storage -----------------------------------------------------------------------------------

    @initialize()
    def first_attempt(self):
        self.attempt()

    def attempt(self, **fault):
        self.token += 1
        self.store = FaultyStore(self.new_store())
        if fault:
            self.store.arm(**fault)
        os.makedirs(self.root, exist_ok=True)
        self.session = open_session(
            self.root, self.store, self.token, registered=self.newest, max_concurrency=1, retries=1, on_error="raise"
        )
        self.model = Model()
        if not fault:
            self.session._run(self.session._open, "Opening")  # else the claim would race with faults armed later

    @rule(changes=changes)
    def sync(self, changes):
        self.change(changes)
        self.session.sync()
        self.check_newest()

    @rule(changes=changes, meanwhile=st.none() | changes)
    def checkpoint(self, changes, meanwhile):
        self.change(changes)
        held = self.model.tree()
        assert save(self.session, self.next_checkpoint, meanwhile=lambda: self.train_on(meanwhile))
        self.register(held)
        self.check()
        if meanwhile is None:
            self.check_newest()

    def train_on(self, changes) -> None:
        """What may happen while the checkpoint's own files are uploaded: the trial writes, a background sync runs."""
        if changes is not None:
            self.change(changes)
            self.session.sync()
            self.check()

    def change(self, changes) -> None:
        for kind, path, data, number in changes:
            getattr(self, kind)(path, data, number)

    @property
    def next_checkpoint(self) -> str:
        return f"checkpoint_{self.newest + 1:06d}"

    def register(self, held) -> None:
        self.retained[self.next_checkpoint] = held
        self.newest += 1

    @rule(changes=changes, fault=faults, retryable=st.booleans(), then=st.sampled_from(["sync", "checkpoint"]))
    def train_with_a_fault(self, changes, fault, retryable, then):
        self.change(changes)
        self.store.arm(**fault, kill=False, retryable=retryable)
        try:
            if then == "sync":
                self.session.sync()
            else:
                save(self.session, self.next_checkpoint)
        except ArtifactSyncError:
            assert self.store.fired
        else:
            if then == "checkpoint":
                self.register(self.model.tree())
            self.check_newest()
        self.store.disarm()
        self.check()

    @precondition(lambda self: self.retained)
    @rule(data=st.data())
    def num_to_keep(self, data):
        name = data.draw(st.sampled_from(sorted(self.retained)))
        del self.retained[name]
        self.delete_checkpoint(name)

    # --- ends --------------------------------------------------------------------------------------

    @rule(changes=changes, fault=faults, during=st.sampled_from(["sync", "checkpoint", "nothing"]), data=st.data())
    def kill(self, changes, fault, during, data):
        self.change(changes)
        if during != "nothing":
            self.store.arm(**fault, kill=True)
            with contextlib.suppress(Killed):
                if during == "sync":
                    self.session.sync()
                else:
                    # Killed or not: never registered, so that the next attempt takes the same directory again.
                    save(self.session, self.next_checkpoint)
        abandon(self.session)
        self.check()
        self.start_again(data)

    @rule(data=st.data())
    def close(self, data):
        tree = self.model.tree()
        self.session.close()
        assert independent_reader.head_tree(self.place()) == tree
        self.start_again(data)

    def start_again(self, data) -> None:
        if data.draw(st.booleans(), label="another node"):
            self.node += 1
        for _ in range(data.draw(st.integers(0, 2), label="attempts killed in their restore")):
            if self.retained:
                self.restore_killed(data)
        self.attempt()
        if self.retained and data.draw(st.sampled_from([True, True, False]), label="restore"):
            self.restore(data, fresh=True)

    def restore_killed(self, data) -> None:
        self.attempt(countdown=data.draw(st.integers(0, 3)), kill=True, landed=data.draw(st.booleans()))
        with contextlib.suppress(Killed):
            self.session.restore(data.draw(st.sampled_from(sorted(self.retained))), fresh=True)
        abandon(self.session)
        self.check()

    @precondition(lambda self: self.retained)
    @rule(data=st.data())
    def restore_within_the_attempt(self, data):
        self.restore(data, fresh=False)

    def restore(self, data, *, fresh: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.retained)), label="checkpoint")
        report = self.session.restore(name, fresh=fresh)
        assert report.exact
        self.model = Model.of(self.retained[name])
        assert read_tree(self.root) == self.model.tree()
        self.check()
        assert independent_reader.head_tree(self.place()) == self.model.tree()

    # --- what must hold -----------------------------------------------------------------------------

    def check(self) -> None:
        place = self.place()
        snapshots = independent_reader.snapshots(place)
        for name, tree in self.retained.items():
            assert independent_reader.tree_of(place, snapshots[name]) == tree, name
        independent_reader.head_tree(place)
        aside = layout.aside_path(self.session.token)
        if aside in set(place.names()):
            independent_reader.tree_of(place, aside)  # what this attempt's restore superseded is still there

    def check_newest(self) -> None:
        """After a sync: the head is the working dir, and whoever looks at the paths sees the newest versions."""
        self.check()
        place, tree = self.place(), self.model.tree()
        assert independent_reader.head_tree(place) == tree
        assert {path: place.read(path) for path in self.model.files} == self.model.files

    @invariant()
    def disk_equals_model(self):
        if self.session is not None:
            assert read_tree(self.root) == self.model.tree()

    def teardown(self):
        if self.session is not None:
            abandon(self.session)
        shutil.rmtree(self.base, ignore_errors=True)


class PosixTrial(Trial):
    """On a local disk: appends, renames, real directories."""

    @property
    def storage(self) -> str:
        return os.path.join(self.base, "storage")

    def new_store(self):
        return PosixStore(self.storage)

    def delete_checkpoint(self, name):
        shutil.rmtree(os.path.join(self.storage, name))

    def place(self):
        return independent_reader.posix_place(self.storage)


class ObjectTrial(Trial):
    """On an object store: no append, no directories, conditional writes."""

    def __init__(self) -> None:
        super().__init__()
        self.client = MemoryStore()

    def new_store(self):
        return CloudStore(self.client, "runs/trial")

    def delete_checkpoint(self, name):
        store = self.new_store()
        store.delete([file.path for file in store.list(name)])

    def place(self):
        return independent_reader.store_place(self.new_store())


@pytest.mark.parametrize("machine", [PosixTrial, ObjectTrial])
def test_any_life_of_a_trial(machine):
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=STEPS,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            print_blob=True,
            phases=PHASES,
        ),
    )
