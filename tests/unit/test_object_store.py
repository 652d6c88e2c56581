"""The obstore store against servers that misbehave."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import threading
import time

import pytest

from ray_artifact_sync.errors import (
    ArtifactNotFoundError,
    PreconditionFailedError,
    StorageError,
    StoragePermissionError,
)
from ray_artifact_sync.stores import cloud, open_store
from ray_artifact_sync.stores.clients import ClientLimits
from ray_artifact_sync.stores.cloud import CloudStore, part_size, storage_error
from tests.support.s3_servers import BUCKET, SECRET, filesystem_at

pytestmark = pytest.mark.s3

MIB = 1024 * 1024
QUICK = ClientLimits(request_timeout=1.0, retries=2, retry_timeout=3.0)


@pytest.fixture
def store(proxy, request):
    store = open_store(filesystem_at(proxy.endpoint), f"{BUCKET}/object/{request.node.name}", limits=QUICK)
    assert isinstance(store, CloudStore)
    proxy.reset_counts()
    return store


@pytest.fixture
def moto_store(moto_proxy, request):
    name = f"{BUCKET}/object/{request.node.name}"
    return open_store(filesystem_at(moto_proxy.endpoint), name, limits=QUICK)


def big(size=20 * MIB):
    for start in range(0, size, MIB):
        yield bytes([start // MIB % 251]) * min(MIB, size - start)


# --- how many requests ---------------------------------------------------------------------------


def test_a_small_file_is_one_request(store, proxy):
    store.put("a", b"x" * 8 * MIB)
    store.put("b", iter([b"x" * MIB] * 8))
    assert proxy.counts == {"put_object": 2}
    proxy.reset_counts()
    assert len(store.read("a")) == 8 * MIB
    assert proxy.counts == {"get_object": 1}


def test_a_large_file_is_parts(store, proxy):
    store.put("a", big())
    assert proxy.counts == {"create_multipart": 1, "upload_part": 3, "complete_multipart": 1}
    assert proxy.bytes_in["upload_part"] == 20 * MIB


def test_a_copy_sends_no_data(store, proxy):
    store.put("a", big())
    proxy.reset_counts()
    store.copy("a", "b")
    assert proxy.counts == {"copy_object": 1}
    assert not sum(proxy.bytes_in.values())


def test_deletes_are_batched(store, proxy):
    names = [f"d/{number}" for number in range(20)]
    for name in names:
        store.put(name, b"x")
    proxy.reset_counts()
    store.delete(names)
    assert proxy.counts == {"delete_many": 1}


def test_a_listing_of_directories_does_not_look_into_them(store, proxy):
    for number in range(5):
        store.put(f"checkpoint_{number}/deep/file", b"x")
    proxy.reset_counts()
    assert len(store.list_dirs()) == 5
    assert proxy.counts == {"list": 1}


def test_known_ranges_need_one_request(store, proxy):
    store.put("a", b"0123456789")
    proxy.reset_counts()
    assert b"".join(map(bytes, store.read_chunks("a", length=10))) == b"0123456789"
    assert b"".join(map(bytes, store.read_chunks("a", start=4, length=3))) == b"456"
    assert proxy.counts == {"get_object": 2}


def test_a_large_file_is_read_in_windows(store, proxy, monkeypatch):
    monkeypatch.setattr(cloud, "_WINDOW", 8 * MIB)
    store.put("a", big())
    proxy.reset_counts()
    found = hashlib.sha256(b"".join(map(bytes, store.read_chunks("a")))).digest()
    assert found == hashlib.sha256(b"".join(big())).digest()
    assert proxy.counts == {"get_object": 3}


def test_windows_are_read_ahead_and_memory_stays_flat(store, proxy, monkeypatch):
    monkeypatch.setattr(cloud, "_WINDOW", MIB)
    data = b"".join(big(20 * MIB + 5))
    store.put("a", data)
    proxy.reset_counts()
    proxy.latency = 0.05
    chunks = store.read_chunks("a", chunk_size=MIB)
    first = bytes(next(chunks))
    time.sleep(0.5)
    assert proxy.counts["get_object"] <= 1 + 4, "no more than the permits allow"
    assert first + b"".join(map(bytes, chunks)) == data
    assert proxy.most_in_flight > 1
    proxy.clear()
    assert b"".join(map(bytes, store.read_chunks("a", start=MIB - 1, length=9 * MIB))) == data[MIB - 1 : 10 * MIB - 1]


def test_all_permits_come_back(store, proxy, monkeypatch):
    monkeypatch.setattr(cloud, "_WINDOW", MIB)
    permits = threading.BoundedSemaphore(2)
    monkeypatch.setattr(cloud, "_ahead", permits)
    store.put("a", b"".join(big(9 * MIB)))
    for taken in (1, 3, 20):
        chunks = store.read_chunks("a", chunk_size=MIB)
        assert next(chunks)
        for _ in itertools.islice(chunks, taken):
            pass
        chunks.close()
    chunks = store.read_chunks("a", chunk_size=MIB)
    proxy.fail("get_object", status=403)
    with pytest.raises(StorageError):
        list(chunks)
    deadline = time.monotonic() + 20
    while permits._value < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert permits._value == 2


def test_part_sizes_stay_below_the_limit_of_parts():
    assert part_size(0) == 8 * MIB
    assert part_size(70 * 1024**3) == 8 * MIB
    for size in (100 * 1024**3, 5 * 1024**4):
        assert size / part_size(size) < 10_000
        assert part_size(size) % MIB == 0


# --- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        ("put_object", lambda: b"small"),
        ("create_multipart", big),
        ("upload_part", big),
        ("complete_multipart", big),
    ],
)
def test_a_refused_upload_raises_and_publishes_nothing(store, proxy, kind, data):
    store.put("file", b"old")
    proxy.fail(kind, status=403)
    with pytest.raises(StoragePermissionError, match="AccessDenied") as caught:
        store.put("file", data())
    assert isinstance(caught.value, PermissionError)
    assert not caught.value.retryable
    proxy.clear()
    assert store.read("file") == b"old"
    assert [file.path for file in store.list()] == ["file"]


@pytest.mark.parametrize("status", [401, 403])
def test_refusals_of_every_other_call(store, proxy, status):
    store.put("file", b"x")
    proxy.fail(status=status)
    for act in (
        lambda: store.stat("file"),
        lambda: store.read("file"),
        lambda: list(store.list()),
        store.list_dirs,
        store.list_files,
        lambda: store.copy("file", "copy"),
        lambda: store.delete(["file"]),
    ):
        with pytest.raises(StoragePermissionError):
            act()


def test_a_bucket_that_is_not_there(proxy):
    store = open_store(filesystem_at(proxy.endpoint), "no-such-bucket/x", limits=QUICK)
    for act in (lambda: store.put("a", b"x"), lambda: list(store.list())):
        with pytest.raises(StorageError, match="NoSuchBucket") as caught:
            act()
        assert not isinstance(caught.value, ArtifactNotFoundError)
        assert not caught.value.retryable
    with pytest.raises(StorageError):
        store.read("a")


def test_wrong_credentials_do_not_show_in_the_error(proxy):
    from pyarrow import fs as pafs

    filesystem = pafs.S3FileSystem(
        access_key="TESTKEY000000001",
        secret_key="wrong-secret-value",
        region="us-east-1",
        scheme="http",
        endpoint_override=proxy.endpoint.removeprefix("http://"),
    )
    store = open_store(filesystem, f"{BUCKET}/x", limits=QUICK)
    with pytest.raises(StoragePermissionError) as caught:
        store.put("a", b"x")
    assert caught.value.__cause__ is None
    assert "wrong-secret-value" not in f"{caught.value!r}{store.description}{store.client!r}"


# --- what passes ---------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [500, 503, 429])
def test_throttling_passes(store, proxy, status):
    proxy.fail("put_object", status=status, times=2)
    store.put("a", b"x")
    assert proxy.counts["put_object"] == 3
    assert store.read("a") == b"x"


@pytest.mark.parametrize(("kind", "data"), [("put_object", lambda: b"x"), ("upload_part", big)])
def test_lasting_throttling_is_retryable(store, proxy, kind, data):
    proxy.fail(kind, status=503)
    with pytest.raises(StorageError) as caught:
        store.put("a", data())
    assert caught.value.retryable
    assert not isinstance(caught.value, StoragePermissionError)
    proxy.clear()
    assert store.stat("a") is None


def test_a_conflict_of_conditional_writes_is_retryable(store, proxy):
    """S3 answers 409 where two conditional writes meet: neither was judged."""
    proxy.fail("put_object", status=409, code="ConditionalRequestConflict")
    with pytest.raises(StorageError) as caught:
        store.put("a", b"x", if_absent=True)
    assert caught.value.retryable
    assert not isinstance(caught.value, PreconditionFailedError)


@pytest.mark.parametrize(("kind", "data"), [("put_object", lambda: b"x" * MIB), ("upload_part", big)])
def test_a_reset_in_mid_body(store, proxy, kind, data):
    proxy.reset(kind, after=1000, times=1)
    store.put("a", data())
    assert store.stat("a").size == sum(map(len, [data()] if kind == "put_object" else data()))
    proxy.reset(kind, after=1000)
    with pytest.raises(StorageError) as caught:
        store.put("b", data())
    assert caught.value.retryable
    proxy.clear()
    assert store.stat("b") is None


def test_a_lost_answer(store, proxy):
    """The server has the object, the client did not hear of it: the next try is the same again."""
    rule = proxy.reset("put_object", times=1, forward=True)
    store.put("a", b"x")
    assert rule.hits == 1
    assert store.read("a") == b"x"


def test_a_hang_ends_with_the_request_timeout(proxy, request):
    limits = ClientLimits(request_timeout=0.5, retries=1, retry_timeout=1.0)
    store = open_store(filesystem_at(proxy.endpoint), f"{BUCKET}/object/hang", limits=limits)
    rule = proxy.hang("put_object")
    begun = time.monotonic()
    with pytest.raises(StorageError) as caught:
        store.put("a", b"x")
    assert time.monotonic() - begun < 5
    assert caught.value.retryable
    assert rule.hits >= 1


def test_a_server_that_is_not_there(proxy):
    limits = ClientLimits(connect_timeout=0.5, retries=0)
    filesystem = filesystem_at("http://127.0.0.1:9")
    store = open_store(filesystem, f"{BUCKET}/x", limits=limits)
    with pytest.raises(StorageError) as caught:
        store.put("a", b"x")
    assert caught.value.retryable


# --- downloads -----------------------------------------------------------------------------------


def test_a_truncated_download_is_continued_or_refused(store, proxy):
    store.put("a", b"".join(big(6 * MIB)))
    proxy.truncate(after=MIB, times=1)
    assert len(store.read("a")) == 6 * MIB
    proxy.truncate(after=0)
    with pytest.raises(StorageError) as caught:
        store.read("a")
    assert caught.value.retryable


def test_a_corrupted_download_is_left_to_the_digest(store, proxy):
    """Nothing in S3's answer would tell: the session compares BLAKE3 digests."""
    store.put("a", b"0123456789")
    proxy.corrupt(after=4)
    assert store.read("a") == b"0123556789"


def test_a_file_that_is_replaced_while_it_is_read(moto_store, monkeypatch):
    """moto enforces If-Match on reads: windows that were not read ahead belong to another version."""
    monkeypatch.setattr(cloud, "_WINDOW", MIB)
    moto_store.put("a", b"1" * 8 * MIB)
    chunks = moto_store.read_chunks("a", chunk_size=MIB)
    next(chunks)
    moto_store.put("a", b"2" * 8 * MIB)
    with pytest.raises(StorageError, match="replaced while") as caught:
        list(chunks)
    assert caught.value.retryable


def test_a_server_that_ignores_ranges(rclone, monkeypatch):
    """rclone itself answers 200 to a range, which obstore refuses."""
    monkeypatch.setattr(cloud, "_WINDOW", MIB)
    store = open_store(filesystem_at(rclone.endpoint), f"{BUCKET}/object/direct")
    data = b"".join(big(5 * MIB))
    store.put("a", data)
    assert b"".join(map(bytes, store.read_chunks("a"))) == data
    assert b"".join(map(bytes, store.read_chunks("a", start=3 * MIB + 5))) == data[3 * MIB + 5 :]
    assert b"".join(map(bytes, store.read_chunks("a", start=7, length=9))) == data[7:16]


# --- iterables -----------------------------------------------------------------------------------


def test_a_raising_iterable_aborts_the_upload(store, proxy, moto):
    def broken():
        yield from big()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.put("a", broken())
    assert proxy.counts["abort_multipart"] == 1
    assert proxy.counts["complete_multipart"] == 0


def test_a_failed_upload_stops_reading_the_iterable(store, proxy):
    proxy.fail("create_multipart", status=403)
    read = []

    def endless():
        while True:
            read.append(1)
            yield b"x" * MIB

    with pytest.raises(StoragePermissionError):
        store.put("a", endless())
    assert len(read) < 100


# --- directory markers ---------------------------------------------------------------------------


def test_markers_are_no_files(moto, moto_store):
    """Ray and pyarrow leave `dir/` objects, which obstore lists as empty files called `dir`."""
    root = moto_store.root
    with contextlib.closing(moto.boto()) as client:
        for name in ("", "trial/", "trial/checkpoint_0/", "empty/", "empty/deep/"):
            client.put_object(Bucket=moto.bucket, Key=f"{root}/{name}", Body=b"")
    moto_store.put("trial/file", b"x")
    moto_store.put("trial/zero", b"")
    moto_store.put("trial/checkpoint_0/weights", b"x")
    expected = ["trial/checkpoint_0/weights", "trial/file", "trial/zero"]
    assert sorted(file.path for file in moto_store.list()) == expected
    assert [file.path for file in moto_store.list_files("trial")] == ["trial/file", "trial/zero"]
    assert [file.path for file in moto_store.list_files()] == []
    assert moto_store.list_dirs() == ["empty", "trial"]
    assert moto_store.stat("trial") is None
    assert moto_store.stat("empty/deep") is None


def test_many_empty_files_cost_one_more_listing(store, proxy):
    """Each could be a marker; they are not asked about one by one."""
    for number in range(30):
        store.put(f"d{number % 2}/empty-{number}", b"")
    store.put("d0/full", b"x")
    proxy.reset_counts()
    assert len(list(store.list())) == 31
    assert proxy.counts == {"list": 3}


def test_a_few_markers_among_empty_files(moto, moto_store):
    root = moto_store.root
    with contextlib.closing(moto.boto()) as client:
        for name in ("d/one/", "d/two/", "d/two/deep/"):
            client.put_object(Bucket=moto.bucket, Key=f"{root}/{name}", Body=b"")
    names = [f"d/empty-{number}" for number in range(5)]
    for name in names:
        moto_store.put(name, b"")
    assert sorted(file.path for file in moto_store.list()) == names
    assert sorted(file.path for file in moto_store.list("d")) == names


# --- preconditions -------------------------------------------------------------------------------


def test_preconditions_are_switched_off_where_they_are_not_enforced(store, proxy):
    store.can_precondition = False
    store.put("a", b"1", if_absent=True)
    store.put("a", b"2", if_absent=True)
    store.put("a", b"3", if_match='"nonsense"')
    assert store.read("a") == b"3"


@pytest.mark.parametrize("condition", ["if_absent", "if_match"])
def test_a_lost_answer_to_a_conditional_write_is_no_refusal(moto_store, moto_proxy, condition):
    """Tried again by the client, the write would be refused because of itself."""
    options = {"if_absent": True}
    if condition == "if_match":
        options = {"if_match": moto_store.put("a", b"old").etag}
    moto_proxy.reset_counts()
    moto_proxy.reset("put_object", times=1, forward=True)
    with pytest.raises(StorageError) as caught:
        moto_store.put("a", b"new", **options)
    assert caught.value.retryable
    assert not isinstance(caught.value, PreconditionFailedError)
    assert moto_proxy.counts["put_object"] == 1
    assert moto_store.read("a") == b"new"
    with pytest.raises(PreconditionFailedError):
        moto_store.put("a", b"newer", **options)


def test_rclone_ignores_preconditions(store):
    """The reason why the claim of the writer file has to probe."""
    assert store.can_precondition is None
    store.put("a", b"1", if_absent=True)
    store.put("a", b"2", if_absent=True)
    assert store.read("a") == b"2"


def test_a_server_that_knows_no_preconditions_is_not_asked_again(store, proxy):
    proxy.fail("put_object", status=501, code="NotImplemented", times=1)
    store.put("a", b"1", if_absent=True)
    assert store.can_precondition is False
    assert store.read("a") == b"1"
    assert proxy.counts["put_object"] == 2
    store.put("a", b"2", if_absent=True)
    assert proxy.counts["put_object"] == 3


# --- messages ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        f"GET https://x.s3.amazonaws.com/k?X-Amz-Signature={SECRET}&X-Amz-Date=1",
        f"GET https://x.blob.core.windows.net/c/b?sv=1&sig={SECRET}&se=2",
        f"https://user:{SECRET}@host/path",
        f"Authorization: Bearer {SECRET}",
        f"config secret_access_key={SECRET} rejected",
        f'account_key: "{SECRET}"',
        f"<Error><Code>X</Code><StringToSign>{SECRET}</StringToSign></Error>",
        f"<AWSAccessKeyId>{SECRET}</AWSAccessKeyId>",
        f"session_token='{SECRET}'",
    ],
)
def test_messages_hold_no_credentials(text):
    error = storage_error(cloud.obstore_errors.GenericError(text), "Cannot do it", "a")
    assert SECRET not in str(error)


def test_missing_credentials_are_explained():
    text = "Generic S3 error: Error performing PUT http://169.254.169.254/latest/api/token in 1s"
    error = storage_error(cloud.obstore_errors.GenericError(text), "Cannot write 'a'", "a")
    assert isinstance(error, StoragePermissionError)
    assert "no credentials were found" in str(error)
