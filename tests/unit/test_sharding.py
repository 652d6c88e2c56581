"""Many workers, one upload: real processes, real files."""

from __future__ import annotations

import json
import os
import random
import resource
import threading
import time

import pytest

from ray_artifact_sync import ShardedUpload
from ray_artifact_sync.collectives import SingleProcess
from ray_artifact_sync.errors import (
    ArtifactConflictError,
    ArtifactNotFoundError,
    ArtifactSyncError,
    ConfigurationError,
    IncompleteSyncError,
    StorageError,
    WorkerDiedError,
)
from ray_artifact_sync.stores.posix import PosixStore
from tests.support.independent_reader import head_tree, posix_place
from tests.support.ranks import run_ranks
from tests.support.sessions import WrappedStore

CONFLICT = "conflict"


def write(root, files) -> str:
    """Makes a directory: text for a file, None for an empty directory."""
    os.makedirs(root, exist_ok=True)
    for path, content in files.items():
        full = os.path.join(root, path)
        if content is None:
            os.makedirs(full)
            continue
        os.makedirs(os.path.dirname(full), exist_ok=True)
        with open(full, "w") as file:
            file.write(content)
    return str(root)


def upload(collective, target, dirs, options=None, more=None):
    """One rank's upload; says what it sent and who sent what."""
    sharded = ShardedUpload(CountingStore(target), collective, **(options or {}))
    report = sharded.upload(dirs[collective.rank], **((more or {}).get(collective.rank, {})))
    return sorted(sharded.store.sent), sorted(report.manifest.entries), report.metadata


class CountingStore(WrappedStore):
    """Remembers which artifacts were written through it."""

    def __init__(self, target):
        super().__init__(PosixStore(target))
        self.sent = []

    def put(self, path, data, **options):
        if not path.startswith(".ray_artifact_sync"):
            self.sent.append(path)
        return super().put(path, data, **options)


def stored(target) -> dict:
    return {path: data if data is None else data.decode() for path, data in head_tree(posix_place(target)).items()}


def check_untouched(target) -> None:
    """Not one byte of an artifact was sent."""
    assert [name for name in os.listdir(target) if name != ".ray_artifact_sync"] == [] if target.exists() else True


# --- the conflict table -----------------------------------------------------------------------------

A, B, LONGER = "aaaa", "bbbb", "longer than a"
TABLE = {
    # name: (rank 0, rank 1, on_conflict, what is stored or CONFLICT, the paths that rank 0 and rank 1 send)
    "distinct files": ({"a": A}, {"b": B}, "error", {"a": A, "b": B}, ["a"], ["b"]),
    "identical files": ({"a": A}, {"a": A}, "error", {"a": A}, ["a"], []),
    "identical empty files": ({"a": ""}, {"a": ""}, "error", {"a": ""}, ["a"], []),
    "identical and more": ({"a": A}, {"a": A, "b": B}, "error", {"a": A, "b": B}, ["a"], ["b"]),
    "different bytes, equal sizes": ({"a": A}, {"a": B}, "error", CONFLICT, ["a"], None),
    "different sizes": ({"a": A}, {"a": LONGER}, "error", CONFLICT, ["a"], None),
    "file and directory": ({"x": A}, {"x/y": B}, "error", CONFLICT, ["x"], None),
    "directory and file": ({"x/y/z": A}, {"x/y": B}, "error", CONFLICT, ["x/y"], None),
    "file and empty directory": ({"x": A}, {"x": None}, "error", CONFLICT, ["x"], None),
    "file below a file": ({"x": A}, {"x/y/z": A}, "error", CONFLICT, ["x"], None),
    "directories merge": ({"d/a": A}, {"d/b": B}, "error", {"d/a": A, "d/b": B}, ["d/a"], ["d/b"]),
    "empty directories": ({"d": None}, {"d": None, "a": A}, "error", {"d": None, "a": A}, [], ["a"]),
    "empty and full directory": ({"d": None}, {"d/a": A}, "error", {"d/a": A}, [], ["d/a"]),
    "names that begin alike": (
        {"x": A},
        {"x.d/y": B, "xy": B},
        "error",
        {"x": A, "x.d/y": B, "xy": B},
        ["x"],
        ["x.d/y", "xy"],
    ),
    "nothing from one": ({"a": A}, None, "error", {"a": A}, ["a"], []),
    "nothing from the first": (None, {"a": A}, "error", {"a": A}, [], ["a"]),
    "an empty directory each": ({}, {}, "error", {}, [], []),
    "shared directory": ({"a": A, "d": None}, "shared", "error", {"a": A, "d": None}, ["a"], []),
    "lowest rank: different": ({"a": A}, {"a": B, "b": B}, "lowest_rank", {"a": A, "b": B}, ["a"], ["b"]),
    "lowest rank: sizes": ({"a": LONGER}, {"a": B}, "lowest_rank", {"a": LONGER}, ["a"], []),
    "lowest rank: file wins": ({"x": A}, {"x/y": B, "x/z/w": B}, "lowest_rank", {"x": A}, ["x"], []),
    "lowest rank: directory wins": ({"x/y": A}, {"x": B}, "lowest_rank", {"x/y": A}, ["x/y"], []),
    "rank suffix: different": (
        {"a": A},
        {"a": B},
        "rank_suffix",
        {"a.rank_0": A, "a.rank_1": B},
        ["a.rank_0"],
        ["a.rank_1"],
    ),
    "rank suffix: identical": ({"a": A}, {"a": A}, "rank_suffix", {"a": A}, ["a"], []),
    "rank suffix: file and directory": (
        {"x": A},
        {"x/y": B},
        "rank_suffix",
        {"x.rank_0": A, "x/y": B},
        ["x.rank_0"],
        ["x/y"],
    ),
    "rank suffix: taken": ({"a": A, "a.rank_1": A}, {"a": B}, "rank_suffix", CONFLICT, ["a.rank_1"], None),
}


@pytest.mark.parametrize("row", TABLE)
def test_conflict_table(row, tmp_path):
    first, second, on_conflict, expected, sent_by_first, sent_by_second = TABLE[row]
    dirs = [
        None
        if files is None
        else str(tmp_path / "rank_0")
        if files == "shared"
        else write(tmp_path / f"rank_{n}", files)
        for n, files in enumerate((first, second))
    ]
    target = tmp_path / "target"
    outcomes = run_ranks(2, upload, str(target), dirs, {"on_conflict": on_conflict})
    if expected == CONFLICT:
        for outcome in outcomes:
            assert isinstance(outcome.error, ArtifactConflictError), outcome
            assert set(outcome.error.conflicts) == set(sent_by_first)
            for path in sent_by_first:
                assert repr(path) in str(outcome.error)
                assert outcome.error.conflicts[path] == (0, 1)
            assert "ranks 0 and 1" in str(outcome.error) or "rank 0" in str(outcome.error)
        check_untouched(target)
        return
    assert [outcome.error for outcome in outcomes] == [None, None]
    assert stored(target) == expected
    assert [outcome.value[0] for outcome in outcomes] == [sent_by_first, sent_by_second]
    assert all(outcome.value[1] == sorted(expected) for outcome in outcomes)


def test_all_ranks_with_nothing_is_an_error(tmp_path):
    for outcome in run_ranks(2, upload, str(tmp_path / "target"), [None, None]):
        assert isinstance(outcome.error, ConfigurationError)
    with pytest.raises(ConfigurationError, match="at least one"):
        ShardedUpload(tmp_path / "alone").upload(None)


def upload_selected(collective, target, directory):
    sharded = ShardedUpload(CountingStore(target), collective)
    sharded.upload(directory, selector=lambda path: path.endswith((f"{collective.rank}.txt", "all.txt")))
    return sorted(sharded.store.sent)


def test_shared_directory_with_selectors(tmp_path):
    directory = write(tmp_path / "shared", {f"d/{n}.txt": str(n) for n in range(5)} | {"all.txt": A})
    outcomes = run_ranks(4, upload_selected, str(tmp_path / "target"), directory)
    assert [outcome.value for outcome in outcomes] == [
        ["all.txt", "d/0.txt"], ["d/1.txt"], ["d/2.txt"], ["d/3.txt"],
    ]  # fmt: skip
    assert stored(tmp_path / "target") == {f"d/{n}.txt": str(n) for n in range(4)} | {"all.txt": A}


# --- order, clocks, metadata ------------------------------------------------------------------------


def upload_in_odd_order(collective, target, dirs):
    """Each rank's directory lists in an order of its own, and its clock is off by hours."""
    scandir, clock = os.scandir, time.time_ns
    offset = (collective.rank - 1) * 3_600_000_000_000

    class Shuffled:
        def __init__(self, path):
            self.entries = list(scandir(path))
            random.Random(collective.rank).shuffle(self.entries)

        def __enter__(self):
            return iter(self.entries)

        def __exit__(self, *_):
            pass

    os.scandir = Shuffled
    time.time_ns = lambda: clock() + offset
    directory = dirs[collective.rank]
    for path in os.listdir(directory):
        full = os.path.join(directory, path)
        if os.path.isfile(full):
            os.utime(full, ns=(clock() + offset, clock() + offset))
    sharded = ShardedUpload(target, collective)
    first = sharded.upload(directory)
    second = sharded.upload(directory)
    assert second.manifest.token > first.manifest.token
    return second.manifest


def test_same_result_with_other_orders_and_clocks(tmp_path):
    common = {f"common_{n}": str(n) for n in range(30)}
    dirs = [write(tmp_path / f"r{r}", common | {f"own/{r}_{n}": str(n) for n in range(30)}) for r in range(4)]
    outcomes = run_ranks(4, upload_in_odd_order, str(tmp_path / "target"), dirs)
    assert [outcome.error for outcome in outcomes] == [None] * 4
    assert len({json.dumps(sorted(map(str, outcome.value))) for outcome in outcomes}) == 1
    assert len({outcome.value.token for outcome in outcomes}) == 1
    assert stored(tmp_path / "target") == common | {f"own/{r}_{n}": str(n) for n in range(30) for r in range(4)}


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ([{"a": 1}, None], {"a": 1}),
        ([{"a": {"b": 1}}, {"a": {"c": [2]}}], {"a": {"b": 1, "c": [2]}}),
        ([{"a": {"b": 1}}, {"a": {"b": 1}}], {"a": {"b": 1}}),
        ([{"a": float("nan")}, {"a": float("nan")}], {"a": float("nan")}),
        ([{"a": {"b": 1}}, {"a": {"b": 2}}], "'a.b' by ranks 0 and 1"),
        ([{"a": {"b": 1}}, {"a": 1}], "'a' by ranks 0 and 1"),
        ([{"a": [1]}, {"a": [1, 2]}], "'a' by ranks 0 and 1"),
    ],
)
def test_metadata(parts, expected, tmp_path):
    dirs = [write(tmp_path / f"r{n}", {f"{n}": A}) for n in range(2)]
    more = {rank: {"metadata": part} for rank, part in enumerate(parts)}
    outcomes = run_ranks(2, upload, str(tmp_path / "target"), dirs, None, more)
    if isinstance(expected, str):
        for outcome in outcomes:
            assert isinstance(outcome.error, ArtifactConflictError)
            assert expected in str(outcome.error)
        check_untouched(tmp_path / "target")
        return
    assert all(json.dumps(outcome.value[2]) == json.dumps(expected) for outcome in outcomes), outcomes
    assert json.dumps(ShardedUpload(tmp_path / "target").metadata()) == json.dumps(expected)


def test_metadata_that_is_no_json_fails_on_all(tmp_path):
    dirs = [write(tmp_path / f"r{n}", {f"{n}": A}) for n in range(2)]
    more = {1: {"metadata": {"a": {1: 2}}}}
    for outcome in run_ranks(2, upload, str(tmp_path / "target"), dirs, None, more):
        assert isinstance(outcome.error, ConfigurationError)
        assert "rank 1" in str(outcome.error)
    check_untouched(tmp_path / "target")


# --- a second upload --------------------------------------------------------------------------------


def upload_twice(collective, target, dirs, second):
    sharded = ShardedUpload(CountingStore(target), collective)
    sharded.upload(dirs[collective.rank], metadata={"n": 1} if collective.rank == 0 else None)
    sharded.store.sent.clear()
    write(dirs[collective.rank], second.get(collective.rank, {}))
    sharded.upload(dirs[collective.rank])
    return sorted(sharded.store.sent)


def test_a_later_upload_replaces_the_set_and_sends_what_changed(tmp_path):
    dirs = [write(tmp_path / "r0", {"a": A, "b": B}), write(tmp_path / "r1", {"c": A})]
    outcomes = run_ranks(2, upload_twice, str(tmp_path / "target"), dirs, {1: {"c": LONGER}})
    assert [outcome.error for outcome in outcomes] == [None, None]
    assert stored(tmp_path / "target") == {"a": A, "b": B, "c": LONGER}
    assert ShardedUpload(tmp_path / "target").metadata() == {}, "the metadata belongs to its set"


def test_kinds_change_between_uploads(tmp_path):
    target = tmp_path / "target"
    run_ranks(
        2, upload, str(target), [write(tmp_path / "1/r0", {"x": A}), write(tmp_path / "1/r1", {"y/z": B, "k": B})]
    )
    dirs = [write(tmp_path / "2/r0", {"y": A, "x/0": A}), write(tmp_path / "2/r1", {"x/1": B, "k": B})]
    outcomes = run_ranks(2, upload, str(target), dirs)
    assert [outcome.error for outcome in outcomes] == [None, None]
    assert stored(target) == {"y": A, "x/0": A, "x/1": B, "k": B}


# --- failures and deaths ----------------------------------------------------------------------------


class Refusing(WrappedStore):
    def put(self, path, data, **options):
        if path == "d/3":
            raise StorageError("403 for this one")
        return super().put(path, data, **options)


def upload_refused(collective, target, dirs):
    ShardedUpload(Refusing(PosixStore(target)), collective, retries=0).upload(dirs[collective.rank])


def test_one_refused_file_fails_all_ranks_and_commits_nothing(tmp_path):
    target = tmp_path / "target"
    run_ranks(2, upload, str(target), [write(tmp_path / "old", {"old": A}), None])
    dirs = [write(tmp_path / f"r{n}", {f"d/{n}": str(n)}) for n in range(4)]
    for outcome in run_ranks(4, upload_refused, str(target), dirs):
        assert isinstance(outcome.error, IncompleteSyncError), outcome
        assert "403" in str(outcome.error)
        assert list(outcome.error.failures) == ["d/3"]
    assert stored(target) == {"old": A}


STEPS = (
    "newest token",
    "token",
    "claim",
    "learn",
    "sources",
    "listings",
    "digests",
    "uploads",
    "commit",
    "old metadata",
)
OLD = {"log": "before", "old": A}


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("step", STEPS)
def test_a_rank_killed_at_any_step(step, victim, moment, tmp_path):
    target = tmp_path / "target"
    ShardedUpload(target).upload(write(tmp_path / "old", OLD))
    dirs = [write(tmp_path / f"r{n}", {"log": "now", "same": A, f"own/{n}": str(n) * 100}) for n in range(3)]
    started = time.monotonic()
    outcomes = run_ranks(3, upload, str(target), dirs, {}, kill=(victim, step, moment), timeout=20)
    assert outcomes[victim].exitcode == -9
    for rank, outcome in enumerate(outcomes):
        last = (step, moment) == ("old metadata", "after")  # it had nothing left to do but to return
        if rank != victim and not last:
            assert isinstance(outcome.error, WorkerDiedError), outcome
    assert time.monotonic() - started < 20
    new = {"log": "now", "same": A} | {f"own/{n}": str(n) * 100 for n in range(3)}
    # Once all have said that their part is there, rank 0 commits; a death of another one changes nothing any more.
    late = STEPS.index(step) > STEPS.index("uploads") or (step, moment, victim) == ("uploads", "after", 1)
    assert stored(target) == (new if late else OLD), "half a set"
    # The next ones are not kept from it.
    outcomes = run_ranks(3, upload, str(target), dirs)
    assert [outcome.error for outcome in outcomes] == [None] * 3
    assert stored(target) == new


class DyingStore(WrappedStore):
    """SIGKILL in the middle of the n-th write of an artifact."""

    left = 10**9

    def put(self, path, data, **options):
        self.left -= 1
        if self.left < 0:
            os.kill(os.getpid(), 9)
        return super().put(path, data, **options)


def upload_until_killed(collective, target, dirs, victim, writes):
    store = DyingStore(PosixStore(target))
    if collective.rank == victim:
        store.left = writes
    ShardedUpload(store, collective, max_concurrency=1).upload(dirs[collective.rank])


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("writes", range(5))
def test_a_rank_killed_while_it_uploads(victim, writes, tmp_path):
    target = tmp_path / "target"
    ShardedUpload(target).upload(write(tmp_path / "old", OLD))
    dirs = [write(tmp_path / f"r{n}", {f"{n}/{i}": f"{i}" for i in range(10)} | {"log": "now"}) for n in range(2)]
    outcomes = run_ranks(2, upload_until_killed, str(target), dirs, victim, writes, timeout=20)
    assert outcomes[victim].exitcode == -9
    assert isinstance(outcomes[1 - victim].error, WorkerDiedError)
    assert stored(target) == OLD


# --- paths in and out -------------------------------------------------------------------------------


def store_and_restore(collective, target, download):
    rank = collective.rank
    sharded = ShardedUpload(target, collective)
    with sharded.store_path(metadata={"ranks": {str(rank): rank}}) as path:
        write(path, {f"shard_{rank}": str(rank), "same": A})
    assert not os.path.exists(path)
    with sharded.restore_path(download=download, selector=lambda name: name == f"shard_{rank}") as path:
        seen = sorted(os.listdir(path))
        identity = os.stat(path).st_ino
        with open(os.path.join(path, f"shard_{rank}")) as file:
            assert file.read() == str(rank)
    return seen, identity, sharded.metadata(), os.path.exists(path)


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_store_path_and_restore_path(world_size, tmp_path):
    outcomes = run_ranks(world_size, store_and_restore, str(tmp_path / "target"), "per_node")
    assert [outcome.error for outcome in outcomes] == [None] * world_size
    assert len({outcome.value[1] for outcome in outcomes}) == 1, "one directory for the node"
    assert outcomes[0].value[0] == sorted(f"shard_{n}" for n in range(world_size)), "what its ranks need, no more"
    assert outcomes[0].value[2] == {"ranks": {str(n): n for n in range(world_size)}}
    assert not outcomes[0].value[3]


def test_restore_path_per_rank(tmp_path):
    outcomes = run_ranks(3, store_and_restore, str(tmp_path / "target"), "per_rank")
    assert [outcome.value[0] for outcome in outcomes] == [["shard_0"], ["shard_1"], ["shard_2"]]
    assert len({outcome.value[1] for outcome in outcomes}) == 3


def raise_in_selector(collective, target, scratch):
    sharded = ShardedUpload(target, collective)

    def selector(name):
        if collective.rank == 1:
            raise ValueError("a bug of rank 1")
        return True

    with sharded.restore_path(selector=selector, scratch_dir=scratch):
        pass


def test_a_selector_that_raises_on_one_rank(tmp_path):
    ShardedUpload(tmp_path / "target").upload(write(tmp_path / "d", {"a": A}))
    (tmp_path / "scratch").mkdir()
    outcomes = run_ranks(3, raise_in_selector, str(tmp_path / "target"), str(tmp_path / "scratch"), timeout=20)
    assert isinstance(outcomes[1].error, ValueError)
    for rank in (0, 2):
        assert isinstance(outcomes[rank].error, ArtifactSyncError)
        assert "a bug of rank 1" in str(outcomes[rank].error)
    assert not [*(tmp_path / "scratch").iterdir()]


def raise_in_block(collective, target):
    sharded = ShardedUpload(target, collective)
    with sharded.store_path() as path:
        write(path, {"a": A})
        if collective.rank == 1:
            raise ValueError("a bug of rank 1")


def test_a_block_that_raises_on_one_rank(tmp_path):
    outcomes = run_ranks(3, raise_in_block, str(tmp_path / "target"))
    assert isinstance(outcomes[1].error, ValueError)
    for rank in (0, 2):
        assert isinstance(outcomes[rank].error, ArtifactSyncError)
        assert "Rank 1: ValueError: a bug of rank 1" in str(outcomes[rank].error)
    assert not (tmp_path / "target").exists()


def store_unsharded(collective, target):
    sharded = ShardedUpload(target, collective)
    with sharded.store_path(shard=False, metadata={"a": 1}) as path:
        write(path, {"a": A})


def test_store_path_without_sharding(tmp_path):
    outcomes = run_ranks(2, store_unsharded, str(tmp_path / "target"))
    assert outcomes[0].error is None
    assert isinstance(outcomes[1].error, ConfigurationError)
    assert stored(tmp_path / "target") == {"a": A}


def test_nothing_there(tmp_path):
    sharded = ShardedUpload(tmp_path / "target")
    with pytest.raises(ArtifactNotFoundError), sharded.restore_path():
        pass


def out_of_step(collective, target, directory):
    sharded = ShardedUpload(target, collective)
    if collective.rank == 0:
        sharded.upload(directory)
    else:
        with sharded.restore_path():
            pass


def test_ranks_that_make_different_calls_are_told(tmp_path):
    outcomes = run_ranks(2, out_of_step, str(tmp_path / "target"), write(tmp_path / "d", {"a": A}), timeout=20)
    for outcome in outcomes:
        assert isinstance(outcome.error, WorkerDiedError | ArtifactNotFoundError), outcome
    assert any("not all ranks made the same calls" in str(outcome.error) for outcome in outcomes)


# --- cost -------------------------------------------------------------------------------------------


def upload_many(collective, target, files):
    directory = os.path.join(f"{target}-local", str(collective.rank))
    for n in range(files):
        path = os.path.join(directory, f"dir_{n % 20}", f"rank_{collective.rank}_file_{n}.bin")
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w") as file:
            file.write(str(n))
    collective.barrier()
    from ray_artifact_sync import sharded_trial

    agree = sharded_trial.ShardedTrial._agree
    cost = []

    def measured(self, deadline):
        started, rounds = time.monotonic(), len(collective.steps)
        try:
            return agree(self, deadline)
        finally:
            cost.append((len(collective.steps) - rounds, time.monotonic() - started))

    sharded_trial.ShardedTrial._agree = measured
    ShardedUpload(target, collective).upload(directory)
    return cost[0]


@pytest.mark.slow
def test_eight_ranks_with_2000_files_agree_in_two_rounds(tmp_path):
    """Whatever the number of files: first where they are, then what they are called."""
    outcomes = run_ranks(8, upload_many, str(tmp_path / "target"), 2000, timeout=120)
    assert [outcome.error for outcome in outcomes] == [None] * 8
    print(f"8 ranks x 2,000 files agreed in {max(outcome.value[1] for outcome in outcomes):.2f} s")
    assert {outcome.value[0] for outcome in outcomes} == {2}
    assert len(ShardedUpload(tmp_path / "target").manifest()) == 16_000


def hash_a_huge_file(collective, target, dirs):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    steps = []
    try:
        ShardedUpload(target, collective).upload(dirs[collective.rank])
    except ArtifactConflictError as error:
        steps = list(error.conflicts)
    return steps, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


@pytest.mark.slow
def test_memory_stays_flat_with_a_2_gib_collision(tmp_path):
    dirs = []
    for n in range(2):
        dirs.append(write(tmp_path / f"r{n}", {}))
        with open(tmp_path / f"r{n}/huge.bin", "wb") as file:
            file.truncate(2 * 1024**3)
            file.seek(1024**3 + n)
            file.write(b"x")
    outcomes = run_ranks(2, hash_a_huge_file, str(tmp_path / "target"), dirs, timeout=120)
    assert [outcome.error for outcome in outcomes] == [None, None]
    for outcome in outcomes:
        conflicts, megabytes = outcome.value
        print(f"a collision of 2 GiB took {megabytes:.0f} MiB more")
        assert conflicts == ["huge.bin"]
        assert megabytes < 64
    check_untouched(tmp_path / "target")


def test_only_colliding_files_are_hashed_in_one_exchange(tmp_path, monkeypatch):
    from ray_artifact_sync import sharded_trial

    hashed = []
    original = sharded_trial.hash_local_file

    def counted(file, *args):
        hashed.append(file.path)
        return original(file, *args)

    monkeypatch.setattr(sharded_trial, "hash_local_file", counted)
    dirs = [
        write(
            tmp_path / f"r{r}",
            {f"own_{r}_{n}": A for n in range(20)} | {f"both_{n}": A for n in range(3)} | {"sized": "x" * r},
        )
        for r in range(2)
    ]
    collectives = in_threads(2)
    threads = [
        threading.Thread(
            target=lambda c=c: ShardedUpload(tmp_path / "t", c, on_conflict="lowest_rank").upload(dirs[c.rank])
        )
        for c in collectives
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(hashed) == sorted(["both_0", "both_1", "both_2"] * 2)
    assert collectives[0].steps.count("digests") == 1


def in_threads(count):
    gathered = {}
    barrier = threading.Barrier(count)

    class Threaded:
        def __init__(self, rank):
            self.rank, self.world_size, self.steps = rank, count, []

        def allgather(self, value):
            self.steps.append(value[1])
            gathered[self.rank] = value
            barrier.wait(30)
            values = [gathered[rank] for rank in range(count)]
            barrier.wait(30)
            return values

    return [Threaded(rank) for rank in range(count)]


def test_bad_options():
    with pytest.raises(ConfigurationError, match="on_conflict"):
        ShardedUpload("/tmp/x", SingleProcess(), on_conflict="newest")
