"""A file that driver and worker both write, although no callback declares it: the driver's stays, nothing is lost."""

from __future__ import annotations

import itertools
import json
import os
from collections import Counter

import pytest

from ray_artifact_sync import layout
from ray_artifact_sync.concurrency import Deadline
from ray_artifact_sync.directory_sync import DirectorySync
from ray_artifact_sync.driver_files import LOOKS, DriverFiles
from ray_artifact_sync.driver_note import TakenPaths, read_note, write_note
from ray_artifact_sync.errors import StoragePermissionError
from ray_artifact_sync.options import SyncOptions
from ray_artifact_sync.registry import ArtifactRegistry
from ray_artifact_sync.scan import take_all
from ray_artifact_sync.stores import open_store
from ray_artifact_sync.stores.posix import PosixStore
from tests.support.s3_servers import BUCKET, filesystem_at
from tests.support.sessions import WrappedStore, abandon, open_session, read_tree, save

NAME = "summary.json"
DRIVERS, NEWER = b"the driver's", b"the driver's, newer"
WORKERS, GROWN, OTHER = b"the worker's", b"the worker's, grown", b"something else of the worker"
_numbers = itertools.count()


class Driver:
    """The driver's staging directory and its syncs."""

    def __init__(self, staging, store, registry=None) -> None:
        self.staging, self.store = staging, store
        self.files = DriverFiles(str(staging), registry or ArtifactRegistry.default())
        self.directory = DirectorySync(
            str(staging), store, options=SyncOptions(retries=1), verify_remote=False, shared=self.files
        )
        self.write("trial/result.json", b"{}")

    def write(self, path, data) -> None:
        (self.staging / path).parent.mkdir(parents=True, exist_ok=True)
        (self.staging / path).write_bytes(data)

    def sync(self) -> set[str]:
        found = self.files.before_sync(self.store.below, self.directory.stored, Deadline())
        self.directory.forget(found)
        self.directory.sync_up(Deadline(), self.files.sync_rule(take_all))
        return found


@pytest.fixture(
    params=["posix", pytest.param("rclone", marks=pytest.mark.s3), pytest.param("moto", marks=pytest.mark.s3)]
)
def experiment(request, tmp_path):
    """A function that opens the store of an experiment."""
    if request.param == "posix":
        return lambda: PosixStore(tmp_path / "storage")
    proxy = request.getfixturevalue("proxy" if request.param == "rclone" else "moto_proxy")
    path = f"{BUCKET}/driver-owned/{next(_numbers)}"
    return lambda: open_store(filesystem_at(proxy.endpoint), path)


@pytest.fixture
def driver(experiment, tmp_path):
    return Driver(tmp_path / "staging", experiment())


@pytest.fixture
def worker(experiment, tmp_path):
    session = open_session(tmp_path / "work", experiment().below("trial"), 1)
    session.sync()  # it has looked what is there before the driver comes
    yield session
    abandon(session)


def write(session, data, name=NAME):
    path = os.path.join(session.working_dir, name)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb") as file:
        file.write(data)


def restored(experiment, tmp_path, checkpoint, token=9):
    session = open_session(tmp_path / f"restored-{token}", experiment().below("trial"), token)
    try:
        assert session.restore(checkpoint, fresh=True).exact
        return read_tree(tmp_path / f"restored-{token}")
    finally:
        abandon(session)


def refusals(caplog):
    return [record.message for record in caplog.records if "is not synced" in record.message]


def test_the_worker_is_first(experiment, driver, worker, tmp_path, caplog):
    write(worker, WORKERS)
    write(worker, b"log", "log.txt")
    assert save(worker, "checkpoint_000000")
    write(worker, GROWN)
    assert save(worker, "checkpoint_000001")
    driver.write(f"trial/{NAME}", DRIVERS)
    driver.sync()
    store = experiment().below("trial")
    assert store.read(NAME) == DRIVERS
    write(worker, OTHER)
    write(worker, b"log, longer", "log.txt")
    assert save(worker, "checkpoint_000002")
    write(worker, OTHER + b" again")
    worker.sync()
    driver.sync()
    assert store.read(NAME) == DRIVERS
    assert store.read("log.txt") == b"log, longer"
    assert NAME not in worker.trial.head().manifest.entries
    (refusal,) = refusals(caplog)
    assert NAME in refusal
    assert "the driver writes summary.json of this trial too" in refusal
    assert worker.stats.failed_syncs == 0
    # What the checkpoints list is still the worker's, also the version that was a prefix of the next.
    assert restored(experiment, tmp_path, "checkpoint_000000", 8)[NAME] == WORKERS
    assert restored(experiment, tmp_path, "checkpoint_000001", 9) == {NAME: GROWN, "log.txt": b"log"}


def test_the_driver_is_first(experiment, driver, worker, tmp_path, caplog):
    driver.write(f"trial/{NAME}", DRIVERS)
    driver.sync()
    write(worker, WORKERS)
    write(worker, b"log", "log.txt")
    assert save(worker, "checkpoint_000000")
    driver.sync()  # repairs what a store without preconditions has let pass
    store = experiment().below("trial")
    assert store.read(NAME) == DRIVERS
    driver.write(f"trial/{NAME}", NEWER)
    driver.sync()
    write(worker, OTHER)
    worker.sync()
    worker.close()
    assert store.read(NAME) == NEWER
    assert len(refusals(caplog)) == 1
    # Where the store let the worker's version through, the checkpoint lists it, and it was preserved.
    tree = restored(experiment, tmp_path, "checkpoint_000000")
    assert tree == {"log.txt": b"log", **({NAME: WORKERS} if NAME in tree else {})}


def test_stores_that_notice_let_nothing_pass(experiment, driver, worker):
    if not (worker.store.can_fence or worker.store.can_precondition):
        pytest.skip("a store without preconditions")
    driver.write(f"trial/{NAME}", DRIVERS)
    driver.sync()
    write(worker, WORKERS)
    worker.sync()
    assert experiment().below("trial").read(NAME) == DRIVERS
    assert driver.sync() == set()


def test_the_driver_sends_its_version_again(experiment, driver, worker):
    """A store without preconditions, or a file in many parts: the worker has replaced it, and the driver sees that."""
    driver.write(f"trial/{NAME}", DRIVERS)
    driver.sync()
    store = experiment().below("trial")
    store.put(NAME, b"THE DRIVER's")  # of the same size
    assert driver.sync() == {f"trial/{NAME}"}
    assert store.read(NAME) == DRIVERS
    assert driver.sync() == set()


def test_a_driver_that_comes_in_the_middle_of_a_checkpoint(experiment, worker, tmp_path):
    """What it replaced before anybody preserved it is preserved from the node."""
    store = experiment().below("trial")

    def driver_comes() -> None:
        write_note(store, [NAME])
        store.put(NAME, DRIVERS)

    write(worker, WORKERS)
    assert save(worker, "checkpoint_000000", meanwhile=driver_comes)
    abandon(worker)
    assert restored(experiment, tmp_path, "checkpoint_000000") == {NAME: WORKERS}
    assert store.read(NAME) == DRIVERS


class Between(WrappedStore):
    """Calls `act` once, right before the first call of a verb with a path that ends so."""

    act = None

    def around(self, verb, path, act):
        if self.act is not None and self.verb == verb and path.endswith(self.end):
            come, self.act = self.act, None
            come()
        return act()

    def before(self, verb, end, act) -> None:
        self.verb, self.end, self.act = verb, end, act

    def below(self, path):
        store = Between(self.inner.below(path))
        store.around = self.around
        return store


def test_a_driver_that_comes_between_upload_and_commit(experiment, driver, tmp_path):
    """What it finds there is listed nowhere yet; and the worker, which has seen no note, is killed right after."""
    store = Between(experiment().below("trial"))
    worker = open_session(tmp_path / "work", store, 1)
    worker.sync()
    write(worker, WORKERS)
    write(worker, b"log", "log.txt")
    driver.write(f"trial/{NAME}", DRIVERS)
    store.before("put", layout.MANIFEST, driver.sync)
    assert save(worker, "checkpoint_000000")
    abandon(worker)
    assert experiment().below("trial").read(NAME) == DRIVERS
    tree = restored(experiment, tmp_path, "checkpoint_000000")
    assert tree == {NAME: WORKERS, "log.txt": b"log"}


def test_a_worker_that_writes_between_look_and_write_of_the_driver(experiment, tmp_path):
    """The driver has preserved one version, and replaces another."""
    worker = open_session(tmp_path / "work", experiment().below("trial"), 1)
    write(worker, WORKERS)
    assert save(worker, "checkpoint_000000")
    store = Between(experiment())
    driver = Driver(tmp_path / "staging", store)
    driver.write(f"trial/{NAME}", DRIVERS)

    def worker_saves() -> None:
        write(worker, OTHER)
        assert save(worker, "checkpoint_000001")
        write(worker, b"changed since, so that the node does not have it")
        abandon(worker)

    store.before("put", f"trial/{NAME}", worker_saves)
    driver.sync()
    assert experiment().below("trial").read(NAME) == DRIVERS
    assert restored(experiment, tmp_path, "checkpoint_000000", 8) == {NAME: WORKERS}
    tree = restored(experiment, tmp_path, "checkpoint_000001", 9)
    assert tree in ({NAME: OTHER}, {}), "listed and there, or refused"


def test_what_cannot_be_preserved_is_not_replaced(experiment, worker, tmp_path, caplog):
    class Refusing(WrappedStore):
        refuses = True

        def copy(self, source, target):
            if Refusing.refuses:
                raise StoragePermissionError("403")
            super().copy(source, target)

        def below(self, path):
            return Refusing(self.inner.below(path))

    write(worker, WORKERS)
    assert save(worker, "checkpoint_000000")
    driver = Driver(tmp_path / "staging", Refusing(experiment()))
    driver.write(f"trial/{NAME}", DRIVERS)
    driver.sync()
    store = experiment().below("trial")
    assert store.read(NAME) == WORKERS
    assert "Could not look at what the worker of trial stored: 403" in caplog.text
    Refusing.refuses = False
    driver.sync()
    assert store.read(NAME) == DRIVERS
    assert restored(experiment, tmp_path, "checkpoint_000000") == {NAME: WORKERS}


def test_nothing_is_left_of_the_look(experiment, driver, worker):
    write(worker, WORKERS)
    worker.sync()
    driver.write(f"trial/{NAME}", DRIVERS)
    driver.sync()
    assert [file.path for file in experiment().below("trial").list(layout.DRIVER_DIR)] == [layout.DRIVER_FILES]


def test_the_drivers_own_earlier_version_is_not_preserved(experiment, driver, worker, tmp_path):
    driver.write(f"trial/{NAME}", DRIVERS)
    driver.sync()
    again = Driver(tmp_path / "again", driver.store)
    again.write(f"trial/{NAME}", DRIVERS)
    again.sync()
    assert not list(experiment().below("trial").list(layout.OBJECTS))


def test_what_is_lost_is_not_replaced_by_the_drivers(tmp_path):
    """Killed in the middle of that: the restore must not take the driver's version for the newest of the worker's."""
    store = PosixStore(tmp_path / "storage")
    worker = open_session(tmp_path / "work", store, 1)
    write(worker, WORKERS)
    write(worker, b"log", "log.txt")
    assert save(worker, "checkpoint_000000")
    abandon(worker)
    write_note(store, [NAME])
    store.put(NAME, DRIVERS)
    session = open_session(tmp_path / "again", store, 2)
    report = session.restore("checkpoint_000000", fresh=True)
    abandon(session)
    assert report.lost == (NAME,)
    assert read_tree(tmp_path / "again") == {"log.txt": b"log"}


def test_the_next_attempt_knows(experiment, driver, worker, tmp_path, caplog):
    write(worker, WORKERS)
    assert save(worker, "checkpoint_000000")
    driver.write(f"trial/{NAME}", DRIVERS)
    driver.sync()
    abandon(worker)
    again = open_session(tmp_path / "again", experiment().below("trial"), 2)
    assert again.restore("checkpoint_000000", fresh=True).exact
    assert read_tree(tmp_path / "again") == {NAME: WORKERS}, "a restore gives the trial what it had"
    again.sync()
    again.close()
    assert experiment().below("trial").read(NAME) == DRIVERS
    assert len(refusals(caplog)) == 1
    assert restored(experiment, tmp_path, "checkpoint_000000") == {NAME: WORKERS}


@pytest.mark.parametrize("experiment", ["posix", pytest.param("moto", marks=pytest.mark.s3)], indirect=True)
def test_directories_on_one_side_and_files_on_the_other(experiment, driver, worker, caplog):
    driver.write("trial/plots/driver.png", DRIVERS)
    driver.write("trial/logs/a.txt", DRIVERS)
    driver.write("trial/table", DRIVERS)
    driver.sync()
    write(worker, WORKERS, "plots/worker.png")  # a directory that both write into is no collision
    write(worker, WORKERS, "logs")
    write(worker, WORKERS, "table/part")
    assert save(worker, "checkpoint_000000")  # sees the note at the latest
    write(worker, OTHER, "plots/worker.png")
    worker.sync()
    store = experiment().below("trial")
    assert store.read("plots/worker.png") == OTHER
    assert store.read("plots/driver.png") == DRIVERS
    assert store.read("logs/a.txt") == DRIVERS
    assert store.read("table") == DRIVERS
    assert sorted(worker.trial.head().manifest.entries) == ["plots/worker.png"]
    assert {message.partition(" ")[0] for message in refusals(caplog)} >= {"logs", "table"}


def test_declared_files_cost_nothing_of_this(tmp_path):
    class Counting(WrappedStore):
        counts: Counter[str] = Counter()

        def around(self, verb, path, act):
            self.counts[verb] += 1
            return act()

        def below(self, path):
            return Counting(self.inner.below(path))

    store = Counting(PosixStore(tmp_path / "storage"))
    driver = Driver(tmp_path / "staging", store, ArtifactRegistry.default().with_owner("Mine", NAME))
    driver.write(f"trial/{NAME}", DRIVERS)
    driver.files.before_sync(store.below, driver.directory.stored, Deadline())
    assert not store.counts


def test_looks_end_when_the_trial_is_quiet(tmp_path):
    class Watched(WrappedStore):
        looks = 0

        def stat(self, path):
            Watched.looks += path == NAME
            return super().stat(path)

        def below(self, path):
            return Watched(self.inner.below(path))

    driver = Driver(tmp_path / "staging", Watched(PosixStore(tmp_path / "storage")))
    driver.write(f"trial/{NAME}", DRIVERS)
    for _ in range(10):
        driver.sync()
    assert Watched.looks == LOOKS - 1  # the first visit has nothing to look for
    driver.write("trial/result.json", b"{}\n{}")
    for _ in range(10):
        driver.sync()
    assert Watched.looks == 2 * LOOKS - 1


def test_directories_that_are_no_trials_get_no_note(tmp_path):
    store = PosixStore(tmp_path / "storage")
    driver = Driver(tmp_path / "staging", store)
    driver.write("plots_of_all/1.png", b"x")
    driver.write(f"trial/{NAME}", DRIVERS)
    driver.write("experiment_state.json", b"{}")
    driver.sync()
    notes = [file.path for file in store.list() if layout.DRIVER_DIR in file.path]
    assert notes == [f"trial/{layout.DRIVER_FILES}"]
    assert json.loads(store.read(notes[0])) == {"format": 1, "kind": "driver_files", "files": [NAME]}


def test_a_new_driver_adds_to_the_note(tmp_path):
    store = PosixStore(tmp_path / "storage")
    for name in ("one.txt", "two.txt"):
        driver = Driver(tmp_path / name, store)
        driver.write(f"trial/{name}", DRIVERS)
        driver.sync()
    assert read_note(store.below("trial")) == {"one.txt", "two.txt"}


def test_a_refused_note_does_not_keep_the_drivers_files(tmp_path, caplog):
    class Refusing(WrappedStore):
        def put(self, path, data, **options):
            if path == layout.DRIVER_FILES:
                raise StoragePermissionError("403")
            return super().put(path, data, **options)

        def below(self, path):
            return Refusing(self.inner.below(path))

    store = PosixStore(tmp_path / "storage")
    driver = Driver(tmp_path / "staging", Refusing(store))
    driver.write(f"trial/{NAME}", DRIVERS)
    driver.sync()
    assert store.read(f"trial/{NAME}") == DRIVERS
    assert "Could not look at what the worker of trial stored: 403" in caplog.text


@pytest.mark.parametrize("bad", [b"bad\xff", b"a\nb"])
def test_a_name_that_no_store_takes_is_alone_with_that(tmp_path, bad):
    """Not valid UTF-8, or a control character: the driver's other files go on, and the note can be read."""
    store = PosixStore(tmp_path / "storage")
    driver = Driver(tmp_path / "staging", store)
    driver.write("experiment_state.json", b"{}")
    driver.write(f"trial/{NAME}", DRIVERS)
    driver.write(f"trial/{os.fsdecode(bad)}", DRIVERS)
    for _ in range(2):
        driver.sync()
        assert store.read("experiment_state.json") == b"{}"
        assert store.read(f"trial/{NAME}") == DRIVERS
        assert read_note(store.below("trial")) == {NAME}


@pytest.mark.parametrize(
    "damage", [b"", b"{", b"[]", b'{"format": 2, "kind": "driver_files", "files": []}', b'{"format":1,"kind":"x"}']
)
def test_a_damaged_note_is_left_out(tmp_path, caplog, damage):
    store = PosixStore(tmp_path)
    store.put(layout.DRIVER_FILES, damage)
    assert read_note(store) == frozenset()
    assert "is damaged and left out" in caplog.text


def test_a_hostile_note_is_left_out(tmp_path):
    store = PosixStore(tmp_path)
    write_note(store, ["../evil"])
    assert read_note(store) == frozenset()


def test_taken_paths():
    taken = TakenPaths(["a/b", "c"])
    assert [path in taken for path in ("a/b", "c", "c/x", "a", "a/x", "b", "cc")] == [
        True,
        True,
        True,
        True,  # a file where the driver has a directory
        False,
        False,
        False,
    ]
    assert taken.skip("a", True) is None, "a directory may be both's"
    assert taken.skip("a/b", True).kind == "owned"
    assert "x" not in TakenPaths()
    assert not TakenPaths()
