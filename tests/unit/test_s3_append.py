"""Appends on S3: what they send, what they prove first, and how they fail."""

from __future__ import annotations

import itertools
import logging
import random
import time

import pytest
from blake3 import blake3

from ray_artifact_sync.entries import Append, FileEntry, LocalFile, Manifest, Upload
from ray_artifact_sync.errors import CannotAppendError, PreconditionFailedError, StorageError, StoragePermissionError
from ray_artifact_sync.layout import TMP
from ray_artifact_sync.plan import PathState, plan_sync_up
from ray_artifact_sync.stores import open_store, s3_append
from ray_artifact_sync.stores.clients import ClientLimits, ClientSpec, spec_of_arrow
from ray_artifact_sync.stores.s3_append import MIN_APPEND_SIZE, appender_of, endpoint_of
from tests.support.s3_servers import BUCKET, REGION, filesystem_at
from tests.support.sessions import abandon, open_session, read_tree, save

MIB = 1024 * 1024
QUICK = ClientLimits(request_timeout=6.0, retries=1, retry_timeout=2.0)

s3 = pytest.mark.s3


def content(size: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(size)


def digest(data: bytes) -> str:
    return blake3(data).hexdigest()


@pytest.fixture
def store(juicefs_proxy, request):
    """A new endpoint for each test, and so a client that has proven nothing yet."""
    return open_store(filesystem_at(juicefs_proxy.endpoint), f"{BUCKET}/append/{request.node.name}", limits=QUICK)


@pytest.fixture
def proven(store):
    """The same, after an append that succeeded."""
    base = content(MIN_APPEND_SIZE)
    store.put("first", base)
    store.append("first", len(base), [b"x"], digest=digest(base + b"x"))
    store.put("log", base)
    return store


# --- a session -----------------------------------------------------------------------------------


@s3
@pytest.mark.parametrize("size", [24 * MIB, pytest.param(200 * MIB, marks=pytest.mark.exhaustive)])
def test_an_appended_file_costs_what_was_appended(juicefs_proxy, tmp_path, size):
    # Not the short timeouts: the server takes its time to copy 200 MiB.
    store = open_store(filesystem_at(juicefs_proxy.endpoint), f"{BUCKET}/costs/{tmp_path.name}")
    root = tmp_path / "work"
    root.mkdir()
    session = open_session(root, store, 1, set_aside=False)
    log, versions = root / "log.bin", [content(size)]
    log.write_bytes(versions[0])
    assert save(session, "checkpoint_000000")
    for number in (1, 2):
        versions.append(versions[-1] + content(64 * 1024, number))
        with log.open("ab") as file:
            file.write(versions[-1][len(versions[-2]) :])
        time.sleep(0.06)
        juicefs_proxy.reset_counts()
        report = session.sync()
        assert report.bytes_sent == 64 * 1024
        # The first append sends a part of the proof, too.
        assert sum(juicefs_proxy.bytes_in.values()) <= MIB
        assert juicefs_proxy.counts["upload_part_copy"] == (2 if number == 1 else 1)
        assert save(session, f"checkpoint_{number:06d}")
    assert not juicefs_proxy.counts["copy_object"], "the old versions are prefixes of the new one"
    assert store.read("log.bin") == versions[-1]
    assert not [file.path for file in store.list_files(TMP)]
    abandon(session)
    for number, expected in reversed([*enumerate(versions)]):
        again = open_session(tmp_path / f"restored-{number}", store, 10 - number)
        again.restore(f"checkpoint_{number:06d}", fresh=True)
        assert read_tree(tmp_path / f"restored-{number}") == {"log.bin": expected}
        abandon(again)


@s3
@pytest.mark.parametrize("server", ["rclone", "moto", "refused", "wrong"])
def test_content_is_exact_whatever_the_server_can(request, server, tmp_path, caplog):
    """moto's UploadPartCopy works, and it has conditional writes."""
    name = {"rclone": "proxy", "moto": "moto_proxy"}.get(server, "juicefs_proxy")
    proxy = request.getfixturevalue(name)
    store = open_store(filesystem_at(proxy.endpoint), f"{BUCKET}/exact/{tmp_path.name}", limits=QUICK)
    root = tmp_path / "work"
    root.mkdir()
    session = open_session(root, store, 1, set_aside=False)
    log, data = root / "log.bin", content(MIN_APPEND_SIZE + 1)
    log.write_bytes(data)
    assert save(session, "checkpoint_000000")
    if server == "refused":
        proxy.fail("upload_part_copy", status=403)
    if server == "wrong":
        proxy.corrupt("get_object", TMP, times=1, after=3)  # what the proof reads back
    caplog.set_level(logging.WARNING)
    for number in range(3):
        data += content(1000, number)
        log.write_bytes(data)
        time.sleep(0.06)
        report = session.sync()
        assert not report.failures
        assert store.read("log.bin") == data
    # rclone's HEAD gives another ETag than its Complete, so that nothing is appended to and the server never proven.
    assert store.can_append == (server in ("moto", "rclone"))
    assert bool(proxy.counts["upload_part_copy"]) == (server != "rclone")
    said = [record for record in caplog.records if record.name == s3_append.__name__]
    assert len(said) == (not store.can_append), said
    abandon(session)


@s3
def test_another_writer_between_two_appends(juicefs_proxy, store, tmp_path):
    """Same size, other content: the append is refused, and the whole file sent."""
    root = tmp_path / "work"
    root.mkdir()
    session = open_session(root, store, 1, set_aside=False)
    log, data = root / "log.bin", content(MIN_APPEND_SIZE)
    log.write_bytes(data)
    session.sync()
    store.put("log.bin", content(MIN_APPEND_SIZE, 7))
    log.write_bytes(data + b"more")
    time.sleep(0.06)
    juicefs_proxy.reset_counts()
    assert not session.sync().failures
    assert store.read("log.bin") == data + b"more"
    assert not juicefs_proxy.counts["upload_part_copy"]
    abandon(session)


# --- the store -----------------------------------------------------------------------------------


@s3
def test_the_first_append_is_proven_and_the_others_are_cheap(juicefs_proxy, store):
    base = content(MIN_APPEND_SIZE)
    store.put("log", base)
    juicefs_proxy.reset_counts()
    store.append("log", len(base), [b"one"], digest=digest(base + b"one"))
    assert juicefs_proxy.counts["upload_part_copy"] == 2
    expected = 2 * 5 * MIB + 64 + len(base) + 3
    deadline = time.monotonic() + 10
    while juicefs_proxy.bytes_out["get_object"] < expected and time.monotonic() < deadline:
        time.sleep(0.01)  # the proxy counts after it has sent
    assert juicefs_proxy.bytes_out["get_object"] == expected
    juicefs_proxy.reset_counts()
    written = store.append("log", len(base) + 3, [b"two"], digest="whatever: only the size is looked at now")
    assert juicefs_proxy.counts == {
        "head_object": 2,
        "create_multipart": 1,
        "upload_part_copy": 1,
        "upload_part": 1,
        "complete_multipart": 1,
    }
    assert store.read("log") == base + b"onetwo"
    assert written.size == len(base) + 6


@s3
def test_the_first_append_is_read_back_whole(store, caplog):
    base = content(MIN_APPEND_SIZE)
    store.put("log", base)
    with pytest.raises(CannotAppendError):
        store.append("log", len(base), [b"tail"], digest=digest(base + b"another tail"))
    assert not store.can_append
    assert "gave something else" in caplog.text


@s3
def test_completing_is_conditional_where_the_store_can(moto_proxy, tmp_path, monkeypatch):
    """moto does not look at If-Match there; S3 does."""
    conditions = []
    call = s3_append.S3Appender.call

    def watching(self, store, path, operation, **arguments):
        if operation == "complete_multipart_upload":
            conditions.append(arguments.get("IfMatch"))
        return call(self, store, path, operation, **arguments)

    monkeypatch.setattr(s3_append.S3Appender, "call", watching)
    store = open_store(filesystem_at(moto_proxy.endpoint), f"{BUCKET}/condition/{tmp_path.name}", limits=QUICK)
    base = content(MIN_APPEND_SIZE)
    before = store.put("log", base)
    store.can_precondition = True
    between = store.append("log", len(base), [b"1"], if_match=before.etag, digest=digest(base + b"1"))
    moto_proxy.fail("complete_multipart", status=412, times=1)
    with pytest.raises(PreconditionFailedError):
        store.append("log", len(base) + 1, [b"2"], if_match=between.etag)
    assert conditions == [None, before.etag, between.etag]  # the first is the proof's, under a name of its own
    assert store.read("log") == base + b"1"


@s3
def test_a_long_tail_is_several_parts(proven, juicefs_proxy):
    tail = [content(3 * MIB, number) for number in range(7)]
    juicefs_proxy.reset_counts()
    proven.append("log", MIN_APPEND_SIZE, iter(tail))
    assert juicefs_proxy.counts["upload_part"] == 3
    assert proven.read("log") == content(MIN_APPEND_SIZE) + b"".join(tail)


@s3
def test_a_large_object_is_copied_in_pieces(proven, juicefs_proxy, monkeypatch):
    monkeypatch.setattr(s3_append, "_COPY_PART", 6 * MIB)
    juicefs_proxy.reset_counts()
    proven.append("log", MIN_APPEND_SIZE, [b"tail"])
    assert juicefs_proxy.counts["upload_part_copy"] == 3
    assert proven.read("log") == content(MIN_APPEND_SIZE) + b"tail"


@pytest.mark.parametrize("size", [5 * MIB, 512 * MIB, 512 * MIB + 1, 5 * 1024**4])
def test_ranges_cover_the_object(size):
    ranges = s3_append._ranges(size)
    assert ranges[0][0] == 0
    assert ranges[-1][1] == size
    assert all(left[1] == right[0] for left, right in itertools.pairwise(ranges))
    assert all(5 * MIB <= stop - start <= 5 * 1024**3 for start, stop in ranges)
    assert len(ranges) <= 5_000


@s3
@pytest.mark.parametrize("kind", ["upload_part_copy", "upload_part", "complete_multipart", "create_multipart"])
def test_a_refusal_is_an_error_and_the_old_content_stands(proven, juicefs_proxy, kind):
    juicefs_proxy.fail(kind, status=403)
    with pytest.raises(StoragePermissionError) as caught:
        proven.append("log", MIN_APPEND_SIZE, [b"tail"])
    assert not caught.value.retryable
    assert caught.value.__cause__ is None
    juicefs_proxy.clear()
    assert proven.read("log") == content(MIN_APPEND_SIZE)
    assert proven.can_append
    assert juicefs_proxy.counts["abort_multipart"] == (0 if kind == "create_multipart" else 1)


@s3
@pytest.mark.parametrize("kind", ["upload_part_copy", "complete_multipart"])
@pytest.mark.parametrize("fault", ["500", "503", "reset", "hang"])
def test_a_failure_that_may_pass_can_be_retried(proven, juicefs_proxy, kind, fault):
    if fault in ("reset", "hang"):
        getattr(juicefs_proxy, fault)(kind, times=1)
    else:
        juicefs_proxy.fail(kind, status=int(fault), times=1)
    started = time.monotonic()
    with pytest.raises(StorageError) as caught:
        proven.append("log", MIN_APPEND_SIZE, [b"tail"])
    assert caught.value.retryable
    assert time.monotonic() - started < 20
    assert proven.read("log") == content(MIN_APPEND_SIZE)
    juicefs_proxy.clear()
    proven.append("log", MIN_APPEND_SIZE, [b"tail"])
    assert proven.read("log") == content(MIN_APPEND_SIZE) + b"tail"


@s3
def test_a_lost_answer_is_found_out(proven, juicefs_proxy):
    juicefs_proxy.reset("complete_multipart", forward=True, times=1)
    with pytest.raises(StorageError) as caught:
        proven.append("log", MIN_APPEND_SIZE, [b"tail"])
    assert caught.value.retryable
    with pytest.raises(PreconditionFailedError):
        proven.append("log", MIN_APPEND_SIZE, [b"tail"])
    assert proven.read("log") == content(MIN_APPEND_SIZE) + b"tail"


@s3
@pytest.mark.parametrize("status", [400, 403, 500, 501])
def test_a_client_that_never_succeeded_is_given_up(store, juicefs_proxy, caplog, status):
    store.put("log", content(MIN_APPEND_SIZE))
    juicefs_proxy.fail("upload_part_copy", status=status)
    for _ in range(2):
        with pytest.raises(CannotAppendError):
            store.append("log", MIN_APPEND_SIZE, [b"tail"])
    assert not store.can_append
    assert not open_store(filesystem_at(juicefs_proxy.endpoint), f"{BUCKET}/elsewhere", limits=QUICK).can_append
    assert juicefs_proxy.counts["upload_part_copy"] == 1
    assert store.read("log") == content(MIN_APPEND_SIZE)
    assert len([record for record in caplog.records if record.name == s3_append.__name__]) == 1


@s3
def test_throttling_says_nothing_about_a_server_unless_it_goes_on(store, juicefs_proxy):
    store.put("log", content(MIN_APPEND_SIZE))
    juicefs_proxy.fail("upload_part_copy", status=503)
    for left in (True, True, False):
        with pytest.raises(CannotAppendError):
            store.append("log", MIN_APPEND_SIZE, [b"tail"])
        assert store.can_append == left


@s3
def test_a_tail_that_raises_changes_nothing(proven, juicefs_proxy):
    boom = ValueError("mine")

    def broken():
        yield b"x" * 9 * MIB
        raise boom

    with pytest.raises(ValueError, match="mine") as caught:
        proven.append("log", MIN_APPEND_SIZE, broken())
    assert caught.value is boom
    assert juicefs_proxy.counts["abort_multipart"] == 1
    assert proven.read("log") == content(MIN_APPEND_SIZE)


@s3
def test_the_copy_is_bound_to_the_version_that_was_seen(proven, monkeypatch):
    """Replaced between the look and the copy: the server itself refuses."""
    seen = proven.stat("log")
    proven.put("log", content(MIN_APPEND_SIZE, 1))
    monkeypatch.setattr(proven, "stat", lambda path: seen)
    with pytest.raises(PreconditionFailedError):
        proven.append("log", MIN_APPEND_SIZE, [b"tail"])
    assert proven.read("log") == content(MIN_APPEND_SIZE, 1)


@s3
def test_secrets_stay_out_of_messages(proven, juicefs_proxy):
    juicefs_proxy.fail("complete_multipart", status=403)
    with pytest.raises(StoragePermissionError) as caught:
        proven.append("log", MIN_APPEND_SIZE, [b"tail"])
    assert "SECRET" not in str(caught.value)
    assert "Signature" not in str(caught.value)


# --- who gets an appender, and where it goes -------------------------------------------------------


def spec(**options) -> ClientSpec:
    found = spec_of_arrow(filesystem_at("http://s3.example:9", **options), "bucket", {})
    assert isinstance(found, ClientSpec)
    return found


def test_equal_clients_share_what_they_learned():
    assert appender_of(spec(), QUICK) is appender_of(spec(), QUICK)
    assert appender_of(spec(), QUICK) is not appender_of(spec(), ClientLimits())


def test_no_appender_without_botocore_or_credentials(monkeypatch):
    assert appender_of(ClientSpec("GCS", "b"), QUICK) is None
    assert appender_of(ClientSpec("S3", "b", config=(("skip_signature", True),)), QUICK) is None
    monkeypatch.setattr(s3_append, "has_botocore", lambda: False)
    assert appender_of(spec(), QUICK) is None


@pytest.mark.parametrize("virtual", [False, True])
def test_the_client_goes_where_the_other_goes(virtual):
    made = spec(force_virtual_addressing=virtual, session_token="TOKEN")
    assert endpoint_of(made) == "http://s3.example:9"
    client = appender_of(made, QUICK)._client()
    assert client.meta.endpoint_url == "http://s3.example:9"
    assert client.meta.region_name == REGION
    assert client.meta.config.s3["addressing_style"] == ("virtual" if virtual else "path")
    assert client._request_signer._credentials.token == "TOKEN"
    url = client.generate_presigned_url("get_object", {"Bucket": "bucket", "Key": "a b"})
    assert url.startswith("http://bucket.s3.example:9/a" if virtual else "http://s3.example:9/bucket/a")


def test_an_own_authority_and_a_proxy_reach_the_client(tmp_path):
    made = spec(force_virtual_addressing=True)
    made = ClientSpec(
        *("S3", "bucket", made.config, made.secret),
        options=(("proxy_url", "http://proxy:3128"), ("root_certificate", b"CERTIFICATE")),
    )
    appender = s3_append.S3Appender(made, QUICK)
    client = appender._client()
    assert client.meta.config.proxies == {"http": "http://proxy:3128", "https": "http://proxy:3128"}
    with open(appender._authority.name, "rb") as file:
        assert file.read() == b"CERTIFICATE"


def test_a_client_that_cannot_be_made_means_no_appends(monkeypatch):
    def fail(self):
        raise TypeError("an old botocore does not know this option")

    monkeypatch.setattr(s3_append.S3Appender, "_make", fail)
    appender = s3_append.S3Appender(spec(), QUICK)

    class Store:
        description = "somewhere"

    with pytest.raises(CannotAppendError):
        appender.call(Store(), "log", "create_multipart_upload", Key="log")
    assert not appender.usable


# --- the planner ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stored", "grown", "expected"),
    [(100, 101, Append), (100, 125, Append), (100, 126, Upload), (99, 100, Upload), (1000, 1250, Append)],
)
def test_an_append_is_planned_where_it_pays(stored, grown, expected):
    local = LocalFile("log", grown, 1, "new", prefix_digests={stored: "old"})
    (op,) = plan_sync_up(
        {"log": local},
        head=Manifest({"log": FileEntry("log", stored, "0" * 64, 1)}),
        states={"log": PathState(stored, "old", own=True)},
        can_append=True,
        min_append_size=100,
    ).transfers
    assert type(op) is expected
