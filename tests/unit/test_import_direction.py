"""The architecture has one direction: Ray adapters -> session -> I/O -> pure. Imports prove it."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = "ray_artifact_sync"
ROOT = Path(__file__).resolve().parents[2]

PURE, IO, SESSION, RAY, PEOPLE = range(5)
LAYER_NAMES = ("pure", "I/O", "session", "Ray adapters", "people")

# The one table: a module may import from its own layer and from lower ones. Names of modules that
# do not exist (yet) do no harm; a module that is missing here fails a test. `x.*` is a subpackage.
LAYERS = {
    "_version": PURE,
    "errors": PURE,
    "options": PURE,
    "entries": PURE,
    "layout": PURE,
    "patterns": PURE,
    "registry": PURE,
    "manifest": PURE,
    "plan": PURE,
    "journal": PURE,
    "local_files": IO,
    "concurrency": IO,
    "scan": IO,
    "stores.*": IO,
    "progress": IO,
    "transfer": IO,
    "uploader": IO,
    "upload_worker": IO,
    "working_dir": IO,
    "trial_dir": IO,
    "journal_files": IO,
    "sync_up": IO,
    "sync_down": IO,
    "checkpoint_upload": IO,
    "directory_sync": IO,
    "known_storage": SESSION,
    "session_log": SESSION,
    "session_events": SESSION,
    "attempt": SESSION,
    "attempt_sync": SESSION,
    "attempt_restore": SESSION,
    "session": SESSION,
    "sharding": PURE,
    "collectives": IO,
    "run_parts": IO,
    "sharded_trial": SESSION,
    "sharded_upload": SESSION,
    "ray_collective": RAY,
    "config": RAY,
    "metrics": RAY,
    "progress_bars": RAY,
    "driver_files": SESSION,
    "state_copies": SESSION,
    "driver_note": IO,
    "syncer": RAY,
    "storage_context": RAY,
    "restore": RAY,
    "trainable": RAY,
    "callback": RAY,
    "function": RAY,
    "train": RAY,
    "experiments": PEOPLE,
    "trial_reader": PEOPLE,
    "artifact_file": PEOPLE,
    "view": PEOPLE,
    "commands.*": PEOPLE,
    "report": PEOPLE,
    "report_data": PEOPLE,
    "report_json": PEOPLE,
    "cli": PEOPLE,
    "demo.*": PEOPLE,
    "__init__": PEOPLE,  # re-exports everything, lazily where Ray is needed
    "__main__": PEOPLE,
}

OUTSIDE_PURE = {"ray", "pyarrow", "obstore", "fsspec", "s3fs", "socket", "subprocess", "requests"}


def module_name(path, root):
    parts = list(path.relative_to(root).with_suffix("").parts)
    if parts[-1] == "__init__" and len(parts) > 1:
        parts.pop()
    return ".".join(parts)


def modules(root=ROOT / PACKAGE):
    return {module_name(path, root): path for path in sorted(root.rglob("*.py"))}


def layer_of(module):
    if module in LAYERS:
        return LAYERS[module]
    return LAYERS.get(f"{module.partition('.')[0]}.*")


def imports_of(module, source, known, *, is_package=False):
    """(line, absolute name, at module level) of every import, also in functions."""
    tree = ast.parse(source)
    in_functions = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        for inner in ast.walk(node)
    }
    # `module` is relative to the package; the package of a plain module is its parent.
    home = [PACKAGE, *(() if module == "__init__" else module.split("."))]
    if module != "__init__" and not is_package:
        home.pop()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = home[: len(home) - node.level + 1]
                base = ".".join([*parents, base] if base else parents)
            # `from package import module` names a module; `from module import name` does not.
            names = [
                full if (full := f"{base}.{alias.name}").removeprefix(f"{PACKAGE}.") in known else base
                for alias in node.names
            ]
        else:
            continue
        for name in names:
            yield node.lineno, name, node not in in_functions


def violations(module, source, known, *, is_package=False):
    own = layer_of(module)
    for line, name, at_top in imports_of(module, source, known, is_package=is_package):
        if name == PACKAGE or name.startswith(f"{PACKAGE}."):
            target = name.removeprefix(PACKAGE).removeprefix(".") or "__init__"
            layer = layer_of(target)
            if layer is not None and layer > own:
                yield (f"{module}:{line} ({LAYER_NAMES[own]}) imports {target} ({LAYER_NAMES[layer]})")
        top = name.partition(".")[0]
        if own == PURE and top in OUTSIDE_PURE:
            yield f"{module}:{line} is pure and imports {top}"
        if own < RAY and at_top and top == "ray":
            yield f"{module}:{line} ({LAYER_NAMES[own]}) imports ray at module level"


def test_every_module_has_a_layer():
    unknown = [module for module in modules() if layer_of(module) is None]
    assert not unknown, f"Add {unknown} to LAYERS in {Path(__file__).name}: which layer is it?"


@pytest.mark.parametrize("module", sorted(modules()))
def test_imports_go_down_only(module):
    if layer_of(module) is None:
        pytest.fail(f"{module} has no layer")
    path = modules()[module]
    found = list(
        violations(
            module,
            path.read_text(encoding="utf-8"),
            set(modules()),
            is_package=path.name == "__init__.py",
        )
    )
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("plan", "from ray_artifact_sync.scan import scan"),
        ("plan", "from ray_artifact_sync import scan"),
        ("plan", "import ray_artifact_sync.session"),
        ("plan", "from .scan import x"),
        ("plan", "from . import scan"),
        ("plan", "def f():\n    from ray_artifact_sync import session"),
        ("plan", "from ray_artifact_sync import ArtifactSyncer"),
        ("plan", "import pyarrow.fs"),
        ("registry", "import ray"),
        ("registry", "def f():\n    from ray.tune import Callback"),
        ("stores.posix", "from ..session import TrialArtifacts"),
        ("session", "from ray_artifact_sync.syncer import ArtifactSyncer"),
        ("session", "import ray.train"),
        ("config", "from ray_artifact_sync.cli import main"),
    ],
)
def test_the_check_sees_a_violation(module, source):
    known = {"plan", "scan", "session", "syncer", "cli", "stores.posix", "registry"}
    assert list(violations(module, source, known))


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("session", "from ray_artifact_sync import plan, scan"),
        ("session", "def f():\n    import ray"),
        ("scan", "from ray_artifact_sync.stores.posix import PosixStore"),
        ("stores.posix", "from . import base"),
        ("config", "import ray.tune"),
        ("plan", "from pathlib import Path\nimport rayleigh"),
    ],
)
def test_the_check_accepts_what_is_allowed(module, source):
    known = {"plan", "scan", "session", "syncer", "cli", "stores.posix", "stores.base", "stores"}
    assert not list(violations(module, source, known))


def test_train_is_there_without_importing_it():
    """In a process of its own: whoever has imported the module has the attribute."""
    code = "import ray_artifact_sync; assert callable(ray_artifact_sync.train.artifacts)"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", code], env=env, timeout=120, check=True)


def test_everything_but_the_adapters_imports_without_ray():
    without_ray = [
        module
        for module in modules()
        if layer_of(module) not in (RAY, None)
        and not module.startswith("demo")
        and module != "__main__"  # it runs the command
    ]
    names = [
        PACKAGE if module == "__init__" else f"{PACKAGE}.{module}"
        for module in sorted(without_ray, key=lambda m: m != "__init__")
    ]
    code = (
        "import importlib, sys\n"
        "sys.modules['ray'] = None\n"
        f"for name in {names!r}:\n"
        "    importlib.import_module(name)\n"
        "loaded = [m for m in sys.modules if m.startswith('ray.')]\n"
        "assert not loaded, loaded\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
