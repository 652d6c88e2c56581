"""Artifact paths in one spelling, entries and manifests as values."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_artifact_sync.entries import MAX_PATH_BYTES, FileEntry, Manifest, Preserve, SyncPlan, validate_path
from ray_artifact_sync.errors import InvalidPathError
from ray_artifact_sync.stores.common import check_path

A = "a" * 64
B = "b" * 64


@pytest.mark.parametrize(
    "path",
    [
        "x",
        "a/b/c.txt",
        "a b",
        "a%20b",
        "a#b",
        "a:b",
        "a?b",
        ".hidden",
        "...",
        "a/..b",
        "b../c",
        "~x",
        "a\\b",
        "ü/😀",
        "f[1]*",
    ],
)
def test_a_path_is_kept_as_it_is(path):
    assert validate_path(path) == path


@pytest.mark.parametrize(
    "path",
    [
        "",
        "/",
        "/etc/passwd",
        ".",
        "..",
        "../x",
        "a/../b",
        "a/..",
        "./a",
        "a/./b",
        "a//b",
        "a/",
        "a\0b",
        "a\nb",
        "a\x7fb",
        "a\x1fb",
        "bad-\udcff",
        None,
        3,
        b"bytes",
    ],
)
def test_what_is_no_artifact_path_is_refused(path):
    with pytest.raises(InvalidPathError) as caught:
        validate_path(path)
    assert caught.value.path == path
    assert str(caught.value).isprintable(), "the message must be fit for a log line"


def test_the_length_is_counted_in_bytes():
    assert validate_path("x" * MAX_PATH_BYTES)
    with pytest.raises(InvalidPathError, match=f"{MAX_PATH_BYTES + 1} bytes"):
        validate_path("x" * (MAX_PATH_BYTES + 1))
    with pytest.raises(InvalidPathError, match="limit"):
        validate_path("ü" * (MAX_PATH_BYTES // 2 + 1))


@given(st.text(max_size=40))
def test_every_accepted_path_stays_below_the_root(path):
    try:
        validate_path(path)
    except InvalidPathError:
        return
    import posixpath

    assert posixpath.normpath(posixpath.join("/root", path)) == f"/root/{path}"
    assert check_path(path) == path, "stores and manifests mean the same by a path"


def test_times_are_not_content():
    entry = FileEntry("x", 3, A, 1)
    assert entry.same_content(FileEntry("y", 3, A, 2))
    assert not entry.same_content(FileEntry("x", 4, A, 1))
    assert not entry.same_content(FileEntry("x", 3, B, 1))
    assert not entry.same_content(None)
    assert not FileEntry("d", 0, "", is_dir=True).same_content(FileEntry("d", 0, ""))


def test_a_manifest_is_its_entries():
    one = FileEntry("x", 3, A, 1)
    manifest = Manifest.of([one, FileEntry("d", 0, "", is_dir=True)], "token")
    assert len(manifest) == 2
    assert manifest.get("x") is one
    assert manifest.get("y") is None
    assert next(iter(manifest)) is one
    assert manifest.total_bytes == 3
    assert manifest.same_content(Manifest.of([FileEntry("x", 3, A, 99), FileEntry("d", 0, "", is_dir=True)]))
    assert manifest.same_content(Manifest(manifest.entries, "other"))
    assert not manifest.same_content(Manifest.of([one]))
    assert not Manifest.of([one]).same_content(manifest)
    assert not manifest.same_content(Manifest.of([FileEntry("x", 3, B, 1), FileEntry("d", 0, "", is_dir=True)]))


@pytest.mark.parametrize("value", [FileEntry("x", 3, A), Manifest(), Preserve("x", (A,), "why"), SyncPlan()])
def test_values_are_frozen(value):
    field = dataclasses.fields(value)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(value, field, None)


def test_only_unchanged_files_make_an_empty_plan():
    assert SyncPlan(unchanged=(FileEntry("x", 3, A),)).is_empty
    assert not SyncPlan(dropped=("x",)).is_empty
    assert not SyncPlan(preserves=(Preserve("x", (A,), "why"),)).is_empty
