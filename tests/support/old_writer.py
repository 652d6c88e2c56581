"""An attempt that is going to be replaced while it is in the middle of a sync, in a process of its own.

Usage: python -m tests.support.old_writer '<json>' with working_dir, storage (see `victim`), token, and
- pause: on POSIX storage, hold every write of log.txt right before it is published, while `<pause>.hold` exists;
  `<pause>.reached` is made there;
- linger: seconds between the sync and the end.

Prints `saved`, `syncing`, then how each further operation ended: `<operation> <error class or "fine">`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from tests.support.sessions import WrappedStore, open_session, save
from tests.support.victim import say, store_of


class Pausing(WrappedStore):
    """Stops between the last byte of log.txt and its publication."""

    def __init__(self, inner, flag: str) -> None:
        super().__init__(inner)
        self.flag = flag

    def put(self, path, data, **options):
        return self.inner.put(path, self.held(data) if path == "log.txt" else data, **options)

    def append(self, path, offset, data, **options):
        return self.inner.append(path, offset, self.held(data) if path == "log.txt" else data, **options)

    def held(self, data):
        yield from [data] if isinstance(data, bytes | bytearray | memoryview) else data
        if os.path.exists(f"{self.flag}.hold"):
            Path(f"{self.flag}.reached").touch()
        while os.path.exists(f"{self.flag}.hold"):
            time.sleep(0.01)


def ending(name: str, call) -> None:
    try:
        call()
    except Exception as error:
        say(name, type(error).__name__)
    else:
        say(name, "fine")


def main() -> None:
    job = json.loads(sys.argv[1])
    store = store_of(job["storage"])
    if job.get("pause"):
        store = Pausing(store, job["pause"])
    root = Path(job["working_dir"])
    session = open_session(root, store, job["token"], retries=0)
    (root / "log.txt").write_text("one\n")
    (root / "same.txt").write_text("the same in both attempts\n")
    assert save(session, "checkpoint_000000")
    say("saved", "checkpoint_000000")
    if job.get("pause"):
        Path(f"{job['pause']}.hold").touch()
    (root / "log.txt").write_text("OLD ATTEMPT\n")
    (root / "only-old.txt").write_text("of the old attempt\n")
    say("syncing", "")
    ending("sync", session.sync)
    time.sleep(job.get("linger", 0))
    (root / "only-old.txt").write_text("later\n")
    ending("checkpoint", lambda: save(session, "checkpoint_000001", {"model.bin": b"OLD ATTEMPT"}))
    ending("close", session.close)


if __name__ == "__main__":
    main()
