"""What a working dir does on file systems that cannot do everything."""

from __future__ import annotations

import errno
import fcntl
import os
import time

import pytest

from ray_artifact_sync import layout
from ray_artifact_sync.working_dir import WorkingDir


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_has_no_predecessor_to_wait_for(tmp_path, monkeypatch, caplog, code):
    def refuse(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "lockf", refuse)
    working_dir = WorkingDir(str(tmp_path / "work"), layout.make_token(1))
    started = time.monotonic()
    working_dir.begin(30)
    assert time.monotonic() - started < 15
    assert "still alive" not in caplog.text
    working_dir.end()
