"""Credentials that do not last: where a client gets new ones, and how a server says that it wants them.

A source is called by obstore, in whatever thread sends a request: when a client begins, and again before the time
that the source names. What a server refuses before that time is asked for anew by `clients.Client.renew`.
"""

from __future__ import annotations

import datetime as dt
import importlib.util
import inspect
from dataclasses import dataclass, field
from typing import Any, Protocol

EXPIRED_CODES = frozenset(
    ("ExpiredToken", "ExpiredTokenException", "InvalidAccessKeyId", "InvalidToken", "TokenRefreshRequired")
)
"""What S3 says of credentials that were right once. A key that was taken back is not known any more."""

_SHORTEST_SECONDS = 900  # of an assumed role
_ASK_AGAIN = dt.timedelta(minutes=6)  # obstore asks five minutes before this is over

Credential = dict[str, Any]


class CredentialSource(Protocol):
    """Gives credentials for S3, again and again. Equal sources give those of the same identity."""

    def __call__(self) -> Credential:
        """Credentials as obstore takes them."""

    def renew(self) -> None:
        """Forgets those that the server has refused."""


@dataclass(frozen=True, slots=True)
class AssumedRole:
    """A role that is assumed with the credentials of the environment, as pyarrow's `role_arn` means it.

    Attributes:
        role_arn: Which role.
        session_name: Name of the session in the audit log; one of botocore's if empty.
        external_id: What the role's owner may ask for.
        seconds: How long the credentials are to last.
        region: Of the server that hands them out.
    """

    role_arn: str
    session_name: str = ""
    external_id: str = ""
    seconds: int = _SHORTEST_SECONDS
    region: str | None = None

    def __call__(self) -> Credential:
        """See `CredentialSource`."""
        import botocore.config  # noqa: PLC0415  (an optional extra, and slow to import)
        import botocore.session  # noqa: PLC0415

        client = botocore.session.Session().create_client(
            "sts",
            region_name=self.region,
            config=botocore.config.Config(connect_timeout=5, read_timeout=15, retries={"total_max_attempts": 3}),
        )
        try:
            found = client.assume_role(
                RoleArn=self.role_arn,
                RoleSessionName=self.session_name or "ray-artifact-sync",
                DurationSeconds=max(_SHORTEST_SECONDS, self.seconds),
                **({"ExternalId": self.external_id} if self.external_id else {}),
            )["Credentials"]
        finally:
            client.close()
        return {
            "access_key_id": found["AccessKeyId"],
            "secret_access_key": found["SecretAccessKey"],
            "token": found["SessionToken"],
            "expires_at": found["Expiration"].astimezone(dt.timezone.utc),
        }

    def renew(self) -> None:
        """See `CredentialSource`: nothing is kept."""


@dataclass(frozen=True, slots=True)
class S3fsSession:
    """Whatever the session of an s3fs file system finds: a profile, SSO, a role, a user's own refreshing credentials.

    Attributes:
        filesystem: The s3fs object.
    """

    filesystem: Any = field(repr=False)

    def __call__(self) -> Credential:
        """See `CredentialSource`."""
        from fsspec.asyn import sync  # noqa: PLC0415  (only with s3fs)

        self.filesystem.connect()  # makes the session, if there is none yet
        frozen = sync(self.filesystem.loop, self._frozen)
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            # botocore itself gets new ones in time: asking it often is enough.
            "expires_at": dt.datetime.now(dt.timezone.utc) + _ASK_AGAIN,
        }

    async def _frozen(self) -> Any:
        credentials = await self.filesystem.session.get_credentials()
        if credentials is None:
            raise PermissionError("s3fs has found no credentials")
        frozen = credentials.get_frozen_credentials()
        return await frozen if inspect.isawaitable(frozen) else frozen

    def renew(self) -> None:
        """See `CredentialSource`. A session that the user has made is only asked again: it alone knows how."""
        self.filesystem.connect(refresh=True)


def has_botocore() -> bool:
    """Whether botocore is installed (the extra `[s3]`; s3fs and boto3 bring it, too)."""
    return importlib.util.find_spec("botocore") is not None
