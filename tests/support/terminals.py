"""A program in a terminal of its own (a pseudo terminal), and what it shows there."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import termios
import time

_CODES = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal:
    """Runs a program with a terminal; `shown` is its text so far. A context manager that ends the program."""

    def __init__(self, command: list[str], **options) -> None:
        self._own, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 160, 0, 0))
        self._raw = b""
        environment = {**options.pop("env", os.environ), "TERM": "xterm"}
        self.process = subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, start_new_session=True, **options
        )
        os.close(theirs)

    @property
    def shown(self) -> str:
        return _CODES.sub(b"", self._raw).decode("utf-8", "replace")

    def wait_for(self, text: str, seconds: float = 120) -> None:
        """Reads until the text was shown."""
        ends = time.monotonic() + seconds
        while text not in self.shown:
            assert self._read(ends), f"{text!r} was not shown; this was:\n{self.shown}"

    def wait(self, seconds: float = 120) -> int:
        """Reads until the program ends; its exit code."""
        ends = time.monotonic() + seconds
        while self._read(ends):
            pass
        return self.process.wait(max(0.1, ends - time.monotonic()))

    def _read(self, ends: float) -> bool:
        ready, _, _ = select.select([self._own], [], [], max(0.0, ends - time.monotonic()))
        if not ready:
            return False
        try:
            chunk = os.read(self._own, 65536)
        except OSError:  # the other side is closed
            return False
        self._raw += chunk
        return bool(chunk)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *exc) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._own)
