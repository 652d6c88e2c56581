"""Background syncs give way: to the program, and to whoever waits."""

from __future__ import annotations

import threading

from ray_artifact_sync import session as session_module
from ray_artifact_sync.stores.posix import PosixStore
from tests.support import independent_reader
from tests.support.sessions import WrappedStore, abandon, open_session, read_tree


class Noticing(WrappedStore):
    """Says when the first artifact is written."""

    def __init__(self, inner):
        super().__init__(inner)
        self.written = threading.Event()

    def around(self, verb, path, act):
        if verb == "put" and path.startswith("plots/"):
            self.written.set()
        return super().around(verb, path, act)


def test_a_sync_does_not_wait_for_a_background_sync_that_takes_its_time(tmp_path, monkeypatch):
    monkeypatch.setattr(session_module, "BACKGROUND_SHARE", 1e-9)  # would take days
    store = Noticing(PosixStore(tmp_path / "storage"))
    plots = tmp_path / "work" / "plots"
    plots.mkdir(parents=True)
    for number in range(200):
        (plots / f"{number}.bin").write_bytes(b"%d" % number)
    session = open_session(tmp_path / "work", store, 1, sync_period=0.01, max_concurrency=4, set_aside=False)
    assert store.written.wait(30)
    assert session.stats.files_sent < 200
    session.sync()
    place = independent_reader.posix_place(tmp_path / "storage")
    assert independent_reader.head_tree(place) == read_tree(session.working_dir)
    abandon(session)
