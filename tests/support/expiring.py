"""Credentials that do not last: an S3 server that stops taking a key, and a service that hands out new ones."""

from __future__ import annotations

import datetime as dt
import json
import re
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tests.support.fault_proxy import FaultProxy, Rule

_KEY = re.compile(r"Credential=([^/]+)/")


class ExpiringProxy(FaultProxy):
    """A proxy that takes each access key for so many requests.

    Attributes:
        calls: How many requests one key is good for; None for any number.
        status: What is answered then.
        code: The error that is answered then.
        served: Requests that were passed on, by access key.
        refused: Those that were not.
    """

    def __init__(self, upstream_endpoint: str, *, calls: int | None = None, **options) -> None:
        super().__init__(upstream_endpoint, **options)
        self.calls = calls
        self.status, self.code = 400, "ExpiredToken"
        self.served: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()

    def expire(self) -> None:
        """Takes none of the keys any more that were seen so far."""
        with self._lock:
            self.refused.update(dict.fromkeys(self.served, 0))

    def _match(self, kind: str, path: str, headers: dict[str, str]) -> Rule | None:
        found = _KEY.search(headers.get("authorization", ""))
        key = found.group(1) if found else ""
        with self._lock:
            if key in self.refused or (self.calls is not None and self.served[key] >= self.calls):
                self.refused[key] += 1
                return Rule(kind, path, "status", status=self.status, code=self.code)
            self.served[key] += 1
        return super()._match(kind, path, headers)


class KeyService:
    """Hands out keys as the agent of a container does; a context manager.

    Attributes:
        uri: For `AWS_CONTAINER_CREDENTIALS_FULL_URI`.
        lasts: Seconds that it says a key is good for.
        given: The access keys that it gave, in order.
    """

    TOKEN = "token-of-the-container"

    def __init__(self, *, lasts: float = 3600.0) -> None:
        self.lasts = lasts
        self.given: list[str] = []
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                allowed = self.headers.get("Authorization") == service.TOKEN
                body = json.dumps(service.credentials()).encode() if allowed else b""
                self.send_response(200 if allowed else 401)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args: object) -> None:
                """Says nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.uri = f"http://127.0.0.1:{self._server.server_port}/credentials"

    def credentials(self) -> dict[str, str]:
        """The next ones."""
        key = f"SHORTLIVED{len(self.given) + 1:06d}"
        self.given.append(key)
        ends = dt.datetime.now(dt.timezone.utc) + dt.timedelta(seconds=self.lasts)
        return {
            "AccessKeyId": key,
            "SecretAccessKey": f"secret-of-{key}",
            "Token": f"token-of-{key}",
            "Expiration": ends.strftime("%Y-%m-%dT%H:%M:%SZ"),
        }

    def __enter__(self) -> KeyService:
        threading.Thread(target=self._server.serve_forever, name="key-service", daemon=True).start()
        return self

    def __exit__(self, *exc) -> None:
        self._server.shutdown()
        self._server.server_close()
