"""Which store serves a place, and what of a file system's options reaches its client."""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import logging
import os
import pickle
import subprocess
import sys
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.dirfs import DirFileSystem
from pyarrow import fs as pafs

from ray_artifact_sync.errors import ConfigurationError
from ray_artifact_sync.stores import clients, open_store, open_uri
from ray_artifact_sync.stores.arrow import ArrowStore
from ray_artifact_sync.stores.clients import (
    ClientLimits,
    ClientSpec,
    NoClient,
    client_of,
    spec_of_arrow,
    spec_of_fsspec,
)
from ray_artifact_sync.stores.cloud import CloudStore
from ray_artifact_sync.stores.posix import PosixStore
from tests.support.expiring import ExpiringProxy
from tests.support.s3_servers import BUCKET, KEY, SECRET, filesystem_at

NO_FILES = {"HOME": "/nonexistent"}


def fsspec_wrapped(filesystem) -> pafs.PyFileSystem:
    return pafs.PyFileSystem(pafs.FSSpecHandler(filesystem))


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch, tmp_path):
    """Nothing of the developer's own cloud accounts takes part."""
    for name in list(os.environ):
        if name.startswith(("AWS_", "GOOGLE_", "AZURE_", "CLOUD_STORAGE", "STORAGE_EMULATOR")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


# --- local ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "open_it",
    [
        lambda path: open_store(pafs.LocalFileSystem(), path),
        lambda path: open_store(fsspec_wrapped(fsspec.filesystem("file")), path),
        lambda path: open_store(fsspec.filesystem("file"), path),
        lambda path: open_store(
            pafs.SubTreeFileSystem(os.path.dirname(path), pafs.LocalFileSystem()),
            os.path.basename(path),
        ),
        lambda path: open_store(pafs.SubTreeFileSystem(path, pafs.LocalFileSystem()), ""),
        lambda path: open_store(
            pafs.SubTreeFileSystem(
                os.path.basename(path),
                pafs.SubTreeFileSystem(os.path.dirname(path), pafs.LocalFileSystem()),
            ),
            "",
        ),
        lambda path: open_store(
            DirFileSystem(os.path.dirname(path), fsspec.filesystem("file")),
            os.path.basename(path),
        ),
        open_uri,
        lambda path: open_uri(path + "/"),
        lambda path: open_uri(Path(path)),
        lambda path: open_uri(f"file://{path}"),
        lambda path: open_uri(f"file://localhost{path}"),
        lambda path: open_uri(path, storage_filesystem=pafs.LocalFileSystem()),
    ],
)
def test_local_places_go_to_the_kernel(tmp_path, open_it):
    place = tmp_path / "t_(1, 2)_[32, 32]"
    store = open_it(str(place))
    assert isinstance(store, PosixStore)
    store.put("a/b", b"x")
    assert (place / "a" / "b").read_bytes() == b"x"


def test_file_uris_are_decoded(tmp_path):
    assert open_uri(f"file://{tmp_path}/a%20b").root == f"{tmp_path}/a b"
    assert open_uri(f"{tmp_path}/a%20b").root == f"{tmp_path}/a%20b"
    assert open_uri(f"file://{tmp_path}/a#b?c").root == f"{tmp_path}/a#b?c"


@pytest.mark.parametrize("bad", ["relative/path", "", "nosuchscheme://x/y"])
def test_places_that_cannot_be_understood(bad):
    with pytest.raises(ConfigurationError):
        open_uri(bad)


def test_only_file_systems_are_file_systems():
    with pytest.raises(ConfigurationError, match="pyarrow or fsspec"):
        open_store("s3", "bucket")


def test_anything_else_goes_to_pyarrow(caplog):
    caplog.set_level(logging.DEBUG, "ray_artifact_sync")
    store = open_store(fsspec_wrapped(fsspec.filesystem("memory")), "/resolve/x")
    assert isinstance(store, ArrowStore)
    assert isinstance(open_uri("memory://resolve/x"), ArrowStore)
    assert "pyarrow, because" in caplog.text


# --- pyarrow S3 ----------------------------------------------------------------------------------


def s3_spec(**options):
    options.setdefault("region", "eu-west-1")
    spec = spec_of_arrow(pafs.S3FileSystem(**options), "bucket", NO_FILES)
    assert isinstance(spec, ClientSpec), spec
    return spec


def test_s3_keys():
    spec = s3_spec(access_key="AK", secret_key="SK")
    assert dict(spec.secret) == {"access_key_id": "AK", "secret_access_key": "SK"}
    assert dict(spec.config) == {
        "region": "eu-west-1",
        "skip_signature": False,
        "virtual_hosted_style_request": False,
        "unsigned_payload": False,
    }
    assert spec.proven
    assert "SK" not in repr(spec)


def test_s3_session_token():
    spec = s3_spec(access_key="AK", secret_key="SK", session_token="ST")
    assert dict(spec.secret)["token"] == "ST"


def test_s3_anonymous():
    spec = s3_spec(anonymous=True)
    assert dict(spec.config)["skip_signature"] is True
    assert spec.secret == ()
    assert spec.proven


@pytest.mark.parametrize(
    ("endpoint", "scheme", "expected", "http"),
    [
        ("127.0.0.1:9000", "http", "http://127.0.0.1:9000", True),
        ("minio.local:9000", "https", "https://minio.local:9000", False),
        ("http://127.0.0.1:9000", "https", "http://127.0.0.1:9000", True),
    ],
)
def test_s3_endpoint(endpoint, scheme, expected, http):
    spec = s3_spec(access_key="AK", secret_key="SK", endpoint_override=endpoint, scheme=scheme)
    assert dict(spec.config)["endpoint"] == expected
    assert dict(spec.options).get("allow_http", False) is http
    assert spec.place == expected


def test_s3_virtual_hosted():
    keys = {"access_key": "AK", "secret_key": "SK", "force_virtual_addressing": True}
    spec = s3_spec(**keys, endpoint_override="oss.example.com", scheme="https")
    assert dict(spec.config)["virtual_hosted_style_request"] is True
    assert dict(spec.config)["endpoint"] == "https://bucket.oss.example.com"
    spec = s3_spec(**keys)
    assert dict(spec.config)["endpoint"] == "https://bucket.s3.eu-west-1.amazonaws.com"


def test_s3_proxy():
    proxy = "http://user:pass@proxy.local:3128"
    spec = s3_spec(access_key="AK", secret_key="SK", proxy_options=proxy)
    assert dict(spec.options)["proxy_url"] == proxy
    assert "pass" not in repr(spec)


class Reduced:
    """A pyarrow file system whose making would ask the network, as far as it is looked at."""

    def __init__(self, type_name, **options):
        self.type_name = type_name
        self.region = options.get("region", "")
        self.options = options

    def __reduce__(self):
        return Reduced, (self.options,)


@pytest.mark.parametrize(
    ("filesystem", "option"),
    [
        (Reduced("s3", access_key="A", secret_key="S", default_metadata={"ACL": "x"}), "metadata"),
        (Reduced("s3", access_key="A", secret_key="S", option_of_tomorrow="x"), "tomorrow"),
        (Reduced("gcs", target_service_account="x@y"), "target_service_account"),
        (Reduced("abfs", account_name="a", option_of_tomorrow="x"), "tomorrow"),
        (Reduced("hdfs"), "hdfs"),
    ],
)
def test_options_that_only_pyarrow_knows(filesystem, option):
    spec = spec_of_arrow(filesystem, "bucket", NO_FILES)
    assert isinstance(spec, NoClient)
    assert option in spec.reason


def test_s3_empty_credentials_with_keys_in_the_environment():
    """Both chains begin with the environment; the client is probed all the same."""
    environ = {**NO_FILES, "AWS_ACCESS_KEY_ID": "AK", "AWS_SECRET_ACCESS_KEY": "SK"}
    spec = spec_of_arrow(pafs.S3FileSystem(region="eu-west-1"), "bucket", environ)
    assert isinstance(spec, ClientSpec)
    assert not spec.proven
    assert spec.secret == ()


@pytest.mark.parametrize("how", ["profile", "file", "home"])
def test_s3_empty_credentials_with_profile_files(tmp_path, how):
    """obstore does not read profile files: it would find other credentials, or none."""
    credentials = tmp_path / ".aws" / "credentials"
    credentials.parent.mkdir()
    credentials.write_text("[default]\n")
    environ = {
        "profile": {**NO_FILES, "AWS_PROFILE": "dev"},
        "file": {**NO_FILES, "AWS_SHARED_CREDENTIALS_FILE": str(credentials)},
        "home": {"HOME": str(tmp_path)},
    }[how]
    spec = spec_of_arrow(pafs.S3FileSystem(region="eu-west-1"), "bucket", environ)
    assert isinstance(spec, NoClient)
    assert "profile" in spec.reason


def test_a_stale_session_token_in_the_environment_does_not_mix_in(monkeypatch):
    monkeypatch.setenv("AWS_SESSION_TOKEN", "stale")
    client = client_of(s3_spec(access_key="AK", secret_key="SK")).current
    assert client.credential_provider() == {
        "access_key_id": "AK",
        "secret_access_key": "SK",
        "token": None,
        "expires_at": None,
    }


# --- pyarrow GCS and Azure -----------------------------------------------------------------------


def gcs_spec(**options):
    spec = spec_of_arrow(pafs.GcsFileSystem(**options), "bucket", NO_FILES)
    assert isinstance(spec, ClientSpec), spec
    return spec


def test_gcs_anonymous_with_endpoint():
    spec = gcs_spec(anonymous=True, scheme="http", endpoint_override="localhost:4443")
    assert dict(spec.config) == {"base_url": "http://localhost:4443", "skip_signature": True}
    assert dict(spec.options) == {"allow_http": True}
    assert spec.proven


def test_gcs_token():
    when = dt.datetime(2030, 1, 1, tzinfo=dt.timezone.utc)
    spec = gcs_spec(access_token="TOKEN", credential_token_expiration=when)
    assert dict(spec.secret) == {"token": "TOKEN"}
    assert spec.proven
    assert "TOKEN" not in repr(spec)


def test_gcs_default_credentials_are_to_be_probed(tmp_path, monkeypatch):
    key = tmp_path / "adc.json"
    key.write_text(
        json.dumps({"type": "authorized_user", "client_id": "i", "client_secret": "s", "refresh_token": "r"})
    )
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(key))
    assert not gcs_spec().proven


def test_azure_key():
    filesystem = pafs.AzureFileSystem(account_name="acct", account_key="S0VZ")
    spec = spec_of_arrow(filesystem, "container", NO_FILES)
    assert isinstance(spec, ClientSpec)
    assert dict(spec.secret) == {"access_key": "S0VZ"}
    assert dict(spec.config) == {
        "account_name": "acct",
        "endpoint": "https://acct.blob.core.windows.net",
        "skip_signature": False,
    }


def test_azure_sas_and_emulator():
    filesystem = pafs.AzureFileSystem(
        account_name="devstoreaccount1",
        sas_token="?sv=1&sig=abc",
        blob_storage_authority="127.0.0.1:10000",
        blob_storage_scheme="http",
        dfs_storage_authority="127.0.0.1:10000",
        dfs_storage_scheme="http",
    )
    spec = spec_of_arrow(filesystem, "container", NO_FILES)
    assert isinstance(spec, ClientSpec)
    assert dict(spec.secret) == {"sas_token": "sv=1&sig=abc"}
    assert dict(spec.config)["endpoint"] == "http://127.0.0.1:10000/devstoreaccount1"
    assert dict(spec.options) == {"allow_http": True}


def test_azure_service_principal_and_default():
    filesystem = pafs.AzureFileSystem(account_name="acct", client_id="C", client_secret="S", tenant_id="T")
    spec = spec_of_arrow(filesystem, "container", NO_FILES)
    assert isinstance(spec, ClientSpec)
    assert dict(spec.config)["client_secret"] == "S"
    assert spec.proven
    assert not spec_of_arrow(pafs.AzureFileSystem(account_name="acct"), "c", NO_FILES).proven


@pytest.mark.parametrize(
    "filesystem",
    [
        lambda: pafs.S3FileSystem(access_key="AK", secret_key="SK", region="eu-west-1"),
        lambda: pafs.GcsFileSystem(anonymous=True, endpoint_override="localhost:1", scheme="http"),
        lambda: pafs.AzureFileSystem(account_name="acct", account_key="S0VZ"),
        lambda: pafs.AzureFileSystem(account_name="acct", sas_token="sv=1&sig=abc"),
    ],
)
def test_a_client_can_be_built_inside_of_subtrees(filesystem):
    tree = pafs.SubTreeFileSystem("bucket/runs", filesystem())
    store = open_store(tree, "exp/trial")
    assert isinstance(store, CloudStore)
    assert store.root == "runs/exp/trial"
    assert "bucket/runs/exp/trial" in store.description
    direct = open_store(filesystem(), "bucket/runs/exp/trial/")
    assert direct.root == store.root
    assert direct.client is store.client


# --- fsspec --------------------------------------------------------------------------------------


def s3fs_spec(**options):
    s3fs = pytest.importorskip("s3fs")
    return spec_of_fsspec(s3fs.S3FileSystem(**options, skip_instance_cache=True), "b", NO_FILES)


def test_s3fs_options():
    spec = s3fs_spec(
        key="AK",
        secret="SK",
        token="ST",
        endpoint_url="http://127.0.0.1:9000",
        client_kwargs={"region_name": "eu-west-1"},
    )
    assert isinstance(spec, ClientSpec)
    assert dict(spec.secret) == {
        "access_key_id": "AK",
        "secret_access_key": "SK",
        "token": "ST",
    }
    assert dict(spec.config)["endpoint"] == "http://127.0.0.1:9000"
    assert dict(spec.config)["region"] == "eu-west-1"
    assert spec.proven


def test_s3fs_anonymous_and_virtual():
    spec = s3fs_spec(anon=True, client_kwargs={"endpoint_url": "https://e.x"})
    assert dict(spec.config)["skip_signature"] is True
    assert dict(spec.config)["endpoint"] == "https://e.x"
    spec = s3fs_spec(
        key="A",
        secret="S",
        endpoint_url="https://e.x",
        config_kwargs={"s3": {"addressing_style": "virtual"}},
    )
    assert dict(spec.config)["endpoint"] == "https://b.e.x"


def test_s3fs_without_region_is_to_be_probed():
    assert not s3fs_spec(key="A", secret="S").proven
    assert not s3fs_spec().proven


@pytest.mark.parametrize(
    "options",
    [
        {"s3_additional_kwargs": {"ServerSideEncryption": "aws:kms"}},
        {"client_kwargs": {"verify": "/nonexistent/authority.pem"}},
        {"client_kwargs": {"config": None}},
        {"requester_pays": True},
    ],
)
def test_s3fs_options_that_only_s3fs_knows(options):
    assert isinstance(s3fs_spec(key="A", secret="S", **options), NoClient)


class Fake:
    """What the derivation reads of an fsspec object; gcsfs and adlfs are not installed here."""

    def __init__(self, protocol, **storage_options):
        self.protocol = protocol
        self.storage_options = storage_options
        self.storage_args = ()


def test_gcsfs_options(tmp_path):
    spec = spec_of_fsspec(Fake(("gs", "gcs"), token="anon"), "b", NO_FILES)
    assert dict(spec.config)["skip_signature"] is True
    account = {"type": "service_account", "private_key": "PK", "client_email": "e"}
    spec = spec_of_fsspec(Fake(("gs", "gcs"), token=account, project="p"), "b", NO_FILES)
    assert json.loads(dict(spec.config)["service_account_key"]) == account
    key = tmp_path / "key.json"
    key.write_text(json.dumps(account))
    spec = spec_of_fsspec(Fake(("gs", "gcs"), token=str(key)), "b", NO_FILES)
    assert json.loads(dict(spec.config)["service_account_key"]) == account
    assert "PK" not in repr(spec)
    assert not spec_of_fsspec(Fake(("gs", "gcs")), "b", NO_FILES).proven
    assert isinstance(spec_of_fsspec(Fake(("gs",), token="browser"), "b", NO_FILES), NoClient)


def test_adlfs_options():
    spec = spec_of_fsspec(Fake("abfs", account_name="a", account_key="K"), "c", NO_FILES)
    assert dict(spec.secret) == {"access_key": "K"}
    assert dict(spec.config)["endpoint"] == "https://a.blob.core.windows.net"
    assert isinstance(spec_of_fsspec(Fake("abfs"), "c", NO_FILES), NoClient)
    unknown = Fake("abfs", account_name="a", connection_string="x")
    assert isinstance(spec_of_fsspec(unknown, "c", NO_FILES), NoClient)


# --- clients are shared --------------------------------------------------------------------------


def test_equal_options_share_one_client():
    options = {"access_key": "AK", "secret_key": "SK", "region": "eu-west-1"}
    one = open_store(pafs.S3FileSystem(**options), "bucket/a")
    two = open_store(pafs.S3FileSystem(**options), "bucket/b")
    assert one.client is two.client
    other = open_store(pafs.S3FileSystem(**{**options, "secret_key": "S2"}), "bucket/a")
    assert other.client is not one.client
    slow = open_store(pafs.S3FileSystem(**options), "bucket/a", limits=ClientLimits(retries=9))
    assert slow.client is not one.client


def test_a_forked_child_makes_its_own_client(monkeypatch):
    spec = s3_spec(access_key="AK", secret_key="SK")
    ours = client_of(spec)
    monkeypatch.setattr(clients.os, "getpid", lambda: -1)
    assert client_of(spec) is not ours


def test_limits_reach_the_client():
    spec = s3_spec(access_key="AK", secret_key="SK")
    client = client_of(spec, ClientLimits(request_timeout=7, retries=2, retry_timeout=3)).current
    assert client.retry_config["max_retries"] == 2
    assert client.retry_config["retry_timeout"] == dt.timedelta(seconds=3)
    assert "7" in str(client.client_options["timeout"])


# --- against a server ----------------------------------------------------------------------------


@pytest.mark.s3
def test_uris_with_and_without_credentials(rclone, monkeypatch):
    endpoint = rclone.endpoint.removeprefix("http://")
    query = f"endpoint_override={endpoint}&scheme=http&region=us-east-1"
    inside = open_uri(f"s3://{KEY}:{SECRET}@{BUCKET}/uri/a%20b?{query}")
    assert isinstance(inside, CloudStore)
    assert SECRET not in inside.description
    inside.put("f", b"x")
    for name, value in rclone.env().items():
        monkeypatch.setenv(name, value)
    bare = open_uri(f"s3://{BUCKET}/uri/a b?{query}")
    assert bare.read("f") == b"x"
    assert open_uri(rclone.uri("uri/a%20b")).read("f") == b"x"
    on_fs = open_uri(f"{BUCKET}/uri/a b", storage_filesystem=rclone.filesystem())
    assert on_fs.read("f") == b"x"


@pytest.mark.s3
def test_credentials_of_the_environment_are_probed(rclone, monkeypatch, caplog):
    """pyarrow found the credentials by itself: obstore is trusted once it sees the same."""
    caplog.set_level(logging.DEBUG, "ray_artifact_sync")
    for name, value in rclone.env().items():
        monkeypatch.setenv(name, value)
    filesystem = pafs.S3FileSystem(
        region="us-east-1", scheme="http", endpoint_override=rclone.endpoint[len("http://") :]
    )
    filesystem_at(rclone.endpoint).open_output_stream(f"{BUCKET}/probe/exp/.validate_storage_marker").close()
    store = open_store(filesystem, f"{BUCKET}/probe/exp/trial")
    assert isinstance(store, CloudStore)
    assert "obstore, because its own credentials see the same files" in caplog.text
    assert SECRET not in caplog.text


@pytest.mark.s3
def test_obstore_is_not_trusted_where_its_credentials_differ(rclone, monkeypatch, caplog):
    """pyarrow took the right keys from the environment when it started; they are gone now."""
    caplog.set_level(logging.DEBUG, "ray_artifact_sync")
    for name, value in rclone.env().items():
        monkeypatch.setenv(name, value)
    endpoint = rclone.endpoint[len("http://") :]
    filesystem = pafs.S3FileSystem(region="us-east-1", scheme="http", endpoint_override=endpoint)
    filesystem.get_file_info(f"{BUCKET}/x")  # pyarrow keeps what it found for a while
    spec = spec_of_arrow(filesystem, BUCKET, {**NO_FILES})
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "SOMEONEELSE00000")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "other")
    assert isinstance(spec, ClientSpec)
    store = open_store(filesystem, f"{BUCKET}/probe/other", limits=ClientLimits(retries=1))
    assert isinstance(store, ArrowStore)
    assert "pyarrow, because obstore's own credentials do not work there" in caplog.text


@pytest.mark.s3
def test_s3fs_reaches_the_same_place(rclone):
    s3fs = pytest.importorskip("s3fs")
    filesystem = s3fs.S3FileSystem(key=KEY, secret=SECRET, endpoint_url=rclone.endpoint)
    store = open_store(fsspec_wrapped(filesystem), f"{BUCKET}/s3fs/x")
    assert isinstance(store, CloudStore)
    store.put("f", b"x")
    pickled = pickle.loads(pickle.dumps(filesystem))
    assert open_store(fsspec_wrapped(pickled), f"{BUCKET}/s3fs/x").read("f") == b"x"


@pytest.mark.s3
def test_virtual_hosts_are_reached_through_a_proxy(moto):
    """The bucket is in the name of the host, which only the proxy can find."""
    filesystem = pafs.S3FileSystem(
        access_key=KEY,
        secret_key=SECRET,
        region="us-east-1",
        scheme="http",
        endpoint_override="s3.us-east-1.amazonaws.com",
        force_virtual_addressing=True,
        proxy_options=moto.endpoint,
    )
    store = open_store(filesystem, f"{BUCKET}/virtual")
    assert isinstance(store, CloudStore)
    store.put("a b", b"x")
    assert [file.path for file in store.list()] == ["a b"]
    assert open_store(moto.filesystem(), f"{BUCKET}/virtual").read("a b") == b"x"


@pytest.mark.s3
@pytest.mark.parametrize("kind", ["arrow", "s3fs"])
def test_anonymous_requests_are_not_signed(kind, moto):
    open_store(moto.filesystem(), f"{BUCKET}/public").put("a", b"x")
    with contextlib.closing(moto.boto()) as client:
        client.put_object_acl(Bucket=BUCKET, Key="public/a", ACL="public-read")
    with ExpiringProxy(moto.endpoint, answer_markers=False) as proxy:
        if kind == "arrow":
            endpoint = proxy.endpoint.removeprefix("http://")
            filesystem = pafs.S3FileSystem(
                anonymous=True, region="us-east-1", scheme="http", endpoint_override=endpoint
            )
        else:
            s3fs = pytest.importorskip("s3fs")
            filesystem = fsspec_wrapped(s3fs.S3FileSystem(anon=True, endpoint_url=proxy.endpoint))
        store = open_store(filesystem, f"{BUCKET}/public")
        assert isinstance(store, CloudStore)
        assert store.read("a") == b"x"
        assert set(proxy.served) == {""}


# --- imports -------------------------------------------------------------------------------------


def test_the_package_is_light_and_knows_no_ray():
    code = (
        "import sys; import ray_artifact_sync.stores as s; "
        "assert not {'obstore', 'pyarrow', 'ray'} & set(sys.modules), sorted(sys.modules); "
        "s.open_uri; assert 'ray' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
