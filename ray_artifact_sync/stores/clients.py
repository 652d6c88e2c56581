"""From the options of a pyarrow or fsspec file system to the obstore client of the same place.

The derivation is pure (`spec_of_arrow`, `spec_of_fsspec` return a value or the reason why there is
none); only `client_of` builds something, once for each process and spec, since a client holds a
connection pool.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal

from obstore import store as obstore_store

from ray_artifact_sync.stores.credentials import AssumedRole, CredentialSource, S3fsSession, has_botocore


@dataclass(frozen=True, slots=True)
class ClientLimits:
    """How long a client waits, and how often it tries by itself.

    Small: the transfer layer above retries too, and an error is to surface before `sync_timeout`.

    Attributes:
        connect_timeout: Seconds until a connection stands.
        request_timeout: Seconds of one request, its body included. Its path is kept from others as long, whatever
            `sync_timeout` is: a request that was given up may still arrive, and without conditional writes it would
            land on what was sent after it.
        retries: Further tries of one request.
        retry_timeout: Seconds after which no further try starts.
    """

    connect_timeout: float = 5.0
    request_timeout: float = 60.0
    retries: int = 3
    retry_timeout: float = 15.0


@dataclass(frozen=True, slots=True)
class ClientSpec:
    """What makes an obstore client; two equal specs share one.

    Attributes:
        kind: Which client.
        bucket: Bucket or container.
        config: obstore's configuration, as sorted pairs.
        secret: Fields of a fixed credential, as sorted pairs. Given through a provider, so that
            what lies in the environment (a stale `AWS_SESSION_TOKEN`) does not mix with it.
        source: Where credentials that do not last come from, in the place of `secret`.
        options: obstore's client options, as sorted pairs.
        place: For descriptions: where it is, without credentials.
        proven: False where the client finds credentials by its own chain, which need not be those
            that the file system found: probe it before trusting it.
    """

    kind: Literal["S3", "GCS", "Azure"]
    bucket: str
    config: tuple[tuple[str, Any], ...] = field(default=(), repr=False)
    secret: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    source: CredentialSource | None = None
    options: tuple[tuple[str, Any], ...] = field(default=(), repr=False)
    place: str = ""
    proven: bool = True

    @property
    def renewable(self) -> bool:
        """Whether asking anew may give other credentials; those that were given as such cannot change."""
        return self.kind == "S3" and not self.secret and not dict(self.config).get("skip_signature")


@dataclass(frozen=True, slots=True)
class NoClient:
    """There is no obstore client for this file system.

    Attributes:
        reason: Why, for the log.
    """

    reason: str


# --- pyarrow -------------------------------------------------------------------------------------

# Options that tune pyarrow itself and say nothing about the place or the rights.
_TUNING = frozenset(
    (
        "allow_bucket_creation",
        "allow_bucket_deletion",
        "allow_delayed_open",
        "background_writes",
        "check_directory_existence_before_creation",
        "connect_timeout",
        "default_bucket_location",
        "external_id",
        "load_frequency",
        "project_id",
        "request_timeout",
        "retry_strategy",
        "retry_time_limit",
        "session_name",
        "tls_verify_certificates",
    )
)


def spec_of_arrow(filesystem: Any, bucket: str, environ: Mapping[str, str] | None = None) -> ClientSpec | NoClient:
    """The client for a pyarrow S3, GCS or Azure file system.

    Args:
        filesystem: The file system (not a `SubTreeFileSystem`).
        bucket: Bucket or container.
        environ: Environment variables; this process's by default.

    Returns:
        The spec, or why there is none.
    """
    environ = os.environ if environ is None else environ
    derive = {"s3": _arrow_s3, "gcs": _arrow_gcs, "abfs": _arrow_azure}.get(filesystem.type_name)
    if derive is None:
        return NoClient(f"there is no client for {filesystem.type_name!r}")
    try:
        options = dict(filesystem.__reduce__()[1][0])
    except (TypeError, ValueError, IndexError, LookupError) as error:
        return NoClient(f"its options cannot be read ({type(error).__name__})")
    if filesystem.type_name == "s3":
        options["region"] = filesystem.region
    return derive(options, bucket, environ)


def _arrow_s3(options: dict[str, Any], bucket: str, environ: Mapping[str, str]) -> ClientSpec | NoClient:
    known = {
        *("access_key", "secret_key", "session_token", "anonymous", "region", "scheme"),
        *("endpoint_override", "proxy_options", "force_virtual_addressing", "tls_ca_file_path"),
        "role_arn",
    }
    if unknown := _unknown(options, known):
        return NoClient(f"it has options that only pyarrow knows: {unknown}")
    scheme = options.get("scheme") or "https"
    endpoint = options.get("endpoint_override") or ""
    if endpoint and "://" not in endpoint:
        endpoint = f"{scheme}://{endpoint}"
    client: dict[str, Any] = {}
    if options.get("tls_verify_certificates") is False:
        client["allow_invalid_certificates"] = True
    proxy = options.get("proxy_options") or {}
    if proxy.get("host"):
        client["proxy_url"] = _proxy_url(proxy)
    if options.get("tls_ca_file_path"):
        authority = _authority(options["tls_ca_file_path"])
        if isinstance(authority, NoClient):
            return authority
        client.update(authority)
    role: AssumedRole | None = None
    if options.get("role_arn"):
        if not has_botocore():
            return NoClient("it assumes a role, for which obstore needs botocore (the extra `[s3]`)")
        role = AssumedRole(
            options["role_arn"],
            session_name=options.get("session_name") or "",
            external_id=options.get("external_id") or "",
            seconds=int(options.get("load_frequency") or 0),
            region=options.get("region"),
        )
    return _s3(
        bucket,
        environ,
        key=options.get("access_key"),
        secret=options.get("secret_key"),
        token=options.get("session_token"),
        anonymous=bool(options.get("anonymous")),
        region=options.get("region"),
        endpoint=endpoint,
        virtual_hosted=bool(options.get("force_virtual_addressing")),
        client=client,
        source=role,
    )


def _arrow_gcs(options: dict[str, Any], bucket: str, environ: Mapping[str, str]) -> ClientSpec | NoClient:
    known = {
        *("access_token", "credential_token_expiration", "anonymous", "scheme"),
        "endpoint_override",
    }
    if unknown := _unknown(options, known):
        return NoClient(f"it has options that only pyarrow knows: {unknown}")
    endpoint = options.get("endpoint_override") or ""
    if endpoint and "://" not in endpoint:
        endpoint = f"{options.get('scheme') or 'https'}://{endpoint}"
    return _gcs(
        bucket,
        environ,
        token=options.get("access_token"),
        anonymous=bool(options.get("anonymous")),
        endpoint=endpoint,
    )


def _arrow_azure(
    options: dict[str, Any],
    bucket: str,
    environ: Mapping[str, str],  # noqa: ARG001  (one signature for all)
) -> ClientSpec | NoClient:
    known = {
        *("account_name", "account_key", "sas_token", "client_id", "client_secret", "tenant_id"),
        *("blob_storage_authority", "blob_storage_scheme"),
        *("dfs_storage_authority", "dfs_storage_scheme"),
    }
    if unknown := _unknown(options, known):
        return NoClient(f"it has options that only pyarrow knows: {unknown}")
    account = options["account_name"]
    authority = options.get("blob_storage_authority") or ".blob.core.windows.net"
    scheme = options.get("blob_storage_scheme") or "https"
    # As pyarrow does: a leading dot means that the account is part of the host.
    host = f"{account}{authority}" if authority.startswith(".") else f"{authority}/{account}"
    return _azure(bucket, options, account=account, endpoint=f"{scheme}://{host}")


def _unknown(options: Mapping[str, Any], known: set[str]) -> str:
    """Names of the options that are set and that are not understood here."""
    return ", ".join(sorted(name for name in options if options[name] and name not in known | _TUNING))


def _proxy_url(proxy: Mapping[str, Any]) -> str:
    user = proxy.get("username") or ""
    if user:
        user = f"{user}:{proxy.get('password') or ''}@"
    port = f":{proxy['port']}" if (proxy.get("port") or 0) > 0 else ""
    return f"{proxy.get('scheme') or 'http'}://{user}{proxy['host']}{port}"


# --- fsspec --------------------------------------------------------------------------------------


def spec_of_fsspec(filesystem: Any, bucket: str, environ: Mapping[str, str] | None = None) -> ClientSpec | NoClient:
    """The client for an fsspec s3fs, gcsfs or adlfs file system.

    Args:
        filesystem: The fsspec object.
        bucket: Bucket or container.
        environ: Environment variables; this process's by default.

    Returns:
        The spec, or why there is none.
    """
    environ = os.environ if environ is None else environ
    protocol = filesystem.protocol
    protocols = {protocol} if isinstance(protocol, str) else set(protocol)
    if getattr(filesystem, "storage_args", ()):
        return NoClient("it was made with positional options")
    options = {name: value for name, value in filesystem.storage_options.items() if value}
    if protocols & {"s3", "s3a"}:
        return _fsspec_s3(filesystem, options, bucket, environ)
    if protocols & {"gs", "gcs"}:
        return _fsspec_gcs(options, bucket, environ)
    if protocols & {"abfs", "az"}:
        return _fsspec_azure(filesystem, options, bucket)
    return NoClient(f"there is no client for {sorted(protocols)}")


# Options of fsspec file systems that tune them and say nothing about the place or the rights.
_FSSPEC_TUNING = frozenset(
    (
        *("asynchronous", "cache_regions", "cache_timeout", "default_block_size", "block_size"),
        *("default_cache_type", "default_fill_cache", "max_concurrency", "skip_instance_cache"),
        *("use_listings_cache", "listings_expiry_time", "max_paths", "fixed_upload_size"),
        *("version_aware", "project", "consistency", "check_connection", "requests_timeout"),
        *("blocksize", "default_fill_cache", "use_ssl", "loop", "batch_size"),
        *("assume_container_exists", "timeout", "connection_timeout", "read_timeout"),
    )
)


def _only(options: Mapping[str, Any], known: set[str]) -> str:
    return ", ".join(sorted(set(options) - known - _FSSPEC_TUNING))


def _fsspec_s3(
    filesystem: Any, options: Mapping[str, Any], bucket: str, environ: Mapping[str, str]
) -> ClientSpec | NoClient:
    known = {
        *("key", "username", "secret", "password", "token", "anon", "endpoint_url"),
        *("client_kwargs", "config_kwargs", "profile", "session"),
    }
    if unknown := _only(options, known):
        return NoClient(f"it has options that only s3fs knows: {unknown}")
    client = dict(options.get("client_kwargs") or {})
    config = dict(options.get("config_kwargs") or {})
    addressing = (config.pop("s3", None) or {}).get("addressing_style", "auto")
    key = filesystem.key or client.pop("aws_access_key_id", None)
    secret = filesystem.secret or client.pop("aws_secret_access_key", None)
    token = filesystem.token or client.pop("aws_session_token", None)
    endpoint = filesystem.endpoint_url or client.pop("endpoint_url", None) or ""
    region = client.pop("region_name", None)
    secure = client.pop("use_ssl", filesystem.use_ssl)
    tls = _verify(client.pop("verify", None), environ)
    if isinstance(tls, NoClient):
        return tls
    client.pop("endpoint_url", None)
    for name in ("signature_version", "max_pool_connections", "retries", "connect_timeout"):
        config.pop(name, None)
    config.pop("read_timeout", None)
    if client or config:
        return NoClient(f"it has botocore options: {', '.join(sorted({*client, *config}))}")
    region = region or _session_region(options, environ)
    if not secure and not endpoint and not _endpoint_of(environ):
        endpoint = f"http://s3.{region or _REGION}.amazonaws.com"
    session = None if (key and secret) or filesystem.anon else S3fsSession(filesystem)
    return _s3(
        bucket,
        environ,
        key=key,
        secret=secret,
        token=token,
        anonymous=bool(filesystem.anon),
        region=region,
        endpoint=endpoint,
        virtual_hosted=addressing == "virtual",
        client=tls,
        source=session,
    )


def _verify(verify: Any, environ: Mapping[str, str]) -> dict[str, Any] | NoClient:
    """What botocore's `verify` (False, or a file of certificates) is for obstore.

    Of an authority of one's own, not quite: obstore trusts it besides the public ones, botocore in their place.
    """
    verify = environ.get("AWS_CA_BUNDLE") if verify is None else verify
    if verify is False:
        return {"allow_invalid_certificates": True}
    if verify in (None, True, ""):
        return {}
    return _authority(os.fspath(verify))


def _authority(path: str) -> dict[str, Any] | NoClient:
    try:
        with open(path, "rb") as file:
            return {"root_certificate": file.read()}
    except OSError as error:
        return NoClient(f"its CA file cannot be read ({error.strerror})")


def _session_region(options: Mapping[str, Any], environ: Mapping[str, str]) -> str | None:
    """The region that a session has of its own, where it is none of the environment's."""
    if "session" in options:
        region = options["session"].get_config_variable("region")
    elif "profile" in options and has_botocore():
        import botocore.session  # noqa: PLC0415  (an optional extra, and slow to import)

        region = botocore.session.Session(profile=options["profile"]).get_config_variable("region")
    else:
        return environ.get("AWS_DEFAULT_REGION")  # botocore does not know AWS_REGION
    return str(region) if region else None


def _fsspec_gcs(options: Mapping[str, Any], bucket: str, environ: Mapping[str, str]) -> ClientSpec | NoClient:
    if unknown := _only(options, {"token", "endpoint_url"}):
        return NoClient(f"it has options that only gcsfs knows: {unknown}")
    endpoint = options.get("endpoint_url") or ""
    token = options.get("token")
    if token == "anon":  # noqa: S105  (gcsfs' word for "no token")
        return _gcs(bucket, environ, anonymous=True, endpoint=endpoint)
    if isinstance(token, dict) and "private_key" in token:
        return _gcs(bucket, environ, service_account=json.dumps(token), endpoint=endpoint)
    if isinstance(token, str) and os.path.isfile(token):
        with open(token, encoding="utf-8") as file:
            content = file.read()
        if '"private_key"' not in content:
            return NoClient("its token file is no service account")
        return _gcs(bucket, environ, service_account=content, endpoint=endpoint)
    if token in (None, "google_default"):
        return _gcs(bucket, environ, endpoint=endpoint)
    return NoClient("its kind of token is known to gcsfs only")


def _fsspec_azure(filesystem: Any, options: Mapping[str, Any], bucket: str) -> ClientSpec | NoClient:
    names = (
        *("account_name", "account_key", "sas_token", "client_id", "client_secret", "tenant_id"),
        *("account_host", "connection_string"),
    )
    if unknown := _only(options, {*names, "anon"}):
        return NoClient(f"it has options that only adlfs knows: {unknown}")
    # Not only what it was given: adlfs reads the environment, too.
    found = {name: getattr(filesystem, name, None) or options.get(name) for name in names}
    if found["connection_string"]:
        return _azure_of_connection_string(found["connection_string"], bucket)
    account = found["account_name"]
    if not account:
        return NoClient("it names no storage account")
    host = found["account_host"] or f"{account}.blob.core.windows.net"
    has_credential = any(found[name] for name in ("account_key", "sas_token", "client_id"))
    return _azure(
        bucket,
        found,
        account=account,
        endpoint=f"https://{host}",
        anonymous=not has_credential and bool(getattr(filesystem, "anon", options.get("anon") is True)),
    )


def _azure_of_connection_string(text: str, bucket: str) -> ClientSpec | NoClient:
    """Azure's own way to say everything in one string, `Name=Value;...`."""
    pairs = (pair.partition("=") for pair in text.split(";") if pair.strip())
    found = {name.strip().lower(): value.strip() for name, _, value in pairs}
    account = found.get("accountname")
    endpoint = found.get("blobendpoint", "").rstrip("/")
    if not account:
        return NoClient("its connection string names no storage account")
    if not endpoint:
        scheme = found.get("defaultendpointsprotocol", "https")
        endpoint = f"{scheme}://{account}.blob.{found.get('endpointsuffix', 'core.windows.net')}"
    options = {"account_key": found.get("accountkey"), "sas_token": found.get("sharedaccesssignature")}
    if not any(options.values()):
        return NoClient("its connection string holds neither a key nor a SAS")
    return _azure(bucket, options, account=account, endpoint=endpoint)


# --- one client each -----------------------------------------------------------------------------

_REGION = "us-east-1"


def _s3(
    bucket: str,
    environ: Mapping[str, str],
    *,
    key: str | None,
    secret: str | None,
    token: str | None,
    anonymous: bool,
    region: str | None,
    endpoint: str,
    virtual_hosted: bool,
    client: Mapping[str, Any] | None = None,
    source: CredentialSource | None = None,
) -> ClientSpec | NoClient:
    region = region or environ.get("AWS_REGION") or environ.get("AWS_DEFAULT_REGION")
    has_keys = bool(key and secret)
    if not anonymous and not has_keys and source is None and (reason := _uncertain_aws_chain(environ)):
        return NoClient(reason)
    endpoint = (endpoint or _endpoint_of(environ)).rstrip("/")
    config: dict[str, Any] = {
        "region": region or _REGION,
        # All said, so that nothing in the environment says otherwise.
        "skip_signature": anonymous,
        "virtual_hosted_style_request": virtual_hosted,
        "unsigned_payload": False,
    }
    if endpoint:
        scheme, _, host = endpoint.partition("://")
        config["endpoint"] = f"{scheme}://{bucket}.{host}" if virtual_hosted else endpoint
    elif virtual_hosted:
        config["endpoint"] = f"https://{bucket}.s3.{config['region']}.amazonaws.com"
    fixed: dict[str, str] = {}
    if has_keys and not anonymous:
        fixed = {"access_key_id": str(key), "secret_access_key": str(secret)}
        if token:
            fixed["token"] = token
    return ClientSpec(
        "S3",
        bucket,
        config=_pairs(config),
        secret=_pairs(fixed),
        source=source,
        options=_pairs({**(client or {}), **_http(endpoint)}),
        place=_place(endpoint) or config["region"],
        # The role's own credentials are looked for by another chain; a profile may name another endpoint.
        proven=anonymous
        or (bool(region or endpoint) and (has_keys or (isinstance(source, S3fsSession) and not _profiles(environ)))),
    )


def _endpoint_of(environ: Mapping[str, str]) -> str:
    return environ.get("AWS_ENDPOINT_URL_S3") or environ.get("AWS_ENDPOINT_URL", "")


def _uncertain_aws_chain(environ: Mapping[str, str]) -> str:
    """Why obstore's chain of credentials may end at others than AWS's own; empty if it does not.

    Both begin with the environment; obstore does not know profile files.
    """
    if environ.get("AWS_ACCESS_KEY_ID") and environ.get("AWS_SECRET_ACCESS_KEY"):
        return ""
    if _profiles(environ):
        return "its credentials come from AWS profile files, which only pyarrow and boto read"
    return ""


def _profiles(environ: Mapping[str, str]) -> bool:
    """Whether there are AWS profile files."""
    home = environ.get("HOME", "")
    files = (
        environ.get("AWS_SHARED_CREDENTIALS_FILE") or f"{home}/.aws/credentials",
        environ.get("AWS_CONFIG_FILE") or f"{home}/.aws/config",
    )
    return bool(environ.get("AWS_PROFILE")) or any(os.path.exists(name) for name in files)


def _gcs(
    bucket: str,
    environ: Mapping[str, str],
    *,
    token: str | None = None,
    anonymous: bool = False,
    service_account: str | None = None,
    endpoint: str = "",
) -> ClientSpec | NoClient:
    # The emulator's variable is honoured by pyarrow and gcsfs, not by obstore.
    endpoint = (
        endpoint or environ.get("CLOUD_STORAGE_EMULATOR_ENDPOINT", "") or environ.get("STORAGE_EMULATOR_HOST", "")
    ).rstrip("/")
    config: dict[str, Any] = {"skip_signature": anonymous}
    if endpoint:
        config["base_url"] = endpoint if "://" in endpoint else f"http://{endpoint}"
    fixed: dict[str, str] = {}
    if token and not anonymous:
        fixed["token"] = token
    if service_account:
        config["service_account_key"] = service_account
    return ClientSpec(
        "GCS",
        bucket,
        config=_pairs(config),
        secret=_pairs(fixed),
        options=_pairs(_http(config.get("base_url", ""))),
        place=_place(endpoint),
        proven=bool(anonymous or token or service_account),
    )


def _azure(
    bucket: str,
    options: Mapping[str, Any],
    *,
    account: str,
    endpoint: str,
    anonymous: bool = False,
) -> ClientSpec | NoClient:
    config: dict[str, Any] = {
        "account_name": account,
        "endpoint": endpoint,
        "skip_signature": anonymous,
    }
    fixed: dict[str, str] = {}
    if options.get("account_key"):
        fixed["access_key"] = options["account_key"]
    elif options.get("sas_token"):
        fixed["sas_token"] = options["sas_token"].lstrip("?")
    elif options.get("client_secret"):
        for name in ("client_id", "client_secret", "tenant_id"):
            config[name] = options.get(name) or ""
    return ClientSpec(
        "Azure",
        bucket,
        config=_pairs(config),
        secret=_pairs(fixed),
        options=_pairs(_http(endpoint)),
        place=_place(endpoint),
        proven=anonymous or bool(fixed) or "client_secret" in config,
    )


def _http(endpoint: str) -> dict[str, Any]:
    return {"allow_http": True} if endpoint.startswith("http://") else {}


def _place(endpoint: str) -> str:
    scheme, found, host = endpoint.partition("://")
    host = host.partition("/")[0].rpartition("@")[2]
    return f"{scheme}://{host}" if found else ""


def _pairs(values: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    return tuple(sorted(values.items()))


# --- the clients of this process -----------------------------------------------------------------


class Client:
    """The obstore client of a place: another one, once the server has said that its credentials expired.

    Args:
        current: The obstore store.
        make: Makes another one, with credentials that are looked for anew; None where that cannot help.

    Attributes:
        current: What to send the next request with.
    """

    def __init__(self, current: Any, make: Callable[[], Any] | None = None) -> None:
        self.current = current
        self._make = make
        self._lock = threading.Lock()

    @property
    def renewable(self) -> bool:
        """Whether there may be other credentials."""
        return self._make is not None

    def renew(self, refused: Any) -> bool:
        """Sees to it that `current` is not the one that was refused any more; once, of many threads that say so.

        Returns:
            False if its credentials are what they are.
        """
        if self._make is None:
            return False
        with self._lock:
            if self.current is refused:
                self.current = self._make()
        return True


_clients: dict[tuple[int, ClientSpec, ClientLimits], Client] = {}
_clients_lock = threading.Lock()


def _renew_lock() -> None:
    """A lock that another thread held at a fork would stay locked for ever in the child."""
    global _clients_lock
    _clients_lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)


def client_of(spec: ClientSpec, limits: ClientLimits | None = None) -> Client:
    """The client for a spec: the same one for equal arguments in one process.

    Raises:
        ValueError: obstore refuses the configuration.
    """
    limits = limits or ClientLimits()
    # The process is part of the key: a forked child must not use its parent's connections.
    key = (os.getpid(), spec, limits)
    with _clients_lock:
        if key not in _clients:
            _clients[key] = Client(_build(spec, limits), (lambda: _rebuild(spec, limits)) if spec.renewable else None)
        return _clients[key]


def _rebuild(spec: ClientSpec, limits: ClientLimits) -> Any:
    """Another client: obstore keeps the credentials that it has found, and has no way to be told to look again."""
    if spec.source is not None:
        spec.source.renew()
    return _build(spec, limits)


def _build(spec: ClientSpec, limits: ClientLimits) -> Any:
    make: Callable[..., Any] = {
        "S3": obstore_store.S3Store,
        "GCS": obstore_store.GCSStore,
        "Azure": obstore_store.AzureStore,
    }[spec.kind]
    provider: dict[str, Any] = {}
    if spec.source is not None:
        provider["credential_provider"] = spec.source.__call__
    elif spec.secret:
        credential: dict[str, str | None] = {"token": None} if spec.kind == "S3" else {}
        credential.update(dict(spec.secret))
        credential["expires_at"] = None
        provider["credential_provider"] = lambda: credential
    return make(
        spec.bucket,
        config=dict(spec.config),
        client_options={
            **dict(spec.options),
            "connect_timeout": timedelta(seconds=limits.connect_timeout),
            "timeout": timedelta(seconds=limits.request_timeout),
        },
        retry_config={
            "max_retries": limits.retries,
            "retry_timeout": timedelta(seconds=limits.retry_timeout),
            "backoff": {
                "init_backoff": timedelta(milliseconds=100),
                "max_backoff": timedelta(seconds=2),
                "base": 2,
            },
        },
        **provider,
    )
