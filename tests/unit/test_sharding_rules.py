"""The pure half of sharding: what `test_sharding.py` cannot see from outside."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_artifact_sync.entries import FileEntry, Manifest
from ray_artifact_sync.errors import ArtifactConflictError, ConfigurationError
from ray_artifact_sync.sharding import (
    Listing,
    Source,
    assign,
    digests_to_exchange,
    merge_listings,
    merge_metadata,
    who_lists,
)


def decide(trees, *, base=None, on_conflict="error", roots=None):
    """What becomes of trees of path to content; None is an empty directory."""
    sources = [None if tree is None else Source(roots[n] if roots else n) for n, tree in enumerate(trees)]
    listing = who_lists(sources)
    listings = [
        Listing(
            {path: len(content) for path, content in tree.items() if content is not None},
            tuple(path for path, content in tree.items() if content is None),
        )
        if n in listing
        else None
        for n, tree in enumerate(trees)
    ]
    merge = merge_listings(listings, sources)
    wanted = digests_to_exchange(merge, listings, base)
    contents = [{path: (len(trees[n][path]), trees[n][path]) for path in wanted.get(n, [])} for n in range(len(trees))]
    return assign(merge, listings, contents, base=base, on_conflict=on_conflict).uploads, wanted


def base_of(tree):
    return Manifest.of(FileEntry(path, len(content), content) for path, content in tree.items())


def test_what_a_rank_did_not_change_gives_way():
    base = base_of({"log": "1", "same": "s", "mine": "m"})
    uploads, _ = decide([{"log": "1", "same": "s", "mine": "x"}, {"log": "12", "same": "s", "mine": "m"}], base=base)
    assert uploads == {"log": (1, "log"), "same": (0, "same"), "mine": (0, "mine")}


def test_two_ranks_that_both_changed_a_file_conflict():
    base = base_of({"log": "1"})
    with pytest.raises(ArtifactConflictError, match="'log' has different bytes from ranks 1 and 2"):
        decide([{"log": "1"}, {"log": "2"}, {"log": "3"}], base=base)
    uploads, _ = decide([{"log": "1"}, {"log": "2"}, {"log": "2"}], base=base)
    assert uploads == {"log": (1, "log")}


def test_files_of_other_sizes_are_not_hashed():
    _, wanted = decide([{"a": "1"}, {"a": "22"}], on_conflict="lowest_rank")
    assert wanted == {}
    _, wanted = decide([{"a": "1"}, {"a": "22"}, {"a": "33"}, {"b": "1"}], on_conflict="lowest_rank")
    assert wanted == {1: ["a"], 2: ["a"]}


def test_ranks_that_share_a_directory_never_collide():
    tree = {"a": "1", "d/b": "2"}
    uploads, wanted = decide([None, tree, tree, tree], roots=["", "x", "x", "x"])
    assert wanted == {}
    assert uploads == {"a": (1, "a"), "d/b": (1, "d/b")}
    uploads, wanted = decide([tree, tree, {"a": "1"}], roots=["x", "x", "y"])
    assert wanted == {0: ["a"], 2: ["a"]}
    assert uploads == {"a": (0, "a"), "d/b": (0, "d/b")}


def test_a_long_list_of_conflicts_is_cut():
    trees = [{f"f{n:03}": str(rank) for n in range(100)} for rank in range(2)]
    with pytest.raises(ArtifactConflictError, match="and 90 more") as caught:
        decide(trees)
    assert len(caught.value.conflicts) == 100
    assert len(str(caught.value)) < 2000


def test_nothing_from_anybody():
    with pytest.raises(ConfigurationError, match="at least one"):
        who_lists([None, None])


def test_metadata_of_the_lowest_rank():
    assert merge_metadata([{"a": 1}, {"a": 2, "b": 3}], on_conflict="lowest_rank") == {"a": 1, "b": 3}


paths = st.lists(st.sampled_from("abc"), min_size=1, max_size=3).map("/".join)
trees = st.dictionaries(paths, st.sampled_from(["", "x", "y", "zz", None]), max_size=6).map(
    lambda tree: {path: content for path, content in tree.items() if not any(o.startswith(path + "/") for o in tree)}
)


@settings(max_examples=200, deadline=None)
@given(st.lists(trees, min_size=1, max_size=4), st.randoms())
def test_any_trees(ranks, shuffler: random.Random):
    """Against the plain definition: the union of all trees, if no two say different things about a path."""

    def result(trees):
        try:
            return decide(trees)[0]
        except ArtifactConflictError as error:
            return set(error.conflicts)

    shuffled = []
    for tree in ranks:
        items = list(tree.items())
        shuffler.shuffle(items)
        shuffled.append(dict(items))
    found = result(ranks)
    assert found == result(shuffled), "the order in which a rank lists must not matter"
    claims = {}
    for tree in ranks:
        for path, content in tree.items():
            claims.setdefault(path, set()).add(content)
    directories = {"/".join(path.split("/")[:n]) for path in claims for n in range(1, len(path.split("/")))}
    conflicts = {
        path for path, contents in claims.items() if len(contents) > 1 or (path in directories and contents != {None})
    }
    if conflicts:
        assert found == conflicts
    else:
        assert found == {
            path: (min(n for n, tree in enumerate(ranks) if path in tree), path)
            for path in claims
            if path not in directories
        }
    lowest = decide(ranks, on_conflict="lowest_rank")[0]
    assert {path for path, content in ranks[0].items() if content is not None} <= {
        path for path, (rank, _) in lowest.items() if rank == 0
    }
    for how in ("lowest_rank", "rank_suffix"):
        files = {
            path for path, (rank, local) in decide(ranks, on_conflict=how)[0].items() if ranks[rank][local] is not None
        }
        assert not any(other.startswith(f"{path}/") for path in files for other in files)
