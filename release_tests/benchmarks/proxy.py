"""A thin proxy in a process of its own: adds latency, counts requests, and mends what this S3 server does unlike S3.

It answers directory markers (the server makes files of them), and says 206 where the server says 200 to a range (else
obstore could not read by ranges). Bodies go from socket to socket inside the kernel, so that it costs next to nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

from typing_extensions import Self

from tests.support.fault_proxy import classify

KIB, MIB = 1024, 1024**2
_MARKER = b'HTTP/1.1 200 OK\r\nETag: "d41d8cd98f00b204e9800998ecf8427e"\r\nContent-Length: 0\r\n\r\n'


class Proxy:
    """Starts and ends the process; a context manager.

    Args:
        upstream: `http://127.0.0.1:<port>` of the server.
        latency: Seconds added to each request.
    """

    def __init__(self, upstream: str, latency: float = 0.0) -> None:
        self.latency = latency
        self._process = subprocess.Popen(
            [sys.executable, "-m", "release_tests.benchmarks.proxy", upstream, str(latency)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        )
        self.endpoint = self._process.stdout.readline().strip()

    def take_counts(self) -> dict[str, int]:
        """Requests by kind since the last call."""
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._process.stdin.close()  # it ends by this, as it does when we die
        self._process.wait(10)
        self._process.stdout.close()


class _Serving:
    def __init__(self, upstream: str, latency: float) -> None:
        host, _, port = upstream.removeprefix("http://").partition(":")
        self.upstream = host, int(port)
        self.latency = latency
        self.counts: Counter[str] = Counter()
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=512)

    def accept(self) -> None:
        while True:
            client, _ = self.listener.accept()
            threading.Thread(target=self.serve, args=(client,), daemon=True).start()

    def serve(self, client: socket.socket) -> None:
        with client, socket.create_connection(self.upstream) as server, contextlib.suppress(OSError, ValueError):
            for end in (client, server):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            pipe = os.pipe()
            try:
                while head := read_head(client):
                    if not self.exchange(client, server, head, pipe):
                        return
            finally:
                os.close(pipe[0])
                os.close(pipe[1])

    def exchange(self, client: socket.socket, server: socket.socket, head: bytes, pipe: tuple[int, int]) -> bool:
        """One request and its answer; False when the connection is over."""
        first, *lines = head[:-4].split(b"\r\n")
        headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(b":") for line in lines)}
        method, target, _ = first.decode("latin-1").split(" ", 2)
        text = {name.decode("latin-1"): value.decode("latin-1") for name, value in headers.items()}
        kind = classify(method, target, text, int(headers.get(b"content-length", 0)))
        self.counts[kind] += 1
        if b"expect" in headers:
            client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
            head = (
                b"\r\n".join([first, *(line for line in lines if not line.lower().startswith(b"expect:"))])
                + b"\r\n\r\n"
            )
        time.sleep(self.latency)
        if kind == "marker":
            left = int(headers.get(b"content-length", 0))
            while left:
                left -= len(client.recv(left))
            client.sendall(_MARKER)
            return True
        server.sendall(head)
        forward(client, server, headers, pipe)
        answer = read_head(server)
        if not answer:
            return False
        lowered = answer.lower()
        if b"\ncontent-range:" in lowered:
            answer = answer.replace(b" 200 OK", b" 206 Partial Content", 1)
        client.sendall(answer)
        if method != "HEAD":
            pairs = (line.partition(b":") for line in lowered[:-4].split(b"\r\n")[1:])
            forward(server, client, {name.strip(): value.strip() for name, _, value in pairs}, pipe)
        return b"connection: close" not in lowered


def read_head(source: socket.socket) -> bytes:
    """Everything up to the empty line, and not a byte more; nothing at the end of the connection."""
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        seen = source.recv(16 * KIB, socket.MSG_PEEK)
        if not seen:
            return b""
        cut = (head + seen).find(b"\r\n\r\n")
        head += source.recv(len(seen) if cut < 0 else cut + 4 - len(head))
    return head


def forward(source: socket.socket, target: socket.socket, headers: dict[bytes, bytes], pipe: tuple[int, int]) -> None:
    """Passes a body on."""
    if headers.get(b"transfer-encoding", b"").lower() == b"chunked":
        forward_chunks(source, target)
        return
    left = int(headers.get(b"content-length", 0))
    while left:
        moved = os.splice(source.fileno(), pipe[1], min(left, MIB))
        if not moved:
            raise OSError("closed in the middle")
        left -= moved
        while moved:
            moved -= os.splice(pipe[0], target.fileno(), moved)


def forward_chunks(source: socket.socket, target: socket.socket) -> None:
    file = source.makefile("rb", buffering=0)
    size = 1
    while size:
        line = b""
        while not line.endswith(b"\n"):
            line += file.read(1)
        size = int(line.split(b";")[0], 16)
        body = b""
        while len(body) < size + 2:
            body += file.read(size + 2 - len(body))
        target.sendall(line + body)


def main(upstream: str, latency: str) -> None:
    serving = _Serving(upstream, float(latency))
    threading.Thread(target=serving.accept, daemon=True).start()
    print(f"http://127.0.0.1:{serving.listener.getsockname()[1]}", flush=True)
    for _ in sys.stdin:
        counts, serving.counts = serving.counts, Counter()
        print(json.dumps(counts), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
