"""The script on the layout page restores what a checkpoint lists, with aws, jq and nothing of this library."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import uuid

import pytest

from ray_artifact_sync.stores import open_store
from tests.docs.pages import DOCS
from tests.support.independent_reader import snapshots, store_place, tree_of
from tests.support.s3_servers import BUCKET, environment, filesystem_at
from tests.support.sessions import abandon, open_session, save

pytestmark = [pytest.mark.s3, pytest.mark.slow]

SCRIPT = re.compile(r"<<'SCRIPT'\n(.*?)\nSCRIPT\n", re.DOTALL)
NAMES = ("a b", "a%20b", "a#b", "a?b", "a:b", "f[1].txt", "back\\slash", "sub/dir/\N{SNOWMAN}", "'quoted'", "$HOME")


def write(root, name, content):
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def tree_below(root):
    found = {}
    for folder, directories, files in os.walk(root):
        for name in files:
            path = os.path.join(folder, name)
            with open(path, "rb") as file:
                found[os.path.relpath(path, root)] = file.read()
        if folder != str(root) and not directories and not files:
            found[os.path.relpath(folder, root)] = None
    return found


def test_restore_by_hand(tmp_path, proxy):
    missing = [program for program in ("aws", "jq") if shutil.which(program) is None]
    if missing:
        message = f"the script needs {' and '.join(missing)}, not on this machine"
        pytest.fail(message) if os.environ.get("CI") else pytest.skip(message)
    trial = f"{BUCKET}/{uuid.uuid4().hex}/trial (1, 2)"
    store = open_store(filesystem_at(proxy.endpoint), trial)
    root = tmp_path / "work"
    root.mkdir()
    session = open_session(root, store, 1, set_aside=False)
    for number in range(140):  # more than a document holds itself
        write(root, f"samples/{number}", b"%d" % number)
    for name in NAMES:
        write(root, name, name.encode())
    write(root, "log.txt", b"step 1\n")
    write(root, "plot.svg", b"as of the checkpoint")
    write(root, "nothing", b"")
    write(root, "was-a-file", b"before it was a directory")
    (root / "empty").mkdir()
    session.sync()
    (root / "samples/7").unlink()  # listed in a layer, removed in the document
    assert save(session, "checkpoint_000000")
    write(root, "log.txt", b"step 1\nstep 2\n")
    write(root, "plot.svg", b"newer")
    write(root, "later", b"not in the checkpoint")
    (root / "was-a-file").unlink()
    write(root, "was-a-file/now", b"a directory")
    assert save(session, "checkpoint_000001")

    script = tmp_path / "restore.sh"
    script.write_text(SCRIPT.search((DOCS / "layout.md").read_text(encoding="utf-8")).group(1))
    for checkpoint, snapshot in snapshots(store_place(store)).items():
        target = tmp_path / checkpoint
        subprocess.run(
            ["bash", str(script), f"s3://{trial}", checkpoint, str(target)],
            env={**os.environ, **environment(), "AWS_ENDPOINT_URL": proxy.endpoint, "HOME": str(tmp_path)},
            check=True,
            timeout=120,
        )
        assert tree_below(target) == tree_of(store_place(store), snapshot)
    abandon(session)
