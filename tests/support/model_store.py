"""A store in memory whose atomicity can be chosen, one request at a time; what lies in it is a value to compare.

Every step that another process could see, or be seen in the middle of, calls `arrive` first: a scheduler may hold it
there. What comes after `arrive` is atomic.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Literal

from ray_artifact_sync import layout
from ray_artifact_sync.errors import ArtifactConflictError, ArtifactNotFoundError, PreconditionFailedError
from ray_artifact_sync.stores.base import ArtifactStore, StoredFile
from ray_artifact_sync.stores.common import check_path, check_prefix

Atomicity = Literal["conditional", "conditional by content", "plain", "fence"]
"""What a store gives beside atomic writes of one file.

- `conditional`: `if_match` and `if_absent` are enforced, and each write has a tag of its own, as on GCS and Azure.
- `conditional by content`: the same, but the tag says what the content is, as on S3: written again, it is the old tag.
- `plain`: they are ignored without a word, as by some S3 servers.
- `fence`: a local disk or share: a write is a temporary file and a rename that fails once a newer attempt has begun;
  appends go to the open file, half by half; deletions look at the fence once and then go on.
"""


def short(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()


class Inode:
    """The content of one version of a file; an append changes it in place."""

    def __init__(self, data: bytes, etag: str, time: int) -> None:
        self.data, self.etag, self.time = data, etag, time


class ModelDisk:
    """What the servers hold."""

    def __init__(self, atomicity: Atomicity) -> None:
        self.atomicity = atomicity
        self.files: dict[str, Inode] = {}
        self.tmp: set[str] = set()
        self.versions: dict[str, int] = {}
        self.now = 0
        self.changes = 0

    def copy(self) -> ModelDisk:
        """The same content, to go on from."""
        disk = ModelDisk(self.atomicity)
        disk.files = {path: Inode(node.data, node.etag, node.time) for path, node in self.files.items()}
        disk.tmp, disk.versions, disk.now = set(self.tmp), dict(self.versions), self.now
        return disk

    def etag(self, path: str, data: bytes) -> str:
        if self.atomicity == "conditional by content":
            return short(data)
        # Counted for each path: two orders of writes to different paths lead to the same state.
        self.versions[path] = self.versions.get(path, 0) + 1
        return f"{path}-{self.versions[path]}"

    def tick(self) -> int:
        self.now += 1
        self.changes += 1
        return self.now

    def write(self, path: str, data: bytes) -> Inode:
        time = self.tick()
        node = self.files[path] = Inode(data, self.etag(path, data), time)
        return node

    def grow(self, path: str, node: Inode, data: bytes) -> None:
        node.time = self.tick()
        node.data += data
        node.etag = self.etag(path, node.data)

    def unlink(self, path: str) -> None:
        if self.files.pop(path, None) is not None:
            self.changes += 1

    def is_newer_than_head(self, path: str) -> bool:
        """All that readers make of times."""
        head = next((self.files[name] for name in self.files if name.endswith(layout.MANIFEST)), None)
        return head is not None and self.files[path].time > head.time

    def key(self) -> tuple:
        """Equal for states that nobody could tell apart."""
        files = tuple(
            (path, short(node.data), node.etag, self.is_newer_than_head(path))
            for path, node in sorted(self.files.items())
        )
        return files, tuple(sorted(self.tmp))

    def content_key(self) -> tuple:
        """Like `key`, for a state that nobody is in the middle of: what was written how often is forgotten."""
        files = tuple(
            (path, short(node.data), self.is_newer_than_head(path)) for path, node in sorted(self.files.items())
        )
        return files, tuple(sorted(self.tmp))


Arrive = Callable[..., None]


class ModelStore(ArtifactStore):
    """One process' client of a `ModelDisk`.

    Args:
        disk: Where everything is.
        root: Prefix.
        arrive: Called with verb and path before each step.
        saw: Called with what a step answered: all that a process can know of the others.
        ended: Called after a step that changed something; may raise, as if the answer had been lost.
    """

    def __init__(
        self,
        disk: ModelDisk,
        root: str = "",
        *,
        arrive: Arrive = lambda _verb, _path: None,
        saw: Callable[[object], None] = lambda _answer: None,
        ended: Callable[[], None] = lambda: None,
    ) -> None:
        self.disk, self.root = disk, root
        self.arrive, self.saw, self.ended = arrive, saw, ended
        self.description = f"model {root or '/'}"
        self.can_append = self.can_fence = disk.atomicity == "fence"
        self.can_precondition = False if disk.atomicity == "fence" else None
        self.token: str | None = None
        self.open_file: tuple[str, Inode] | None = None

    def full(self, path: str) -> str:
        path = check_path(path)
        return f"{self.root}/{path}" if self.root else path

    def shown(self, full: str) -> StoredFile:
        node = self.disk.files[full]
        path = full[len(self.root) + 1 :] if self.root else full
        return StoredFile(path, len(node.data), node.etag, node.time)

    def answer(self, full: str) -> StoredFile:
        file = self.shown(full)
        self.saw((file.path, file.size, file.etag, self.disk.is_newer_than_head(full)))
        return file

    # --- reading -----------------------------------------------------------------------------------

    def stat(self, path):
        self.arrive("stat", path)
        full = self.full(path)
        if full in self.disk.files:
            return self.answer(full)
        self.saw(None)
        return None

    def below_prefix(self, prefix: str) -> list[str]:
        prefix = check_prefix(prefix)
        folder = "/".join(part for part in (self.root, prefix) if part)
        return sorted(path for path in self.disk.files if not folder or path.startswith(f"{folder}/"))

    def list(self, prefix=""):
        self.arrive("list", prefix)
        return iter([self.answer(path) for path in self.below_prefix(prefix)])

    def list_dirs(self, prefix=""):
        self.arrive("list_dirs", prefix)
        skip = len(f"{self.full(prefix)}/") if prefix else len(f"{self.root}/") if self.root else 0
        rests = [path[skip:] for path in self.below_prefix(prefix)]
        names = sorted({rest.partition("/")[0] for rest in rests if "/" in rest})
        self.saw(tuple(names))
        return names

    def list_files(self, prefix=""):
        self.arrive("list_files", prefix)
        skip = len(f"{self.full(prefix)}/") if prefix else len(f"{self.root}/") if self.root else 0
        return [self.answer(path) for path in self.below_prefix(prefix) if "/" not in path[skip:]]

    def read_chunks(self, path, *, start=0, length=None, chunk_size=1 << 20):
        self.arrive("read", path)
        node = self.disk.files.get(self.full(path))
        self.saw(node and short(node.data))
        if node is None:
            raise ArtifactNotFoundError(f"There is no {path!r} in {self.description}.", path=path)
        data = node.data[start : None if length is None else start + length]
        return iter([data[at : at + chunk_size] for at in range(0, len(data), chunk_size)])

    # --- writing -----------------------------------------------------------------------------------

    def put(self, path, data, *, if_match=None, if_absent=False, size_hint=None):
        full = self.full(path)
        whole = bytes(data) if isinstance(data, bytes | bytearray | memoryview) else b"".join(map(bytes, data))
        self.arrive("put", path)
        self.check_fence()
        present = self.disk.files.get(full)
        enforced = self.disk.atomicity != "plain"
        wrong = (if_absent and present is not None) or (
            if_match is not None and (present is None or present.etag != if_match)
        )
        if enforced and wrong:
            self.saw("refused")
            raise PreconditionFailedError(f"{path!r} is not the version that was expected.", path=path)
        self.disk.write(full, whole)
        self.ended()
        return self.answer(full)

    def append(self, path, offset, data, *, if_match=None, digest=None):
        whole = b"".join(bytes(chunk) for chunk in data)
        self.arrive("open", path)
        self.check_fence()
        full = self.full(path)
        node = self.disk.files.get(full)
        self.saw(None if node is None else len(node.data))
        if node is None or len(node.data) != offset:
            raise PreconditionFailedError(f"{path!r} is not {offset} bytes long.", path=path)
        self.open_file = full, node
        for part in (whole[: len(whole) // 2], whole[len(whole) // 2 :]):
            if part:
                self.arrive("append", path)
                self.disk.grow(full, node, part)
                self.ended()
        self.open_file = None
        self.saw(node.etag)
        return StoredFile(path, len(node.data), node.etag, node.time)

    def copy(self, source, target):
        self.arrive("copy", target)
        node = self.disk.files.get(self.full(source))
        self.saw(node is not None)
        if node is None:
            raise ArtifactNotFoundError(f"There is no {source!r} in {self.description}.", path=source)
        data = node.data
        if self.disk.atomicity == "fence":
            self.arrive("rename", target)
            self.check_fence()
        self.disk.write(self.full(target), data)
        self.ended()

    def delete(self, paths):
        paths = list(paths)
        if self.disk.atomicity == "fence":
            self.arrive("look", layout.TMP)
            self.check_fence()
        for path in paths:
            self.arrive("delete", path)
            self.disk.unlink(self.full(path))
            self.ended()

    def make_dir(self, path):
        """Directories are not modelled."""

    def begin_writing(self, token):
        if self.disk.atomicity != "fence":
            return
        self.arrive("mkdir", layout.TMP)
        self.disk.tmp.add(token)
        self.disk.changes += 1
        self.arrive("listdir", layout.TMP)
        names = sorted(self.disk.tmp)
        self.saw(tuple(names))
        if newer := [name for name in names if name > token]:
            self.disk.tmp.discard(token)
            raise ArtifactConflictError(f"A newer attempt ({max(newer)}) took over {self.description}.")
        if token not in names:
            raise AssertionError("an own directory that vanished although nobody newer is there")
        for name in names:
            if name < token:
                self.arrive("take_away", name)
                self.disk.tmp.discard(name)
                self.disk.changes += 1
        self.token = token

    def check_fence(self) -> None:
        if self.disk.atomicity == "fence" and self.token is not None:
            alive = self.token in self.disk.tmp
            self.saw(alive)
            if not alive:
                raise ArtifactConflictError(f"A newer attempt took over {self.description}.")

    def below(self, path):
        return ModelStore(self.disk, self.full(path), arrive=self.arrive, saw=self.saw, ended=self.ended)
