"""The demo on a local directory: killed trials are exact with this library, and are not with Ray alone."""

from pathlib import Path

from ray_artifact_sync.demo.command import PLAIN, SYNCED, is_exact, measure

NAME = "demo, local"
quick = False  # `packaging` runs it, as the README says it


def run(workdir: Path, *, quick: bool, s3: bool = False) -> dict[str, object]:
    counts = measure(workdir, s3=s3)
    assert is_exact(counts), counts[SYNCED]
    plain = counts[PLAIN].values()
    figures = {
        "lines lost": sum(trial.lines.lost for trial in plain),
        "lines twice": sum(trial.lines.duplicated for trial in plain),
        "files of the end missing": sum(trial.at_stop.expected - trial.at_stop.right for trial in plain),
    }
    assert any(figures.values()), "Ray alone is exact, too: the demo proves nothing any more"
    return {"exact with this library": "yes", **{f"Ray alone: {name}": value for name, value in figures.items()}}
