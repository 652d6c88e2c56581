"""Every Python and bash block of README and guide runs, page by page; what a page says was printed was printed."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from pyarrow import fs as pafs

from ray_artifact_sync.stores import open_store
from tests.docs.pages import ROOT, RUN_ELSEWHERE, fences, guide
from tests.docs.run_page import OUTPUT, Blocks, parse
from tests.support.s3_servers import environment, filesystem_at

RUN = ("python", "bash")
SHOWN = ("text", OUTPUT, "diff", "json")
"""Other fences are not run, so that nothing that should run can hide behind another name (`py`, `sh`, `console`)."""

NEEDS = {"layout.md": ("aws", "jq")}
"""Programs that a page uses and that are no Python packages of this project's."""


def pages() -> list[Path]:
    return [page for page in guide() if any(language in RUN for language in fences(page.read_text(encoding="utf-8")))]


def test_every_fence_is_run_or_shown():
    strange = {
        f"{page.relative_to(ROOT)}: {language!r}"
        for page in guide()
        for language in fences(page.read_text(encoding="utf-8"))
        if language not in (*RUN, *SHOWN) and page.name != "architecture.md"
    }
    assert not strange


def test_the_parser_sees_every_block():
    for page in guide():
        text = page.read_text(encoding="utf-8")
        expected = sum(language in (*RUN, OUTPUT) for language in fences(text))
        assert sum(1 for _ in parse(text, str(page), Blocks())) == expected, page


@pytest.fixture
def bucket(rclone):
    """An empty bucket named `bucket`, as in the guide."""
    directory = Path(rclone.data) / "bucket"
    storage = filesystem_at(rclone.endpoint)
    if directory.is_dir():
        store = open_store(storage, "bucket")  # through the server, which remembers what its directories hold
        store.delete([file.path for file in store.list()])
        return directory
    directory.mkdir()
    deadline = time.monotonic() + 30
    while storage.get_file_info("bucket").type == pafs.FileType.NotFound:
        assert time.monotonic() < deadline, "the server does not see its new bucket"
        rclone.process.send_signal(signal.SIGHUP)  # forgets what it remembers
        time.sleep(0.05)
    return directory


def run(arguments: list[str], directory: Path, endpoint: str) -> None:
    (directory / "home").mkdir()
    (directory / "work").mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "tests.docs.run_page", *arguments],
        cwd=directory / "work",
        env={
            **os.environ,
            **environment(),
            "AWS_ENDPOINT_URL": endpoint,
            "HOME": str(directory / "home"),
            "PYTHONPATH": str(ROOT),
            "RAY_AIR_NEW_OUTPUT": "0",
            "RAY_TRAIN_V2_ENABLED": "1",
            "RAY_USAGE_STATS_ENABLED": "0",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-10_000:]


@pytest.mark.ray
@pytest.mark.s3
@pytest.mark.slow
@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_page(page, tmp_path, proxy, bucket):
    missing = [program for program in NEEDS.get(page.name, ()) if shutil.which(program) is None]
    if missing:
        message = f"{page.name} shows how to use {' and '.join(missing)}, not on this machine"
        pytest.fail(message) if os.environ.get("CI") else pytest.skip(message)
    run([str(page)], tmp_path, proxy.endpoint)


@pytest.mark.ray
@pytest.mark.s3
@pytest.mark.slow
def test_examples_in_docstrings(tmp_path, proxy, bucket):
    run(["--docstrings"], tmp_path, proxy.endpoint)


@pytest.mark.parametrize("command", RUN_ELSEWHERE)
def test_blocks_that_run_elsewhere_do(command):
    assert any(command in page.read_text(encoding="utf-8") for page in guide()), "on no page any more"
    where, fragments = RUN_ELSEWHERE[command]
    text = (ROOT / where).read_text(encoding="utf-8")
    assert all(fragment in text for fragment in fragments)
