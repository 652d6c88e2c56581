"""Runs real sessions against a `ModelDisk`, one request at a time, in every order that matters.

Each attempt is a thread with a script; it stops before each request until the scheduler lets it make that one. Nothing
of the library is replaced but the clock of the lease. After each step that changed storage, `World.check` reads all of
it with the independent reader.

Two states that nobody could tell apart (same storage, same answers seen by each attempt) are explored once: what a
deterministic program does next depends on nothing else.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import shutil
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from ray_artifact_sync import layout, trial_dir
from ray_artifact_sync.checkpoint_upload import upload_checkpoint
from ray_artifact_sync.concurrency import Deadline
from ray_artifact_sync.errors import ArtifactConflictError, ArtifactSyncError, StorageError
from ray_artifact_sync.stores.posix import PosixStore
from tests.support import independent_reader
from tests.support.model_store import Atomicity, ModelDisk, ModelStore, short
from tests.support.sessions import Killed, abandon, open_session, read_tree

ROOT = "experiment/t_1"
FOREIGN = {
    "experiment/experiment_state.json": b"of Ray",
    f"{ROOT}/progress.csv": b"of the driver",
    f"{ROOT}/notes.txt": b"of a person",
    "experiment/t_10/log.txt": b"of another trial",
    "experiment/t_10/.ray_artifact_sync/manifest.json": b"of another trial",
}
SCRATCH = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
FIXED_NS = 1_700_000_000_000_000_000

WRITING = frozenset(("put", "append", "copy", "rename", "delete", "take_away"))

LOST = 100
ALONE = frozenset(("start", "sleep", "mkdir", "listdir", "look", "driver deletes"))
"""What may depend on anything."""

Tree = dict[str, bytes | None]
Script = Callable[["Attempt"], None]


class Violation(AssertionError):  # noqa: N818  (what it is called where models are checked)
    """A promise that was broken."""


@dataclass
class Driver:
    """What Ray's driver knows: which attempt counts, which checkpoints are registered and kept."""

    current: int = 0
    newest: int = -1
    retained: dict[str, tuple[Tree, bytes]] = field(default_factory=dict)
    exploit: Tree | None = None  # PBT: the artifacts when another trial's checkpoint was taken over, since the newest

    def key(self) -> tuple:
        kept = tuple((name, short(repr(sorted(tree.items())).encode())) for name, (tree, _) in self.retained.items())
        exploit = None if self.exploit is None else short(repr(sorted(self.exploit.items())).encode())
        return self.current, self.newest, kept, exploit

    def copy(self) -> Driver:
        return Driver(self.current, self.newest, dict(self.retained), self.exploit)


class Attempt:
    """One attempt of the trial: a thread that runs a script, and stops before each request."""

    def __init__(self, world: World, number: int, script: Script, **options) -> None:
        self.world, self.number, self.script, self.options = world, number, script, options
        self.pending: tuple[str, str] | None = None
        self.finished = False
        self.dead = self.opened = self.answer_lost = False
        self.history = 0
        self.index = -1
        self.error: BaseException | None = None
        self.outcome = ""
        self.tree: Tree = {}
        self.settled: Tree | None = None  # what the head must be until this attempt does something else
        self.session = None
        self.store: ModelStore | None = None
        self._go = threading.Semaphore(0)
        self._stopped = threading.Semaphore(0)
        self._thread = threading.Thread(target=self._main, name=f"attempt-{number}", daemon=True)

    # --- for the scheduler -------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()
        self._await()

    def step(self, *, answer_lost: bool = False) -> None:
        """Lets the pending request be made, and waits for the next one."""
        self.history = hash((self.history, self.pending, answer_lost))
        self.answer_lost = answer_lost
        self.pending = None
        self._go.release()
        self._await()

    def _await(self) -> None:
        if not self._stopped.acquire(timeout=60):
            raise AssertionError(f"attempt {self.number} does not come back")

    def kill(self) -> None:
        """SIGKILL: no request is made any more; the pending one never was."""
        if self.finished:
            return
        self.dead = True
        self._go.release()
        self._thread.join(60)

    def is_writing(self) -> bool:
        """Whether a request that changes storage is under way."""
        return self.pending is not None and self.pending[0] in WRITING

    def key(self) -> tuple:
        current = True
        if self.store is not None and self.store.open_file is not None:
            path, node = self.store.open_file
            current = self.world.disk.files.get(path) is node
        return self.number, self.finished, self.pending, self.history, current

    # --- for the store (any thread of the attempt) -------------------------------------------------

    def arrive(self, verb: str, path: str) -> None:
        if self.dead:
            raise Killed
        assert self.pending is None, f"two requests of one attempt at once: {self.pending} and {verb} {path}"
        self.pending = verb, path
        self.world.threads[threading.get_ident()] = self
        self._stopped.release()
        self._go.acquire()
        if self.dead:
            raise Killed

    def saw(self, answer: object) -> None:
        self.history = hash((self.history, answer))

    def ended(self) -> None:
        """A request that changes storage has taken effect."""
        if self.answer_lost:
            self.answer_lost = False
            raise StorageError("the connection broke before the answer came", retryable=True)

    # --- its life ----------------------------------------------------------------------------------

    def _main(self) -> None:
        self.world.threads[threading.get_ident()] = self
        try:
            self.arrive("start", "")
            self.begin()
            self.script(self)
            self.outcome = "done"
        except Killed:
            self.outcome = "killed"
        except ArtifactConflictError:
            self.outcome = "replaced"
            if self.world.driver.current == self.number:
                self.error = Violation(f"attempt {self.number} was told that it was replaced, but nobody did")
        except BaseException as error:
            self.outcome = f"{type(error).__name__}: {error}"
            if self.world.driver.current == self.number or not isinstance(error, ArtifactSyncError):
                self.error = error
        finally:
            if self.session is not None:
                abandon(self.session)
            self.finished = True
            self.settled = None
            self._stopped.release()

    def begin(self) -> None:
        driver = self.world.driver
        driver.current = self.number
        newest = max(driver.retained, default=None)
        exploit = driver.exploit
        self.saw((driver.newest, newest, exploit is None))
        self.index = driver.newest
        self.store = self.store_of(ROOT)
        options = {"max_concurrency": 1, "retries": 3, "on_error": "raise", "journal": False, **self.options}
        self.session = open_session(
            self.world.working_dir(self.number),
            self.store,
            self.number,
            trial="t_1",
            registered=driver.newest,
            **options,
        )
        self.session._run(self.session._open, "Opening")
        self.opened = True
        if exploit is not None:
            self.take_over_a_foreign_checkpoint(exploit)
        elif newest is not None:
            tree, _ = driver.retained[newest]
            self.restore(newest, tree, fresh=True)
        self.session.proceed()

    def restore(self, name: str, tree: Tree, *, fresh: bool) -> None:
        self.settled = None
        report = self.session.restore(name, fresh=fresh)
        found = read_tree(self.session.working_dir)
        if not report.exact or found != tree:
            raise Violation(f"attempt {self.number} restored {name} as {found} (exact={report.exact}), not as {tree}")
        self.tree = dict(tree)

    def take_over_a_foreign_checkpoint(self, expected: Tree | None = None) -> None:
        """PBT: the model of another trial, the own artifacts; at the start of an attempt, those of that moment."""
        self.settled = None
        donor = trial_dir.TrialDir(self.store_of("experiment/t_2"), "t_2")
        self.session.restore_foreign(donor, "checkpoint_000009", fresh=expected is not None)
        found = read_tree(self.session.working_dir)
        if found != (self.tree if expected is None else expected):
            raise Violation(f"attempt {self.number} goes on with {found}, not with {expected}")
        self.tree = dict(found)
        if self.world.driver.current == self.number:
            self.world.driver.exploit = dict(found)

    def store_of(self, root: str) -> ModelStore:
        return ModelStore(self.world.disk, root, arrive=self.arrive, saw=self.saw, ended=self.ended)

    # --- what scripts do ---------------------------------------------------------------------------

    def local(self, path: str) -> str:
        return os.path.join(self.session.working_dir, path)

    def write(self, path: str, data: bytes, mode: str = "wb") -> None:
        self.settled = None
        for known in [known for known in self.tree if known.startswith(f"{path}/") or path.startswith(f"{known}/")]:
            self.remove(known)
        if os.path.isdir(self.local(path)):
            shutil.rmtree(self.local(path))
        os.makedirs(os.path.dirname(self.local(path)), exist_ok=True)
        with open(self.local(path), mode) as file:
            file.write(data)
        # The time goes into manifests, and these are part of the state.
        os.utime(self.local(path), ns=(FIXED_NS, FIXED_NS))
        self.tree[path] = (self.tree.get(path) or b"") + data if mode == "ab" else data

    def append(self, path: str, data: bytes) -> None:
        self.write(path, data, "ab")

    def remove(self, path: str) -> None:
        self.settled = None
        os.unlink(self.local(path))
        del self.tree[path]

    def settle(self, tree: Tree) -> None:
        """Says that storage is up to date. Where this attempt has not written at all, the head is not its own yet."""
        self.settled = None if self.session._takes_over else tree

    def sync(self) -> None:
        self.settled = None
        tree = dict(self.tree)
        self.session.sync()
        self.settle(tree)

    def save(self, model: bytes = b"", *, keep: int = 2) -> None:
        """A checkpoint, registered if this attempt still counts; then Ray deletes the oldest."""
        self.settled = None
        driver, tree = self.world.driver, dict(self.tree)
        self.index += 1
        name = f"checkpoint_{self.index:06d}"
        model = model or f"model of {name} by {self.number}".encode()
        source = os.path.join(self.world.base, f"checkpoint-{self.number}")
        shutil.rmtree(source, ignore_errors=True)
        os.makedirs(source)
        with open(os.path.join(source, "model"), "wb") as file:
            file.write(model)
        upload = lambda engine: upload_checkpoint(PosixStore(source), engine, name, Deadline()) and None  # noqa: E731
        if not self.session.commit_checkpoint(name, upload):
            raise Violation(f"{name} has no snapshot")
        if driver.current != self.number:
            return
        driver.retained[name] = tree, model
        driver.newest = self.index
        driver.exploit = None
        self.settle(tree)
        self.world.check()
        while len(driver.retained) > keep:
            oldest = min(driver.retained)
            del driver.retained[oldest]
            for path in sorted(self.world.disk.files):
                if path.startswith(f"{ROOT}/{oldest}/"):
                    self.arrive("driver deletes", path)
                    self.world.disk.unlink(path)

    def close(self) -> None:
        tree, self.settled = dict(self.tree), None
        self.session.close()  # ends quietly if it was replaced
        if self.world.driver.current == self.number:
            self.settle(tree)


class Clock:
    """The clock of the lease. It stands still while programs work, and sleeping moves it.

    Args:
        threads: Which attempt a thread belongs to.
        step: Seconds that pass with each look at it; with more than the lease, no proof is ever trusted.
    """

    def __init__(self, threads: dict[int, Attempt], step: float = 0.0) -> None:
        self.threads, self.step, self.now = threads, step, 1000.0

    def monotonic(self) -> float:
        self.now += self.step
        return self.now

    def sleep(self, seconds: float) -> None:
        if seconds > 0:
            attempt = self.threads.get(threading.get_ident())
            until = self.now + seconds + 0.001  # a proof is a little older than the claim that it did not see
            if attempt is not None:
                attempt.arrive("sleep", "")
            self.now = max(self.now, until)


class InlineThread:
    """The probe of a first claim is made at once: attempts make one request at a time."""

    def __init__(self, target, args=(), **_options) -> None:
        self._target, self._args = target, args

    def start(self) -> None:
        self._target(*self._args)

    def join(self) -> None:
        pass


class _Threading:
    Thread = InlineThread
    Lock = staticmethod(threading.Lock)


class World:
    """Storage, the driver, and some attempts.

    Args:
        disk: Storage.
        scripts: What each attempt does; the last one what `process` does, if there is one.
        driver: What Ray's driver knows at the start.
        first: Number of the first attempt.
        clock_step: See `Clock`.
        prompt: Claims are written before the next attempt looks for one, and requests take less time than sleep.
        lost_answers: How many requests may take effect although they seem to fail.
        extra: Called with this world by each check.
        taken: Artifacts that may be left out, because somebody else writes there. What is listed of them is readable.
        process: Makes the last participant, which is no attempt.
        **options: Of the sessions.
    """

    def __init__(
        self,
        disk: ModelDisk,
        scripts: list[Script],
        *,
        driver: Driver | None = None,
        first: int = 1,
        clock_step: float = 0.0,
        prompt: bool = False,
        lost_answers: int = 0,
        extra: Callable[[World], None] | None = None,
        taken: frozenset[str] = frozenset(),
        process: Callable[..., Attempt] | None = None,
        **options,
    ) -> None:
        self.base = tempfile.mkdtemp(prefix="model-", dir=SCRATCH)
        self.disk = disk
        self.prompt = prompt
        self.lost_answers = lost_answers
        self.extra = extra
        self.driver = driver or Driver()
        self.threads: dict[int, Attempt] = {}
        self.clock = Clock(self.threads, clock_step)
        self.taken = taken
        self.attempts = [Attempt(self, first + number, script, **options) for number, script in enumerate(scripts)]
        if process is not None:
            self.attempts[-1] = process(self, first + len(scripts) - 1, scripts[-1])
        self.trace: list[tuple[int, str, str]] = []
        self._checked = -1
        for attempt in self.attempts:
            attempt.start()

    def working_dir(self, number: int) -> str:
        path = os.path.join(self.base, f"node-{number}")
        os.makedirs(path, exist_ok=True)
        return path

    def choices(self) -> list[int]:
        """What can come next: a request of one of the attempts, or (`LOST` added) one whose answer gets lost."""
        ready = self.enabled()
        lost = [index for index in ready if self.attempts[index].is_writing()] if self.lost_answers else []
        return [*ready, *(index + LOST for index in lost)]

    def pending(self, choice: int) -> tuple[str, str]:
        """The request that a choice stands for."""
        return self.attempts[choice % LOST].pending

    def enabled(self) -> list[int]:
        """Attempts that can make their next request. The next attempt starts when the one before has started."""
        waiting = [index for index, attempt in enumerate(self.attempts) if not attempt.finished]
        unstarted = [index for index in waiting if self.attempts[index].pending == ("start", "")]
        ready = [index for index in waiting if index not in unstarted[1:]]
        if self.prompt:
            # A claim is written before the next attempt looks for one.
            ready = [index for index in ready if not index or self.attempts[index - 1].opened]
            # A request takes less time than anyone sleeps: what is under way lands first.
            writing = any(self.attempts[index].is_writing() for index in ready)
            asleep = [index for index in ready if self.attempts[index].pending == ("sleep", "")]
            if writing:
                ready = [index for index in ready if index not in asleep]
        return ready

    def independent(self, one: int, other: int, pending: Mapping[int, tuple[str, str]]) -> bool:
        """Whether two choices lead to the same state in both orders."""
        if one % LOST == other % LOST or min(one, other) >= LOST:
            return False
        return not depends(pending[one], pending[other])

    def step(self, choice: int) -> None:
        attempt, lost = self.attempts[choice % LOST], choice >= LOST
        self.trace.append((attempt.number, attempt.pending[0], attempt.pending[1] + " (answer lost)" * lost))
        self.lost_answers -= lost
        attempt.step(answer_lost=lost)
        if attempt.error is not None:
            raise self.explain(attempt.error)
        if self.disk.changes != self._checked:
            self._checked = self.disk.changes
            try:
                self.check()
            except AssertionError as error:
                raise self.explain(error) from None

    def key(self) -> tuple:
        return (
            self.disk.key(),
            self.driver.key(),
            self.lost_answers,
            tuple(attempt.key() for attempt in self.attempts),
            self.clock.now if not self.clock.step else 0,
        )

    def explain(self, error: BaseException) -> BaseException:
        """The error, with the way that led to it."""
        lines = [f"  attempt {number}: {verb} {path}" for number, verb, path in self.trace]
        error.__notes__ = ["After these requests:", *lines]  # type: ignore[attr-defined]
        return Violation(f"{error}\n" + "\n".join(error.__notes__)) if isinstance(error, AssertionError) else error

    def check(self) -> None:
        """What must hold at every instant, whoever looks."""
        disk = self.disk
        for path, data in FOREIGN.items():
            if path not in disk.files or disk.files[path].data != data:
                raise Violation(f"{path}, which is somebody else's, was changed")
        place = self.place()
        snapshots = independent_reader.snapshots(place)
        for name, (tree, model) in self.driver.retained.items():
            if name not in snapshots:
                raise Violation(f"{name} has no snapshot")
            found = independent_reader.tree_of(place, snapshots[name])
            if not self.is_tree(found, tree):
                raise Violation(f"{name} lists {found}, not {tree}")
            if place.read(f"{name}/model") != model:
                raise Violation(f"the model in {name} is {place.read(f'{name}/model')!r}, not {model!r}")
        head = independent_reader.head_tree(place)
        current = next((one for one in self.attempts if one.number == self.driver.current), None)
        if current is not None and current.settled is not None and not self.is_tree(head, current.settled):
            raise Violation(f"the head is {head}, not {current.settled}, which attempt {current.number} has synced")
        if self.extra is not None:
            self.extra(self)

    def is_tree(self, found: Tree, wanted: Tree) -> bool:
        """Whether something is as it must be; what is taken may be left out."""
        return found == {path: data for path, data in wanted.items() if path in found or path not in self.taken}

    def place(self) -> independent_reader.Place:
        files = self.disk.files

        def read(path: str) -> bytes:
            try:
                return files[f"{ROOT}/{path}"].data
            except KeyError:
                raise FileNotFoundError(path) from None

        return independent_reader.Place(
            lambda: [path[len(ROOT) + 1 :] for path in files if path.startswith(f"{ROOT}/")], read
        )

    def close(self) -> None:
        for attempt in self.attempts:
            attempt.kill()
        shutil.rmtree(self.base, ignore_errors=True)

    def __enter__(self) -> World:
        self._patches = contextlib.ExitStack()
        _patch(self._patches, trial_dir, "time", self.clock)
        _patch(self._patches, trial_dir, "threading", _Threading)
        _patch(self._patches, Deadline, "sleep", lambda _self, _seconds: None)  # between two tries
        return self

    def __exit__(self, *exc) -> None:
        self.close()
        self._patches.close()


def _patch(stack: contextlib.ExitStack, place, name: str, value) -> None:
    old = getattr(place, name)
    setattr(place, name, value)
    stack.callback(setattr, place, name, old)


@contextlib.contextmanager
def small_limits() -> Iterator[None]:
    """What is for large trials happens with a few bytes: layers, copies on the server, spare copies that go at once."""
    from ray_artifact_sync import attempt_sync, manifest, plan

    with contextlib.ExitStack() as stack:
        _patch(stack, manifest, "INLINE_ENTRIES", 1)
        _patch(stack, manifest, "MERGE_RATIO", 1)
        _patch(stack, plan, "MIN_COPY_SIZE", 4)
        _patch(stack, attempt_sync, "SPARE_FILES", 2)
        yield


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without the log, which costs more than the work here."""
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def new_disk(atomicity: Atomicity) -> ModelDisk:
    disk = ModelDisk(atomicity)
    for path, data in FOREIGN.items():
        disk.write(path, data)
    return disk


# --- exploring --------------------------------------------------------------------------------------


@dataclass
class Explored:
    """What an exploration saw."""

    states: int = 0
    runs: int = 0
    requests: int = 0
    outcomes: dict[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.states} states, {self.runs} runs, {self.requests} requests, ends: {self.outcomes}"


def depends(one: tuple[str, str], other: tuple[str, str]) -> bool:
    """Whether it may matter which of two requests of different attempts comes first."""
    if one[0] in ALONE or other[0] in ALONE:
        return True
    if one[0] not in WRITING:
        one, other = other, one
    if one[0] not in WRITING:
        return False  # two readers
    (verb, path), (other_verb, other_path) = one, other
    if layout.MANIFEST in (path, other_path):
        return True  # what is newer than it, and what is older?
    if "take_away" in (verb, other_verb) or "copy" in (verb, other_verb):
        return True
    if other_verb.startswith("list"):
        return not other_path or path.startswith(f"{other_path}/")
    return path == other_path


def every_order(make: Callable[[], World], *, limit: int | None = None) -> Explored:
    """Explores every order of the requests of some attempts, but for those that differ in nothing that matters.

    A depth-first search with sleep sets and a memory of states (Godefroid, "Partial-Order Methods for the Verification
    of Concurrent Systems", 1996): after "A, then B" was explored, "B, then A" is left out where the two do not depend
    on each other.

    Args:
        make: Makes the world anew; must do the same each time.
        limit: The most runs, chosen by a die that always falls alike; None for all.

    Raises:
        Violation: A promise was broken; the message has the way that led there.
    """
    explored = Explored()
    slept_at: dict[tuple, frozenset[int]] = {}  # state to the attempts that were left out there
    todo: list[tuple[tuple[int, ...], frozenset[int]]] = [((), frozenset())]
    with quiet(), small_limits():
        dice = random.Random(0)
        while todo and (limit is None or explored.runs < limit):
            if limit is not None:  # not only what differs at the end
                last = dice.randrange(len(todo))
                todo[last], todo[-1] = todo[-1], todo[last]
            way, asleep = todo.pop()
            explored.runs += 1
            with make() as world:
                for choice in way:
                    world.step(choice)
                while ready := world.choices():
                    key = world.key()
                    wanted = [index for index in ready if index not in asleep]
                    if key in slept_at:
                        wanted = [index for index in slept_at[key] - asleep if index in ready]
                        asleep &= slept_at[key]
                    slept_at[key] = asleep
                    if not wanted:
                        break
                    pending = {choice: world.pending(choice) for choice in ready}
                    done = asleep & pending.keys()
                    ways = []
                    for index in sorted(wanted):
                        ways.append(
                            ((*way, index), frozenset(one for one in done if world.independent(one, index, pending)))
                        )
                        done |= {index}
                    todo.extend(reversed(ways[1:]))
                    way, asleep = ways[0]
                    world.step(way[-1])
                else:
                    ends = ", ".join(attempt.outcome for attempt in world.attempts)
                    explored.outcomes[ends] = explored.outcomes.get(ends, 0) + 1
                explored.requests += len(world.trace)
    explored.states = len(slept_at)
    return explored


def every_crash(
    atomicity: Atomicity, script: Script, *, attempts: int, limit: int | None = None, **options
) -> Explored:
    """Explores every crash of one attempt after the other, each going on from what the one before left.

    A crash comes before or after each request that changes storage; states of storage that nobody can tell apart are
    gone on from once.
    """
    explored = Explored()
    seen: set[tuple] = set()
    start = (new_disk(atomicity), Driver(), 1)
    todo: deque[tuple[ModelDisk, Driver, int]] = deque([start])
    with quiet(), small_limits():
        dice = random.Random(0)
        while todo and (limit is None or explored.runs < limit):
            if limit is not None:
                todo.rotate(dice.randrange(len(todo)))
            disk, driver, number = todo.popleft()
            explored.runs += 1
            with World(disk.copy(), [script], driver=driver.copy(), first=number, **options) as world:
                while world.enabled():
                    changes = world.disk.changes
                    world.step(0)
                    if number < attempts and world.disk.changes != changes:
                        key = number, world.disk.content_key(), world.driver.key()
                        if key not in seen:
                            seen.add(key)
                            todo.append((world.disk.copy(), world.driver.copy(), number + 1))
                outcome = world.attempts[0].outcome
                explored.outcomes[outcome] = explored.outcomes.get(outcome, 0) + 1
                explored.requests += len(world.trace)
    explored.states = len(seen)
    return explored
