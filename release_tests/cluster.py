"""A Ray cluster on this machine whose nodes have disks of their own, and can be lost, frozen and thawed.

Each node lives in mount and process namespaces (`unshare`), with a tmpfs over Ray's directory: what a worker writes
there no other node sees, and it is gone with the node. Needs the right to do that (root, or a container that has it).
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.support.s3_servers import free_port, tool

ROOT = Path(__file__).resolve().parent.parent
DISK = "1500m"
"""Size of a node's disk (memory of this machine, as far as it is used)."""

ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AIR_NEW_OUTPUT": "0",
    "PYTHONPATH": str(ROOT),
    "AWS_REQUEST_CHECKSUM_CALCULATION": "when_required",
}
"""Of every Ray that is started here."""

_OF_NODES = {
    **ENVIRONMENT,
    "RAY_AUTH_MODE": "disabled",
    # A frozen node is given up after some 3 s instead of 25.
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "5",
}


def why_not() -> str:
    """Why there can be no such cluster here; empty if there can."""
    if sys.platform != "linux" or shutil.which("unshare") is None:
        return "needs Linux with `unshare`"
    with tempfile.TemporaryDirectory() as directory:
        done = subprocess.run(
            [*_UNSHARE, "sh", "-c", f"mount --make-rprivate / && mount -t tmpfs tmpfs {directory}"],
            capture_output=True,
            text=True,
            check=False,
        )
    return f"namespaces and mounts are refused here ({done.stderr.strip()})" if done.returncode else ""


_UNSHARE = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]


class Node:
    """One node of a cluster: `ray start --block` and all that it started."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], log: Path) -> None:
        self.name, self.process, self.log = name, process, log

    @property
    def pids(self) -> list[int]:
        """All of its processes, by their numbers outside of the node."""
        children: dict[int, list[int]] = {}
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError, ValueError, IndexError):
                fields = stat.read_text().rpartition(")")[2].split()
                children.setdefault(int(fields[1]), []).append(int(stat.parent.name))
        found, pending = [], [self.process.pid]
        while pending:
            pid = pending.pop()
            found.append(pid)
            pending.extend(children.get(pid, ()))
        return found

    def named(self, name: str) -> list[int]:
        """Its processes with this name (`raylet`)."""
        found = []
        for pid in self.pids:
            with contextlib.suppress(OSError):
                if Path(f"/proc/{pid}/comm").read_text().strip() == name:
                    found.append(pid)
        return found

    def disk(self, path: str | Path) -> Path:
        """Where something on the node's own disk can be looked at from outside."""
        pid = (self.named("raylet") or self.pids)[0]
        return Path(f"/proc/{pid}/root{path}")

    def kill_raylet(self) -> None:
        """A lost spot instance, as far as Ray can see: its workers end with the raylet."""
        for pid in self.named("raylet"):
            os.kill(pid, signal.SIGKILL)

    def lose(self) -> None:
        """The machine is gone: every process and the disk."""
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()  # with --kill-child, the namespace ends, and all in it
        self.process.wait()

    def freeze(self) -> None:
        """Every process stops where it is."""
        for _ in range(3):  # what was being started meanwhile
            for pid in self.pids[1:]:  # not `unshare` itself
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP)

    def thaw(self, names: str = "") -> None:
        """Lets the processes go on whose names begin so."""
        for pid in self.pids[1:]:
            with contextlib.suppress(OSError):
                if Path(f"/proc/{pid}/comm").read_text().startswith(names):
                    os.kill(pid, signal.SIGCONT)


class Cluster:
    """A head without CPUs, and nodes; a context manager.

    Attributes:
        address: For `ray.init`.
        nodes: By name.
    """

    def __init__(self) -> None:
        # Short: the paths of Ray's sockets must fit into 107 bytes.
        self.base = Path(tempfile.mkdtemp(prefix="rt", dir="/tmp"))
        self.ray_dir = self.base / "r"
        self.ray_dir.mkdir()
        self.port = free_port()
        self.address = f"127.0.0.1:{self.port}"
        self.nodes: dict[str, Node] = {}
        self._head: Node | None = None
        self._numbers = itertools.count()
        self._environment = {**os.environ, **_OF_NODES}

    def __enter__(self) -> Cluster:  # noqa: PYI034  (nobody derives from it)
        command = [
            *(tool("ray"), "start", "--head", f"--port={self.port}", "--num-cpus=0", "--include-dashboard=false"),
            *("--node-ip-address=127.0.0.1", f"--temp-dir={self.ray_dir}", "--block", "--disable-usage-stats"),
            "--object-store-memory=100000000",
        ]
        # A process namespace here, too: it takes everything with it when it ends.
        self._head = self._start("head", ["unshare", "--pid", "--fork", "--kill-child", *command])
        self._wait_for(self._head, lambda: _listens(self.port))
        return self

    def __exit__(self, *exc) -> None:
        for node in [*self.nodes.values(), *([self._head] if self._head else [])]:
            node.thaw()
            node.lose()
        shutil.rmtree(self.base, ignore_errors=True)

    def add(self, *names: str, cpus: int = 1, disk: str = DISK) -> list[Node]:
        """Starts nodes at once; returns when the cluster knows them."""
        import ray

        script = f'mount --make-rprivate / && mount -t tmpfs -o size={disk} tmpfs {self.ray_dir} && exec "$@"'
        commands = {}
        for name in names:
            ray_start = [
                *(tool("ray"), "start", f"--address={self.address}", f"--num-cpus={cpus}", "--block"),
                *(f"--temp-dir={self.ray_dir}", f'--resources={{"{name}": 1}}', "--object-store-memory=100000000"),
            ]
            commands[name] = [*_UNSHARE, "sh", "-c", script, "sh", *ray_start]
            self.nodes[name] = self._start(name, commands[name])
        known = lambda: {key for node in ray.nodes() if node["Alive"] for key in node["Resources"]}  # noqa: E731
        for name, command in commands.items():
            for tries_left in (2, 1, 0):  # on a busy machine, Ray's own limits of some 30 s are not enough at times
                try:
                    self._wait_for(self.nodes[name], lambda name=name: name in known())
                    break
                except RuntimeError:
                    if not tries_left:
                        raise
                    self.nodes[name] = self._start(name, command)
        return [self.nodes[name] for name in names]

    def new_name(self) -> str:
        """A name that no node has had."""
        return f"node{len(self.nodes)}-{next(self._numbers)}"

    def _start(self, name: str, command: list[str]) -> Node:
        log = self.base / f"{name}.log"
        with open(log, "wb") as output:
            process = subprocess.Popen(
                command, stdout=output, stderr=output, env=self._environment, cwd=self.base, start_new_session=True
            )
        return Node(name, process, log)

    def _wait_for(self, node: Node, condition: Callable[[], bool], seconds: float = 120.0) -> None:
        wait_until(condition, seconds, lambda: self._check(node), what=f"{node.name} is up")

    def _check(self, node: Node) -> None:
        if node.process.poll() is not None:
            raise RuntimeError(f"{node.name} ended: {node.log.read_text(errors='replace')[-3000:]}")

    def node_of(self, pid_file: Path) -> Node:
        """The node on which a trial runs that has written Ray's node id into this file."""
        import ray

        node_id = pid_file.read_text()
        info = next(node for node in ray.nodes() if node["NodeID"] == node_id)
        return self.nodes[next(name for name in info["Resources"] if name in self.nodes)]


@contextlib.contextmanager
def connected(*names: str, cpus: int = 1) -> Iterator[Cluster]:
    """A cluster with some nodes, and this process as its driver."""
    import ray

    os.environ.update(_OF_NODES)
    with Cluster() as cluster:
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
        try:
            cluster.add(*names, cpus=cpus)
            yield cluster
        finally:
            ray.shutdown()


def wait_until(
    condition: Callable[[], object],
    seconds: float = 60.0,
    check: Callable[[], None] = lambda: None,
    *,
    what: str = "",
    pause: float = 0.02,
) -> None:
    """Waits for a condition, calling `check` meanwhile."""
    ends = time.monotonic() + seconds
    while not condition():
        check()
        if time.monotonic() > ends:
            raise TimeoutError(f"Not so within {seconds:g} s: {what or condition}")
        time.sleep(pause)


def _listens(port: int) -> bool:
    import socket

    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
