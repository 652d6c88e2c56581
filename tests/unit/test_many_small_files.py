"""10,000 small files reach S3 in a request each, and in little memory."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from collections import Counter
from pathlib import Path

import pytest

from tests.support.s3_servers import BUCKET

ROOT = Path(__file__).resolve().parents[2]
FILES = 10_000
MEMORY = 64 * 1024 * 1024

SYNC = """
    import json, os, sys, time
    sys.path.insert(0, {root!r})
    from ray_artifact_sync.stores import open_store
    from tests.support.s3_servers import filesystem_at
    from tests.support.sessions import open_session

    def memory(name):
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) * 1024 for line in status if line.startswith(name))

    def begin(directory, token):
        os.makedirs(directory, exist_ok=True)
        return open_session(directory, open_store(filesystem_at({endpoint!r}), {place!r}), token)

    def measure(act):
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # the peak begins anew
        before, started = memory("VmRSS"), time.monotonic()
        act()
        return memory("VmHWM") - before, time.monotonic() - started

    def say(**what):
        print(json.dumps(what), flush=True)
        sys.stdin.readline()

    session = begin({work!r}, 1)
    session.sync()
    for number in range({files}):
        path = os.path.join(session.working_dir, f"d{{number % 100}}", f"{{number}}.txt")
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(b"%07d" % number * 512)
    say()
    peak, seconds = measure(session.sync)
    say(peak=peak, seconds=seconds)
    assert session.commit_checkpoint("checkpoint_000000", lambda engine: None)
    session.close()

    session = begin({other!r}, 2)
    reports = []
    peak, seconds = measure(lambda: reports.append(session.restore("checkpoint_000000", fresh=True)))
    say(peak=peak, seconds=seconds, exact=reports[0].exact)
    session.close()
"""


@pytest.mark.s3
@pytest.mark.exhaustive
def test_ten_thousand_small_files(proxy, tmp_path):
    work, other = tmp_path / "work", tmp_path / "other"
    code = SYNC.format(
        root=str(ROOT), endpoint=proxy.endpoint, place=f"{BUCKET}/many", work=str(work), other=str(other), files=FILES
    )
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:

            def step() -> dict:
                said = json.loads(process.stdout.readline())
                requests.append(Counter((one.kind, one.path) for one in proxy.log))
                proxy.reset_counts()
                process.stdin.write("\n")
                process.stdin.flush()
                return said

            requests: list[Counter[tuple[str, str]]] = []
            step()
            up = step()
            down = step()
            assert process.wait(60) == 0
        finally:
            process.kill()
    print(up, down, [(len(each), each.total()) for each in requests])
    # rclone's server answers 500 now and then, and the writer looks every few seconds whether it still is the writer.
    assert len(requests[1]) <= FILES + 10
    assert requests[1].total() <= 1.01 * FILES
    assert up["peak"] <= MEMORY
    assert down["exact"]
    assert down["peak"] <= MEMORY
    for number in (0, 1, 99, FILES - 1):
        path = Path("d" + str(number % 100), f"{number}.txt")
        assert (other / path).read_bytes() == (work / path).read_bytes()
    assert sum(1 for path in other.rglob("*.txt")) == FILES
