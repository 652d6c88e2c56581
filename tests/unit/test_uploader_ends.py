"""`RemoteUploader` when its whole process is killed in the middle, and when its storage is full."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from ray_artifact_sync import RemoteUploader
from ray_artifact_sync.errors import ArtifactExistsError, IncompleteSyncError, StorageError
from ray_artifact_sync.stores import open_uri
from tests.support.processes import children, is_alive, wait_until
from tests.support.s3_servers import BUCKET, filesystem_at

MIB = 1024 * 1024
ROOT = Path(__file__).resolve().parents[2]
SIZE = 40 * MIB

VICTIM = """
    import sys
    sys.path.insert(0, {root!r})
    from tests.support.s3_servers import filesystem_at
    from ray_artifact_sync import RemoteUploader
    filesystem = filesystem_at({endpoint!r}) if {endpoint!r} else None
    with RemoteUploader({place!r}, filesystem, executor={executor!r}, staging_dir={staging!r}) as uploader:
        uploader.upload_file_async("large.bin", {file!r}).result()
"""


@contextlib.contextmanager
def victim(place, file, staging, *, endpoint="", executor="thread"):
    """A process that uploads one large file; whoever stops it does so with SIGKILL."""
    code = VICTIM.format(
        root=str(ROOT), endpoint=endpoint, place=str(place), executor=executor, staging=str(staging), file=str(file)
    )
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def large(tmp_path):
    path = tmp_path / "large.bin"
    path.write_bytes(os.urandom(SIZE))
    return path


@pytest.fixture
def staging(tmp_path):
    path = tmp_path / "staging"
    path.mkdir()
    return path


def unfinished(server) -> list[int]:
    """Bytes of each multipart upload that nobody completed or aborted."""
    with contextlib.closing(server.boto()) as client:
        uploads = client.list_multipart_uploads(Bucket=BUCKET).get("Uploads", [])
        return [
            sum(
                part["Size"]
                for part in client.list_parts(Bucket=BUCKET, Key=upload["Key"], UploadId=upload["UploadId"]).get(
                    "Parts", []
                )
            )
            for upload in uploads
        ]


@pytest.mark.s3
@pytest.mark.parametrize("executor", ["thread", "process"])
def test_killed_in_the_middle_of_a_multipart_upload(executor, moto, moto_proxy, large, staging):
    """No half object is seen, and the next process uploads it, without `overwrite`.

    What stays are the parts of that one try, which no listing shows and no reader gets: at most the size of the file.
    Only the bucket's lifecycle rules can take them away, since nobody knows the upload's id any more.
    """
    place = f"{BUCKET}/killed-{executor}"
    before = unfinished(moto)
    held = moto_proxy.hang("upload_part", abandoned="dropped")
    with victim(place, large, staging, endpoint=moto_proxy.endpoint, executor=executor) as process:
        assert held.reached.wait(60)
        workers = children(process.pid)
        process.send_signal(signal.SIGKILL)
        process.wait()
        # One that still lives would see its requests fail, and take its own parts away.
        wait_until(lambda: not any(is_alive(pid) for pid in workers), 60)
    moto_proxy.clear()
    store = open_uri(place, filesystem_at(moto.endpoint))
    assert store.stat("large.bin") is None
    assert [file.path for file in store.list()] == []
    with RemoteUploader(place, filesystem_at(moto_proxy.endpoint)) as uploader:
        assert uploader.upload_file_async("large.bin", large, overwrite=False).result(60).size == SIZE
    assert store.read("large.bin") == large.read_bytes()
    left = unfinished(moto)
    assert len(left) == len(before) + 1
    assert all(size <= SIZE for size in left)


@pytest.mark.s3
def test_killed_after_the_last_part(moto, moto_proxy, large, staging):
    """The request that publishes it arrives although its sender is dead: then it is there, whole."""
    place = f"{BUCKET}/killed-late"
    held = moto_proxy.hang("complete_multipart")
    with victim(place, large, staging, endpoint=moto_proxy.endpoint) as process:
        assert held.reached.wait(60)
        process.send_signal(signal.SIGKILL)
        process.wait()
    store = open_uri(place, filesystem_at(moto.endpoint))
    assert store.stat("large.bin") is None
    with RemoteUploader(place, filesystem_at(moto.endpoint)) as uploader:
        uploader.upload_file_async("large.bin", large).result(60)
        held.release()
        # Whichever came last: it is the same file, and it is not uploaded by mistake a second time.
        assert isinstance(uploader.upload_file_async("large.bin", large).exception(60), ArtifactExistsError)
        with pytest.raises(IncompleteSyncError):
            uploader.wait()
    assert store.read("large.bin") == large.read_bytes()


DYING = """
    import os, signal, sys
    sys.path.insert(0, {root!r})
    from ray_artifact_sync import RemoteUploader, upload_worker

    class Dying(upload_worker.ConsistentReader):
        def __iter__(self):
            for chunk in super().__iter__():
                yield chunk
                os.kill(os.getpid(), signal.SIGKILL)  # it has been written

    upload_worker.ConsistentReader = Dying
    with RemoteUploader({remote!r}, staging_dir={staging!r}) as uploader:
        uploader.upload_file_async("large.bin", {file!r}).result()
"""


def test_killed_while_it_writes_to_a_directory(tmp_path, large, staging):
    """What it had written is no file of anybody; a later uploader takes it away."""
    remote = tmp_path / "remote"
    code = DYING.format(root=str(ROOT), remote=str(remote), staging=str(staging), file=str(large))
    died = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=False, timeout=60)
    assert died.returncode == -signal.SIGKILL
    assert not (remote / "large.bin").exists()
    (left,) = remote.rglob("free-*/*")
    assert left.stat().st_size > 0
    with RemoteUploader(remote) as uploader:
        uploader.upload_file_async("large.bin", large, overwrite=False).result(60)
    assert (remote / "large.bin").read_bytes() == large.read_bytes()
    assert left.exists(), "it might be another machine's, which is still at it"
    os.utime(left, (1, 1))
    RemoteUploader(remote).close()
    assert not left.exists()
    assert not left.parent.exists()


# --- a full disk ---------------------------------------------------------------------------------


@pytest.mark.parametrize("executor", ["thread", "process"])
def test_a_full_remote_directory(executor, small_disk, tmp_path):
    remote = small_disk / "remote"
    files = {}
    for name, size in (("first", 300_000), ("large", 5 * MIB), ("second", 100_000)):
        files[name] = tmp_path / name
        files[name].write_bytes(os.urandom(size))
    uploader = RemoteUploader(remote, executor=executor, max_workers=1)
    done = {name: uploader.upload_file_async(name, path) for name, path in files.items()}
    pointer = uploader.publish_after(done.values(), "latest", "all")
    error = done["large"].exception(60)
    assert isinstance(error, StorageError)
    assert "No space left" in str(error)
    assert str(remote) in str(error)
    with pytest.raises(IncompleteSyncError) as caught:
        uploader.wait()
    assert set(caught.value.failures) == {"large", "latest"}
    assert pointer.exception() is not None
    # Nothing of it is left, so that there is room for the others.
    assert {path.name for path in remote.rglob("*") if path.is_file()} == {"first", "second"}
    assert not list(remote.rglob("free-*"))
    (remote / "first").unlink()
    files["large"].write_bytes(os.urandom(600_000))
    uploader.upload_file_async("large", files["large"], overwrite=False).result(60)
    uploader.wait_and_close()
    assert (remote / "large").read_bytes() == files["large"].read_bytes()


def test_an_uploader_to_a_full_disk_says_so_at_once(small_disk):
    (small_disk / "in the way").write_bytes(bytes(2 * MIB)[: os.statvfs(small_disk).f_bavail * 4096])
    with pytest.raises(StorageError, match=r"cannot write to directory .*No space left"):
        RemoteUploader(small_disk / "remote")
