"""Long runs of zeros become holes: a sparse file needs no more room on storage, or back on a node, than it did."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator

from ray_artifact_sync.stores.base import Buffer

_SHORTEST = 64 * 1024
"""Bytes of a chunk from which on a hole is worth it."""


def is_hole(chunk: Buffer) -> bool:
    """Whether a chunk is nothing but zeros, and long. Costs next to nothing where it is not."""
    if not isinstance(chunk, bytes) or len(chunk) < _SHORTEST or chunk[0] or chunk[-1]:
        return False
    return chunk == bytes(len(chunk))


def write_chunk(descriptor: int, chunk: Buffer) -> bool:
    """Writes a chunk at the descriptor's position, which must be the end of the file.

    Returns:
        Whether it was a hole. If it is the last one, the file still has to be given its size.

    Raises:
        OSError: The write failed.
    """
    if is_hole(chunk):
        os.lseek(descriptor, len(chunk), os.SEEK_CUR)
        return True
    view = memoryview(chunk).cast("B")
    while view:
        view = view[os.write(descriptor, view) :]
    return False


def data_ranges(descriptor: int, size: int) -> Iterator[tuple[int, int]]:
    """Begin and end of what the first `size` bytes of a file hold beside holes; moves the descriptor's position."""
    position = 0
    while position < size:
        try:
            start = os.lseek(descriptor, position, os.SEEK_DATA)
            end = os.lseek(descriptor, start, os.SEEK_HOLE)
        except OSError as error:
            if error.errno != errno.ENXIO:  # this file system cannot tell
                yield position, size
            return  # else a hole up to the end
        if start < size:
            yield start, min(end, size)
        position = end
