"""The contestants: each uploads or downloads one directory to or from `bucket/prefix`."""

from __future__ import annotations

import http.client
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import obstore
import s3fs
from obstore.store import S3Store
from pyarrow import fs as pafs
from ray.train._internal import storage as ray_storage

from ray_artifact_sync.concurrency import Deadline
from ray_artifact_sync.directory_sync import DirectorySync, sync_directory_down
from ray_artifact_sync.layout import make_token
from ray_artifact_sync.options import SyncOptions
from ray_artifact_sync.session import TrialArtifacts
from ray_artifact_sync.stores import open_store
from release_tests.benchmarks.common import MIB, Place
from tests.support.s3_servers import KEY, REGION, SECRET, filesystem_at

Run = Callable[[str], object]
CONCURRENCY = SyncOptions().max_concurrency

# This server answers 500 to the directory markers that Ray and pyarrow write, and they try again for a second. The
# directories are made beforehand, and the time is not held against them.
_ray_create_directory = ray_storage._create_directory


def _without_markers(place: Place) -> None:
    ray_storage._create_directory = _ray_create_directory if place.proxy else (lambda **_options: None)


# --- ours ----------------------------------------------------------------------------------------


def session(working_dir: str, store: Any, **options: Any) -> TrialArtifacts:
    """A new attempt of a trial, as Ray's adapters make it; no background syncs."""
    artifacts = TrialArtifacts(
        working_dir,
        store,
        trial="trial",
        token=make_token(time.time_ns()),
        options=SyncOptions(**{"sync_period": 3600, **options}),
    )
    artifacts.begin(set_aside=False)
    return artifacts


def ours(directory: str, place: Place, **options: Any) -> Run:
    """`TrialArtifacts.sync()` of a fresh trial dir: claim, scan, hash, plan, upload, commit of the manifest."""

    def run(prefix: str) -> None:
        store = open_store(filesystem_at(place.endpoint), f"{place.bucket}/{prefix}")
        artifacts = session(directory, store, **options)
        artifacts.sync()
        artifacts.close(flush=False)
        shutil.rmtree(os.path.join(directory, ".ray_artifact_sync"))

    return run


def our_directory_sync(directory: str, place: Place) -> Run:
    """`DirectorySync`, which the driver and `ArtifactSyncer().sync_up` use."""

    def run(prefix: str) -> None:
        store = open_store(filesystem_at(place.endpoint), f"{place.bucket}/{prefix}")
        DirectorySync(directory, store, options=SyncOptions(), verify_remote=False).sync_up(Deadline())

    return run


# --- others --------------------------------------------------------------------------------------


def rays(directory: str, place: Place) -> Run:
    def run(prefix: str) -> None:
        _without_markers(place)
        place.directory(prefix)
        ray_storage._upload_to_fs_path(directory, filesystem_at(place.endpoint), f"{place.bucket}/{prefix}")

    return run


def arrow(directory: str, place: Place) -> Run:
    """`copy_files` with its threads, which Ray turns off."""

    def run(prefix: str) -> None:
        place.directory(prefix)
        pafs.copy_files(
            directory,
            f"{place.bucket}/{prefix}",
            destination_filesystem=filesystem_at(place.endpoint),
            use_threads=True,
        )

    return run


def fsspec_s3(directory: str, place: Place) -> Run:
    def run(prefix: str) -> None:
        filesystem = s3fs.S3FileSystem(
            key=KEY, secret=SECRET, endpoint_url=place.endpoint, client_kwargs={"region_name": REGION}
        )
        filesystem.put(f"{directory}/", f"{place.bucket}/{prefix}/", recursive=True)

    return run


def rclone_remote(place: Place) -> str:
    return (
        f":s3,provider=Other,access_key_id={KEY},secret_access_key={SECRET},region={REGION},"
        f"endpoint='{place.endpoint}',force_path_style=true:{place.bucket}"
    )


def rclone(directory: str, place: Place, *extra: str) -> Run:
    """`rclone copy` with as many transfers as we have requests; its start is part of it (some 50 ms)."""

    def run(prefix: str) -> None:
        _rclone("copy", directory, f"{rclone_remote(place)}/{prefix}", *extra)

    return run


def rclone_down(place: Place, prefix: str) -> Run:
    def run(directory: str) -> None:
        _rclone("copy", f"{rclone_remote(place)}/{prefix}", directory)

    return run


def _rclone(*arguments: str) -> None:
    program = Path(sys.executable).with_name("rclone")
    flags = ("--transfers", str(CONCURRENCY), "--checkers", str(CONCURRENCY), "--config", os.devnull, "-q")
    subprocess.run([program, *arguments, *flags], check=True)


def obstore_client(place: Place) -> S3Store:
    return S3Store(
        place.bucket,
        config={
            "region": REGION,
            "endpoint": place.endpoint,
            "access_key_id": KEY,
            "secret_access_key": SECRET,
            "virtual_hosted_style_request": False,
        },
        client_options={"allow_http": True, "timeout": timedelta(seconds=120)},
    )


def bare_obstore(directory: str, place: Place) -> Run:
    """obstore in a thread pool: read, put; no hash, no manifest, no retry of its own."""

    def run(prefix: str) -> None:
        client = obstore_client(place)

        def put(name: str) -> None:
            with open(os.path.join(directory, name), "rb") as file:
                obstore.put(client, f"{prefix}/{name}", file.read(), use_multipart=False)

        with ThreadPoolExecutor(CONCURRENCY) as pool:
            list(pool.map(put, os.listdir(directory)))

    return run


def obstore_multipart(path: str, place: Place) -> Run:
    """obstore's own multipart upload of one file, as fast as its defaults go."""

    def run(prefix: str) -> None:
        obstore.put(obstore_client(place), f"{prefix}/{os.path.basename(path)}", Path(path))

    return run


# --- the limit: HTTP and nothing else --------------------------------------------------------------


class RawHttp:
    """PUTs that were signed beforehand, over kept connections: what the server and the network allow.

    Signing is not part of the time. It signs `UNSIGNED-PAYLOAD`, so that no body is hashed either.
    """

    def __init__(self, place: Place) -> None:
        from botocore.auth import S3SigV4Auth
        from botocore.credentials import Credentials

        self.host = place.endpoint.removeprefix("http://")
        self.bucket = place.bucket
        self._auth = S3SigV4Auth(Credentials(KEY, SECRET), "s3", REGION)

    def sign(self, method: str, key: str, query: str = "") -> tuple[str, dict[str, str]]:
        from botocore.awsrequest import AWSRequest

        target = f"/{self.bucket}/{key}" + (f"?{query}" if query else "")
        request = AWSRequest(
            method, f"http://{self.host}{target}", headers={"X-Amz-Content-SHA256": "UNSIGNED-PAYLOAD"}
        )
        request.context["payload_signing_enabled"] = False
        self._auth.add_auth(request)
        return target, dict(request.headers)

    def files(self, directory: str, concurrency: int = CONCURRENCY) -> tuple[Run, Callable[[str], None]]:
        """(upload, prepare): `prepare` signs for a prefix."""
        signed: dict[str, list[tuple[str, str, dict[str, str]]]] = {}

        def prepare(prefix: str) -> None:
            signed[prefix] = [
                (os.path.join(directory, name), *self.sign("PUT", f"{prefix}/{name}")) for name in os.listdir(directory)
            ]

        def run(prefix: str) -> None:
            work = iter(signed.pop(prefix))
            self._crew(work, concurrency, self._put_file)

        return run, prepare

    def _put_file(self, connection: http.client.HTTPConnection, job: tuple[str, str, dict[str, str]]) -> None:
        path, target, headers = job
        with open(path, "rb") as file:
            self._request(connection, "PUT", target, file.read(), headers)

    def parts(self, path: str, key: str, part: int = 32 * MIB, concurrency: int = 4) -> None:
        """One file as a multipart upload."""
        size = os.path.getsize(path)
        control = http.client.HTTPConnection(self.host)
        target, headers = self.sign("POST", key, "uploads=")
        _, body = self._request(control, "POST", target, b"", headers)
        upload = body.split(b"<UploadId>")[1].split(b"<")[0].decode()
        numbers = range(1, -(-size // part) + 1)
        jobs = [(n, *self.sign("PUT", key, f"partNumber={n}&uploadId={upload}")) for n in numbers]
        etags: dict[int, str] = {}
        descriptor = os.open(path, os.O_RDONLY)

        def put(connection: http.client.HTTPConnection, job: tuple[int, str, dict[str, str]]) -> None:
            number, target, headers = job
            data = os.pread(descriptor, part, (number - 1) * part)
            etags[number] = self._request(connection, "PUT", target, data, headers)[0]["etag"]

        self._crew(iter(jobs), concurrency, put)
        os.close(descriptor)
        parts = "".join(f"<Part><PartNumber>{n}</PartNumber><ETag>{etags[n]}</ETag></Part>" for n in numbers)
        target, headers = self.sign("POST", key, f"uploadId={upload}")
        body = f"<CompleteMultipartUpload>{parts}</CompleteMultipartUpload>".encode()
        self._request(control, "POST", target, body, headers)

    def get(self, key: str, path: str, part: int = 32 * MIB, concurrency: int = 4) -> None:
        """One object by parallel ranges."""
        control = http.client.HTTPConnection(self.host)
        target, headers = self.sign("HEAD", key)
        size = int(self._request(control, "HEAD", target, None, headers)[0]["content-length"])
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)

        def fetch(connection: http.client.HTTPConnection, start: int) -> None:
            target, headers = self.sign("GET", key)
            headers["Range"] = f"bytes={start}-{min(start + part, size) - 1}"
            connection.request("GET", target, headers=headers)
            response = connection.getresponse()
            buffer = bytearray(MIB)
            while count := response.readinto(buffer):
                os.pwrite(descriptor, memoryview(buffer)[:count], start)
                start += count

        self._crew(iter(range(0, size, part)), concurrency, fetch)
        os.close(descriptor)

    def _request(
        self, connection: http.client.HTTPConnection, method: str, target: str, body: bytes | None, headers: Any
    ) -> tuple[dict[str, str], bytes]:
        for _ in range(5):
            connection.request(method, target, body=body, headers=headers)
            response = connection.getresponse()
            data = response.read()
            if response.status < 300:
                return {name.lower(): value for name, value in response.headers.items()}, data
            if response.status < 500:
                break
        raise RuntimeError(f"{method} {target}: {response.status} {data[:300]!r}")

    def _crew(self, work: Any, concurrency: int, act: Callable[..., None]) -> None:
        lock, failed = threading.Lock(), []

        def loop() -> None:
            connection = http.client.HTTPConnection(self.host)
            try:
                while True:
                    with lock:
                        job = next(work, None)
                    if job is None:
                        return
                    act(connection, job)
            except Exception as error:
                failed.append(error)
            finally:
                connection.close()

        threads = [threading.Thread(target=loop) for _ in range(concurrency)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failed:
            raise failed[0]


# --- down ----------------------------------------------------------------------------------------


def ours_down(place: Place, prefix: str) -> Run:
    """`sync_directory_down`: every byte verified against the manifest."""

    def run(directory: str) -> None:
        store = open_store(filesystem_at(place.endpoint), f"{place.bucket}/{prefix}")
        sync_directory_down(store, directory, options=SyncOptions(), deadline=Deadline())

    return run


def our_restore(place: Place, prefix: str, checkpoint: str) -> Run:
    """`TrialArtifacts.restore` into an empty working dir."""

    def run(directory: str) -> None:
        os.makedirs(directory, exist_ok=True)
        store = open_store(filesystem_at(place.endpoint), f"{place.bucket}/{prefix}")
        artifacts = session(directory, store)
        artifacts.restore(checkpoint, fresh=True)
        artifacts.close(flush=False)

    return run


def rays_down(place: Place, prefix: str) -> Run:
    def run(directory: str) -> None:
        ray_storage._download_from_fs_path(filesystem_at(place.endpoint), f"{place.bucket}/{prefix}", directory)

    return run


def arrow_down(place: Place, prefix: str) -> Run:
    def run(directory: str) -> None:
        os.makedirs(directory, exist_ok=True)
        pafs.copy_files(f"{place.bucket}/{prefix}", directory, source_filesystem=filesystem_at(place.endpoint))

    return run


def obstore_down(place: Place, key: str) -> Run:
    """obstore's stream of one object into a file."""

    def run(directory: str) -> None:
        os.makedirs(directory, exist_ok=True)
        with open(os.path.join(directory, os.path.basename(key)), "wb") as file:
            file.writelines(obstore.get(obstore_client(place), key).stream(min_chunk_size=4 * MIB))

    return run
