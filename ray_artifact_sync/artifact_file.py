"""One version of an artifact as a Python file, read from storage in blocks as they are asked for."""

from __future__ import annotations

import io

from blake3 import blake3

from ray_artifact_sync.entries import FileEntry
from ray_artifact_sync.errors import ArtifactNotFoundError
from ray_artifact_sync.trial_reader import TrialReader, request

SMALL_FILE = 8 * 1024 * 1024
"""Bytes up to which a file is read and verified as a whole before the first byte is given out."""
_FIRST_BLOCK = 256 * 1024
_LARGEST_BLOCK = 8 * 1024 * 1024


def open_artifact(reader: TrialReader, entry: FileEntry) -> io.BufferedReader | io.BytesIO:
    """Opens one version for reading, in binary.

    Up to 8 MiB it is verified before anything is given out. Beyond, the digest is verified when the file is read from
    its beginning to its end: the last block is refused if it is wrong. What is read after seeking about is not.

    Raises:
        IntegrityError: No place holds a small file any more.
        ArtifactNotFoundError: A large one is gone.
    """
    if entry.size <= SMALL_FILE:
        return io.BytesIO(reader.read(entry))
    return io.BufferedReader(ArtifactFile(reader, entry), buffer_size=_FIRST_BLOCK)


class ArtifactFile(io.RawIOBase):
    """Reads a large file by ranges; blocks grow while it is read one after the other.

    Args:
        reader: Of the trial.
        entry: The version.
    """

    def __init__(self, reader: TrialReader, entry: FileEntry) -> None:
        super().__init__()
        self.name = entry.path
        self._reader = reader
        self._entry = entry
        self._places = reader.places(entry)
        self._place = next(self._places)
        self._position = 0
        self._block = memoryview(b"")
        self._block_start = 0
        self._block_size = _FIRST_BLOCK
        self._hasher = blake3()
        self._hashed = 0  # bytes from the beginning on that the hasher has seen

    def readable(self) -> bool:
        """Yes."""
        return True

    def seekable(self) -> bool:
        """Yes: every store reads ranges."""
        return True

    def tell(self) -> int:
        """The position, in bytes."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Moves the position; costs nothing until the next read."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._entry.size}.get(whence)
        if base is None or base + offset < 0:
            raise ValueError(f"Cannot seek to {offset} (whence {whence}).")
        self._position = base + offset
        return self._position

    def readinto(self, buffer: object) -> int:
        """Reads some bytes into a buffer; 0 at the end.

        Raises:
            IntegrityError: What was read from the beginning to the end is not the version that was opened.
        """
        target = memoryview(buffer).cast("B")  # type: ignore[arg-type]
        if not target.nbytes or self._position >= self._entry.size:
            return 0
        if not 0 <= self._position - self._block_start < self._block.nbytes:
            self._load_block()
        offset = self._position - self._block_start
        count = min(target.nbytes, self._block.nbytes - offset)
        target[:count] = self._block[offset : offset + count]
        self._position += count
        return count

    def _load_block(self) -> None:
        follows = self._block.nbytes and self._position == self._block_start + self._block.nbytes
        self._block_size = min(4 * self._block_size, _LARGEST_BLOCK) if follows else _FIRST_BLOCK
        start = self._position
        length = min(self._block_size, self._entry.size - start)
        data = self._read_range(start, length)
        if start <= self._hashed < start + length:
            self._hasher.update(memoryview(data)[self._hashed - start :])
            self._hashed = start + length
            if self._hashed == self._entry.size and self._hasher.hexdigest() != self._entry.digest:
                raise self._reader.lost(self._entry)
        self._block, self._block_start = memoryview(data), start

    def _read_range(self, start: int, length: int) -> bytes:
        while True:
            place = self._place

            def read(place: str = place) -> bytes:
                return b"".join(self._reader.trial.store.read_chunks(place, start=start, length=length))

            try:
                data = request(read, f"Reading {place}")
            except ArtifactNotFoundError:
                data = b""
            if len(data) == length:
                return data
            # Gone or shorter: another place may do, as long as nothing from this one was given out.
            following = next(self._places, None) if self._hashed == 0 and not self._block.nbytes else None
            if following is None:
                raise self._reader.lost(self._entry)
            self._place = following
