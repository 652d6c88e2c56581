"""Runs the release tests: whole scenarios on real Ray, with figures.

    python release_tests/run.py            all of them; writes the table in release_tests/README.md
    python release_tests/run.py --quick    those for every commit, in their short form
    python release_tests/run.py NAME ...   the files with these names

Each file in `scenarios/` is one scenario (see there), run in a process of its own; those that say `beside = True` run
beside the others, which come one after the other; those that say `by_name = True` run only if they are named. Exit
code: 0 if all passed, else 1.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import date
from importlib import metadata
from pathlib import Path

HERE = Path(__file__).resolve().parent
SCENARIOS = HERE / "scenarios"
RESULTS = HERE / "README.md"
BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"
TIMEOUT = 600.0

# Scenarios import each other and the tests' servers, as packages; no module here may stand in for one of the same name.
sys.path[:] = [str(HERE.parent), *(path for path in sys.path if Path(path or ".").resolve() != HERE)]


@dataclass(frozen=True)
class Outcome:
    name: str
    seconds: float
    figures: dict[str, object]
    error: str = ""

    @property
    def summary(self) -> str:
        figures = ", ".join(f"{name}: {value}" for name, value in self.figures.items())
        word = "FAIL" if self.error else "skip" if "skipped" in self.figures else "ok"
        return f"{word:4} {self.name} ({self.seconds:.0f} s) {self.error or figures}"


def load(stem: str):
    return importlib.import_module(f"release_tests.scenarios.{stem}")


def run_in_process(stem: str, workdir: Path, *, quick: bool) -> Outcome:
    """Runs one scenario in a child; its output is shown only if it fails."""
    module = load(stem)
    started = time.monotonic()
    result, output = workdir / "figures.json", workdir / "output.log"
    (workdir / "work").mkdir()
    with open(output, "wb") as log:
        child = subprocess.Popen(
            [sys.executable, __file__, *(["--quick"] if quick else []), "--child", str(workdir), stem],
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            code = child.wait(getattr(module, "TIMEOUT", TIMEOUT))
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)  # the group that it started in, by id
                child.wait()
    seconds = time.monotonic() - started
    if code == 0:
        return Outcome(module.NAME, seconds, json.loads(result.read_text()))
    print(output.read_text(errors="replace")[-8000:], flush=True)
    return Outcome(module.NAME, seconds, {}, "took too long" if code is None else f"exit code {code}, see above")


def run_as_child(stem: str, workdir: Path, *, quick: bool) -> int:
    try:
        figures = load(stem).run(workdir / "work", quick=quick)
    except BaseException:
        traceback.print_exc()
        return 1
    (workdir / "figures.json").write_text(json.dumps(figures))
    return 0


def with_table(text: str, table: str) -> str:
    """The page with this table between its two marks."""
    before, _, rest = text.partition(BEGIN)
    after = rest.partition(END)[2]
    return f"{before}{BEGIN}\n\n{table}\n\n{END}{after}"


def run_all(stems: list[str], *, quick: bool) -> list[Outcome]:
    """Runs scenarios and says how each ended, when it has."""

    def run(stem: str) -> Outcome:
        with tempfile.TemporaryDirectory(prefix="release-test-", ignore_cleanup_errors=True) as workdir:
            outcome = run_in_process(stem, Path(workdir), quick=quick)
        print(outcome.summary, flush=True)
        return outcome

    beside = [stem for stem in stems if getattr(load(stem), "beside", False)]
    with ThreadPoolExecutor(max_workers=max(1, len(beside))) as pool:
        later = {stem: pool.submit(run, stem) for stem in beside}
        done = {stem: run(stem) for stem in stems if stem not in later}
        return [later[stem].result() if stem in later else done[stem] for stem in stems]


def write_results(outcomes: list[Outcome], seconds: float) -> None:
    versions = ", ".join(
        f"{name} {metadata.version(name)}" for name in ("ray-artifact-sync", "ray", "pyarrow", "obstore")
    )
    where = f"Python {platform.python_version()}, {os.cpu_count()} cores, {platform.system()}"
    lines = [
        f"{date.today().isoformat()}: {versions}, {where}. `python release_tests/run.py`: {seconds / 60:.0f} min.",
        "",
        "| scenario | result | seconds | figures |",
        "|---|---|---|---|",
    ]
    for outcome in outcomes:
        figures = "; ".join(f"{name}: {value}" for name, value in outcome.figures.items())
        result = f"FAIL: {outcome.error}" if outcome.error else "skipped" if "skipped" in outcome.figures else "passed"
        lines.append(f"| {outcome.name} | {result} | {outcome.seconds:.0f} | {figures} |")
    RESULTS.write_text(with_table(RESULTS.read_text(), "\n".join(lines)))
    print(f"Written: {RESULTS.relative_to(Path.cwd()) if RESULTS.is_relative_to(Path.cwd()) else RESULTS}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="file names in scenarios/, without .py")
    parser.add_argument(
        "--quick", action="store_true", help="only the quick ones, in their short form; writes no results"
    )
    parser.add_argument("--child", metavar="DIR", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        return run_as_child(options.names[0], options.child, quick=options.quick)

    known = sorted(path.stem for path in SCENARIOS.glob("*.py") if not path.stem.startswith("_"))
    if unknown := set(options.names) - set(known):
        parser.error(f"there is no scenario {', '.join(sorted(unknown))}; there are: {', '.join(known)}")
    wanted = options.names or [stem for stem in known if not getattr(load(stem), "by_name", False)]
    wanted = [stem for stem in wanted if not options.quick or load(stem).quick]
    started = time.monotonic()
    outcomes = run_all(wanted, quick=options.quick)
    failed = sum(bool(outcome.error) for outcome in outcomes)
    seconds = time.monotonic() - started
    print(f"{len(outcomes)} scenarios in {seconds / 60:.0f} min, {failed} failed.")
    if not options.quick and not options.names:
        write_results(outcomes, seconds)
    return 1 if failed or not outcomes else 0


if __name__ == "__main__":
    raise SystemExit(main())
