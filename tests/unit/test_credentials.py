"""Credentials that do not last, roles that are assumed, and servers with certificates of one's own."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
from concurrent.futures import ThreadPoolExecutor

import pytest
from pyarrow import fs as pafs

from ray_artifact_sync import RemoteUploader
from ray_artifact_sync.errors import IncompleteSyncError, StorageError, StoragePermissionError
from ray_artifact_sync.stores import clients, open_store
from ray_artifact_sync.stores.arrow import ArrowStore
from ray_artifact_sync.stores.clients import ClientLimits, NoClient, spec_of_arrow, spec_of_fsspec
from ray_artifact_sync.stores.cloud import CloudStore
from ray_artifact_sync.stores.s3_append import MIN_APPEND_SIZE
from tests.support.expiring import ExpiringProxy, KeyService
from tests.support.s3_servers import BUCKET, KEY, REGION, SECRET
from tests.support.sessions import open_session, read_tree, save
from tests.support.tls import Authority, TlsFront

pytestmark = pytest.mark.s3

MIB = 1024 * 1024
LIMITS = ClientLimits(connect_timeout=2, request_timeout=30, retries=1, retry_timeout=5)

_numbers = itertools.count()


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch, tmp_path):
    """Nothing of the developer's own cloud accounts takes part, and no instance is asked."""
    for name in list(os.environ):
        if name.startswith("AWS_") and name != "AWS_REQUEST_CHECKSUM_CALCULATION":
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_DEFAULT_REGION", REGION)
    monkeypatch.setattr(clients, "_clients", {})  # the same place with the credentials of another test


@pytest.fixture
def service(monkeypatch, tmp_path):
    """What a container asks for its credentials."""
    token = tmp_path / "container-token"
    token.write_text(KeyService.TOKEN)
    with KeyService() as service:
        monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", service.uri)
        monkeypatch.setenv("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", str(token))
        yield service


@pytest.fixture
def server(moto):
    """A real S3 server, which takes any key, behind a proxy that lets keys expire."""
    with ExpiringProxy(moto.endpoint, answer_markers=False) as proxy:
        yield proxy


def arrow_at(endpoint: str, **options) -> pafs.S3FileSystem:
    """pyarrow's client, which looks for its credentials itself."""
    scheme, _, host = endpoint.partition("://")
    return pafs.S3FileSystem(region=REGION, scheme=scheme, endpoint_override=host, **options)


def s3fs_at(endpoint: str, **options) -> pafs.PyFileSystem:
    """s3fs' client behind pyarrow, as Ray takes it."""
    s3fs = pytest.importorskip("s3fs")
    filesystem = s3fs.S3FileSystem(endpoint_url=endpoint, skip_instance_cache=True, **options)
    return pafs.PyFileSystem(pafs.FSSpecHandler(filesystem))


def place() -> str:
    return f"{BUCKET}/credentials/{next(_numbers)}"


@pytest.fixture(params=["arrow", "s3fs", "arrow_store"])
def ambient(request, server, service):
    """A store whose credentials come from the service, and last for as long as the server says."""
    filesystem = (s3fs_at if request.param == "s3fs" else arrow_at)(server.endpoint)
    if request.param == "arrow_store":
        store = ArrowStore(filesystem, place())
    else:
        store = open_store(filesystem, place(), limits=LIMITS)
        assert type(store) is CloudStore
    return store


def patiently(store, act):
    """As the layers above do where a store says that it is worth it; obstore's clients try again by themselves."""
    for _ in range(3):
        try:
            return act()
        except StoragePermissionError as error:
            if not error.retryable or type(store) is CloudStore:
                raise
    return act()


# --- expired, and refreshed ----------------------------------------------------------------------

OPERATIONS = {
    "stat": lambda store: store.stat("old").size == 3,
    "stat of nothing": lambda store: store.stat("nothing") is None,
    "read": lambda store: store.read("old") == b"old",
    "put": lambda store: store.put("new", b"new").size == 3,
    "put, absent": lambda store: store.put("new", b"new", if_absent=True).size == 3,
    "copy": lambda store: store.copy("old", "copied") is None and store.read("copied") == b"old",
    "delete": lambda store: store.delete(["old"]) is None and store.stat("old") is None,
    "list": lambda store: [file.path for file in store.list()] == ["old"],
    "list_dirs": lambda store: store.list_dirs() == [],
    "list_files": lambda store: [file.path for file in store.list_files()] == ["old"],
}


# pyarrow asks with HEAD, and a 403 without a body may mean anything: 400 is what S3 says.
@pytest.mark.parametrize(
    ("ambient", "status"), [("arrow", 400), ("arrow", 403), ("s3fs", 400), ("arrow_store", 400)], indirect=["ambient"]
)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_kind_of_request_gets_new_credentials(operation, status, ambient, server, service):
    ambient.put("old", b"old")
    ambient.put("warm", b"", if_absent=True)  # conditional writes have a client of their own
    ambient.delete(["warm"])
    server.status = status
    server.expire()
    given = len(service.given)
    assert patiently(ambient, lambda: OPERATIONS[operation](ambient))
    assert sum(server.refused.values()) >= 1
    assert 1 <= len(service.given) - given <= 2  # one with which requests are retried, one with which they are not


def test_a_key_that_was_taken_back_is_replaced(ambient, server, service):
    ambient.put("a", b"1")
    server.status, server.code = 403, "InvalidAccessKeyId"
    server.expire()
    assert patiently(ambient, lambda: ambient.put("a", b"2")).size == 1
    assert ambient.read("a") == b"2"


def test_many_threads_ask_for_new_credentials_once(server, service):
    store = open_store(arrow_at(server.endpoint), place(), limits=LIMITS)
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda number: store.put(f"{number}", b"x"), range(64)))
        given = len(service.given)
        server.expire()
        list(pool.map(lambda number: store.put(f"{number}", b"y"), range(64)))
    assert len(service.given) == given + 1
    assert {store.read(f"{number}") for number in range(64)} == {b"y"}


def test_access_denied_is_not_tried_again(server, service):
    store = open_store(arrow_at(server.endpoint), place(), limits=LIMITS)
    store.put("a", b"1")
    given = len(service.given)
    rule = server.fail("put_object", status=403)
    with pytest.raises(StoragePermissionError, match="AccessDenied") as caught:
        store.put("a", b"2")
    assert not caught.value.retryable
    assert rule.hits == 1
    assert len(service.given) == given


@pytest.mark.parametrize("kind", ["arrow", "s3fs", "arrow_store"])
def test_a_trial_outlives_keys_that_are_good_for_some_calls(kind, server, service, tmp_path):
    """Nothing is lost: after each key there is another, whatever request it is that is refused."""
    server.calls = {"arrow": 20, "s3fs": 40, "arrow_store": 80}[kind]
    filesystem = (s3fs_at if kind == "s3fs" else arrow_at)(server.endpoint)
    root = place()

    def open_it():
        return ArrowStore(filesystem, root) if kind == "arrow_store" else open_store(filesystem, root, limits=LIMITS)

    session = open_session(tmp_path / "work", open_it(), 1, max_concurrency=4, retries=5, sync_timeout=240.0)
    work = session.working_dir
    with open(os.path.join(work, "large.bin"), "wb") as file:
        file.write(os.urandom(20 * MIB))
    for step in range(3):
        for number in range(25):
            with open(os.path.join(work, f"{number}.txt"), "w") as file:
                file.write(f"{step}")
        assert save(session, f"checkpoint_{step:06d}")
    tree = read_tree(work)
    session.close()
    assert sum(1 for key in server.refused if server.refused[key]) >= 2
    # On another node.
    session = open_session(tmp_path / "other", open_it(), 2, retries=5)
    assert session.restore("checkpoint_000002", fresh=True).exact
    assert read_tree(tmp_path / "other") == tree
    session.close()


def test_a_large_file_is_sent_again_with_new_credentials(server, service, tmp_path):
    source = tmp_path / "large"
    source.write_bytes(os.urandom(20 * MIB))
    root = place()
    with RemoteUploader(root, arrow_at(server.endpoint)) as uploader:
        rule = server.hang("upload_part", times=1)
        future = uploader.upload_file_async("large", source)
        assert rule.reached.wait(30)
        server.expire()
        rule.release()
        assert future.result(60).size == 20 * MIB
    assert open_store(arrow_at(server.endpoint), root).read("large") == source.read_bytes()


def test_an_append_gets_new_credentials(juicefs, service, monkeypatch):
    """JuiceFS' gateway takes one key only: the service hands that out, under a name that the proxy can tell apart."""
    pytest.importorskip("botocore")
    with ExpiringProxy(juicefs.endpoint) as proxy:
        monkeypatch.setattr(service, "credentials", lambda: pytest.fail("not asked: the environment comes first"))
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
        store = open_store(arrow_at(proxy.endpoint), place(), limits=LIMITS)
        store.put("log", bytes(MIN_APPEND_SIZE), size_hint=MIN_APPEND_SIZE)
        store.append("log", MIN_APPEND_SIZE, [b"first"])
        refusal = proxy.fail("upload_part_copy", status=400, code="ExpiredToken", times=1)
        store.append("log", MIN_APPEND_SIZE + 5, [b"second"])
        assert refusal.hits == 1
        assert store.read("log")[-11:] == b"firstsecond"
        assert store.can_append


# --- expired for good ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["arrow", "s3fs"])
def test_keys_that_were_given_cannot_be_renewed(kind, server):
    """At once: another try has the same keys."""
    keys = {
        "arrow": {"access_key": "GIVEN", "secret_key": "SECRETOFGIVEN", "session_token": "TOKENOFGIVEN"},
        "s3fs": {"key": "GIVEN", "secret": "SECRETOFGIVEN", "token": "TOKENOFGIVEN"},
    }[kind]
    filesystem = (s3fs_at if kind == "s3fs" else arrow_at)(server.endpoint, **keys)
    store = open_store(filesystem, place(), limits=LIMITS)
    store.put("a", b"1")
    server.expire()
    with pytest.raises(StoragePermissionError, match=r"ExpiredToken.*were given with the file system") as caught:
        store.put("a", b"2")
    assert not caught.value.retryable
    assert sum(server.refused.values()) == 1
    assert "OFGIVEN" not in str(caught.value)


def test_where_new_credentials_are_refused_too_that_is_the_error(server, service, tmp_path):
    (tmp_path / "file").write_text("x")
    uploader = RemoteUploader(place(), arrow_at(server.endpoint), num_attempts=2)
    server.calls = 0
    error = uploader.upload_file_async("file", tmp_path / "file").exception(60)
    assert isinstance(error, StoragePermissionError)
    assert "ExpiredToken" in str(error)
    assert "looked for anew" in str(error)
    assert len(service.given) < 12
    with pytest.raises(IncompleteSyncError):
        uploader.wait_and_close()


def test_a_session_of_the_users_own_says_what_the_credentials_are(server):
    """The usual way to let s3fs have credentials that somebody else hands out: botocore asks for more in time."""
    import datetime as dt

    aiobotocore = pytest.importorskip("aiobotocore.session")
    from aiobotocore.credentials import AioRefreshableCredentials

    asked = []

    async def more():
        asked.append(f"OWN{len(asked)}")
        ends = dt.datetime.now(dt.timezone.utc) + dt.timedelta(hours=1)
        return {"access_key": asked[-1], "secret_key": "S", "token": "T", "expiry_time": ends.isoformat()}

    session = aiobotocore.AioSession()
    session._credentials = AioRefreshableCredentials.create_from_metadata(
        {
            "access_key": "OWN",
            "secret_key": "S",
            "token": "T",
            "expiry_time": dt.datetime.now(dt.timezone.utc).isoformat(),
        },
        refresh_using=more,
        method="own",
    )
    store = open_store(s3fs_at(server.endpoint, session=session), place(), limits=LIMITS)
    assert type(store) is CloudStore
    store.put("a", b"1")
    assert asked == ["OWN0"]
    assert set(server.served) == {"OWN0"}


def test_an_s3fs_profile_is_read(server, tmp_path, monkeypatch):
    (tmp_path / "credentials").write_text("[dev]\naws_access_key_id = OFDEV\naws_secret_access_key = s\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    store = open_store(s3fs_at(server.endpoint, profile="dev"), place(), limits=LIMITS)
    assert type(store) is CloudStore
    store.put("a", b"1")
    assert set(server.served) == {"OFDEV"}


# --- roles ---------------------------------------------------------------------------------------

ROLE_POLICY = (
    '{"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": "s3:*", "Resource": "arn:aws:s3:::*"}]}'
)
USER_POLICY = (
    '{"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": "sts:AssumeRole", "Resource": "*"}]}'
)


@pytest.fixture
def role(monkeypatch):
    """A server that checks rights: the environment's user may assume a role and nothing else; the role may use S3."""
    import boto3

    from tests.support.s3_servers import MotoServer

    with MotoServer() as server, ExpiringProxy(server.endpoint, answer_markers=False) as proxy:
        options = {
            "endpoint_url": server.endpoint,
            "aws_access_key_id": KEY,
            "aws_secret_access_key": SECRET,
            "region_name": REGION,
        }
        with contextlib.closing(boto3.client("iam", **options)) as iam:
            arn = iam.create_role(RoleName="writer", AssumeRolePolicyDocument=USER_POLICY)["Role"]["Arn"]
            iam.put_role_policy(RoleName="writer", PolicyName="s3", PolicyDocument=ROLE_POLICY)
            iam.create_user(UserName="job")
            iam.put_user_policy(UserName="job", PolicyName="assume", PolicyDocument=USER_POLICY)
            keys = iam.create_access_key(UserName="job")["AccessKey"]
        server.check_rights()
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", keys["AccessKeyId"])
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", keys["SecretAccessKey"])
        monkeypatch.setenv("AWS_ENDPOINT_URL_STS", server.endpoint)
        yield arn, proxy, keys["AccessKeyId"]


def test_a_role_is_assumed_by_obstore(role, caplog):
    caplog.set_level(logging.DEBUG, "ray_artifact_sync")
    arn, proxy, user = role
    root = place()
    store = open_store(arrow_at(proxy.endpoint, role_arn=arn, session_name="trial"), root, limits=LIMITS)
    assert type(store) is CloudStore
    assert "obstore, because its own credentials see the same files" in caplog.text
    store.put("a", b"1")
    assert store.read("a") == b"1"
    assert user not in proxy.served
    # The user itself may not, so that it must have been the role.
    plain = open_store(arrow_at(proxy.endpoint), root, limits=LIMITS)
    with pytest.raises(StoragePermissionError):
        plain.put("b", b"1")
    # Its credentials end before their time.
    proxy.expire()
    store.put("a", b"2")
    assert store.read("a") == b"2"
    assert sum(1 for key in proxy.refused if key != user) >= 1


def test_without_botocore_pyarrow_assumes_the_role(role, caplog, monkeypatch):
    caplog.set_level(logging.DEBUG, "ray_artifact_sync")
    arn, proxy, _ = role
    monkeypatch.setattr(clients, "has_botocore", lambda: False)
    store = open_store(arrow_at(proxy.endpoint, role_arn=arn), place())
    assert type(store) is ArrowStore
    assert "pyarrow, because it assumes a role" in caplog.text
    store.put("a", b"1")
    proxy.expire()
    assert patiently(store, lambda: store.read("a")) == b"1"


def test_what_is_asked_for_a_role(monkeypatch):
    filesystem = type("Reduced", (), {})()
    filesystem.type_name, filesystem.region = "s3", "eu-west-1"
    options = {"role_arn": "arn:r", "session_name": "me", "external_id": "x", "load_frequency": 1200}
    filesystem.__class__.__reduce__ = lambda self: (None, (options,))
    spec = spec_of_arrow(filesystem, "bucket", {})
    assert not isinstance(spec, NoClient)
    assert not spec.proven
    role = spec.source
    assert (role.role_arn, role.session_name, role.external_id, role.seconds) == ("arn:r", "me", "x", 1200)
    assert role.region == "eu-west-1"


# --- certificates of one's own -------------------------------------------------------------------


@pytest.fixture(scope="module")
def authorities(tmp_path_factory):
    """Ours, and another."""
    directory = tmp_path_factory.mktemp("authorities")
    return Authority(directory, "ours"), Authority(directory, "others")


@pytest.fixture(scope="module")
def secure(moto, authorities):
    """An S3 server whose certificate only our authority vouches for."""
    with TlsFront(moto.endpoint, authorities[0].certificate) as front:
        yield front


TRUSTING = {
    "arrow": lambda endpoint, ca: arrow_at(endpoint, access_key=KEY, secret_key=SECRET, tls_ca_file_path=str(ca)),
    "s3fs": lambda endpoint, ca: s3fs_at(endpoint, key=KEY, secret=SECRET, client_kwargs={"verify": str(ca)}),
    "s3fs, use_ssl": lambda endpoint, ca: s3fs_at(
        endpoint, key=KEY, secret=SECRET, use_ssl=True, client_kwargs={"verify": str(ca)}
    ),
}


@pytest.mark.parametrize("kind", TRUSTING)
def test_an_authority_of_ones_own_is_trusted(kind, secure, authorities):
    root = place()
    filesystem = TRUSTING[kind](secure.endpoint, authorities[0].file)
    store = open_store(filesystem, root, limits=LIMITS)
    assert type(store) is CloudStore
    store.put("a", b"1")
    assert store.read("a") == b"1"
    # As the file system itself sees it.
    with filesystem.open_input_stream(f"{root}/a") as file:
        assert file.read() == b"1"


@pytest.mark.parametrize("kind", TRUSTING)
def test_a_server_of_an_unknown_authority_is_refused(kind, secure, authorities):
    before = secure.connections
    store = open_store(TRUSTING[kind](secure.endpoint, authorities[1].file), place(), limits=LIMITS)
    assert type(store) is CloudStore
    with pytest.raises(StorageError, match="certificate") as caught:
        store.put("a", b"1")
    assert secure.endpoint in str(caught.value)
    assert not caught.value.retryable
    assert secure.connections == before


def test_pyarrow_refuses_a_server_of_an_unknown_authority(secure, authorities):
    store = ArrowStore(TRUSTING["arrow"](secure.endpoint, authorities[1].file), place())
    with pytest.raises(StorageError, match="certificate") as caught:
        store.put("a", b"1")
    assert not caught.value.retryable


def test_the_uploader_says_that_it_is_the_certificate(secure):
    filesystem = arrow_at(secure.endpoint, access_key=KEY, secret_key=SECRET)
    with pytest.raises(StorageError, match=r"cannot write to .*certificate.*tls_ca_file_path"):
        RemoteUploader(place(), filesystem)


def test_s3fs_takes_the_bundle_of_the_environment(secure, authorities, monkeypatch):
    monkeypatch.setenv("AWS_CA_BUNDLE", str(authorities[0].file))
    store = open_store(s3fs_at(secure.endpoint, key=KEY, secret=SECRET), place(), limits=LIMITS)
    assert type(store) is CloudStore
    assert store.put("a", b"1").size == 1


def test_s3fs_without_verification_asks_nobody(secure):
    filesystem = s3fs_at(secure.endpoint, key=KEY, secret=SECRET, client_kwargs={"verify": False})
    store = open_store(filesystem, place(), limits=LIMITS)
    assert type(store) is CloudStore
    assert store.put("a", b"1").size == 1


def test_s3fs_without_ssl_goes_over_http():
    s3fs = pytest.importorskip("s3fs")
    filesystem = s3fs.S3FileSystem(key=KEY, secret=SECRET, use_ssl=False, client_kwargs={"region_name": "eu-west-1"})
    spec = spec_of_fsspec(filesystem, "bucket", {})
    assert dict(spec.config)["endpoint"] == "http://s3.eu-west-1.amazonaws.com"
    assert dict(spec.options)["allow_http"] is True


def test_an_append_trusts_the_same_authority(juicefs, authorities):
    pytest.importorskip("botocore")
    with TlsFront(juicefs.endpoint, authorities[0].certificate) as front:
        filesystem = arrow_at(
            front.endpoint, access_key=KEY, secret_key=SECRET, tls_ca_file_path=str(authorities[0].file)
        )
        store = open_store(filesystem, place(), limits=LIMITS)
        store.put("log", bytes(MIN_APPEND_SIZE), size_hint=MIN_APPEND_SIZE)
        assert store.append("log", MIN_APPEND_SIZE, [b"tail"]).size == MIN_APPEND_SIZE + 4
        assert store.can_append
