"""What somebody who can write to the storage can do to a worker, and what anybody can read that must stay secret.

Hostile documents one by one are in `test_manifest.py` (decoding) and `test_journal.py`. Here they lie in a trial dir,
and a whole session meets them. Ray's own pickles (`tuner.pkl`, `experiment_state-*.json`) are not ours: Ray unpickles
them, and they may hold the credentials of the file system that it was given.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import textwrap
from collections import Counter
from pathlib import Path

import pytest
from blake3 import blake3

import ray_artifact_sync
from ray_artifact_sync import layout
from ray_artifact_sync.driver_note import read_note
from ray_artifact_sync.errors import ArtifactSyncError, ManifestError
from ray_artifact_sync.stores import open_store
from ray_artifact_sync.stores.arrow import ArrowStore
from ray_artifact_sync.stores.posix import PosixStore
from ray_artifact_sync.trial_dir import TrialDir
from tests.support.s3_servers import BUCKET, filesystem_at
from tests.support.sessions import abandon, open_session, read_tree, save
from tests.unit.test_manifest import HOSTILE, RAW

PACKAGE = Path(ray_artifact_sync.__file__).parent
TOKEN = layout.make_token(1)

# --- no code from storage -----------------------------------------------------------------------------

LOADERS = {
    *("pickle.load", "pickle.loads", "pickle.Unpickler", "cloudpickle.load", "cloudpickle.loads", "dill.loads"),
    *("marshal.load", "marshal.loads", "shelve.open", "joblib.load", "torch.load", "numpy.load", "np.load"),
    *("yaml.load", "yaml.unsafe_load", "yaml.full_load", "jsonpickle.decode", "runpy.run_path", "os.system"),
    *("eval", "exec", "compile", "__import__", "importlib.import_module"),
}
ALLOWED = {
    # An error's own bytes, pickled in the same line, to see whether it survives that.
    ("errors.py", "pickle.loads"): 1,
    # The place to upload to, from the parent over a pipe; and again an error's own bytes.
    ("upload_worker.py", "pickle.loads"): 2,
    # What another rank of the same run said, through Ray's object store.
    ("ray_collective.py", "pickle.loads"): 2,
    # A module of this package, by a table in the same file.
    ("__init__.py", "importlib.import_module"): 1,
}


def calls_of(path: Path) -> Counter[tuple[str, str]]:
    """The loaders that a module calls or hands on, by their full names whatever they were imported as."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update((alias.asname or alias.name.split(".")[0], alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names.update((alias.asname or alias.name, f"{node.module}.{alias.name}") for alias in node.names)

    def full_name(node: ast.AST) -> str:
        if isinstance(node, ast.Attribute):
            return f"{full_name(node.value)}.{node.attr}"
        return names.get(node.id, node.id) if isinstance(node, ast.Name) else "?"

    found: Counter[tuple[str, str]] = Counter()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Name):
            name = full_name(node)
            for loader in LOADERS:
                if name == loader or ("." in loader and name.endswith(f".{loader}")):
                    found[path.relative_to(PACKAGE).as_posix(), loader] += 1
    return found


def test_nothing_from_storage_is_unpickled_or_run():
    found: Counter[tuple[str, str]] = Counter()
    for path in PACKAGE.rglob("*.py"):
        found.update(calls_of(path))
    assert dict(found) == ALLOWED


def test_the_search_for_loaders_finds_them(tmp_path, monkeypatch):
    (tmp_path / "x.py").write_text(
        "from pickle import loads as l\nimport ray.cloudpickle as cp, yaml\nl(b'')\ncp.loads(b'')\nmap(eval, [])\n"
    )
    monkeypatch.setattr(sys.modules[__name__], "PACKAGE", tmp_path)
    assert {name for _, name in calls_of(tmp_path / "x.py")} == {"pickle.loads", "cloudpickle.loads", "eval"}


# --- hostile documents, wherever a session meets them ------------------------------------------------------

GOOD = {"size": 1, "digest": blake3(b"x").hexdigest(), "mtime_ns": 1}


def document(which, **more):
    body = {"format": 1, "kind": which, "token": TOKEN, "entries": {"x": GOOD}, **more}
    return json.dumps(body).encode()


PLACES = {
    "head": (layout.MANIFEST, "manifest", {}),
    "snapshot": (
        f"checkpoint_000000/{layout.snapshot_name(TOKEN)}",
        "snapshot",
        {"trial": "trial", "checkpoint": "checkpoint_000000"},
    ),
    "record": (layout.exploit_path("0" * 32), "manifest", {}),
    "aside": (layout.aside_path(layout.make_token(0)), "manifest", {}),
    "claim": (layout.WRITER, "writer", {}),
    "note": (layout.DRIVER_FILES, "driver_files", {"files": ["../../x", "/etc/passwd", "x"]}),
    "journal": (f"{layout.JOURNAL}/{layout.journal_name(TOKEN, 0)}", "sync", {}),
}


@pytest.fixture
def fenced(tmp_path):
    """A trial's places between files that nobody may touch; a check that they are as they were."""
    outside = {}
    for folder in ("storage", "storage/other", "nodes", "nodes/other"):
        (tmp_path / folder).mkdir(exist_ok=True)
        for name in ("x", "passwd", "victim"):
            (tmp_path / folder / name).write_bytes(b"of somebody else")
            outside[tmp_path / folder / name] = b"of somebody else"

    def check():
        for path, data in outside.items():
            assert path.read_bytes() == data, path
        assert {path.name for path in (tmp_path / "storage").iterdir()} == {"other", "trial", "x", "passwd", "victim"}
        assert {path.name for path in (tmp_path / "nodes").iterdir()} <= {"other", "work", "x", "passwd", "victim"}
        assert {path.name for path in tmp_path.iterdir()} == {"storage", "nodes"}

    return tmp_path / "storage" / "trial", tmp_path / "nodes" / "work", check


@pytest.mark.parametrize("place", PLACES)
def test_a_session_among_hostile_documents(place, fenced):
    """It goes on, or says what is wrong; nothing outside of the working dir and the trial dir changes."""
    storage, work, check = fenced
    path, kind, more = PLACES[place]
    store = PosixStore(storage)
    said: list[str] = []
    for number, (name, body) in enumerate([*RAW.items(), *HOSTILE.items()]):
        store.delete([file.path for file in store.list()])
        store.put("checkpoint_000000/model", b"m")
        store.put("x", b"x")
        if path != layout.WRITER:
            store.put(layout.WRITER, json.dumps({"format": 1, "kind": "writer", "token": TOKEN}).encode())
        store.put(path, body if isinstance(body, bytes) else document(kind, **{**more, **body}))
        session = open_session(work, PosixStore(storage), number + 2, registered=0, retries=0)
        try:
            session.restore("checkpoint_000000", fresh=True)
            (work / "mine").write_bytes(b"mine")
            session.sync()
            assert save(session, "checkpoint_000001"), name
            assert store.read("mine") == b"mine"
        except ArtifactSyncError as error:
            said.append(str(error))
        finally:
            abandon(session)
        assert read_tree(work).keys() <= {"mine", "x", "trial"}, name
        check()
    assert all(len(text) < 2000 and text.isprintable() for text in said), said


def test_a_layer_that_lies(fenced):
    """Authentic by its digest, hostile inside; or with another number of changes than was said."""
    storage, work, check = fenced
    store = PosixStore(storage)
    name = f"{TOKEN}-000001.json"
    layers = {
        "climbs": (document("layer", entries={"../victim": GOOD}), 1),
        "count too small": (document("layer", entries={"x": GOOD, "y": GOOD}), 1),
        "count too large": (document("layer"), 4_000_000),
        "too many": (document("layer"), 5_000_001),
        "of another kind": (document("manifest"), 1),
    }
    for number, (what, (data, count)) in enumerate(layers.items()):
        ref = {"name": name, "digest": blake3(data).hexdigest(), "count": count}
        store.put(f"{layout.LAYERS}/{name}", data)
        store.put(layout.MANIFEST, document("manifest", layers=[ref]))
        with pytest.raises(ManifestError):
            TrialDir(store, "trial").head()
        store.put(layout.WRITER, json.dumps({"format": 1, "kind": "writer", "token": TOKEN}).encode())
        session = open_session(work, PosixStore(storage), number + 2)
        session.sync()
        abandon(session)
        check()
        assert what


def test_links_in_a_working_dir_lead_nowhere(fenced):
    """At the path of a file, at each directory above it, dangling, in a circle: a restore replaces the link."""
    storage, work, check = fenced
    session = open_session(work, PosixStore(storage), 1)
    for path in ("a/b/victim", "top", "c/d"):
        (work / path).parent.mkdir(parents=True, exist_ok=True)
        (work / path).write_bytes(path.encode())
    assert save(session, "checkpoint_000000")
    tree = read_tree(work)
    outside = work.parent / "other"
    for links in (
        {"a": outside},
        {"a/b": outside},
        {"a/b/victim": outside / "victim"},
        {"top": outside / "victim", "c": outside},
        {"top": "top", "c": "c"},
        {"top": "/nowhere/at/all", "a": "/nowhere/at/all"},
        {"a": "..", "c": "../other"},
    ):
        for path, target in links.items():
            subprocess.run(["rm", "-rf", work / path], check=True)
            (work / path).parent.mkdir(parents=True, exist_ok=True)
            os.symlink(target, work / path)
        assert session.restore("checkpoint_000000", fresh=False).exact
        assert read_tree(work) == tree
        assert not [path for path in work.rglob("*") if path.is_symlink() and layout.STATE_DIR not in path.parts]
        check()
    abandon(session)


KEYS = [
    *("../evil", "a//b", "a/./b", "/abs", "..", "sub/../up", "control\x01", "%2e%2e/x"),
    *(f"{layout.OBJECTS}/x/../../y", f"{layout.OBJECTS}/{TOKEN}/..", f"{layout.EXPLOITS}/../../../e.json"),
    *(f"{layout.EXPLOITS}/mine.json", f"{layout.LAYERS}/mine.json", f"{layout.ASIDE}/0/manifest.json"),
    *(f"{layout.JOURNAL}/..", "checkpoint_000000/../../x", "checkpoint_000000/.ray_artifact_sync-1.json"),
]


OURS = {"sub/../up"}  # in the way of the artifact `sub`: set aside where the client can


@pytest.mark.s3
@pytest.mark.parametrize("client", ["obstore", pytest.param("pyarrow", marks=pytest.mark.exhaustive)])
def test_a_listing_with_hostile_keys(client, moto, fenced):
    """Whoever may write to a bucket may give objects any key. The rest works, or says which key is in its way."""
    _, work, _ = fenced
    (work.parent.parent / "storage" / "trial").mkdir()
    prefix = f"{BUCKET}/hostile/{client}-{work.parent.parent.name}"
    boto = moto.boto()
    filesystem = moto.filesystem()
    said: list[ArtifactSyncError] = []
    for number, keys in enumerate([[key] for key in KEYS] + [KEYS]):
        root = f"{prefix}/{number}/trial"
        for key in keys:
            boto.put_object(Bucket=BUCKET, Key=f"{root}/{key}".removeprefix(f"{BUCKET}/"), Body=b"x")
        store = open_store(filesystem, root) if client == "obstore" else ArrowStore(filesystem, root)
        for attempt in (1, 2):
            here = work / str(number)
            session = open_session(here, store, attempt, registered=attempt - 2, retries=0, journal=False)
            (here / "mine").write_bytes(b"%d" % attempt)
            (here / "sub").write_bytes(b"a file where a key has a directory")
            try:
                save(session, f"checkpoint_00000{attempt}")
                session.close()
            except ArtifactSyncError as error:
                said.append(error)
            finally:
                abandon(session)
        listed = boto.list_objects_v2(Bucket=BUCKET, Prefix=f"{root}/".removeprefix(f"{BUCKET}/"))["Contents"]
        after = {found["Key"].removeprefix(f"{root}/".removeprefix(f"{BUCKET}/")) for found in listed}
        assert after >= {*keys} - OURS, "what others wrote is there still"
    assert all("path" in str(error) for error in said), said
    assert not (work / "evil").exists()
    assert not (work.parent / "evil").exists()


def test_notes_that_are_bombs(tmp_path):
    """Small files that are read at every start: what is huge is not read, what is deep is not followed."""
    store = PosixStore(tmp_path)
    for data in (b"[" * 1_000_000, b'{"a":' * 200_000, b" " * (layout.MAX_LIST_BYTES + 1)):
        store.put(layout.DRIVER_FILES, data)
        assert read_note(store) == frozenset()
        store.put(layout.WRITER, data)
        session = open_session(tmp_path / "work", PosixStore(tmp_path), 2)
        session.sync()
        abandon(session)
        assert json.loads(store.read(layout.WRITER))["token"] == layout.make_token(2)
        subprocess.run(["rm", "-rf", tmp_path / "work"], check=True)


# --- memory ------------------------------------------------------------------------------------------------

BOMBS = {
    "lists": 'b"[" + b"[]," * (SIZE // 3) + b"[]]"',
    "objects": 'b"[" + b"{}," * (SIZE // 3) + b"{}]"',
    "small objects": """b'{"entries":[' + b'{"a":0},' * (SIZE // 8) + b'{}]}'""",
    "deep": 'b"[" * SIZE',
    "numbers": """b'{"removed":[' + b'1.5,' * (SIZE // 4) + b'1]}'""",
    "texts": """b'{"removed":[' + b'"ab",' * (SIZE // 5) + b'""]}'""",
    "one text": """b'{"trial":"' + b'a' * SIZE + b'"}'""",
    "braces in a text": """b'{"trial":"' + b'{' * SIZE + b'"}'""",
    "white space": """b' ' * SIZE + b'{}'""",
    "digits": """b'{"entries":' + b'1' * SIZE + b'}'""",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "size"),
    [
        ("manifest", 100_000_000),
        pytest.param("manifest", 60_000_000, marks=pytest.mark.exhaustive),
        pytest.param("layer", 100_000_000, marks=pytest.mark.exhaustive),
    ],
)
def test_bombs_do_not_exhaust_memory(kind, size, tmp_path):
    """100 MB of each kind in the place of a document, and just below what is read: refused.

    The most memory goes to lists of short texts, which may be removed paths; five million real entries take more.
    """
    program = f"""
        import resource, sys, time
        from pathlib import Path
        from ray_artifact_sync import layout
        from ray_artifact_sync.errors import ManifestError
        from ray_artifact_sync.manifest import LayerRef
        from ray_artifact_sync.stores.posix import PosixStore
        from ray_artifact_sync.trial_dir import TrialDir
        from blake3 import blake3
        SIZE = {size}
        resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
        data = eval(sys.argv[1])
        store = PosixStore({str(tmp_path)!r})
        name = "{TOKEN}-000001.json"
        trial = TrialDir(store, "trial")
        path = layout.MANIFEST if {kind!r} == "manifest" else f"{{layout.LAYERS}}/{{name}}"
        store.put(path, data)
        ref = LayerRef(name, blake3(data).hexdigest(), 5_000_000)
        del data
        started = time.monotonic()
        try:
            trial.head() if {kind!r} == "manifest" else trial._layer(ref)
        except ManifestError as error:
            status = Path("/proc/self/status").read_text()  # `ru_maxrss` begins with that of the parent
            peak = int(status.partition("VmHWM:")[2].split()[0])
            print(len(str(error)) < 600, peak // 1024,
                  round(time.monotonic() - started, 1), error)
    """
    for name, bomb in BOMBS.items():
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(program), bomb], capture_output=True, text=True, check=False
        )
        words = done.stdout.split()
        assert done.returncode == 0, (name, done.stderr[-1000:])
        assert words, (name, "was not refused")
        assert words[0] == "True", (name, done.stdout)
        print(f"{kind}, {name}: {words[1]} MiB, {words[2]} s")
        assert int(words[1]) < (3500 if name == "texts" else 1200), (name, done.stdout)


def test_a_huge_size_is_not_believed(tmp_path):
    """Nothing is allocated for it, and the file does not grow to it."""
    store = PosixStore(tmp_path / "storage")
    session = open_session(tmp_path / "work", store, 1)
    (tmp_path / "work" / "x").write_bytes(b"x")
    assert save(session, "checkpoint_000000")
    abandon(session)
    path = f"checkpoint_000000/{layout.snapshot_name(TOKEN)}"
    body = json.loads(store.read(path))
    body.pop("digest", None)
    body["entries"]["x"]["size"] = 2**62
    store.put(path, json.dumps(body).encode())
    session = open_session(tmp_path / "work", store, 2)
    report = session.restore("checkpoint_000000", fresh=True)
    assert report.lost == ("x",)
    assert not report.exact
    assert (tmp_path / "work" / "x").stat().st_size <= 1
    abandon(session)


# --- secrets -----------------------------------------------------------------------------------------------

SECRETS = {
    "access key": "AKIASECRETACCESSKEY7",
    "secret key": "s3cr3t/KEY+that+nobody/may=see",
    "session token": "tok3n//SESSION++nobody==",
}


def test_errors_and_logs_of_a_session_hold_no_secret(moto_proxy, tmp_path, caplog):
    """Refused, expired, throttled, reset, hung, unreachable; in logs, errors, reprs, and every byte stored or local."""
    import logging

    caplog.set_level(logging.DEBUG)
    filesystem = filesystem_at(moto_proxy.endpoint)
    from pyarrow import fs as pafs

    filesystem = pafs.S3FileSystem(
        access_key=SECRETS["access key"],
        secret_key=SECRETS["secret key"],
        session_token=SECRETS["session token"],
        region="us-east-1",
        scheme="http",
        endpoint_override=moto_proxy.endpoint.partition("://")[2],
    )
    root = f"{BUCKET}/secrets/{tmp_path.name}"
    texts: list[str] = []
    store = open_store(filesystem, root)
    work = tmp_path / "work"
    session = open_session(work, store, 1, retries=0, sync_timeout=3.0)
    (work / "log").write_bytes(b"1")
    assert save(session, "checkpoint_000000")

    def failing(what, act):
        try:
            act()
        except Exception as error:
            chain: BaseException | None = error
            while chain is not None:
                texts.extend((f"{what}: {chain}", repr(chain), repr(vars(chain))))
                chain = chain.__cause__ or chain.__context__
        else:
            texts.append(f"{what}: no error")

    for number, fault in enumerate(
        [
            *(lambda status=status: moto_proxy.fail(status=status) for status in (400, 401, 403, 409, 429, 500, 503)),
            lambda: moto_proxy.fail(status=403, code="InvalidAccessKeyId"),
            lambda: moto_proxy.fail(status=403, code="SignatureDoesNotMatch"),
            lambda: moto_proxy.fail(status=400, code="ExpiredToken"),
            moto_proxy.reset,
            moto_proxy.hang,
            lambda: moto_proxy.truncate("get_object", after=1),
        ]
    ):
        fault()
        (work / "log").write_bytes(b"%d" % number * 10)
        failing(f"sync {number}", session.sync)
        failing(f"save {number}", lambda: save(session, "checkpoint_000001"))
        failing(f"restore {number}", lambda: session.restore("checkpoint_000000", fresh=False))
        moto_proxy.clear()
    texts += [repr(session), str(store), repr(store), store.description, store.reason, repr(session.options)]
    session.close()
    abandon(session)
    with_nobody = open_store(filesystem_at("http://127.0.0.1:9"), root)
    failing("nobody listens", lambda: with_nobody.put("x", b"x"))
    stored = {file.path: store.read(file.path) for file in store.list()}
    assert layout.MANIFEST in stored
    assert any(path.startswith(layout.JOURNAL) for path in stored)
    assert len(texts) > 40
    assert sum("no error" in text for text in texts) < 30
    for name, secret in SECRETS.items():
        for needle in {secret, secret.replace("/", "%2F").replace("+", "%2B").replace("=", "%3D")}:
            assert needle not in caplog.text, name
            assert not [text for text in texts if needle in text], name
            assert not [path for path, data in stored.items() if needle.encode() in data or needle in path], name
            for path in (path for path in work.rglob("*") if path.is_file()):
                assert needle.encode() not in path.read_bytes(), (name, path)
