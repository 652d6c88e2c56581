"""Servers and places that tests run against; all are ended by process id."""

from __future__ import annotations

import os
import signal

import pytest
from xdist.scheduler import LoadScopeScheduling

from tests.support.azure_server import MISSING, AzuriteServer, azurite
from tests.support.fault_proxy import FaultProxy
from tests.support.s3_servers import JuicefsServer, MotoServer, RcloneServer, filesystem_at, uri_at

# pyarrow >= 20 sends parts as aws-chunked without a Content-Length, which some S3-compatible servers (rclone's among
# them) answer with 411. Read when pyarrow's S3 client starts, here and in Ray's workers.
os.environ.setdefault("AWS_REQUEST_CHECKSUM_CALCULATION", "when_required")

# A shell that starts a command in the background makes it and all its children ignore Ctrl-C, which some tests press.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


LONG_FILES = (
    *("test_class_trainable.py", "test_examples.py", "test_restore_workflows.py", "test_endings.py"),
    "test_train.py",
)
"""They take about as long as all others that need Ray."""


class FewRayClusters(LoadScopeScheduling):
    """For parallel runs: two processes have a Ray cluster each; elsewhere, the tests of a file share their servers."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        if nodeid.startswith(("tests/integration", "tests/docs")):
            return "ray, second" if file.endswith(LONG_FILES) else "ray, first"
        return file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    return FewRayClusters(config, log)


@pytest.fixture(scope="session")
def rclone():
    """A real S3 server without conditional writes. Use `proxy` in front for Ray's own writes."""
    with RcloneServer() as server:
        yield server


@pytest.fixture(scope="session")
def moto():
    """An S3 server that enforces conditional writes."""
    with MotoServer() as server:
        yield server


@pytest.fixture(scope="session")
def juicefs():
    """An S3 server whose UploadPartCopy works; without conditional writes."""
    with JuicefsServer() as server:
        yield server


@pytest.fixture(scope="session", name="azurite")
def azurite_server():
    """Azure's Blob storage; enforces conditional writes."""
    if azurite() is None:
        pytest.skip(MISSING)
    with AzuriteServer() as server:
        yield server


@pytest.fixture
def azurite_proxy(azurite):
    """A fresh fault-injecting proxy in front of `azurite`; passes directory markers on."""
    with FaultProxy(azurite.endpoint, answer_markers=False) as proxy:
        yield proxy


@pytest.fixture
def juicefs_proxy(juicefs):
    """A fresh fault-injecting proxy in front of `juicefs`."""
    with FaultProxy(juicefs.endpoint) as proxy:
        yield proxy


@pytest.fixture
def proxy(rclone):
    """A fresh fault-injecting proxy in front of `rclone`; answers directory markers itself."""
    with FaultProxy(rclone.endpoint) as proxy:
        yield proxy


@pytest.fixture
def moto_proxy(moto):
    """A fresh fault-injecting proxy in front of `moto`; passes directory markers on."""
    with FaultProxy(moto.endpoint, answer_markers=False) as proxy:
        yield proxy


@pytest.fixture
def s3_filesystem(proxy):
    """pyarrow's S3 client, through the proxy."""
    return filesystem_at(proxy.endpoint)


@pytest.fixture
def s3_uri(proxy, rclone, monkeypatch, request):
    """A function from a path to an `s3://` URI through the proxy; sets the AWS_* variables."""
    for name, value in rclone.env().items():
        monkeypatch.setenv(name, value)
    return lambda path="": uri_at(proxy.endpoint, path)
