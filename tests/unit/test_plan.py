"""The planner: whatever happened before, a plan never costs a version that somebody may still restore."""

import itertools
from unittest import mock

import pytest
from blake3 import blake3
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from ray_artifact_sync import plan as plan_module
from ray_artifact_sync.entries import Append, CopyStored, FileEntry, LocalFile, Manifest, Upload
from ray_artifact_sync.plan import (
    MIN_COPY_SIZE,
    PathState,
    digests_wanted,
    pinned_versions,
    plan_restore,
    plan_sync_up,
)


def digest(data):
    return blake3(data).hexdigest()


def entry(path, data):
    return FileEntry(path, len(data), digest(data), 1)


def local_file(path, data, marks=(), *, known=True):
    return LocalFile(
        path,
        len(data),
        2,
        digest(data) if known else None,
        {mark: digest(data[:mark]) for mark in marks if mark <= len(data)} if known else {},
    )


def state(data, *, own=True):
    return PathState(len(data), digest(data), own=own)


def parents(path):
    parts = path.split("/")
    return {"/".join(parts[:count]) for count in range(1, len(parts))}


# --- a model of a trial dir ---------------------------------------------------------------------------


class Trial:
    """Local files, storage and what the session knows of it, all as values; every step is checked."""

    def __init__(self, *, can_append):
        self.can_append = can_append
        self.local = {}  # path to bytes; None is an empty directory
        self.stored = {}
        self.objects = {}
        self.states = {}
        self.preserved = set()
        self.head = Manifest()
        self.pins = []

    def pinned(self):
        return [self.head, *self.pins]

    def check_pinned_versions_are_readable(self):
        for manifest in self.pinned():
            for listed in manifest:
                if listed.is_dir or not listed.size:
                    continue
                places = (self.stored.get(listed.path, b""), self.objects.get(listed.digest, b""))
                assert any(digest(place[: listed.size]) == listed.digest for place in places), f"{listed} is lost"

    def plan(self, known):
        local = {}
        for path, data in self.local.items():
            if data is None:
                local[path] = LocalFile(path, 0, 0, "", is_dir=True)
            else:
                local[path] = local_file(path, data) if path in known else local_file(path, data, known=False)
        arguments = {
            "head": self.head,
            "states": self.states,
            "pinned": self.pinned(),
            "preserved": self.preserved,
        }
        for path, marks in digests_wanted(local, **arguments).items():
            local[path] = local_file(path, self.local[path], marks)
        plan = plan_sync_up(local, can_append=self.can_append, **arguments)
        self.check_plan(plan, local)
        return plan

    def check_plan(self, plan, local):
        files = {path for path, file in local.items() if not file.is_dir}
        unchanged = [found.path for found in plan.unchanged]
        sent = [op.path for op in plan.transfers]
        assert sorted(unchanged + sent) == sorted(local), "every local path is exactly one of unchanged and sent"
        assert set(sent) <= files
        for op in (*plan.preserves, *plan.removes, *plan.transfers):
            assert op.reason
        for found in plan.unchanged:
            if not found.is_dir:
                assert digest(self.stored[found.path]) == found.digest == digest(self.local[found.path])
        assert set(plan.dropped) == self.head.entries.keys() - local.keys()
        assert len({op.path for op in plan.preserves}) == len(plan.preserves)
        touched = {op.path for op in (*plan.transfers, *plan.removes)}
        for op in plan.transfers:
            if isinstance(op, CopyStored):
                assert op.source not in touched, "a copy's source must not change in the same plan"
                assert digest(self.stored[op.source]) == op.digest == digest(self.local[op.path])
            if isinstance(op, Append):
                assert self.can_append
                before = self.states[op.path]
                assert before.own
                assert self.stored[op.path] == self.local[op.path][: op.offset]
                assert len(self.stored[op.path]) == op.offset == before.size < op.size
            if isinstance(op, Upload) and op.digest is not None:
                assert op.digest == digest(self.local[op.path])
        for op in plan.removes:
            assert op.path in self.states, "only what this library wrote is removed"
            assert op.path not in files

    def carry_out(self, plan, *, order, fail=(), grown=None):
        """Carries a plan out in any order within a phase; checks the promise after every single request."""
        for op in order(plan.preserves):
            if op.path in self.stored:
                for wanted in op.digests:
                    self.objects[wanted] = self.stored[op.path]
                    self.preserved.add(wanted)
            self.check_pinned_versions_are_readable()
        for op in order(plan.removes):
            self.stored.pop(op.path, None)
            self.states.pop(op.path, None)
            self.check_pinned_versions_are_readable()
        entries = {found.path: found for found in plan.unchanged}
        for op in order(plan.transfers):
            in_the_way = {path for path in self.states if path in parents(op.path) or op.path in parents(path)}
            assert not in_the_way, f"{in_the_way} must give way to {op.path} first"
            data = self.local[op.path]
            if isinstance(op, CopyStored):
                data = self.stored[op.source]
            elif isinstance(op, Append):
                data = self.stored[op.path] + data[op.offset :]
            elif op.digest is None and grown:
                data = grown(data)  # written between scan and upload; nobody had looked inside before
            if op.path in fail:
                # The answer was lost: it is there, or it is not, and nobody knows.
                if fail[op.path]:
                    self.stored[op.path] = data
                self.states[op.path] = PathState()
                if op.path in self.head.entries:
                    entries[op.path] = self.head.entries[op.path]
            else:
                self.stored[op.path] = data
                self.states[op.path] = state(data)
                entries[op.path] = entry(op.path, data)
                self.local[op.path] = data
            self.check_pinned_versions_are_readable()
        return Manifest(entries)

    def restart(self):
        """A new process: it knows what a listing and the head say, and wrote nothing itself yet."""
        states = {}
        for manifest in self.pinned():
            for path in manifest.entries.keys() & self.stored.keys():
                listed = self.head.get(path)
                data = self.stored[path]
                trusted = listed is not None and digest(data) == listed.digest
                states[path] = PathState(len(data), listed.digest if trusted else None)
        self.states = states
        self.preserved &= {listed.digest for manifest in self.pinned() for listed in manifest}

    def forget(self, number):
        """A checkpoint is deleted, and then what nothing needs any more."""
        del self.pins[number : number + 1]
        referenced = {listed.digest for manifest in self.pinned() for listed in manifest}
        self.objects = {key: data for key, data in self.objects.items() if key in referenced}
        self.preserved &= referenced

    def restore(self, manifest):
        self.local = {}
        for listed in manifest:
            if listed.is_dir:
                self.local[listed.path] = None
                continue
            places = (self.objects.get(listed.digest, b""), self.stored.get(listed.path, b""))
            good = [place[: listed.size] for place in places if digest(place[: listed.size]) == listed.digest]
            self.local[listed.path] = good[0]


NAMES = ["log", "b", "a", "a/x", "a/x/deep"]
CONTENT = st.sampled_from([b"123", b"1234", b"12", b"123456", b"1x34", b"zzzz", b"1", b""])
EDITS = st.one_of(
    st.tuples(st.just("append"), st.sampled_from(NAMES), CONTENT),
    st.tuples(st.just("write"), st.sampled_from(NAMES), CONTENT),
    st.tuples(st.sampled_from(["copy", "rename"]), st.sampled_from(NAMES), st.sampled_from(NAMES)),
    st.tuples(st.sampled_from(["delete", "mkdir"]), st.sampled_from(NAMES), st.none()),
)
STEPS = st.tuples(
    st.lists(EDITS, min_size=1, max_size=3),
    st.fixed_dictionaries(
        {},
        optional={
            "known": st.just(True),  # digests that the cache vouches for
            "grown": st.just(True),  # files that grow between the scan and the upload
            "fail": st.dictionaries(st.sampled_from(NAMES), st.booleans(), min_size=1, max_size=2),
            "uncommitted": st.just(True),
        },
    ),
    st.one_of(
        st.just(("checkpoint", 0)),
        st.just(("nothing", 0)),
        st.tuples(st.sampled_from(["forget", "restore", "restart"]), st.integers(0, 2)),
    ),
)


def write(local, path, data):
    """As a file system would have it: parents give way, children too."""
    for other in list(local):
        if other in parents(path) or path in parents(other):
            del local[other]
    local[path] = data


def edit(local, action, one, two):
    if action == "write" or (action == "append" and local.get(one) is None):
        write(local, one, two)
    elif action == "append":
        local[one] += two
    elif action in ("copy", "rename") and local.get(one) is not None:
        data = local.pop(one) if action == "rename" else local[one]
        write(local, two, data)
    elif action == "delete":
        local.pop(one, None)
    elif action == "mkdir" and not any(one in parents(path) for path in local):
        write(local, one, None)


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(STEPS, min_size=2, max_size=10), st.booleans(), st.randoms(use_true_random=False))
def test_no_pinned_version_is_ever_lost(history, can_append, random):
    def order(operations):
        return random.sample(operations, len(operations))

    trial = Trial(can_append=can_append)
    with mock.patch.object(plan_module, "MIN_COPY_SIZE", 3):
        for edits, how, (after, number) in history:
            for one in edits:
                edit(trial.local, *one)
            plan = trial.plan(set(trial.local) if "known" in how else set())
            manifest = trial.carry_out(
                plan,
                order=order,
                fail=how.get("fail", {}),
                grown=(lambda data: data + b"more") if "grown" in how else None,
            )
            for op in (*plan.preserves, *plan.removes, *plan.transfers):
                event(type(op).__name__)
            if "uncommitted" not in how:
                trial.head = manifest
                if "fail" not in how:
                    again = trial.plan(set())
                    assert not again.transfers, "a second sync sends nothing"
                    assert not again.preserves
                    assert not again.removes
                    assert Manifest.of(again.unchanged).same_content(trial.head)
            if after == "checkpoint":
                trial.pins.append(trial.head)
            elif after == "forget":
                trial.forget(number)
            elif after == "restart":
                trial.restart()
            elif after == "restore" and number < len(trial.pins):
                trial.restore(trial.pins[number])
            trial.check_pinned_versions_are_readable()


# --- single decisions ---------------------------------------------------------------------------------


def plan_one(data, *, listed=None, stored=None, own=True, pinned=(), can_append=True, preserved=(), known=True):
    head = Manifest.of([entry("x", listed)] if listed is not None else [])
    states = {"x": state(stored, own=own)} if stored is not None else {}
    pins = [head, *(Manifest.of([entry("x", pin)]) for pin in pinned)]
    arguments = {"head": head, "states": states, "pinned": pins, "preserved": set(preserved)}
    local = {"x": local_file("x", data, known=known)}
    for path, marks in digests_wanted(local, **arguments).items():
        local[path] = local_file(path, data, marks)
    return plan_sync_up(local, can_append=can_append, **arguments)


@pytest.mark.parametrize("can_append", [True, False])
def test_what_no_document_lists_yet_is_preserved_before_it_grows(can_append):
    """Who takes the path over could not know of it; what is listed, they preserve themselves."""
    listed, old = Manifest.of([entry("x", b"12")]), Manifest.of([entry("x", b"1")])
    local = {"x": local_file("x", b"123", {1, 2})}
    arguments = {"head": listed, "states": {"x": state(b"12")}, "pinned": [listed, old], "can_append": can_append}
    assert plan_sync_up(local, **arguments).preserves == ()
    (preserve,) = plan_sync_up(local, unwritten=[listed], **arguments).preserves
    assert (preserve.path, preserve.digests) == ("x", (digest(b"12"),))
    assert plan_sync_up(local, unwritten=[listed], preserved={digest(b"12")}, **arguments).preserves == ()


def test_a_new_file_is_uploaded_unread():
    plan = plan_one(b"new", known=False)
    assert plan.transfers == (Upload("x", 3, 2, None, "new"),)


def test_an_unchanged_file_keeps_the_entry_of_the_head():
    plan = plan_one(b"same", listed=b"same", stored=b"same")
    assert plan.is_empty
    assert plan.unchanged[0].mtime_ns == 1, "the very entry, so that a commit sees no difference"


def test_what_was_sent_but_not_committed_is_not_sent_again():
    plan = plan_one(b"new", listed=b"old", stored=b"new", known=False)
    assert not plan.transfers
    assert plan.unchanged == (FileEntry("x", 3, digest(b"new"), 2),)
    assert not plan_one(b"new", stored=b"new", known=False).transfers


def test_a_head_that_storage_does_not_hold_is_sent_again():
    assert plan_one(b"same", listed=b"same").transfers[0].reason == "storage holds nothing at its path"
    assert (
        plan_one(b"same", listed=b"same", stored=b"else").transfers[0].reason
        == "storage holds another version at its path"
    )


def test_growth_is_appended():
    (op,) = plan_one(b"12345", listed=b"123", stored=b"123").transfers
    assert isinstance(op, Append)
    assert (op.offset, op.size) == (3, 5)


@pytest.mark.parametrize(
    "case",
    [
        {"own": False},  # somebody else may have it open
        {"can_append": False},
        {"stored": b"12x"},  # not a prefix
        {"stored": b""},
        {"stored": b"1234567"},
        {"stored": None},
    ],
)
def test_nothing_else_is_appended(case):
    (op,) = plan_one(b"12345", **{"listed": b"123", "stored": b"123", **case}).transfers
    assert isinstance(op, Upload)


def test_truncated_and_regrown_is_no_append():
    plan = plan_one(b"99999", listed=b"123", stored=b"123")
    assert isinstance(plan.transfers[0], Upload)
    assert plan.preserves[0].digests == (digest(b"123"),)


def test_a_prefix_needs_no_preserving_and_the_rest_does():
    assert not plan_one(b"12345", listed=b"123", stored=b"123", pinned=[b"1", b"12"], can_append=False).preserves
    plan = plan_one(b"12999", listed=b"123", stored=b"123", pinned=[b"1", b"12"])
    assert plan.preserves[0].digests == (digest(b"123"),)
    plan = plan_one(b"9", listed=b"123", stored=b"123", pinned=[b"1", b"12"])
    assert set(plan.preserves[0].digests) == {digest(b"1"), digest(b"12"), digest(b"123")}


def test_what_is_preserved_already_is_not_preserved_again():
    plan = plan_one(b"9", listed=b"123", stored=b"123", pinned=[b"1"], preserved={digest(b"123")})
    assert plan.preserves[0].digests == (digest(b"1"),)


def test_the_empty_version_needs_no_object():
    assert pinned_versions("x", [Manifest.of([entry("x", b"")])], ()) == set()


def test_a_copied_file_is_copied_on_the_server():
    data = b"m" * MIN_COPY_SIZE
    head = Manifest.of([entry("old", data)])
    states = {"old": state(data)}
    arguments = {"head": head, "states": states, "pinned": [head], "preserved": set()}
    local = {"new": local_file("new", data, known=False), "old": local_file("old", data)}
    assert "new" in digests_wanted(local, **arguments)
    local["new"] = local_file("new", data)
    assert plan_sync_up(local, **arguments).transfers[0] == CopyStored(
        "new", "old", len(data), 2, digest(data), "storage holds the content at old"
    )
    # The source changes too: nothing may depend on who comes first.
    local["old"] = local_file("old", b"changed")
    assert all(isinstance(op, Upload) for op in plan_sync_up(local, **arguments).transfers)
    # Not ours, or too small: uploaded.
    states["old"] = state(data, own=False)
    local["old"] = local_file("old", data)
    assert isinstance(plan_sync_up(local, **arguments).transfers[0], Upload)


def test_a_file_that_becomes_a_directory_gives_way():
    head = Manifest.of([entry("a", b"file")])
    plan = plan_sync_up(
        {"a/x": local_file("a/x", b"inside")}, head=head, states={"a": state(b"file")}, pinned=[head], preserved=()
    )
    assert [op.path for op in plan.removes] == ["a"]
    assert plan.preserves[0].digests == (digest(b"file"),)
    assert plan.dropped == ("a",)


def test_a_directory_that_becomes_a_file_gives_way():
    head = Manifest.of([entry("a/x", b"inside"), entry("ab", b"alike")])
    plan = plan_sync_up(
        {"a": local_file("a", b"file"), "ab": local_file("ab", b"alike")},
        head=head,
        states={"a/x": state(b"inside"), "ab": state(b"alike")},
        pinned=[head],
        preserved=(),
    )
    assert [op.path for op in plan.removes] == ["a/x"]
    assert plan.preserves[0].digests == (digest(b"inside"),)


def test_deleted_files_stay_in_storage():
    plan = plan_sync_up({}, head=Manifest.of([entry("a", b"1")]), states={"a": state(b"1")}, preserved=())
    assert plan.dropped == ("a",)
    assert not plan.removes


# --- restoring ----------------------------------------------------------------------------------------

LISTINGS = st.dictionaries(st.sampled_from([*NAMES, "a/y", "b/z"]), st.one_of(CONTENT, st.none()), max_size=6)


def tree(listing):
    """What a file system can hold of it."""
    local = {}
    for path, data in listing.items():
        write(local, path, data)
    return local


@settings(max_examples=500, deadline=None)
@given(LISTINGS, LISTINGS, LISTINGS, st.booleans())
def test_a_restore_gives_what_the_snapshot_lists(wanted, here, left, keep_unlisted):
    wanted, here = tree(wanted), tree(here)
    snapshot = Manifest.of(
        FileEntry(path, 0, "", is_dir=True) if data is None else entry(path, data) for path, data in wanted.items()
    )
    local = {
        path: LocalFile(path, 0, 0, "", is_dir=True)
        if data is None
        else local_file(path, data, known=path in snapshot.entries and snapshot.entries[path].size == len(data))
        for path, data in here.items()
    }
    sizes = {found.path: (found.size,) for found in snapshot}
    leftovers = {path: local_file(path, data, sizes.get(path, ())) for path, data in left.items() if data is not None}
    plan = plan_restore(snapshot, local, leftovers, keep_unlisted=keep_unlisted)

    files = {path for path, data in wanted.items() if data is not None}
    touched = [*(fill.entry.path for fill in plan.fills), *(found.path for found in plan.keeps)]
    assert sorted(touched) == sorted(files), "fills and keeps are the snapshot's files, each once"
    assert set(plan.make_dirs) == wanted.keys() - files
    assert len(set(plan.set_aside)) == len(plan.set_aside)

    disk = dict(here)
    for path in plan.set_aside:
        assert here[path] is not None, "only files are moved away"
        assert path not in {found.path for found in plan.keeps}
        del disk[path]
    for found in plan.keeps:
        assert disk[found.path] == wanted[found.path]
    for path in plan.make_dirs:
        assert all(disk.get(other) is None for other in {path} | parents(path)), "a file is in the way"
        disk[path] = None
    for fill in plan.fills:
        path = fill.entry.path
        assert not any(path in parents(other) for other, data in disk.items() if data is not None)
        assert all(disk.get(parent) is None for parent in parents(path)), "a file is in the way"
        if fill.local_source is not None:
            assert left[fill.local_source][: fill.entry.size] == wanted[path]
        disk[path] = wanted[path]
    restored = {path: data for path, data in disk.items() if data is not None}
    assert {path: restored[path] for path in files} == {path: wanted[path] for path in files}
    if keep_unlisted:
        in_the_way = {
            path for path in here if any(path in parents(w) or w in parents(path) or path == w for w in wanted)
        }
        assert {path for path in here if here[path] is not None} - restored.keys() <= in_the_way
    else:
        assert restored.keys() == files


def test_a_grown_leftover_is_a_source():
    snapshot = Manifest.of([entry("log", b"123")])
    for data, source in ((b"12345", "log"), (b"123", "log"), (b"12", None), (b"99999", None)):
        plan = plan_restore(snapshot, {}, {"log": local_file("log", data, (3,))}, keep_unlisted=False)
        assert plan.fills[0].local_source == source


def test_an_empty_file_is_no_empty_directory():
    snapshot = Manifest.of([entry("x", b"")])
    plan = plan_restore(snapshot, {"x": LocalFile("x", 0, 0, "", is_dir=True)}, {}, keep_unlisted=False)
    assert [fill.entry.path for fill in plan.fills] == ["x"]
    plan = plan_restore(
        Manifest.of([FileEntry("x", 0, "", is_dir=True)]), {"x": local_file("x", b"")}, {}, keep_unlisted=True
    )
    assert plan.set_aside == ("x",)
    assert plan.make_dirs == ("x",)


def test_marks_are_asked_for_only_where_they_can_decide():
    pairs = itertools.product((None, b"12"), (None, b"12"))
    for listed, stored in pairs:
        head = Manifest.of([entry("x", listed)] if listed else [])
        states = {"x": state(stored)} if stored else {}
        wanted = digests_wanted(
            {"x": local_file("x", b"1234", known=False)}, head=head, states=states, pinned=[head], preserved=()
        )
        assert wanted.get("x", frozenset()) <= {2}
        assert ("x" in wanted) == (listed is not None or stored is not None)
