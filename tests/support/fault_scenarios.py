"""What this library does with object storage, as scenarios that a fault can be put into at every kind of request.

A scenario does one operation again and again, each time with new data. It knows what must be in storage once the
operation has said that it succeeded, and what must hold whatever happened. It looks at storage past the faults, and
past the library where trials are concerned (`independent_reader`).
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

import pytest

from ray_artifact_sync import RemoteUploader, ShardedUpload, manifest, trial_dir
from ray_artifact_sync.checkpoint_upload import upload_checkpoint
from ray_artifact_sync.concurrency import Deadline
from ray_artifact_sync.directory_sync import DirectorySync, sync_directory_down
from ray_artifact_sync.errors import ArtifactSyncError
from ray_artifact_sync.options import SyncOptions
from ray_artifact_sync.plan import MIN_COPY_SIZE
from ray_artifact_sync.stores import cloud, open_store, resolve
from ray_artifact_sync.stores.clients import ClientLimits
from ray_artifact_sync.stores.posix import PosixStore
from ray_artifact_sync.stores.s3_append import S3Appender
from tests.support import independent_reader
from tests.support.fault_proxy import FaultProxy
from tests.support.s3_servers import BUCKET, filesystem_at
from tests.support.sessions import abandon, open_session, read_tree

MIB = 1024 * 1024
SMALL = 5 * MIB
"""To what files are one request, and the size of a part: the smallest that S3 allows. See `quick`."""
LARGE = SMALL + 1000
WINDOW = MIB
"""Bytes of one request of a download."""
WINDOWS = 2 * WINDOW + 1000
COPIED = 2 * MIN_COPY_SIZE
INLINE_ENTRIES = 8
"""Entries of a document without layers."""
LIMITS = ClientLimits(connect_timeout=3.0, request_timeout=3.0, retries=1, retry_timeout=6.0)
TIMEOUT = 10.0
"""The deadline of each operation that has one."""
GRACE = 6.0
"""How much later a call may return: a request that was begun in time, and a busy machine."""
RETRIES = 2
ATTEMPTS = 3


def write(root: Path, path: str, data: bytes) -> None:
    target = root / path
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(data)


def noise(size: int, *seed: object) -> bytes:
    return random.Random(repr(seed)).randbytes(size)


class Scenario:
    """One operation against one place.

    Attributes:
        kinds: The kinds of request that faults are put into.
        also: The others that it sends, for which another scenario stands: the commit, above all.
        faults: Which faults; None for all.
        server: The server that it needs.
        seconds: How long a call may take.
        wrong_bytes_in: Where bytes are changed on the way; None for everywhere.
        count: Calls so far.
    """

    kinds: ClassVar[tuple[str, ...]] = ()
    also: ClassVar[tuple[str, ...]] = ()
    faults: ClassVar[tuple[str, ...] | None] = None
    server = "juicefs"
    seconds = TIMEOUT + GRACE
    wrong_bytes_in: str | None = None

    def __init__(self, proxy: FaultProxy, endpoint: str, path: str, scratch: Path) -> None:
        self.proxy = proxy
        self.path = f"{BUCKET}/{path}"
        self.scratch = scratch
        self.direct = open_store(filesystem_at(endpoint), self.path)
        self.place = independent_reader.store_place(self.direct)
        self.count = 0
        self.prepare()

    def new_store(self):
        return open_store(filesystem_at(self.proxy.endpoint), self.path, limits=LIMITS)

    def new_dir(self, name: str) -> Path:
        directory = self.scratch / name
        directory.mkdir(parents=True)
        return directory

    def prepare(self) -> None:
        """Before any fault."""

    def arm(self) -> None:
        """Further faults that lead to the kind of request in question."""

    def run(self) -> bool:
        """Does it once; whether it says that all is well."""
        self.count += 1
        return self.act()

    def act(self) -> bool:
        raise NotImplementedError

    def check_success(self) -> None:
        """What must be so after `run` has said that all is well."""
        raise NotImplementedError

    def check_sound(self) -> None:
        """What must be so at any other time: nothing that storage lists is missing."""
        independent_reader.head_tree(self.place)
        for snapshot in independent_reader.snapshots(self.place).values():
            independent_reader.tree_of(self.place, snapshot)

    def recover(self) -> None:
        """Goes on until it works, after the faults are gone."""
        until_it_works(self.run, seconds=20)
        self.check_success()

    def close(self) -> None:
        """Ends what runs."""


def until_it_works(call: Callable[[], bool], seconds: float) -> None:
    ends = time.monotonic() + seconds
    while True:
        try:
            if call():
                return
        except ArtifactSyncError:
            if time.monotonic() > ends:
                raise
        assert time.monotonic() < ends, "it does not recover"
        time.sleep(0.05)


@contextmanager
def quick() -> Iterator[None]:
    """Short waits and small parts, for all that is opened meanwhile; the claim is looked at before each write."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trial_dir, "LEASE_SECONDS", -1.0)
        patch.setattr(resolve, "ClientLimits", lambda: LIMITS)
        patch.setattr(cloud, "SMALL", SMALL)
        patch.setattr(cloud, "_WINDOW", WINDOW)
        patch.setattr(manifest, "INLINE_ENTRIES", INLINE_ENTRIES)
        yield


# --- a trial -------------------------------------------------------------------------------------


class InSession(Scenario):
    """An operation of one session."""

    def prepare(self) -> None:
        self.work = self.new_dir("work")
        self.session = self.new_session(self.work, 1)
        self.fill()
        self.session.sync()

    def new_session(self, directory: Path, token: int, **options):
        store = self.new_store()
        store.min_append_size = 5 * MIB
        options = {"retries": RETRIES, "sync_timeout": TIMEOUT, "set_aside": False, **options}
        return open_session(directory, store, token, **options)

    def fill(self) -> None:
        write(self.work, "kept.txt", b"kept")
        self.change()  # so that there is an old version of everything

    def act(self) -> bool:
        self.change()
        self.session.sync()
        return True

    def change(self) -> None:
        raise NotImplementedError

    def check_success(self) -> None:
        assert independent_reader.head_tree(self.place) == read_tree(self.work)

    def close(self) -> None:
        abandon(self.session)


class SyncSmall(InSession):
    kinds = ("put_object", "copy_object", "get_object")

    def change(self) -> None:
        write(self.work, "rewritten.txt", noise(1000 + self.count, self.count))
        write(self.work, f"new/{self.count % 5}.txt", b"%d" % self.count)


class SyncSmallConditional(SyncSmall):
    """On a server that enforces preconditions."""

    server = "moto"
    kinds = ("put_object",)
    also = ("copy_object", "get_object")
    faults = ("503", "reset", "lost answer", "hang")


class SyncLarge(InSession):
    kinds = ("create_multipart", "upload_part", "complete_multipart")
    also = ("put_object", "get_object", "copy_object")

    def change(self) -> None:
        write(self.work, "large.bin", noise(LARGE, self.count))


class SyncLargeRefused(SyncLarge):
    kinds = ("abort_multipart",)
    also = ("create_multipart", "upload_part", "get_object", "copy_object")

    def arm(self) -> None:
        self.proxy.fail("upload_part", status=403)


class SyncAppend(InSession):
    kinds = ("head_object", "create_multipart", "upload_part_copy", "upload_part", "complete_multipart")
    also = ("put_object", "get_object")

    def fill(self) -> None:
        write(self.work, "log.bin", noise(LARGE))
        self.session.sync()
        self.change()  # the first append of a client is its proof

    def change(self) -> None:
        with (self.work / "log.bin").open("ab") as file:
            file.write(noise(1000, self.count))


class SyncAppendRefused(SyncAppend):
    kinds = ("abort_multipart",)
    also = ("head_object", "create_multipart", "upload_part_copy", "upload_part", "get_object")

    def arm(self) -> None:
        self.proxy.fail("upload_part", status=403)


class SyncFirstAppend(SyncAppend):
    """By a client that has proven nothing yet: it appends to a piece of the object first, and reads it back."""

    kinds = ("upload_part_copy", "complete_multipart", "get_object", "delete_many")
    also = ("head_object", "create_multipart", "upload_part", "put_object")
    faults = ("403", "503", "lost answer", "hang", "truncated", "wrong bytes")

    def fill(self) -> None:
        write(self.work, "log.bin", noise(LARGE))

    def change(self) -> None:
        before = self.session.store._appender
        self.session.store._appender = S3Appender(before._spec, LIMITS)
        self.session.store._appender._made = before._made  # botocore takes its time to make a client
        super().change()


class SyncCopy(InSession):
    kinds = ("copy_object",)
    also = ("put_object", "get_object")

    def fill(self) -> None:
        write(self.work, "source.bin", noise(COPIED))

    def change(self) -> None:
        write(self.work, f"copy-{self.count}.bin", noise(COPIED))


class Checkpoint(InSession):
    """With what Ray deletes meanwhile: the older checkpoints, and so the versions that only they needed."""

    # After a deletion, JuiceFS' gateway is asked whether it took place.
    kinds = ("put_object", "get_object", "list", "delete_many", "head_object")
    also = ("copy_object",)
    seconds = 3 * (TIMEOUT + 1) + GRACE  # three steps, each of which has the deadline

    def fill(self) -> None:
        write(self.work, "log.txt", b"0\n")
        self.saved: list[str] = []

    def prepare(self) -> None:
        super().prepare()
        for _ in range(3):  # until every kind of request is sent
            self.run()

    def act(self) -> bool:
        write(self.work, "rewritten.bin", noise(10_000, self.count))
        with (self.work / "log.txt").open("ab") as file:
            file.write(b"%d\n" % self.count)
        while len(self.saved) > 1:
            gone = self.saved.pop(0)
            self.direct.delete([file.path for file in self.direct.list(gone)])
        name = f"checkpoint_{self.count:06d}"
        source = self.new_dir(f"source-{self.count}")
        write(source, "model.bin", noise(5000, self.count))
        write(source, "sub/more.bin", noise(50, self.count))

        def upload(engine) -> None:
            upload_checkpoint(PosixStore(source), engine, name, Deadline(TIMEOUT))

        self.saved.append(name)
        return self.session.commit_checkpoint(name, upload)

    def check_success(self) -> None:
        name = self.saved[-1]
        snapshot = independent_reader.snapshots(self.place)[name]
        assert independent_reader.tree_of(self.place, snapshot) == read_tree(self.work)
        assert self.place.read(f"{name}/model.bin") == noise(5000, self.count)
        assert self.place.read(f"{name}/sub/more.bin") == noise(50, self.count)
        self.check_sound()  # the other checkpoints


class CheckpointConditional(Checkpoint):
    server = "moto"
    kinds = ("put_object",)
    also = ("copy_object", "get_object", "list", "delete_many")
    faults = ("503", "lost answer", "hang")


class Open(InSession):
    """A new attempt in the same directory: claims, lists, and goes on."""

    kinds = ("get_object", "put_object", "list")
    also = ("copy_object", "head_object")

    def fill(self) -> None:
        for number in range(INLINE_ENTRIES + 1):  # more than a head holds itself: there is a layer
            write(self.work, f"many/{number}", b"")
        write(self.work, "new.txt", b"old")
        assert self.session.commit_checkpoint("checkpoint_000000", lambda engine: None)
        self.token = 1

    def act(self) -> bool:
        abandon(self.session)
        self.token += 1
        self.session = self.new_session(self.work, self.token)
        write(self.work, "new.txt", b"%d" % self.count)
        self.session.sync()
        return True


class OpenConditional(Open):
    server = "moto"
    kinds = ("put_object", "head_object")
    also = ("get_object", "list", "copy_object")
    faults = ("503", "lost answer", "hang")


class Restore(InSession):
    """On another node: small files, versions kept aside, and a large file in several windows."""

    kinds = ("get_object", "list", "put_object")
    wrong_bytes_in = "large.bin"  # without documents to be trusted, whatever is there is taken, and called inexact

    def fill(self) -> None:
        write(self.work, "log.txt", b"1\n2\n")
        write(self.work, "sub/rewritten.bin", noise(3000))
        write(self.work, "large.bin", noise(WINDOWS))
        assert self.session.commit_checkpoint("checkpoint_000000", lambda engine: None)
        self.tree = read_tree(self.work)
        write(self.work, "sub/rewritten.bin", noise(4000))
        self.session.sync()
        abandon(self.session)
        self.token = 1

    def prepare(self) -> None:
        self.work = self.new_dir("work")
        self.session = self.new_session(self.work, 1)
        self.fill()

    def act(self) -> bool:
        abandon(self.session)
        self.token += 1
        self.work = self.new_dir(f"node-{self.count}")
        self.session = self.new_session(self.work, self.token)
        return self.session.restore("checkpoint_000000", fresh=True).exact

    def check_success(self) -> None:
        assert read_tree(self.work) == self.tree
        self.check_sound()


# --- directories ---------------------------------------------------------------------------------


class DirectoryUp(Scenario):
    kinds = ("get_object", "list", "put_object")

    def prepare(self) -> None:
        self.work = self.new_dir("work")
        write(self.work, "kept.txt", b"kept")
        self.run()

    def act(self) -> bool:
        write(self.work, "rewritten.txt", noise(1000 + self.count, self.count))
        options = SyncOptions(retries=RETRIES)
        syncer = DirectorySync(str(self.work), self.new_store(), options=options, verify_remote=True)
        syncer.sync_up(Deadline(TIMEOUT))
        return True

    def check_success(self) -> None:
        entries = independent_reader.entries_of(self.place, ".ray_artifact_sync/manifest.json")
        assert entries.keys() == read_tree(self.work).keys()
        for path, data in read_tree(self.work).items():
            assert self.place.read(path) == data

    def check_sound(self) -> None:
        assert self.place.read("kept.txt") == b"kept"


class DirectoryDown(Scenario):
    kinds = ("get_object", "list")
    wrong_bytes_in = "large.bin"  # what a damaged manifest lists is downloaded unverified, with a warning

    def prepare(self) -> None:
        source = self.new_dir("source")
        write(source, "sub/small.txt", b"small")
        write(source, "large.bin", noise(WINDOWS))
        options = SyncOptions(retries=RETRIES)
        DirectorySync(str(source), self.new_store(), options=options, verify_remote=True).sync_up(Deadline())
        self.tree = read_tree(source)

    def act(self) -> bool:
        self.target = self.new_dir(f"target-{self.count}")
        options = SyncOptions(retries=RETRIES)
        sync_directory_down(self.new_store(), str(self.target), options=options, deadline=Deadline(TIMEOUT))
        return True

    def check_success(self) -> None:
        assert read_tree(self.target) == self.tree

    def check_sound(self) -> None:
        """Files are there whole, or not at all."""
        for path, data in read_tree(self.target).items():
            assert data is None or data == self.tree[path]


class ShardedUp(Scenario):
    kinds = ("get_object", "list", "put_object", "delete_many")
    also = ("copy_object", "head_object")
    seconds = 3 * TIMEOUT + GRACE  # agreeing on a token, the upload, and taking away old metadata

    def prepare(self) -> None:
        self.work = self.new_dir("work")
        write(self.work, "kept.bin", b"kept")
        self.run()

    def upload(self) -> ShardedUpload:
        return ShardedUpload(self.new_store(), retries=RETRIES, sync_timeout=TIMEOUT)

    def act(self) -> bool:
        write(self.work, "shard.bin", noise(1000 + self.count, self.count))
        self.upload().upload(self.work, metadata={"step": self.count})
        return True

    def check_success(self) -> None:
        assert independent_reader.head_tree(self.place) == read_tree(self.work)


class ShardedDown(ShardedUp):
    kinds = ("get_object", "list")
    also = ()
    seconds = 2 * TIMEOUT + GRACE

    def prepare(self) -> None:
        self.work = self.new_dir("work")
        write(self.work, "small.bin", b"small")
        write(self.work, "large.bin", noise(WINDOWS))
        self.upload().upload(self.work)

    def act(self) -> bool:
        with self.upload().restore_path(scratch_dir=str(self.scratch)) as path:
            self.found = read_tree(path)
        return True

    def check_success(self) -> None:
        assert self.found == read_tree(self.work)


# --- single files --------------------------------------------------------------------------------


class Uploader(Scenario):
    """A small and a large file, and a pointer to both."""

    kinds = ("head_object", "put_object", "create_multipart", "upload_part", "complete_multipart", "delete_many")
    # No deadline of its own: the check, the files and the pointer have their attempts, and each its requests.
    seconds = 3 * ATTEMPTS * 2 * LIMITS.request_timeout + GRACE

    def act(self) -> bool:
        self.files = {"small.txt": noise(100, self.count), "large.bin": noise(LARGE, self.count)}
        source = self.new_dir(f"source-{self.count}")
        with RemoteUploader(self.path, filesystem_at(self.proxy.endpoint), num_attempts=ATTEMPTS) as uploader:
            done = []
            for name, data in self.files.items():
                write(source, name, data)
                done.append(uploader.upload_file_async(f"{self.count}/{name}", source / name))
            uploader.publish_after(done, "latest", str(self.count))
        return True

    def check_success(self) -> None:
        assert self.place.read("latest") == str(self.count).encode()
        self.check_sound()

    def check_sound(self) -> None:
        """Where the pointer points, everything is."""
        if "latest" not in set(self.place.names()):
            return
        count = int(self.place.read("latest"))
        for name, size in (("small.txt", 100), ("large.bin", LARGE)):
            assert self.place.read(f"{count}/{name}") == noise(size, count)


SCENARIOS: dict[str, type[Scenario]] = {
    "open": Open,
    "open, conditional writes": OpenConditional,
    "small files": SyncSmall,
    "small files, conditional writes": SyncSmallConditional,
    "large file": SyncLarge,
    "large file, refused": SyncLargeRefused,
    "append": SyncAppend,
    "append, refused": SyncAppendRefused,
    "first append": SyncFirstAppend,
    "copy": SyncCopy,
    "checkpoint": Checkpoint,
    "checkpoint, conditional writes": CheckpointConditional,
    "restore": Restore,
    "uploader": Uploader,
    "directory up": DirectoryUp,
    "directory down": DirectoryDown,
    "sharded up": ShardedUp,
    "sharded down": ShardedDown,
}
