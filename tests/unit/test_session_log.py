"""What a session says: slow syncs with the figure, the largest files and what to do."""

from __future__ import annotations

import logging

from ray_artifact_sync import session_log
from ray_artifact_sync.stores.posix import PosixStore
from tests.support.sessions import abandon, open_session


def test_a_slow_sync_is_said_with_what_to_do(tmp_path, monkeypatch, caplog):
    session = open_session(tmp_path / "work", PosixStore(tmp_path / "storage"), 1)
    for name, size in (("small", 1), ("large.bin", 3_000_000), ("huge.bin", 4_000_000), ("middle", 2_000_000)):
        (tmp_path / "work" / name).write_bytes(b"x" * size)
    with caplog.at_level(logging.WARNING):
        session.sync()
        assert not caplog.records
        monkeypatch.setattr(session_log, "SLOW_SYNC_SECONDS", -1.0)
        (tmp_path / "work/huge.bin").write_bytes(b"y" * 4_000_000)
        session.sync()
    abandon(session)
    (record,) = caplog.records
    said = record.getMessage()
    assert "Syncing the artifacts of trial took 0 s (1 files, 4.0 MB sent" in said
    assert "huge.bin 4.0 MB, large.bin 3.0 MB, middle 2.0 MB" in said
    for remedy in ("ArtifactSyncer(exclude=...)", "fewer or smaller", "`sync_period`"):
        assert remedy in said
