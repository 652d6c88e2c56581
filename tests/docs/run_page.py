"""Runs the Python and bash blocks of a page in order, in one process, as a reader who types them in.

    python -m tests.docs.run_page docs/quickstart.md
    python -m tests.docs.run_page --docstrings

Prints what fails, with file and line, and exits with 1 then. The working directory should be an empty one.

- ```python blocks share one namespace; Ray, where a page uses it, is started once, for all of the page.
- ```bash blocks run in `bash -euo pipefail`; an error in one is an error of the page.
- ```text title="Output" says what the block above it printed; `...` stands for anything.
- All other fences (diff, json, text) show something and are not run.
"""

from __future__ import annotations

import argparse
import contextlib
import doctest
import io
import logging
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from sybil import Document, Example
from sybil.evaluators.python import PythonEvaluator
from sybil.parsers.markdown import CodeBlockParser

from tests.docs.pages import RUN_ELSEWHERE, documented

OUTPUT = 'text title="Output"'
BASH_SECONDS = 120
SAME = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


class Blocks:
    """Evaluates the blocks of one page; remembers what the last one printed."""

    def __init__(self) -> None:
        self.printed = ""
        self.run = 0
        self._python = PythonEvaluator()

    def parsers(self) -> list[CodeBlockParser]:
        return [
            CodeBlockParser("python", self._recording(self.python)),
            CodeBlockParser("bash", self._recording(self.bash)),
            CodeBlockParser(OUTPUT, self.output),
        ]

    def python(self, example: Example) -> None:
        example.namespace.setdefault("__name__", "__main__")  # classes and functions travel to Ray's workers by value
        self._python(example)

    def bash(self, example: Example) -> None:
        if str(example.parsed).strip() in RUN_ELSEWHERE:
            return
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", str(example.parsed)],
            stdout=subprocess.PIPE,
            stderr=sys.stderr,
            text=True,
            timeout=BASH_SECONDS,
            check=False,
        )
        print(done.stdout, end="")
        assert done.returncode == 0, f"exit code {done.returncode}"

    def output(self, example: Example) -> None:
        expected = str(example.parsed)
        if not doctest.OutputChecker().check_output(expected, self.printed, SAME):
            raise AssertionError(f"The page says:\n{expected}\nThe block printed:\n{self.printed}")

    def _recording(self, evaluate: Callable[[Example], None]) -> Callable[[Example], None]:
        def recorded(example: Example) -> None:
            self.run += 1
            self.printed = ""
            began = time.monotonic()
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                try:
                    evaluate(example)
                finally:
                    self.printed = printed.getvalue()
            print(f"line {example.line}: {time.monotonic() - began:.1f} s", file=sys.stderr)

        return recorded


def evaluate(document: Document, blocks: Blocks) -> str:
    """Runs a document; gives the failure as text, empty if there is none."""
    for example in document:
        try:
            example.evaluate()
        except BaseException:
            printed = f"\nIt printed:\n{blocks.printed}" if blocks.printed else ""
            return f"{document.path}:{example.line}:\n{traceback.format_exc()}{printed}"
    return ""


def parse(text: str, path: str, blocks: Blocks) -> Document:
    document = Document(text, path)
    for parser in blocks.parsers():
        for region in parser(document):
            document.add(region)
    return document


@contextlib.contextmanager
def ray_for(text: str):
    """One small cluster for the page, if it needs one."""
    if not any(call in text for call in (".fit()", "ray.get(")):
        yield
        return
    import ray

    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level=logging.WARNING)
    try:
        yield
    finally:
        ray.shutdown()


def run_page(path: Path) -> int:
    text = path.read_text(encoding="utf-8")
    blocks = Blocks()
    document = parse(text, str(path), blocks)
    with ray_for(text) if any(True for _ in document) else contextlib.nullcontext():
        failure = evaluate(document, blocks)
    print(failure or f"{blocks.run} blocks of {path.name} ran.")
    return 1 if failure else 0


def run_docstrings() -> int:
    failures = []
    ran = 0
    with ray_for("ray.get("):
        for name, docstring in documented().items():
            blocks = Blocks()
            failure = evaluate(parse(docstring, f"docstring of {name}", blocks), blocks)
            ran += blocks.run
            if failure or not blocks.run:
                failures.append(failure or f"The docstring of {name} has no example that runs.")
    print("\n\n".join(failures) or f"The examples of {ran} docstrings ran.")
    return 1 if failures else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=Path, nargs="?")
    parser.add_argument("--docstrings", action="store_true", help="the examples of all public docstrings instead")
    options = parser.parse_args()
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return run_docstrings() if options.docstrings else run_page(options.page)


if __name__ == "__main__":
    raise SystemExit(main())
