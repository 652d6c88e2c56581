"""sdist and wheel, from clean environments, with the newest and the lowest versions of what they need."""

from pathlib import Path

from release_tests.packaging import check

NAME = "packaging"
quick = True


def run(workdir: Path, *, quick: bool) -> dict[str, object]:
    return check(workdir)
