"""`RemoteUploader`: background uploads of single files, in threads and in worker processes."""

from __future__ import annotations

import errno
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from concurrent.futures import CancelledError, Future
from pathlib import Path

import pytest

from ray_artifact_sync import RemoteUploader
from ray_artifact_sync.errors import (
    ArtifactExistsError,
    ArtifactSyncError,
    ConfigurationError,
    IncompleteSyncError,
    InvalidPathError,
    StagingError,
    StorageError,
    StoragePermissionError,
    SyncTimeoutError,
    WorkerDiedError,
)
from ray_artifact_sync.stores import open_uri
from tests.support.processes import is_alive, wait_until
from tests.support.s3_servers import BUCKET, filesystem_at

MIB = 1024 * 1024
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def local(tmp_path):
    """Makes a local file."""

    def make(name="file.bin", content=b"content"):
        path = tmp_path / "local" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        return path

    return make


@pytest.fixture
def remote(tmp_path):
    """A local remote directory."""
    return tmp_path / "remote"


@pytest.fixture
def staging(tmp_path):
    path = tmp_path / "staging"
    path.mkdir()
    return path


def stored(directory):
    return {
        str(path.relative_to(directory)): path.read_bytes() for path in sorted(directory.rglob("*")) if path.is_file()
    }


def hold(uploader):
    """Keeps every worker busy until the event that is returned is set."""
    release = threading.Event()
    crew = uploader._crew
    make_runner = crew._make_runner

    def make_slow_runner():
        runner = make_runner()
        run = runner.run

        def slow(request):
            release.wait(30)
            return run(request)

        runner.run = slow
        return runner

    crew._make_runner = make_slow_runner
    return release


# --- the plain way -------------------------------------------------------------------------------


@pytest.mark.parametrize("executor", ["thread", "process"])
@pytest.mark.parametrize("stage", [True, False])
def test_uploads_and_says_what_it_wrote(executor, stage, local, remote):
    with RemoteUploader(remote, executor=executor, stage=stage) as uploader:
        future = uploader.upload_file_async("a/b.bin", local(content=b"x" * 3 * MIB))
        done = future.result(60)
        assert (done.path, done.size) == ("a/b.bin", 3 * MIB)
        uploader.check_workers()
    assert stored(remote) == {"a/b.bin": b"x" * 3 * MIB}


@pytest.mark.parametrize("executor", ["thread", "process"])
def test_a_forked_child_that_ends_leaves_the_uploads_of_its_parent(executor, local, remote, tmp_path):
    """`with RemoteUploader(...)`, a fork, and a child that unwinds: threads, copies and processes are the parent's."""
    with RemoteUploader(remote, executor=executor, staging_dir=tmp_path) as uploader:
        release = hold(uploader)
        futures = [uploader.upload_file_async(name, local(name, name.encode())) for name in ("a", "b", "c")]
        child = os.fork()
        if not child:
            code = 1
            signal.alarm(20)  # it would wait for threads that it does not have
            try:
                with pytest.raises(ConfigurationError, match="parent process"):
                    uploader.wait()
                uploader.close()
                code = 0
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        release.set()
        assert [future.result(60).path for future in futures] == ["a", "b", "c"]
    assert stored(remote) == {name: name.encode() for name in ("a", "b", "c")}


@pytest.mark.s3
@pytest.mark.parametrize("executor", ["thread", "process"])
def test_uploads_to_s3(executor, local, s3_filesystem, proxy):
    place = f"{BUCKET}/uploader-{executor}"
    with RemoteUploader(place, s3_filesystem, executor=executor) as uploader:
        uploader.upload_file_async("small", local("small", b"s"))
        uploader.upload_file_async("large", local("large", b"l" * (20 * MIB + 1)))
    store = open_uri(place, s3_filesystem)
    assert store.read("small") == b"s"
    assert store.read("large") == b"l" * (20 * MIB + 1)
    assert {file.path for file in store.list()} == {"small", "large"}


@pytest.mark.s3
def test_a_uri_will_do(local, s3_uri):
    with RemoteUploader(s3_uri("uploader-uri")) as uploader:
        uploader.upload_file_async("f", local())
    assert open_uri(s3_uri("uploader-uri")).read("f") == b"content"


@pytest.mark.parametrize("workers", [1, 8])
@pytest.mark.parametrize("place", ["local", pytest.param("s3", marks=pytest.mark.s3)])
def test_200_files(workers, place, local, remote, proxy):
    filesystem = None if place == "local" else filesystem_at(proxy.endpoint)
    target = str(remote) if place == "local" else f"{BUCKET}/uploader-200-{workers}"
    with RemoteUploader(target, filesystem, max_workers=workers) as uploader:
        futures = [uploader.upload_file_async(f"d{n % 7}/f{n}", local(f"f{n}", str(n).encode())) for n in range(200)]
        pointer = uploader.publish_after(futures, "latest", "all of them")
    assert pointer.result().size == 11
    store = open_uri(target, filesystem)
    assert {file.path for file in store.list()} == {f"d{n % 7}/f{n}" for n in range(200)} | {"latest"}
    assert all(store.read(f"d{n % 7}/f{n}") == str(n).encode() for n in range(0, 200, 17))


def test_uploads_without_ray(tmp_path, local):
    code = f"""
        import sys
        sys.modules["ray"] = None
        from ray_artifact_sync import RemoteUploader
        for executor in ("thread", "process"):
            with RemoteUploader({str(tmp_path / "r")!r}, executor=executor) as uploader:
                uploader.upload_file_async(executor, {str(local())!r})
    """
    done = run_python(code)
    assert done.returncode == 0, done.stderr
    assert set(stored(tmp_path / "r")) == {"thread", "process"}


def test_an_unguarded_main_is_not_run_again_in_the_workers(tmp_path, local):
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(f"""
            print("imported")
            from ray_artifact_sync import RemoteUploader
            with RemoteUploader({str(tmp_path / "r")!r}, executor="process") as uploader:
                uploader.upload_file_async("f", {str(local())!r}).result(60)
        """)
    )
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        check=False,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "imported\n"


# --- overwrite -----------------------------------------------------------------------------------


PLACES = ["local", pytest.param("rclone", marks=pytest.mark.s3), pytest.param("moto", marks=pytest.mark.s3)]


@pytest.fixture(params=PLACES)
def anywhere(request, tmp_path):
    """(remote_dir, storage_filesystem, proxy) on stores with and without conditional writes."""
    if request.param == "local":
        return str(tmp_path / "remote"), None, None
    proxy = request.getfixturevalue("proxy" if request.param == "rclone" else "moto_proxy")
    bucket = request.getfixturevalue(request.param).bucket
    return f"{bucket}/{request.node.name}", filesystem_at(proxy.endpoint), proxy


def test_without_overwrite_an_existing_file_stays(anywhere, local):
    place, filesystem, _ = anywhere
    with RemoteUploader(place, filesystem) as uploader:
        uploader.upload_file_async("f", local(content=b"first")).result(60)
        for content in (b"second", b"first"):
            again = uploader.upload_file_async("f", local(content=content))
            with pytest.raises(FileExistsError) as caught:
                again.result(60)
            assert isinstance(caught.value, ArtifactExistsError)
            assert "f" in str(caught.value)
            assert "overwrite=True" in str(caught.value)
        with pytest.raises(IncompleteSyncError):
            uploader.wait()
        assert open_uri(place, filesystem).read("f") == b"first"
        uploader.upload_file_async("f", local(content=b"third"), overwrite=True)
    assert open_uri(place, filesystem).read("f") == b"third"


def test_of_two_at_once_without_overwrite_one_wins(anywhere, local):
    place, filesystem, _ = anywhere
    with RemoteUploader(place, filesystem) as uploader:
        futures = [uploader.upload_file_async("f", local(f"{n}", b"%d" % n)) for n in range(8)]
        with pytest.raises(IncompleteSyncError):
            uploader.wait()
    assert [type(future.exception()) for future in futures] == [type(None)] + [ArtifactExistsError] * 7
    assert open_uri(place, filesystem).read("f") == b"0"


@pytest.mark.s3
@pytest.mark.parametrize("server", ["rclone", "moto"])
@pytest.mark.parametrize("times", [1, 6], ids=["client-retries", "we-retry"])
def test_an_attempt_may_replace_what_an_earlier_one_left(server, times, local, request):
    proxy = request.getfixturevalue("proxy" if server == "rclone" else "moto_proxy")
    place = f"{BUCKET}/{request.node.name}"
    with RemoteUploader(place, filesystem_at(proxy.endpoint), num_attempts=4) as uploader:
        # The server has the file, the client never hears of it.
        rule = proxy.reset("put_object", "/f", times=times, forward=True)
        uploader.upload_file_async("f", local(content=b"mine")).result(120)
        assert rule.hits == times if server == "rclone" else rule.hits >= 1
    assert open_uri(place, filesystem_at(proxy.endpoint)).read("f") == b"mine"


def test_uploads_to_one_path_keep_their_order(remote, local):
    with RemoteUploader(remote, max_workers=8) as uploader:
        for n in range(40):
            uploader.upload_file_async("f", local("f", str(n).encode()), overwrite=True)
            uploader.upload_file_async(f"other-{n}", local("g"))
    assert (remote / "f").read_bytes() == b"39"


# --- staging -------------------------------------------------------------------------------------


@pytest.mark.parametrize("executor", ["thread", "process"])
def test_a_staged_file_may_change_and_vanish_at_once(executor, local, remote, staging):
    with RemoteUploader(remote, executor=executor, max_workers=1, staging_dir=staging) as uploader:
        release = hold(uploader)
        first, second = local("one", b"before"), local("two", b"before")
        uploader.upload_file_async("one", first)
        uploader.upload_file_async("two", second)
        first.write_bytes(b"after!")
        second.unlink()
        release.set()
        uploader.wait()
        assert [path.name for path in next(staging.iterdir()).iterdir()] == ["lock"]
    assert stored(remote) == {"one": b"before", "two": b"before"}
    assert list(staging.iterdir()) == []


def test_without_staging_a_file_that_is_gone_fails_alone(local, remote):
    with RemoteUploader(remote, stage=False, max_workers=1) as uploader:
        release = hold(uploader)
        gone = local("gone")
        future = uploader.upload_file_async("gone", gone)
        uploader.upload_file_async("there", local("there"))
        gone.unlink()
        release.set()
        with pytest.raises(IncompleteSyncError) as caught:
            uploader.wait()
        assert isinstance(future.exception(), FileNotFoundError)
        assert set(caught.value.failures) == {"gone"}
    assert set(stored(remote)) == {"there"}


@pytest.mark.parametrize("stage", [True, False])
def test_a_missing_local_file_is_said_at_once(stage, remote, tmp_path):
    with RemoteUploader(remote, stage=stage) as uploader, pytest.raises(FileNotFoundError):
        uploader.upload_file_async("f", tmp_path / "missing")


def test_staging_waits_for_room(local, remote, staging):
    with RemoteUploader(remote, max_workers=1, staging_dir=staging, max_staged_bytes=10) as uploader:
        release = hold(uploader)
        uploader.upload_file_async("one", local("one", b"x" * 6))
        second = threading.Thread(target=uploader.upload_file_async, args=("two", local("two", b"x" * 6)))
        second.start()
        second.join(0.3)
        assert second.is_alive(), "the second file does not fit beside the first"
        release.set()
        second.join(30)
        assert not second.is_alive()
    assert set(stored(remote)) == {"one", "two"}


def test_a_file_larger_than_the_staging_is_refused(local, remote, staging):
    with RemoteUploader(remote, staging_dir=staging, max_staged_bytes=10) as uploader:
        with pytest.raises(StagingError, match="max_staged_bytes"):
            uploader.upload_file_async("f", local(content=b"x" * 11))
        uploader.upload_file_async("g", local(content=b"x" * 10))
    assert set(stored(remote)) == {"g"}


def test_closing_ends_the_wait_for_room(local, remote):
    uploader = RemoteUploader(remote, max_workers=1, max_staged_bytes=10)
    release = hold(uploader)
    uploader.upload_file_async("one", local("one", b"x" * 6))
    errors = []

    def second():
        try:
            uploader.upload_file_async("two", local("two", b"x" * 6))
        except ArtifactSyncError as error:
            errors.append(error)

    thread = threading.Thread(target=second)
    thread.start()
    time.sleep(0.1)
    uploader.close()
    thread.join(30)
    assert not thread.is_alive()
    assert "closed" in str(errors[0])
    release.set()


def test_a_full_disk_is_a_clear_error_and_leaves_nothing(small_disk, local, remote):
    with RemoteUploader(remote, staging_dir=small_disk) as uploader:
        with pytest.raises(StagingError, match="No space left") as caught:
            uploader.upload_file_async("large", local("large", os.urandom(2 * MIB)))
        assert caught.value.errno == errno.ENOSPC
        assert pickle.loads(pickle.dumps(caught.value)).errno == errno.ENOSPC
        assert [path.name for path in next(small_disk.iterdir()).iterdir()] == ["lock"]
        uploader.upload_file_async("small", local("small", b"s" * 1000))
    assert set(stored(remote)) == {"small"}


def test_the_copy_fails_as_a_full_disk_does(local, remote, staging, monkeypatch):
    def full(source, target):
        os.write(target, b"a part")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("ray_artifact_sync.uploader.copy_data", full)
    with RemoteUploader(remote, staging_dir=staging) as uploader:
        with pytest.raises(StagingError) as caught:
            uploader.upload_file_async("f", local())
        assert caught.value.errno == errno.ENOSPC
        assert [path.name for path in next(staging.iterdir()).iterdir()] == ["lock"]
        assert uploader._staging._used == 0


def test_what_a_killed_process_staged_is_removed_later(local, remote, staging, monkeypatch):
    code = f"""
        import os, signal
        from ray_artifact_sync import RemoteUploader
        uploader = RemoteUploader({str(remote)!r}, staging_dir={str(staging)!r})
        uploader._staging.copy({str(local())!r})
        os.kill(os.getpid(), signal.SIGKILL)
    """
    assert run_python(code).returncode == -signal.SIGKILL
    left = next(staging.iterdir())
    with RemoteUploader(remote, staging_dir=staging):
        assert left.exists(), "it might have been made a moment ago"
    os.utime(left, (1, 1))
    living = RemoteUploader(remote, staging_dir=staging)
    assert not left.exists()
    os.utime(living._staging._dir, (1, 1))
    with RemoteUploader(remote, staging_dir=staging):
        assert os.path.exists(living._staging._dir), "its owner lives"
    living.close()
    assert list(staging.iterdir()) == []


# --- failures ------------------------------------------------------------------------------------


@pytest.mark.s3
@pytest.mark.parametrize("executor", ["thread", "process"])
def test_one_refused_file_does_not_stop_the_others(executor, local, proxy, s3_filesystem):
    place = f"{BUCKET}/uploader-refused-{executor}"
    uploader = RemoteUploader(place, s3_filesystem, executor=executor)
    proxy.fail("put_object", "bad", status=403)
    futures = {name: uploader.upload_file_async(name, local(name)) for name in ("a", "bad-1", "b", "bad-2", "c")}
    with pytest.raises(IncompleteSyncError) as caught:
        uploader.wait()
    assert set(caught.value.failures) == {"bad-1", "bad-2"}
    assert all(isinstance(error, StoragePermissionError) for error in caught.value.failures.values())
    assert "bad-" in str(caught.value)
    assert isinstance(futures["bad-1"].exception(), PermissionError)
    uploader.wait_and_close()  # said once
    assert {file.path for file in open_uri(place, s3_filesystem).list()} == {"a", "b", "c"}


@pytest.mark.s3
@pytest.mark.parametrize("kind", ["create_multipart", "upload_part", "complete_multipart"])
def test_a_refused_part_is_an_error(kind, local, proxy, s3_filesystem):
    place = f"{BUCKET}/uploader-part-{kind}"
    uploader = RemoteUploader(place, s3_filesystem)
    proxy.fail(kind, "large", status=403)
    future = uploader.upload_file_async("large", local(content=b"x" * 20 * MIB))
    assert isinstance(future.exception(60), StoragePermissionError)
    with pytest.raises(IncompleteSyncError):
        uploader.wait_and_close()
    assert open_uri(place, s3_filesystem).stat("large") is None


@pytest.mark.s3
@pytest.mark.parametrize("executor", ["thread", "process"])
def test_two_503_then_success(executor, local, proxy, s3_filesystem):
    with RemoteUploader(f"{BUCKET}/uploader-503-{executor}", s3_filesystem, executor=executor) as uploader:
        rule = proxy.fail("put_object", "/f", status=503, times=2)
        assert uploader.upload_file_async("f", local()).result(60).size == 7
    assert rule.hits == 2


@pytest.mark.s3
def test_a_server_that_always_says_503_fails_after_the_attempts(local, proxy, s3_filesystem):
    uploader = RemoteUploader(f"{BUCKET}/uploader-503-ever", s3_filesystem, num_attempts=2)
    rule = proxy.fail("put_object", "/f", status=503)
    error = uploader.upload_file_async("f", local()).exception(120)
    assert isinstance(error, StorageError)
    assert "503" in str(error)
    assert rule.hits == 2  # one for each attempt: the client itself does not repeat a conditional write
    with pytest.raises(IncompleteSyncError):
        uploader.wait_and_close()


def test_check_workers_does_not_block_and_raises_the_first(local, remote):
    uploader = RemoteUploader(remote, max_workers=1)
    release = hold(uploader)
    (remote / "dir" / "x").mkdir(parents=True)
    uploader.upload_file_async("dir", local())
    uploader.check_workers()
    release.set()
    wait_until(lambda: uploader._crew.unfinished == 0)
    for _ in range(2):
        with pytest.raises(StorageError, match="dir"):
            uploader.check_workers()
    with pytest.raises(IncompleteSyncError):
        uploader.wait()
    uploader.check_workers()
    uploader.close()


def test_wait_has_a_timeout(local, remote):
    with RemoteUploader(remote) as uploader:
        release = hold(uploader)
        uploader.upload_file_async("f", local())
        with pytest.raises(SyncTimeoutError, match="1 uploads"):
            uploader.wait(timeout=0.05)
        release.set()


def test_an_error_in_the_body_goes_on_and_the_uploads_finish(local, remote, caplog):
    (remote / "dir" / "x").mkdir(parents=True)
    with pytest.raises(KeyError), RemoteUploader(remote) as uploader:  # noqa: PT012
        uploader.upload_file_async("f", local())
        uploader.upload_file_async("dir", local())
        raise KeyError("body")
    assert set(stored(remote)) == {"f"}
    assert "dir" in caplog.text


def test_close_cancels_what_has_not_begun(local, remote):
    uploader = RemoteUploader(remote, max_workers=1)
    release = hold(uploader)
    first, second = (uploader.upload_file_async(name, local(name)) for name in "ab")
    wait_until(first.running)
    uploader.close()
    with pytest.raises(CancelledError):
        second.result(5)
    release.set()
    with pytest.raises(ArtifactSyncError, match="closed"):
        uploader.upload_file_async("c", local())
    uploader.close()


def test_a_cancelled_upload_is_no_failure(local, remote):
    with RemoteUploader(remote, max_workers=1) as uploader:
        release = hold(uploader)
        uploader.upload_file_async("a", local("a"))
        assert uploader.upload_file_async("b", local("b")).cancel()
        release.set()
    assert set(stored(remote)) == {"a"}


# --- publish_after -------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 3])
def test_the_pointer_comes_after_the_files(workers, local, remote):
    with RemoteUploader(remote, max_workers=workers) as uploader:
        release = hold(uploader)
        futures = [uploader.upload_file_async(f"step-1/{n}", local(f"{n}")) for n in range(5)]
        pointer = uploader.publish_after(futures, "latest", "step-1")
        assert not pointer.done()
        assert not (remote / "latest").exists()
        release.set()
        pointer.result(60)
        assert all(future.done() for future in futures)
    assert (remote / "latest").read_text() == "step-1"


def test_the_pointer_is_not_written_after_a_failure(local, remote):
    uploader = RemoteUploader(remote, max_workers=1)
    (remote / "step-2" / "bad" / "x").mkdir(parents=True)
    uploader.publish_after([], "latest", b"step-1").result(60)
    futures = [uploader.upload_file_async(f"step-2/{name}", local(name)) for name in ("good", "bad", "fine")]
    pointer = uploader.publish_after(futures, "latest", b"step-2")
    with pytest.raises(IncompleteSyncError) as caught:
        uploader.wait()
    assert set(caught.value.failures) == {"step-2/bad", "latest"}
    with pytest.raises(ArtifactSyncError, match=r"latest was not written: 1 of the 3"):
        pointer.result()
    assert (remote / "latest").read_bytes() == b"step-1"
    # The next one is not held up by it.
    with uploader:
        saved = uploader.upload_file_async("step-3/good", local())
        uploader.publish_after([saved], "latest", b"step-3")
    assert (remote / "latest").read_bytes() == b"step-3"


def test_a_cancelled_upload_holds_the_pointer_back(local, remote):
    uploader = RemoteUploader(remote, max_workers=1)
    release = hold(uploader)
    first, second = (uploader.upload_file_async(name, local(name)) for name in "ab")
    pointer = uploader.publish_after([first, second], "latest", "ab")
    second.cancel()
    release.set()
    assert isinstance(pointer.exception(60), ArtifactSyncError)
    with pytest.raises(IncompleteSyncError):
        uploader.wait_and_close()
    assert not (remote / "latest").exists()


def test_pointers_to_one_path_are_written_in_order(remote):
    slow, fast = Future(), Future()
    with RemoteUploader(remote) as uploader:
        older = uploader.publish_after([slow], "latest", "1")
        newer = uploader.publish_after([fast], "latest", "2")
        fast.set_result(None)
        time.sleep(0.1)
        assert not newer.done()
        slow.set_result(None)
        older.result(60)
    assert (remote / "latest").read_text() == "2"


# --- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{"executor": "fork"}, {"max_workers": 0}, {"num_attempts": 0}, {"max_staged_bytes": 0}]
)
def test_impossible_options(options, remote):
    with pytest.raises(ConfigurationError):
        RemoteUploader(remote, **options)


@pytest.mark.parametrize("path", ["/abs", "../up", "a//b", "", ".ray_artifact_sync/writer.json"])
def test_impossible_remote_paths(path, remote, local):
    with RemoteUploader(remote) as uploader, pytest.raises((InvalidPathError, ConfigurationError)):
        uploader.upload_file_async(path, local())


@pytest.mark.s3
def test_wrong_credentials_are_an_error_at_once(rclone):
    from pyarrow import fs as pafs

    filesystem = pafs.S3FileSystem(
        access_key="WRONG",
        secret_key="NOBODYKNOWSTHISSECRET",
        endpoint_override=rclone.endpoint.removeprefix("http://"),
        scheme="http",
        region=rclone.region,
    )
    with pytest.raises(StorageError) as caught:
        RemoteUploader(f"{BUCKET}/denied", filesystem)
    assert f"{BUCKET}/denied" in str(caught.value)
    assert "NOBODYKNOWSTHISSECRET" not in str(caught.value)


@pytest.mark.s3
def test_no_right_to_write_is_an_error_at_once(proxy, s3_filesystem):
    proxy.fail("put_object", status=403)
    with pytest.raises(StoragePermissionError, match=f"cannot write to S3 {BUCKET}/readonly"):
        RemoteUploader(f"{BUCKET}/readonly", s3_filesystem)


def test_no_right_to_write_to_a_directory(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="RemoteUploader cannot write to directory"):
        RemoteUploader(tmp_path / "file")


@pytest.mark.s3
def test_the_right_to_write_may_come_without_the_right_to_delete(proxy, s3_filesystem, local):
    proxy.fail("delete_many", status=403)
    proxy.fail("delete", status=403)
    with RemoteUploader(f"{BUCKET}/nodelete", s3_filesystem) as uploader:
        uploader.upload_file_async("f", local())
    assert open_uri(f"{BUCKET}/nodelete", s3_filesystem).read("f") == b"content"


def test_the_check_leaves_nothing_behind(remote):
    RemoteUploader(remote).close()
    assert stored(remote) == {} if remote.exists() else True


def test_a_filesystem_that_cannot_be_pickled_is_refused_at_once(tmp_path):
    from fsspec.implementations.local import LocalFileSystem

    class Unpicklable(LocalFileSystem):
        cachable = False

        def __reduce__(self):
            raise TypeError("no")

    with pytest.raises(ConfigurationError, match="executor='thread'"):
        RemoteUploader(str(tmp_path), Unpicklable(), executor="process")


def test_it_cannot_be_pickled_itself(remote):
    with RemoteUploader(remote) as uploader, pytest.raises(TypeError, match="RemoteUploader"):
        pickle.dumps(uploader)


# --- processes -----------------------------------------------------------------------------------


@pytest.mark.s3
def test_a_killed_worker_fails_its_upload_and_is_replaced(local, proxy, s3_filesystem):
    with RemoteUploader(f"{BUCKET}/killed", s3_filesystem, executor="process", max_workers=1) as uploader:
        hanging = proxy.hang("put_object", "/first", times=1)
        first = uploader.upload_file_async("first", local())
        second = uploader.upload_file_async("second", local())
        assert hanging.reached.wait(60)
        (runner,) = uploader._crew.runners()
        os.kill(runner.pid, signal.SIGKILL)
        error = first.exception(30)
        assert isinstance(error, WorkerDiedError)
        assert "signal 9" in str(error)
        assert second.result(60).size == 7
        with pytest.raises(IncompleteSyncError):
            uploader.wait()
        hanging.release()


def test_an_idle_worker_that_is_killed_is_replaced(local, remote):
    with RemoteUploader(remote, executor="process", max_workers=1) as uploader:
        uploader.upload_file_async("first", local()).result(60)
        (runner,) = uploader._crew.runners()
        os.kill(runner.pid, signal.SIGKILL)
        wait_until(lambda: not is_alive(runner.pid))
        assert uploader.upload_file_async("second", local()).result(60).size == 7


PARENT = """
    import sys, time
    sys.path.insert(0, {root!r})
    from tests.support.s3_servers import filesystem_at
    from ray_artifact_sync import RemoteUploader
    uploader = RemoteUploader({place!r}, filesystem_at({endpoint!r}), executor="process", max_workers=2)
    uploader.upload_file_async("idle", {file!r}).result(60)
    uploader.upload_file_async("hanging", {file!r})
    uploader.upload_file_async("hanging-too", {file!r})
    while len([r for r in uploader._crew.runners() if r.pid]) < 2:
        time.sleep(0.01)
    print([r.pid for r in uploader._crew.runners()], flush=True)
    {then}
"""


@pytest.mark.s3
@pytest.mark.parametrize("how", ["SIGKILL", "SIGTERM", "exit"])
def test_workers_end_with_their_parent(how, local, proxy):
    hanging = proxy.hang("put_object", "hanging")
    code = PARENT.format(
        root=str(ROOT),
        place=f"{BUCKET}/orphans-{how}",
        endpoint=proxy.endpoint,
        file=str(local()),
        then="sys.exit(0)" if how == "exit" else "time.sleep(60)",
    )
    parent = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True)
    try:
        pids = json.loads(parent.stdout.readline())
        assert len(pids) == 2
        assert hanging.reached.wait(60)
        if how != "exit":
            assert all(is_alive(pid) for pid in pids)
            parent.send_signal(getattr(signal, how))
        parent.wait(20)
        wait_until(lambda: not any(is_alive(pid) for pid in pids), 60)
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()
        hanging.release()


# --- the end of the interpreter ------------------------------------------------------------------


def run_python(code, timeout=120):
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        check=False,
        text=True,
        timeout=timeout,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


@pytest.mark.s3
def test_an_upload_that_hangs_does_not_keep_the_interpreter(local, proxy, tmp_path):
    hanging = proxy.hang("put_object", "/f")
    code = f"""
        import tempfile
        tempfile.tempdir = {str(tmp_path)!r}
        from tests.support.s3_servers import filesystem_at
        from ray_artifact_sync import RemoteUploader
        uploader = RemoteUploader({BUCKET + "/exit"!r}, filesystem_at({proxy.endpoint!r}), max_workers=1)
        future = uploader.upload_file_async("f", {str(local())!r})
        uploader.upload_file_async("g", {str(local())!r})
        while not future.running():
            pass
    """
    started = time.monotonic()
    done = run_python(code)
    assert time.monotonic() - started < 20
    assert done.returncode == 0, done.stderr
    assert "ends with 2 unfinished uploads" in done.stderr
    assert "wait_and_close" in done.stderr
    assert not list(tmp_path.glob("ray-artifact-sync-*"))
    hanging.release()


def test_an_uploader_that_was_waited_for_says_nothing_at_exit(local, remote):
    code = f"""
        from ray_artifact_sync import RemoteUploader
        uploader = RemoteUploader({str(remote)!r})
        uploader.upload_file_async("f", {str(local())!r})
        uploader.wait()
    """
    done = run_python(code)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_dropped_uploader_finishes_and_is_collected(local, remote, staging):
    uploader = RemoteUploader(remote, staging_dir=staging)
    release = hold(uploader)
    future = uploader.upload_file_async("f", local())
    gone = weakref.ref(uploader)
    del uploader
    release.set()
    assert future.result(30).size == 7
    future = None
    wait_until(lambda: gone() is None, 20)
    wait_until(lambda: not list(staging.iterdir()))


def test_a_forked_child_is_told(remote, local):
    with RemoteUploader(remote) as uploader:
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                uploader.upload_file_async("f", local())
            except ConfigurationError:
                os.write(writer, b"told")
            os._exit(0)
        os.waitpid(child, 0)
        os.close(writer)
        assert os.read(reader, 10) == b"told"
        os.close(reader)


def test_the_example_runs(tmp_path):
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "remote_uploader.py"), str(tmp_path / "remote")],
        capture_output=True,
        check=False,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "remote" / "latest").read_text() == "step-3"
    shutil.rmtree(tmp_path / "remote")
