"""Azure's Blob storage on 127.0.0.1: Microsoft's emulator Azurite, an npm package."""

from __future__ import annotations

import os
import shutil
from urllib.parse import quote

from pyarrow import fs as pafs

from tests.support.s3_servers import Server

ACCOUNT = "devstoreaccount1"
# The emulator's own, published in its manual.
ACCOUNT_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
CONTAINER = "test-container"
PROGRAM = "AZURITE_BLOB"
"""Environment variable: the program `azurite-blob`, where it is not on PATH."""


def azurite() -> str | None:
    """The program, or None if it is not here. One that the environment names is taken as it is: no test is skipped."""
    return os.environ.get(PROGRAM) or shutil.which("azurite-blob")


MISSING = f"azurite is not here: `npm install azurite`, then set {PROGRAM} to its node_modules/.bin/azurite-blob"


def azure_filesystem_at(endpoint: str, **options) -> pafs.AzureFileSystem:
    """pyarrow's client for an endpoint such as `http://127.0.0.1:9000`."""
    scheme, _, host = endpoint.partition("://")
    return pafs.AzureFileSystem(
        account_name=ACCOUNT,
        **({"account_key": ACCOUNT_KEY} | options),
        blob_storage_authority=host,
        blob_storage_scheme=scheme,
        dfs_storage_authority=host,
        dfs_storage_scheme=scheme,
    )


def connection_string_at(endpoint: str) -> str:
    """What adlfs and Azure's own clients take."""
    scheme = endpoint.partition("://")[0]
    return (
        f"DefaultEndpointsProtocol={scheme};AccountName={ACCOUNT};AccountKey={ACCOUNT_KEY};"
        f"BlobEndpoint={endpoint}/{ACCOUNT};"
    )


def azure_uri_at(endpoint: str, path: str = "") -> str:
    """An `abfs://` URI, with the credentials."""
    host = endpoint.partition("://")[2]
    key = quote(ACCOUNT_KEY, safe="")
    return f"abfs://{ACCOUNT}:{key}@{host}/{CONTAINER}/{path}?enable_tls=false"


class AzuriteServer(Server):
    """Enforces conditional writes; flat names (no hierarchical namespace); all in memory."""

    def command(self, port: int) -> list[str]:
        program = azurite()
        if program is None:
            raise FileNotFoundError(MISSING)
        return [
            *(program, "--blobHost", "127.0.0.1", "--blobPort", str(port)),
            *("--inMemoryPersistence", "--skipApiVersionCheck", "--disableTelemetry", "--silent"),
        ]

    def create_bucket(self) -> None:
        self.filesystem().create_dir(CONTAINER)

    def filesystem(self, **options) -> pafs.AzureFileSystem:
        return azure_filesystem_at(self.endpoint, **options)
