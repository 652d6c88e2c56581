"""A reverse proxy in front of an S3 server: counts requests, adds latency, breaks things on demand.

Asyncio in a thread of its own. Bodies are streamed, never decoded, and the Host header is passed on
as it came, so that signatures stay valid.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import parse_qs, unquote, urlsplit

_CHUNK = 256 * 1024
_LIMIT = 1024 * 1024

Kind = Literal[
    "put_object",
    "upload_part",
    "upload_part_copy",
    "create_multipart",
    "complete_multipart",
    "abort_multipart",
    "get_object",
    "head_object",
    "copy_object",
    "delete",
    "delete_many",
    "list",
    "marker",
    "other",
]
Action = Literal["status", "reset", "hang", "truncate", "corrupt"]

_CODES = {
    400: "BadRequest",
    401: "Unauthorized",
    403: "AccessDenied",
    404: "NoSuchKey",
    409: "ConditionalRequestConflict",
    412: "PreconditionFailed",
    429: "TooManyRequests",
    500: "InternalError",
    503: "SlowDown",
}


@dataclass(eq=False)
class Rule:
    """One fault: what it applies to, what it does, how often.

    Attributes:
        kind: Kind of request, or None for every kind.
        path: Substring of the decoded request path, or None for every path.
        action: `status` answers without asking the server; `reset` closes the connection after
            `after` body bytes of the request; `hang` waits for `release`; `truncate` ends the
            response body after `after` bytes; `corrupt` flips a bit of the response body there.
        times: How often it still applies; None for ever.
        chance: How often it applies to a request that it fits, from 0 to 1; the proxy's dice decide.
        hits: How often it applied.
        reached: Set when it applied for the first time.
        released: Ends a `hang`.
        wakers: Wake those who wait for that.
    """

    kind: str | None
    path: str | None
    action: Action
    status: int = 500
    code: str = "InternalError"
    after: int = 0
    times: int | None = None
    chance: float = 1.0
    forward: bool = False
    hits: int = 0
    reached: threading.Event = field(default_factory=threading.Event)
    released: threading.Event = field(default_factory=threading.Event)
    wakers: list[Callable[[], object]] = field(default_factory=list)

    def release(self) -> None:
        """Lets hanging requests go on to the server."""
        self.released.set()
        while self.wakers:
            with contextlib.suppress(RuntimeError):  # the proxy is gone
                self.wakers.pop()()


@dataclass(frozen=True, slots=True)
class Request:
    """What the proxy saw of one request, in `FaultProxy.log`."""

    kind: str
    method: str
    path: str
    size: int


class FaultProxy:
    """A proxy in front of `upstream_endpoint`; a context manager.

    Attributes:
        endpoint: `http://127.0.0.1:<port>`.
        counts: Requests by kind since the last `reset_counts`.
        bytes_in: Request body bytes by kind.
        bytes_out: Response body bytes by kind.
        log: Every request, in order of arrival.
        latency: Seconds added to each request.
        bandwidth: Bytes of request bodies a second, of all connections together; None for no limit.
        answer_markers: Whether directory markers are answered here and not passed on.
        dice: Decide about the rules with a chance; the same seed gives the same faults to the same requests.
        in_flight: Requests being served now.
        most_in_flight: The most there were at once since the last `reset_counts`.
    """

    def __init__(self, upstream_endpoint: str, *, answer_markers: bool = True) -> None:
        parts = urlsplit(upstream_endpoint)
        self._upstream = (parts.hostname or "127.0.0.1", parts.port or 80)
        self.answer_markers = answer_markers
        self.latency = 0.0
        self.bandwidth: float | None = None
        self._link_free_at = 0.0
        self.counts: Counter[str] = Counter()
        self.bytes_in: Counter[str] = Counter()
        self.bytes_out: Counter[str] = Counter()
        self.log: list[Request] = []
        self.dice = random.Random(0)
        self.in_flight = 0
        self.most_in_flight = 0
        self._rules: list[Rule] = []
        self._lock = threading.Lock()
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        self._upstreams: set[asyncio.StreamWriter] = set()
        self._clients: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._server: asyncio.Server | None = None
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fault-proxy", daemon=True)
        self.endpoint = ""

    # --- life ------------------------------------------------------------------------------------

    def start(self) -> FaultProxy:
        self._thread.start()
        self._ready.wait(10)
        return self

    def stop(self) -> None:
        """Closes every connection and ends the thread; may be called twice."""
        self.clear()
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(10)

    def __enter__(self) -> FaultProxy:
        return self.start()

    def __exit__(self, *exc) -> None:
        self.stop()

    # --- faults ----------------------------------------------------------------------------------

    def fail(
        self,
        kind: str | None = None,
        path: str | None = None,
        *,
        status: int = 500,
        code: str | None = None,
        times: int | None = None,
        chance: float = 1.0,
    ) -> Rule:
        """Answers with an error, without asking the server."""
        code = code or _CODES.get(status, "InternalError")
        return self._add(Rule(kind, path, "status", status=status, code=code, times=times, chance=chance))

    def reset(
        self,
        kind: str | None = None,
        path: str | None = None,
        *,
        after: int = 0,
        times: int | None = None,
        chance: float = 1.0,
        forward: bool = False,
    ) -> Rule:
        """Resets the connection after `after` bytes of the request body.

        With `forward`, the server gets and serves the whole request first; only its answer is lost.
        """
        return self._add(Rule(kind, path, "reset", after=after, times=times, chance=chance, forward=forward))

    def hang(
        self,
        kind: str | None = None,
        path: str | None = None,
        *,
        times: int | None = None,
        chance: float = 1.0,
        abandoned: Literal["forwarded", "dropped"] = "forwarded",
    ) -> Rule:
        """Holds requests back until `Rule.release` or `clear`; then they go to the server.

        So do those whose client has given up meanwhile, with `abandoned="forwarded"`: they arrive late.
        """
        return self._add(Rule(kind, path, "hang", times=times, chance=chance, forward=abandoned == "forwarded"))

    def truncate(
        self,
        kind: str | None = "get_object",
        path: str | None = None,
        *,
        after: int = 0,
        times: int | None = None,
    ) -> Rule:
        """Closes the connection after `after` bytes of the response body."""
        return self._add(Rule(kind, path, "truncate", after=after, times=times))

    def corrupt(
        self,
        kind: str | None = "get_object",
        path: str | None = None,
        *,
        after: int = 0,
        times: int | None = None,
    ) -> Rule:
        """Flips a bit of the response body, `after` bytes from its start."""
        return self._add(Rule(kind, path, "corrupt", after=after, times=times))

    def go_down(self) -> None:
        """Refuses connections and resets those that there are, until `come_back`."""
        asyncio.run_coroutine_threadsafe(self._go_down(), self._loop).result(10)

    def come_back(self) -> None:
        """Listens again, at the same port."""
        asyncio.run_coroutine_threadsafe(self._listen(urlsplit(self.endpoint).port or 0), self._loop).result(10)

    def clear(self) -> None:
        """Removes all rules and lets hanging requests go."""
        with self._lock:
            rules, self._rules = self._rules, []
        for rule in rules:
            rule.release()
        self.latency = 0.0
        self.bandwidth = None

    def reset_counts(self) -> None:
        """Starts counting anew."""
        with self._lock:
            self.counts.clear()
            self.bytes_in.clear()
            self.bytes_out.clear()
            self.log.clear()
            self.most_in_flight = self.in_flight

    def _add(self, rule: Rule) -> Rule:
        with self._lock:
            self._rules.append(rule)
        return rule

    def _match(self, kind: str, path: str, headers: dict[str, str]) -> Rule | None:
        with self._lock:
            for rule in self._rules:
                if rule.times == 0 or rule.kind not in (None, kind):
                    continue
                if rule.path is not None and rule.path not in path:
                    continue
                if rule.chance < 1.0 and self.dice.random() >= rule.chance:
                    continue
                if rule.times is not None:
                    rule.times -= 1
                rule.hits += 1
                rule.reached.set()
                return rule
        return None

    # --- serving ---------------------------------------------------------------------------------

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._listen(0))
        port = self._server.sockets[0].getsockname()[1]
        self.endpoint = f"http://127.0.0.1:{port}"
        self._ready.set()
        try:
            self._loop.run_forever()
        finally:
            self._server.close()
            for task in asyncio.all_tasks(self._loop):
                task.cancel()
            pending = asyncio.all_tasks(self._loop)
            self._loop.run_until_complete(asyncio.gather(*pending, return_exceptions=True))
            for writer in self._upstreams:
                writer.transport.abort()
            # Transports close in the next rounds of the loop.
            for _ in range(3):
                self._loop.run_until_complete(asyncio.sleep(0))
            self._loop.close()

    async def _listen(self, port: int) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", port, limit=_LIMIT, backlog=512)

    async def _go_down(self) -> None:
        self._server.close()
        for writer in self._clients:
            writer.transport.abort()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._clients.add(writer)
        try:
            while await self._serve(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, EOFError):
            pass
        except asyncio.CancelledError:
            pass
        finally:
            self._clients.discard(writer)
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """One request; False when the connection ends."""
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:
            return False
        method, target, headers = _parse_head(head)
        length = int(headers.get("content-length", 0))
        chunked = "chunked" in headers.get("transfer-encoding", "").lower()
        kind = classify(method, target, headers, length)
        path = unquote(urlsplit(target).path)
        with self._lock:
            self.counts[kind] += 1
            self.log.append(Request(kind, method, path, length))
            self.in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            if headers.get("expect", "").lower() == "100-continue":
                writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
                head = _without(head, b"expect")
            if self.latency:
                await asyncio.sleep(self.latency)
            rule = self._match(kind, path, headers)
            if rule and rule.action == "hang":
                await self._hold(rule)
                if reader._eof and not rule.forward:  # no public way to ask while there are bytes left to be read
                    return False
                rule = None
            if rule and rule.action == "status":
                await _discard(reader, length, chunked=chunked)
                writer.write(_error(rule.status, rule.code, method))
                await writer.drain()
                return True
            if rule and rule.action == "reset" and not rule.forward:
                await _discard(reader, min(length, rule.after), chunked=False)
                return False
            if kind == "marker" and self.answer_markers:
                await _discard(reader, length, chunked=chunked)
                writer.write(
                    b'HTTP/1.1 200 OK\r\nETag: "d41d8cd98f00b204e9800998ecf8427e"\r\nContent-Length: 0\r\n\r\n'
                )
                await writer.drain()
                return True
            return await self._forward(
                reader,
                writer,
                head,
                method=method,
                kind=kind,
                length=length,
                chunked=chunked,
                rule=rule,
            )
        finally:
            with self._lock:
                self.in_flight -= 1

    async def _hold(self, rule: Rule) -> None:
        event = asyncio.Event()
        rule.wakers.append(lambda: self._loop.call_soon_threadsafe(event.set))
        if not rule.released.is_set():
            await event.wait()

    async def _forward(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        head: bytes,
        *,
        method: str,
        kind: str,
        length: int,
        chunked: bool,
        rule: Rule | None,
    ) -> bool:
        up_reader, up_writer, response = await self._exchange(reader, head, kind, length, chunked=chunked)
        try:
            return await self._relay(up_reader, up_writer, writer, response, method=method, kind=kind, rule=rule)
        except BaseException:
            up_writer.transport.abort()
            raise

    async def _relay(
        self,
        up_reader: asyncio.StreamReader,
        up_writer: asyncio.StreamWriter,
        writer: asyncio.StreamWriter,
        response: bytes,
        *,
        method: str,
        kind: str,
        rule: Rule | None,
    ) -> bool:
        """Passes the server's answer on."""
        while response.startswith(b"HTTP/1.1 100"):
            response = await up_reader.readuntil(b"\r\n\r\n")
        if rule and rule.action == "reset":
            up_writer.transport.abort()
            return False
        status, headers = _parse_response(response)
        if status == 200 and "content-range" in headers:
            # rclone's server says 200 where a cloud says 206, and strict clients refuse that.
            response = response.replace(b" 200 OK", b" 206 Partial Content", 1)
        writer.write(response)
        size = _body_length(method, status, headers)
        keep = headers.get("connection", "").lower() != "close"
        sent = 0
        async for piece in _body(up_reader, size, headers):
            data = piece
            if rule and rule.action == "truncate" and sent + len(data) > rule.after:
                writer.write(data[: rule.after - sent])
                await writer.drain()
                up_writer.transport.abort()
                writer.close()  # what was written is flushed, then the connection ends
                with contextlib.suppress(ConnectionError):
                    await writer.wait_closed()
                return False
            if rule and rule.action == "corrupt" and sent <= rule.after < sent + len(data):
                at = rule.after - sent
                data = data[:at] + bytes((data[at] ^ 1,)) + data[at + 1 :]
            writer.write(data)
            sent += len(data)
            await writer.drain()
        with self._lock:
            self.bytes_out[kind] += sent
        await writer.drain()
        if keep and size is not None:
            self._idle.append((up_reader, up_writer))
        else:
            up_writer.transport.abort()
        return keep and size is not None

    async def _exchange(
        self,
        reader: asyncio.StreamReader,
        head: bytes,
        kind: str,
        length: int,
        *,
        chunked: bool,
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, bytes]:
        """Sends the request, on an idle connection where one is alive; the response's head."""
        for attempt in itertools.count():
            fresh = attempt > 0 or not self._idle
            up_reader, up_writer = await self._connect(fresh=fresh)
            try:
                up_writer.write(head)
                await up_writer.drain()
                # An idle connection that the server closed fails here, before the body is read.
                if not fresh and not length and not chunked:
                    return up_reader, up_writer, await up_reader.readuntil(b"\r\n\r\n")
            except (ConnectionError, asyncio.IncompleteReadError):
                up_writer.transport.abort()
                if fresh:
                    raise
                continue
            try:
                async for piece in _request_body(reader, length, chunked=chunked):
                    if self.bandwidth:
                        self._link_free_at = max(self._link_free_at, self._loop.time()) + len(piece) / self.bandwidth
                        await asyncio.sleep(self._link_free_at - self._loop.time())
                    up_writer.write(piece)
                    with self._lock:
                        self.bytes_in[kind] += len(piece)
                    await up_writer.drain()
                return up_reader, up_writer, await up_reader.readuntil(b"\r\n\r\n")
            except BaseException:
                up_writer.transport.abort()
                raise
        raise AssertionError

    async def _connect(self, *, fresh: bool) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        while self._idle and not fresh:
            reader, writer = self._idle.pop()
            if not reader.at_eof() and not writer.transport.is_closing():
                return reader, writer
            writer.transport.abort()
        host, port = self._upstream
        reader, writer = await asyncio.open_connection(host, port, limit=_LIMIT)
        self._upstreams = {one for one in self._upstreams if not one.transport.is_closing()}
        self._upstreams.add(writer)
        return reader, writer


def classify(method: str, target: str, headers: dict[str, str], length: int) -> Kind:
    """Which operation of S3 a request is, or what is like it on Azure."""
    parts = urlsplit(target)
    query = parse_qs(parts.query, keep_blank_values=True)
    bucket, _, key = parts.path.lstrip("/").partition("/")
    if "x-ms-version" in headers:
        return _classify_azure(method, parts.path, query, headers, length)
    source = "x-amz-copy-source" in headers
    if method == "PUT" and key:
        if "partNumber" in query:
            return "upload_part_copy" if source else "upload_part"
        if source:
            return "copy_object"
        # aws-chunked bodies have a frame around nothing.
        empty = int(headers.get("x-amz-decoded-content-length", length)) == 0
        return "marker" if key.endswith("/") and empty else "put_object"
    if method == "POST":
        if "uploads" in query:
            return "create_multipart"
        if "uploadId" in query:
            return "complete_multipart"
        return "delete_many" if "delete" in query else "other"
    if method == "DELETE" and key:
        return "abort_multipart" if "uploadId" in query else "delete"
    if method == "GET":
        return "get_object" if key else "list" if bucket else "other"
    if method == "HEAD" and key:
        return "head_object"
    return "other"


def _classify_azure(method: str, path: str, query: dict[str, list[str]], headers: dict[str, str], length: int) -> Kind:
    """The same words for Azure's Blob storage: its blocks are parts, a list of blocks completes them."""
    _account, _, rest = path.lstrip("/").partition("/")
    key = rest.partition("/")[2]
    comp = query.get("comp", [""])[0]
    if comp in ("list", "batch"):
        return "list" if comp == "list" else "delete_many"
    if method == "PUT" and key:
        if comp in ("block", "blocklist"):
            return "upload_part" if comp == "block" else "complete_multipart"
        if "x-ms-copy-source" in headers:
            return "copy_object"
        return "marker" if key.endswith("/") and not length else "put_object"
    by_method: dict[str, Kind] = {"GET": "get_object", "HEAD": "head_object", "DELETE": "delete"}
    return by_method.get(method, "other") if key else "other"


def _parse_head(head: bytes) -> tuple[str, str, dict[str, str]]:
    first, *lines = head.decode("latin-1").split("\r\n")
    method, target, _ = first.split(" ", 2)
    return method, target, _headers(lines)


def _parse_response(head: bytes) -> tuple[int, dict[str, str]]:
    first, *lines = head.decode("latin-1").split("\r\n")
    return int(first.split(" ", 2)[1]), _headers(lines)


def _headers(lines: list[str]) -> dict[str, str]:
    pairs = (line.partition(":") for line in lines if line)
    return {name.strip().lower(): value.strip() for name, _, value in pairs}


def _without(head: bytes, name: bytes) -> bytes:
    lines = head.split(b"\r\n")
    return b"\r\n".join(line for line in lines if not line.lower().startswith(name + b":"))


def _body_length(method: str, status: int, headers: dict[str, str]) -> int | None:
    """Bytes of a response body; -1 if chunked, None if it ends with the connection."""
    if method == "HEAD" or status in (204, 304):
        return 0
    if "chunked" in headers.get("transfer-encoding", "").lower():
        return -1
    return int(headers["content-length"]) if "content-length" in headers else None


async def _body(reader: asyncio.StreamReader, size: int | None, headers: dict[str, str]):
    if size == -1:
        async for piece in _chunked(reader):
            yield piece
        return
    while size is None or size > 0:
        piece = await reader.read(_CHUNK if size is None else min(_CHUNK, size))
        if not piece:
            if size is None:
                return
            raise EOFError
        size = None if size is None else size - len(piece)
        yield piece


async def _request_body(reader: asyncio.StreamReader, length: int, *, chunked: bool):
    async for piece in _body(reader, -1 if chunked else length, {}):
        yield piece


async def _chunked(reader: asyncio.StreamReader):
    """The raw bytes of a chunked body, frames included."""
    while True:
        line = await reader.readuntil(b"\r\n")
        yield line
        size = int(line.split(b";")[0], 16)
        if size == 0:
            while True:  # trailers, and the empty line at the end
                line = await reader.readuntil(b"\r\n")
                yield line
                if line == b"\r\n":
                    return
        left = size + 2
        while left:
            piece = await reader.read(min(_CHUNK, left))
            if not piece:
                raise EOFError
            left -= len(piece)
            yield piece


async def _discard(reader: asyncio.StreamReader, length: int, *, chunked: bool) -> None:
    async for _ in _request_body(reader, length, chunked=chunked):
        pass


def _error(status: int, code: str, method: str) -> bytes:
    body = (
        f'<?xml version="1.0" encoding="UTF-8"?><Error><Code>{code}</Code>'
        "<Message>injected by the test</Message></Error>"
    ).encode()
    head = (
        f"HTTP/1.1 {status} Injected\r\nContent-Type: application/xml\r\nContent-Length: {len(body)}\r\n\r\n"
    ).encode()
    return head if method == "HEAD" else head + body
