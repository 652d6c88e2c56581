"""A file system of a user's own behind pyarrow, with what HDFS can do: no more than that.

It knows no etags and no conditional writes, does not copy, and renames only to where nothing is. What a stream has
been given is there while it is still being written.
"""

from __future__ import annotations

import os
import shutil

import pyarrow as pa
from pyarrow import fs as pafs


class PlainHandler(pafs.FileSystemHandler):
    """Files of a local directory.

    Args:
        directory: What `/` is.
    """

    def __init__(self, directory: str) -> None:
        self.directory = directory

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PlainHandler) and other.directory == self.directory

    def __hash__(self) -> int:
        return hash(self.directory)

    def _real(self, path: str) -> str:
        return os.path.join(self.directory, path.lstrip("/"))

    def get_type_name(self) -> str:
        return "plain"

    def normalize_path(self, path: str) -> str:
        return path

    def get_file_info(self, paths):
        return [self._info(path) for path in paths]

    def _info(self, path: str) -> pafs.FileInfo:
        try:
            found = os.stat(self._real(path))
        except (FileNotFoundError, NotADirectoryError):
            return pafs.FileInfo(path, pafs.FileType.NotFound)
        if os.path.isdir(self._real(path)):
            return pafs.FileInfo(path, pafs.FileType.Directory)
        return pafs.FileInfo(path, pafs.FileType.File, size=found.st_size, mtime_ns=found.st_mtime_ns)

    def get_file_info_selector(self, selector):
        if not os.path.isdir(self._real(selector.base_dir)):
            if selector.allow_not_found:
                return []
            raise FileNotFoundError(selector.base_dir)
        return list(self._below(selector.base_dir.rstrip("/"), recursive=selector.recursive))

    def _below(self, path: str, *, recursive: bool):
        for name in sorted(os.listdir(self._real(path))):
            info = self._info(f"{path}/{name}" if path else name)
            if info.type == pafs.FileType.NotFound:
                continue  # gone meanwhile
            yield info
            if recursive and info.type == pafs.FileType.Directory:
                yield from self._below(info.path, recursive=True)

    def create_dir(self, path, recursive):
        if recursive:
            os.makedirs(self._real(path), exist_ok=True)
        else:
            os.mkdir(self._real(path))

    def delete_dir(self, path):
        shutil.rmtree(self._real(path))

    def delete_dir_contents(self, path, missing_dir_ok=False):
        raise NotImplementedError

    def delete_root_dir_contents(self):
        raise NotImplementedError

    def delete_file(self, path):
        os.unlink(self._real(path))

    def move(self, src, dest):
        if os.path.lexists(self._real(dest)):
            raise OSError(f"HDFS rename failed: {dest!r} exists")
        os.rename(self._real(src), self._real(dest))

    def copy_file(self, src, dest):
        raise NotImplementedError("CopyFile is not supported")

    def open_input_stream(self, path):
        return pa.OSFile(self._real(path), "rb")

    def open_input_file(self, path):
        return pa.OSFile(self._real(path), "rb")

    def open_output_stream(self, path, metadata):
        os.makedirs(os.path.dirname(self._real(path)), exist_ok=True)
        return pa.OSFile(self._real(path), "wb")

    def open_append_stream(self, path, metadata):
        raise NotImplementedError
