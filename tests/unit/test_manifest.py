"""Documents and layers: nothing is lost on the way, nothing hostile comes in, a commit costs what changed."""

import contextlib
import itertools
import json

import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_artifact_sync import layout
from ray_artifact_sync.entries import FileEntry, Manifest
from ray_artifact_sync.errors import ManifestError
from ray_artifact_sync.manifest import (
    INLINE_ENTRIES,
    MAX_LAYERS,
    MERGE_RATIO,
    Changes,
    Document,
    LayerRef,
    ManifestStack,
    assemble,
    decode,
    encode,
)

TOKEN = layout.make_token(1)
A = "a" * 64


def entry(path, version=0, *, mtime_ns=1_700_000_000_000_000_000):
    return FileEntry(path, version + 7, blake3(f"{path} {version}".encode()).hexdigest(), mtime_ns + version)


class Storage:
    """What a writer keeps: layers by name and one document; reads them back as a new process would."""

    def __init__(self):
        self.stack = ManifestStack()
        self.layers = {}
        self.written = 0
        self._names = (f"{TOKEN}-{number:06d}.json" for number in itertools.count(1))

    def commit(self, entries):
        manifest = Manifest.of(entries, TOKEN)
        self.stack, files = self.stack.advance(manifest, next_name=lambda: next(self._names))
        for file in files:
            assert file.ref.name not in self.layers, "a layer is never written twice"
            self.layers[file.ref.name] = file.data
            self.written += file.ref.count
        self.data = encode(self.stack.document("manifest", token=TOKEN))
        self.written += len(self.stack.inline)
        return manifest

    def read(self):
        document = decode(self.data, kind="manifest", where="the head")
        layers = {}
        for ref in document.layers:
            assert blake3(self.layers[ref.name]).hexdigest() == ref.digest
            layers[ref.name] = decode(self.layers[ref.name], kind="layer", where=ref.name).changes
            assert len(layers[ref.name]) == ref.count
        return assemble(document, layers)


def read_in_twenty_lines(data, read_layer):
    """Written from the docstring of `manifest.py` alone, without this library."""
    body = json.loads(data)
    files = {}
    for part in [*(json.loads(read_layer(ref["name"])) for ref in body.get("layers", ())), body]:
        for path in part.get("removed", ()):
            files.pop(path, None)
        files.update(part["entries"])
    return files


# Few names, so that files come, change, go and come back; a large and a small number of them.
NUMBERS = st.sets(st.integers(0, 999), max_size=20)
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["put", "put_many", "remove", "remove_many", "replace", "dir", "nothing", "restart", "clear"]),
        NUMBERS,
        st.integers(0, 3),
    ),
    max_size=25,
)


@settings(max_examples=150, deadline=None)
@given(STEPS)
def test_any_sequence_of_manifests_reads_back_the_same(steps):
    storage, listing = Storage(), {}
    for action, numbers, version in steps:
        names = [f"run/file-{number}.txt" for number in numbers]
        if action == "put":
            listing |= {name: entry(name, version) for name in names}
        elif action == "put_many":
            start = min(numbers, default=0)
            listing |= {(name := f"many/{number}"): entry(name, version) for number in range(start, start + 300)}
        elif action == "remove":
            listing = {path: found for path, found in listing.items() if path not in names}
        elif action == "remove_many":
            listing = {path: found for number, (path, found) in enumerate(listing.items()) if number % 3}
        elif action == "replace":
            listing = {name: entry(name, version) for name in names}
        elif action == "dir":
            listing |= {f"empty-{number}": FileEntry(f"empty-{number}", 0, "", is_dir=True) for number in numbers}
        elif action == "clear":
            listing = {}
        manifest = storage.commit(listing.values())
        again = storage.read()
        assert again.manifest.entries == manifest.entries == listing
        assert again.manifest.token == TOKEN
        by_hand = read_in_twenty_lines(storage.data, storage.layers.__getitem__)
        assert by_hand == {
            path: {"dir": True}
            if found.is_dir
            else {"size": found.size, "digest": found.digest, "mtime_ns": found.mtime_ns}
            for path, found in listing.items()
        }
        counts = [ref.count for ref in storage.stack.refs]
        assert all(below > MERGE_RATIO * above for below, above in itertools.pairwise(counts)), counts
        assert len(storage.stack.inline) <= INLINE_ENTRIES
        if action == "restart":
            storage.stack = again


@pytest.mark.parametrize("restart", [False, True])
def test_small_commits_to_a_large_manifest_cost_little(restart):
    storage = Storage()
    listing = {(path := f"data/{number:06d}.bin"): entry(path) for number in range(20_000)}
    storage.commit(listing.values())
    storage.written = 0
    for number in range(200):
        for offset in range(5):
            path = f"data/{(number * 37 + offset) % 20_000:06d}.bin"
            listing[path] = entry(path, number + 1)
        storage.commit(listing.values())
        if restart and number % 50 == 0:
            storage.stack = storage.read()
    assert storage.read().manifest.entries == listing
    # 1,000 changes in 200 commits: far less than 200 times 20,000, and less than 200 times all the changes.
    assert storage.written < 60_000
    assert len(storage.data) < 64 * 1024


def test_two_full_documents_stay_below_64_kib():
    paths = [f"predictions/epoch_{number:04d}/validation_batch_{number:03d}.json" for number in range(INLINE_ENTRIES)]
    storage = Storage()
    storage.commit([entry(path, 2**40) for path in paths])
    assert not storage.stack.refs
    head = encode(storage.stack.document("manifest", token=TOKEN))
    snapshot = encode(
        storage.stack.document("snapshot", token=TOKEN, trial="Train_1234_00000_lr=0.1", checkpoint="checkpoint_000003")
    )
    assert len(head) + len(snapshot) < 64 * 1024
    storage.commit([entry(path) for path in [*paths, "one-more"]])
    assert len(storage.stack.refs) == 1


def test_equal_documents_are_equal_bytes():
    one = Document("manifest", TOKEN, Changes({"b": entry("b"), "a": entry("a")}, frozenset({"x", "y"})))
    two = Document("manifest", TOKEN, Changes({"a": entry("a"), "b": entry("b")}, frozenset({"y", "x"})))
    assert encode(one) == encode(two)


def test_round_trip_of_every_field():
    document = Document(
        "snapshot",
        TOKEN,
        Changes(
            {
                "ü/a b#?%20.txt": FileEntry("ü/a b#?%20.txt", 2**62, A, 5),
                "old": FileEntry("old", 0, A, -5_000_000_000),
                "d": FileEntry("d", 0, "", is_dir=True),
            },
            frozenset({"gone"}),
        ),
        (LayerRef(f"{TOKEN}-000001.json", A, 300),),
        "trial (1, 2) [32, 32]",
        "checkpoint_000003",
    )
    assert decode(encode(document), kind="snapshot", where="x") == document


def test_whatever_a_scan_can_see_can_be_read_again():
    """A file dated before 1970 must not make the manifest unreadable."""
    storage = Storage()
    manifest = storage.commit([FileEntry("x", 1, A, -1)])
    assert storage.read().manifest == manifest


# --- hostile documents ------------------------------------------------------------------------------

GOOD_ENTRY = {"size": 1, "digest": A, "mtime_ns": 1}
GOOD = {"format": 1, "kind": "manifest", "token": TOKEN, "entries": {"x": GOOD_ENTRY}}
GOOD_LAYER = {"name": f"{TOKEN}-000001.json", "digest": A, "count": 3}


def test_the_good_document_of_these_tests_is_good():
    assert decode(json.dumps({**GOOD, "layers": [GOOD_LAYER]}).encode(), kind="manifest", where="x")


HOSTILE = {
    "climbing": {"entries": {"../x": GOOD_ENTRY}},
    "climbing inside": {"entries": {"a/../../x": GOOD_ENTRY}},
    "absolute": {"entries": {"/etc/passwd": GOOD_ENTRY}},
    "nul": {"entries": {"a\0b": GOOD_ENTRY}},
    "newline": {"entries": {"a\nb": GOOD_ENTRY}},
    "empty path": {"entries": {"": GOOD_ENTRY}},
    "lone surrogate": {"entries": {"\ud800": GOOD_ENTRY}},
    "long path": {"entries": {"x" * 5000: GOOD_ENTRY}},
    "reserved dir": {"entries": {".ray_artifact_sync": GOOD_ENTRY}},
    "reserved path": {"entries": {".ray_artifact_sync/writer.json": GOOD_ENTRY}},
    "climbing dir": {"entries": {"..": {"dir": True}}},
    "huge size": {"entries": {"x": {**GOOD_ENTRY, "size": 1 << 63}}},
    "negative size": {"entries": {"x": {**GOOD_ENTRY, "size": -1}}},
    "bool size": {"entries": {"x": {**GOOD_ENTRY, "size": True}}},
    "float size": {"entries": {"x": {**GOOD_ENTRY, "size": 1.0}}},
    "text size": {"entries": {"x": {**GOOD_ENTRY, "size": "1"}}},
    "no size": {"entries": {"x": {"digest": A}}},
    "huge time": {"entries": {"x": {**GOOD_ENTRY, "mtime_ns": 1 << 63}}},
    "very negative time": {"entries": {"x": {**GOOD_ENTRY, "mtime_ns": -(1 << 63) - 1}}},
    "bool time": {"entries": {"x": {**GOOD_ENTRY, "mtime_ns": True}}},
    "short digest": {"entries": {"x": {**GOOD_ENTRY, "digest": A[1:]}}},
    "long digest": {"entries": {"x": {**GOOD_ENTRY, "digest": A + "a"}}},
    "digest with newline": {"entries": {"x": {**GOOD_ENTRY, "digest": A + "\n"}}},
    "upper digest": {"entries": {"x": {**GOOD_ENTRY, "digest": "A" * 64}}},
    "digest as path": {"entries": {"x": {**GOOD_ENTRY, "digest": "../" * 21 + "x"}}},
    "no digest": {"entries": {"x": {"size": 1}}},
    "dir is 1": {"entries": {"x": {"dir": 1}}},
    "entry is a list": {"entries": {"x": [1]}},
    "entries are a list": {"entries": ["x"]},
    "entries are null": {"entries": None},
    "removed is text": {"removed": "x"},
    "removed holds numbers": {"removed": [1]},
    "removed holds lists": {"removed": [[]]},
    "future format": {"format": 2},
    "format as bool": {"format": True},
    "format as float": {"format": 1.0},
    "no format": {"format": None},
    "long format": {"format": "9" * 100_000},
    "other kind": {"kind": "snapshot"},
    "kind is a list": {"kind": ["manifest"]},
    "short token": {"token": TOKEN[1:]},
    "token as number": {"token": 1},
    "token of other digits": {"token": "\N{ARABIC-INDIC DIGIT THREE}" * 20},
    "long token": {"token": "1" * 100_000},
    "trial is a number": {"trial": 1},
    "checkpoint is a list": {"checkpoint": []},
    "layers are text": {"layers": "x"},
    "layer is text": {"layers": ["x"]},
    "layer climbs": {"layers": [{**GOOD_LAYER, "name": "../x.json"}]},
    "layer with a slash": {"layers": [{**GOOD_LAYER, "name": f"{TOKEN}-000001/x.json"}]},
    "layer of other digits": {"layers": [{**GOOD_LAYER, "name": f"{TOKEN}-00000\N{ARABIC-INDIC DIGIT THREE}.json"}]},
    "layer with a long name": {"layers": [{**GOOD_LAYER, "name": f"{TOKEN}-{'1' * 500}.json"}]},
    "layer without a digest": {"layers": [{"name": GOOD_LAYER["name"], "count": 3}]},
    "layer digest malformed": {"layers": [{**GOOD_LAYER, "digest": "x" * 64}]},
    "layer count bool": {"layers": [{**GOOD_LAYER, "count": True}]},
    "layer count negative": {"layers": [{**GOOD_LAYER, "count": -1}]},
    "too many layers": {"layers": [GOOD_LAYER] * (MAX_LAYERS + 1)},
}


@pytest.mark.parametrize("change", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_documents_are_refused(change):
    with pytest.raises(ManifestError, match="the head") as caught:
        decode(json.dumps({**GOOD, **change}).encode(), kind="manifest", where="the head")
    assert len(str(caught.value)) < 600
    assert str(caught.value).isprintable()


RAW = {
    "empty": b"",
    "not json": b"{",
    "a list": b"[]",
    "null": b"null",
    "binary": bytes(range(256)),
    "half of a document": json.dumps(GOOD).encode()[:-9],
    "trailing bytes": json.dumps(GOOD).encode() + b"{}",
    "nesting bomb": b"[" * 1_000_000,
    "nesting bomb inside": json.dumps(GOOD).encode()[:-1] + b',"more":' + b'{"a":' * 200_000,
    "nan size": json.dumps(GOOD).replace('"size": 1', '"size": NaN').encode(),
    "nan elsewhere": json.dumps({**GOOD, "extra": float("nan")}).encode(),
    "infinity": json.dumps({**GOOD, "extra": float("inf")}).encode(),
    "number of 10,000 digits": json.dumps(GOOD).replace('"size": 1', '"size": ' + "1" * 10_000).encode(),
    "path twice": json.dumps(GOOD).replace('"entries": {', '"entries": {"x": {"dir": true}, ').encode(),
    "entries twice": json.dumps(GOOD).encode()[:-1] + b',"entries":{}}',
    "size twice": json.dumps(GOOD).replace('"size": 1', '"size": 1, "size": 2').encode(),
    "latin-1": json.dumps({**GOOD, "trial": "ü"}, ensure_ascii=False).encode("latin-1"),
}


@pytest.mark.parametrize("data", RAW.values(), ids=RAW.keys())
def test_bytes_that_are_no_document_are_refused(data):
    with pytest.raises(ManifestError, match="the head"):
        decode(data, kind="manifest", where="the head")


def test_a_file_that_is_also_a_directory_is_refused():
    for names in (("a", "a/b"), ("a", "a/b/c"), ("x/a", "x/a/b")):
        document = Document("manifest", TOKEN, Changes({name: entry(name) for name in names}))
        with pytest.raises(ManifestError, match="both as a file and as the directory"):
            assemble(decode(encode(document), kind="manifest", where="x"), {})
    # Across layers too, and not for names that only begin alike.
    ref = LayerRef(f"{TOKEN}-000001.json", A, 1)
    document = Document("manifest", TOKEN, Changes({"a/b": entry("a/b")}), (ref,))
    with pytest.raises(ManifestError):
        assemble(document, {ref.name: Changes({"a": entry("a")})})
    assert assemble(document, {ref.name: Changes({"a.txt": entry("a.txt"), "ab": entry("ab")})})


def test_too_large_a_document_is_refused_unread(monkeypatch):
    monkeypatch.setattr("ray_artifact_sync.manifest.MAX_DOCUMENT_BYTES", 10)
    with pytest.raises(ManifestError, match="end at 10"):
        decode(encode(Document("manifest", TOKEN, Changes())), kind="manifest", where="x")


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_no_bytes_raise_anything_else(data):
    with contextlib.suppress(ManifestError):
        decode(data, kind="manifest", where="x")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=300, deadline=None)
@given(st.fixed_dictionaries({}, optional={key: JSON for key in (*GOOD, "layers", "removed", "trial", "checkpoint")}))
def test_no_values_raise_anything_else(change):
    try:
        document = decode(json.dumps({**GOOD, **change}).encode(), kind="manifest", where="x")
        assemble(document, {ref.name: Changes() for ref in document.layers})
    except ManifestError:
        pass
