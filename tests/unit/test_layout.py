"""Names on storage: what is ours, what is Ray's, what is an artifact."""

import pytest

from ray_artifact_sync import layout

TOKEN = layout.make_token(17)


def test_tokens_sort_as_their_numbers():
    numbers = [0, 1, 9, 10, 99, 1_700_000_000_000_000_000, 10**20 - 1]
    tokens = [layout.make_token(number) for number in numbers]
    assert tokens == sorted(tokens)
    assert all(layout.is_token(token) and int(token) == number for token, number in zip(tokens, numbers, strict=True))


@pytest.mark.parametrize("number", [-1, 10**20])
def test_a_number_that_would_not_sort_is_refused(number):
    with pytest.raises(ValueError, match="token"):
        layout.make_token(number)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "17",
        TOKEN + "0",
        TOKEN[1:],
        TOKEN + "\n",
        f"-{TOKEN[1:]}",
        "x" * 20,
        "\N{ARABIC-INDIC DIGIT THREE}" * 20,
        None,
        17,
    ],
)
def test_what_is_no_token(text):
    assert not layout.is_token(text)


@pytest.mark.parametrize("name", ["checkpoint_000003", "checkpoint_0", "checkpoint_1234567", "checkpoint_-00001"])
def test_checkpoint_dirs(name):
    assert layout.is_checkpoint_dir(name)
    assert layout.checkpoint_index(name) == int(name.partition("_")[2])


@pytest.mark.parametrize(
    "name",
    [
        "checkpoint_notes.txt",
        "checkpoint_",
        "checkpoint",
        "checkpoint_000003.tmp",
        "my_checkpoint_000003",
        "checkpoint_3a",
        "checkpoint_\N{ARABIC-INDIC DIGIT THREE}",
        "checkpoint_000003\n",
    ],
)
def test_what_is_no_checkpoint_dir(name):
    assert not layout.is_checkpoint_dir(name)


def test_snapshot_names_carry_the_token():
    assert layout.snapshot_token(layout.snapshot_name(TOKEN)) == TOKEN
    for name in (
        ".ray_artifact_sync-.json",
        f"x{layout.snapshot_name(TOKEN)}",
        layout.snapshot_name(TOKEN) + ".tmp",
        "a",
    ):
        assert layout.snapshot_token(name) is None


def test_reserved_paths():
    assert layout.is_reserved(".ray_artifact_sync")
    assert layout.is_reserved(".ray_artifact_sync/objects/x")
    assert not layout.is_reserved(".ray_artifact_sync_notes")
    assert not layout.is_reserved("sub/.ray_artifact_sync")


def test_everything_of_ours_lies_in_our_directory():
    ours = (
        layout.MANIFEST,
        layout.WRITER,
        layout.LAYERS,
        layout.TMP,
        layout.SET_ASIDE,
        layout.LOCK,
        layout.ALIVE,
        layout.LOCAL_TOKEN,
        layout.EXPLOITS,
        layout.object_path(TOKEN, "d"),
        layout.aside_path(TOKEN),
    )
    assert all(layout.is_reserved(path) for path in ours)
    assert len(set(ours)) == len(ours)
    assert layout.object_path(TOKEN, "d") == f".ray_artifact_sync/objects/{TOKEN}/d"
