"""`verify`: reads everything back and compares digests."""

from __future__ import annotations

from ray_artifact_sync.commands.output import (
    CANNOT,
    NOT_RIGHT,
    OK,
    complain,
    plural,
    print_json,
    progress,
    say,
    show_size,
    table,
)
from ray_artifact_sync.commands.verification import Verification, Verifier
from ray_artifact_sync.concurrency import Deadline, run_all
from ray_artifact_sync.errors import ArtifactSyncError
from ray_artifact_sync.trial_reader import load_all
from ray_artifact_sync.view import ArtifactView

TRIALS_AT_ONCE = 8


def run_verify(view: ArtifactView, *, as_json: bool = False) -> int:
    """Verifies every trial of the view: all of its listings, or those of the view's checkpoint."""
    failures: dict[str, Exception] = {}
    failures.update(load_all(view.readers))
    verifiers = {
        name: Verifier(reader, view.checkpoint) for name, reader in view.readers.items() if name not in failures
    }

    def prepare(name: str) -> None:
        try:
            verifiers[name].prepare()
        except ArtifactSyncError as error:
            failures[name] = error

    run_all(verifiers, prepare, workers=TRIALS_AT_ONCE, deadline=Deadline())
    ready = [verifier for name, verifier in verifiers.items() if name not in failures]
    with progress(
        "Verifying",
        total_bytes=sum(verifier.expected_bytes for verifier in ready),
        files=sum(len(verifier.wanted) for verifier in ready),
    ) as bar:
        run_all(ready, lambda verifier: verifier.run(bar), workers=TRIALS_AT_ONCE, deadline=Deadline())
    results = [verifier.result for verifier in ready]
    if as_json:
        _print_document(view, results, failures)
    else:
        _show(results)
    for name in sorted(failures):
        complain(f"{name}: {failures[name]}")
    if failures:
        return CANNOT
    return NOT_RIGHT if any(result.problems for result in results) else OK


def _print_document(view: ArtifactView, results: list[Verification], failures: dict[str, Exception]) -> None:
    print_json(
        "verify",
        {
            "uri": view.uri,
            "ok": not failures and not any(result.problems for result in results),
            "trials": [
                {
                    "trial": result.trial,
                    "listings": result.documents,
                    "versions": result.versions,
                    "contents": result.contents,
                    "bytes_read": result.bytes_read,
                    "problems": [
                        {
                            "kind": problem.kind,
                            "path": problem.path,
                            "size": problem.size,
                            "digest": problem.digest or None,
                            "listed_by": list(problem.listed_by),
                            "detail": problem.detail,
                        }
                        for problem in result.problems
                    ],
                }
                for result in results
            ],
            "failures": [{"trial": name, "error": str(error)} for name, error in sorted(failures.items())],
        },
    )


def _show(results: list[Verification]) -> None:
    rows = [
        (problem.kind.upper(), ", ".join(problem.listed_by), f"{result.trial}/{problem.path}", problem.detail)
        for result in results
        for problem in result.problems
    ]
    if rows:
        table(("", "LISTED BY", "PATH", "WHAT IS WRONG"), rows)
    say(
        f"{plural(len(rows), 'problem')} in {plural(sum(result.versions for result in results), 'version')} of files "
        f"that {plural(sum(result.documents for result in results), 'manifest')} of "
        f"{plural(len(results), 'trial')} list; {show_size(sum(result.bytes_read for result in results))} read"
    )
