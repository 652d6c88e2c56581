"""Azure's Blob storage, on Azurite: how one gets there, what is its own, and a trial's life on it."""

from __future__ import annotations

import logging
import os
import random
import threading
import time
from datetime import datetime, timedelta, timezone

import pytest
from pyarrow import fs as pafs

from ray_artifact_sync import RemoteUploader
from ray_artifact_sync.errors import (
    ArtifactExistsError,
    ArtifactNotFoundError,
    ConfigurationError,
    IncompleteSyncError,
    PreconditionFailedError,
    StorageError,
    StoragePermissionError,
)
from ray_artifact_sync.stores import cloud, open_store, open_uri
from ray_artifact_sync.stores.clients import ClientLimits
from ray_artifact_sync.stores.cloud import CloudStore
from tests.support import independent_reader
from tests.support.azure_server import (
    ACCOUNT,
    ACCOUNT_KEY,
    CONTAINER,
    azure_filesystem_at,
    azure_uri_at,
    connection_string_at,
)
from tests.support.sessions import abandon, open_session, read_tree, save

pytestmark = pytest.mark.azure

MIB = 1024 * 1024
QUICK = ClientLimits(request_timeout=2.0, retries=2, retry_timeout=4.0)


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch):
    for name in list(os.environ):
        if name.startswith("AZURE_"):
            monkeypatch.delenv(name)


@pytest.fixture
def root(request):
    return f"{CONTAINER}/azure/{request.node.name}"


@pytest.fixture
def new_store(azurite_proxy, root):
    """Gives new stores for one place behind the proxy."""
    return lambda: open_store(azure_filesystem_at(azurite_proxy.endpoint), root, limits=QUICK)


@pytest.fixture
def store(new_store, azurite_proxy):
    store = new_store()
    assert isinstance(store, CloudStore)
    azurite_proxy.reset_counts()
    return store


def write(root, path, data):
    target = os.path.join(root, path)
    os.makedirs(os.path.dirname(target), exist_ok=True)
    with open(target, "wb") as file:
        file.write(data)


# --- ways to get there ---------------------------------------------------------------------------


def sas_of(account_key=ACCOUNT_KEY):
    blob = pytest.importorskip("azure.storage.blob")
    return blob.generate_container_sas(
        ACCOUNT,
        CONTAINER,
        account_key=account_key,
        permission="racwdl",
        expiry=datetime.now(timezone.utc) + timedelta(hours=1),
    )


def of_adlfs(endpoint, root):
    adlfs = pytest.importorskip("adlfs")
    return open_store(adlfs.AzureBlobFileSystem(connection_string=connection_string_at(endpoint)), root)


def of_adlfs_with_sas(endpoint, root):
    adlfs = pytest.importorskip("adlfs")
    text = f"BlobEndpoint={endpoint}/{ACCOUNT};AccountName={ACCOUNT};SharedAccessSignature={sas_of()}"
    filesystem = adlfs.AzureBlobFileSystem(connection_string=text)
    return open_store(pafs.PyFileSystem(pafs.FSSpecHandler(filesystem)), root)


WAYS = {
    "pyarrow": lambda endpoint, root: open_store(azure_filesystem_at(endpoint), root),
    "pyarrow, SAS": lambda endpoint, root: open_store(
        azure_filesystem_at(endpoint, account_key=None, sas_token=sas_of()), root
    ),
    "pyarrow, subtree": lambda endpoint, root: open_store(
        pafs.SubTreeFileSystem(CONTAINER, azure_filesystem_at(endpoint)), root.partition("/")[2]
    ),
    "adlfs": of_adlfs,
    "adlfs, SAS": of_adlfs_with_sas,
    "abfs URI with a key": lambda endpoint, root: open_uri(azure_uri_at(endpoint, root.partition("/")[2])),
}


@pytest.mark.parametrize("way", WAYS)
def test_ways_that_lead_to_one_place(way, azurite, root, caplog):
    caplog.set_level(logging.DEBUG, "ray_artifact_sync")
    found = WAYS[way](azurite.endpoint, root)
    assert isinstance(found, CloudStore), caplog.text
    assert type(found.client).__name__ == "AzureStore"
    assert "obstore, because its options name the credentials" in caplog.text
    assert root in found.description
    assert ACCOUNT_KEY[:20] not in caplog.text + found.description
    found.put("f", b"x")
    with azurite.filesystem().open_input_stream(f"{root}/f") as stream:
        assert stream.read() == b"x"


@pytest.mark.parametrize("scheme", ["abfs", "az", "abfss"])
def test_uris_with_the_credentials_of_the_environment(scheme, azurite, root, monkeypatch):
    """pyarrow does not know them without an account; adlfs finds one in the environment."""
    pytest.importorskip("adlfs")
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", connection_string_at(azurite.endpoint))
    found = open_uri(f"{scheme}://{root}/a b")
    assert type(found.client).__name__ == "AzureStore"
    found.put("f", scheme.encode())
    assert open_store(azurite.filesystem(), f"{root}/a b").read("f") == scheme.encode()


def test_a_key_that_is_not_encoded_does_not_show():
    with pytest.raises(ConfigurationError) as caught:
        open_uri(f"abfs://{ACCOUNT}:{ACCOUNT_KEY}@127.0.0.1:1/{CONTAINER}/x y")
    said = str(caught.value)
    assert not [start for start in range(0, 60, 10) if ACCOUNT_KEY[start : start + 10] in said], said
    assert CONTAINER in said


def test_a_wrong_key(azurite, root):
    wrong = "d3Jvbmcta2V5LXRoYXQtbm9ib2R5LWtub3dz"
    store = open_store(azure_filesystem_at(azurite.endpoint, account_key=wrong), root, limits=QUICK)
    for act in (lambda: store.put("f", b"x"), lambda: store.read("f"), lambda: list(store.list())):
        with pytest.raises(StoragePermissionError) as caught:
            act()
        assert wrong not in str(caught.value)
        assert not caught.value.retryable


def test_a_container_that_is_not_there(azurite):
    store = open_store(azurite.filesystem(), "no-such-container/x", limits=QUICK)
    for act in (lambda: store.put("f", b"x"), lambda: list(store.list())):
        with pytest.raises(StorageError, match="ContainerNotFound") as caught:
            act()
        assert not isinstance(caught.value, ArtifactNotFoundError)
        assert not caught.value.retryable


# --- what is Azure's own -------------------------------------------------------------------------


def test_a_large_file_is_blocks(store, azurite_proxy):
    data = random.Random(0).randbytes(20 * MIB + 1)
    store.put("big", iter([data[:MIB], data[MIB:]]), size_hint=len(data))
    assert azurite_proxy.counts == {"upload_part": 3, "complete_multipart": 1}
    assert store.read("big") == data


def test_markers_of_pyarrow_are_no_files(store, azurite, root):
    filesystem = azurite.filesystem()
    for name in ("", "/trial", "/trial/checkpoint_0", "/empty/deep"):
        filesystem.create_dir(f"{root}{name}", recursive=True)
    store.put("trial/file", b"x")
    store.put("trial/zero", b"")
    store.put("trial/checkpoint_0/weights", b"x")
    expected = ["trial/checkpoint_0/weights", "trial/file", "trial/zero"]
    assert sorted(file.path for file in store.list()) == expected
    assert [file.path for file in store.list_files("trial")] == ["trial/file", "trial/zero"]
    assert store.list_dirs() == ["empty", "trial"]
    assert store.stat("trial") is None
    assert store.stat("empty/deep") is None


def test_files_of_ours_are_files_for_pyarrow(store, azurite, root):
    store.put("dir/file", b"x")
    found = azurite.filesystem().get_file_info(pafs.FileSelector(root, recursive=True))
    assert {(info.path.removeprefix(f"{root}/"), info.type) for info in found} == {
        ("dir", pafs.FileType.Directory),
        ("dir/file", pafs.FileType.File),
    }


def test_a_name_with_a_backslash_is_left_out_with_a_warning(tmp_path, new_store, caplog):
    """Azure would take it for a file in a directory, which may exist."""
    session = open_session(tmp_path / "work", new_store(), 1)
    write(session.working_dir, "a/b", b"in the directory")
    write(session.working_dir, "a\\b", b"with a backslash")
    with caplog.at_level(logging.WARNING):
        report = session.sync()
        session.sync()
    assert [(skip.path, skip.kind) for skip in report.skips] == [("a\\b", "invalid")]
    assert session.stats.failed_syncs == 0
    assert len([record for record in caplog.records if "backslash" in record.getMessage()]) == 1
    assert independent_reader.head_tree(independent_reader.store_place(new_store())) == {"a/b": b"in the directory"}
    abandon(session)


def test_a_copy_that_is_made_later_is_waited_for(store, azurite_proxy):
    """Azure may answer 202: it will copy, and until then the target is empty."""
    store.put("source", b"content")
    store.put("target", b"")
    rule = azurite_proxy.fail("copy_object", status=202, times=1)

    def server():
        rule.reached.wait(30)
        looks = azurite_proxy.counts["head_object"]
        while azurite_proxy.counts["head_object"] < looks + 4:
            time.sleep(0.01)
        open_store(azure_filesystem_at(azurite_proxy.endpoint), store_root).put("target", b"content")

    store_root = f"{CONTAINER}/{store.root}"
    thread = threading.Thread(target=server)
    thread.start()
    store.copy("source", "target")
    assert store.read("target") == b"content"
    thread.join()


def test_a_copy_that_is_never_made_is_an_error(store, azurite_proxy, monkeypatch):
    monkeypatch.setattr(cloud, "_COPY_SECONDS", 0.3)
    store.put("source", b"content")
    azurite_proxy.fail("copy_object", status=202)
    with pytest.raises(StorageError, match="has not copied") as caught:
        store.copy("source", "target")
    assert caught.value.retryable


def test_a_copy_that_is_under_way_already_is_waited_for(store, azurite_proxy):
    store.put("source", b"content")
    store.put("target", b"content")
    azurite_proxy.fail("copy_object", status=409, code="PendingCopyOperation")
    store.copy("source", "target")
    azurite_proxy.clear()
    azurite_proxy.fail("copy_object", status=409, code="SomethingElse")
    with pytest.raises(StorageError):
        store.copy("source", "target")


def test_a_copy_costs_one_look(store, azurite_proxy):
    store.put("source", b"content")
    azurite_proxy.reset_counts()
    store.copy("source", "target")
    assert azurite_proxy.counts == {"copy_object": 1, "head_object": 1}


@pytest.mark.parametrize("condition", ["if_absent", "if_match"])
def test_a_lost_answer_to_a_conditional_write_is_no_refusal(store, azurite_proxy, condition):
    options = {"if_absent": True}
    if condition == "if_match":
        options = {"if_match": store.put("a", b"old").etag}
    azurite_proxy.reset("put_object", times=1, forward=True)
    with pytest.raises(StorageError) as caught:
        store.put("a", b"new", **options)
    assert caught.value.retryable
    assert not isinstance(caught.value, PreconditionFailedError)
    assert store.read("a") == b"new"
    with pytest.raises(PreconditionFailedError):
        store.put("a", b"newer", **options)


# --- refusals and faults -------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["put_object", "upload_part", "complete_multipart"])
@pytest.mark.parametrize("status", [403, 503])
def test_a_refused_artifact_is_an_error(azurite_proxy, new_store, tmp_path, kind, status):
    session = open_session(tmp_path / "work", new_store(), 1, retries=1)
    write(session.working_dir, "fine.txt", b"fine")
    session.sync()
    write(session.working_dir, "refused.bin", os.urandom(10 if kind == "put_object" else 20 * MIB))
    rule = azurite_proxy.fail(kind, "refused.bin", status=status)
    with pytest.raises(IncompleteSyncError) as caught:
        session.sync()
    assert rule.hits
    assert caught.value.failures.keys() == {"refused.bin"}
    place = independent_reader.store_place(new_store())
    assert independent_reader.head_tree(place) == {"fine.txt": b"fine"}
    azurite_proxy.clear()
    session.sync()
    assert independent_reader.head_tree(place) == read_tree(session.working_dir)
    abandon(session)


# --- a trial -------------------------------------------------------------------------------------


def test_the_life_of_a_trial(new_store, azurite_proxy, tmp_path):
    store = new_store()
    session = open_session(tmp_path / "work", store, 1)
    work = session.working_dir
    trees = []
    for number in range(3):
        write(work, "log.txt", b"".join(b"%d\n" % line for line in range(number + 1)))
        write(work, "rewritten.bin", random.Random(number).randbytes(MIB + number))
        write(work, "large.bin", random.Random(number).randbytes(17 * MIB))
        write(work, f"plots/{number}.png", b"%d" % number)
        assert save(session, f"checkpoint_{number:06d}")
        trees.append(read_tree(work))
    assert store.can_precondition, "Azure enforces conditional writes, and the claim found out"
    azurite_proxy.reset_counts()
    session.sync()
    assert not {"put_object", "upload_part", "copy_object"} & azurite_proxy.counts.keys()
    session.close()
    place = independent_reader.store_place(new_store())
    snapshots = independent_reader.snapshots(place)
    for number, tree in enumerate(trees):
        assert independent_reader.tree_of(place, snapshots[f"checkpoint_{number:06d}"]) == tree
        again = open_session(tmp_path / f"node-{number}", new_store(), 2 + number)
        assert again.restore(f"checkpoint_{number:06d}", fresh=True).exact
        assert read_tree(again.working_dir) == tree
        again.close(flush=False)
    # What Ray deletes, takes its versions with it.
    last = open_session(tmp_path / "last", new_store(), 9)
    last.restore("checkpoint_000002", fresh=True)
    for number in (0, 1):
        place_of = new_store()
        place_of.delete([file.path for file in place_of.list(f"checkpoint_{number:06d}")])
    assert save(last, "checkpoint_000003")
    last.close()
    assert not [name for name in place.names() if "/objects/" in name]
    assert independent_reader.head_tree(place) == trees[2]


def test_the_remote_uploader(azurite_proxy, root, tmp_path):
    filesystem = azure_filesystem_at(azurite_proxy.endpoint)
    for name, size in (("small", 10), ("large", 20 * MIB)):
        write(tmp_path, name, random.Random(size).randbytes(size))
    with RemoteUploader(root, filesystem) as uploader:
        azurite_proxy.reset("put_object", "/small", times=1, forward=True)  # its own earlier attempt
        done = [uploader.upload_file_async(name, tmp_path / name) for name in ("small", "large")]
        uploader.publish_after(done, "latest", "both")
    store = open_store(filesystem, root)
    assert {file.path: store.read(file.path) for file in store.list()} == {
        "small": (tmp_path / "small").read_bytes(),
        "large": (tmp_path / "large").read_bytes(),
        "latest": b"both",
    }
    uploader = RemoteUploader(root, filesystem)
    with pytest.raises(ArtifactExistsError):
        uploader.upload_file_async("small", tmp_path / "large").result(60)
    uploader.close()


def test_the_remote_uploader_in_processes(azurite, root, tmp_path):
    write(tmp_path, "f", b"x")
    with RemoteUploader(root, azurite.filesystem(), executor="process") as uploader:
        assert uploader.upload_file_async("f", tmp_path / "f").result(60).size == 1
    assert open_store(azurite.filesystem(), root).read("f") == b"x"
