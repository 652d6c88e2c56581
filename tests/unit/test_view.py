"""`ArtifactView` against a disk and a real S3 server: what it lists is what is there, and what it reads is right."""

from __future__ import annotations

import io
import json
import subprocess
import sys

import pytest
from pyarrow import fs as pafs

from ray_artifact_sync import (
    ArtifactNotFoundError,
    ArtifactView,
    ConfigurationError,
    IntegrityError,
    layout,
)
from ray_artifact_sync.errors import ManifestError, UnknownFormatError
from ray_artifact_sync.options import SyncOptions
from ray_artifact_sync.run_parts import open_part
from ray_artifact_sync.session import TrialArtifacts
from ray_artifact_sync.stores.posix import PosixStore
from tests.support.looking import BIG, Spot, make_trial
from tests.support.s3_servers import BUCKET, filesystem_at
from tests.support.sessions import open_session, save


def read_all(view: ArtifactView) -> dict[str, bytes]:
    return {a.path: view.read_bytes(view.path_of(a)) for a in view.list() if a.owner is None}


def test_a_trial(spot):
    trees = make_trial(spot)
    view = ArtifactView(spot.uri("exp/trial_1"))
    assert view.trials == ("trial_1",)
    assert view.is_single
    assert view.checkpoints == ("checkpoint_000000", "checkpoint_000001")
    assert read_all(view) == trees["newest"]
    for checkpoint in view.checkpoints:
        assert read_all(view.at(checkpoint)) == trees[checkpoint]
        assert read_all(ArtifactView(spot.at("exp/trial_1", checkpoint))) == trees[checkpoint]


def test_a_listing_says_since_when_and_whose(spot):
    make_trial(spot)
    listed = {artifact.path: artifact for artifact in ArtifactView(spot.uri("exp/trial_1"))}
    assert {path: a.checkpoint for path, a in listed.items()} == {
        "empty.txt": "checkpoint_000000",
        "log.txt": None,
        "progress.csv": None,
        "rewritten.txt": None,
        "sub dir/plot [1].png": "checkpoint_000000",
    }
    assert {path for path, a in listed.items() if a.owner} == {"progress.csv"}
    assert listed["progress.csv"].owner == "CSVLoggerCallback"
    assert listed["progress.csv"].digest is None
    assert listed["log.txt"].size == 6
    log = (spot.scratch / "work/exp/trial_1/log.txt").stat()
    assert listed["log.txt"].mtime_ns == log.st_mtime_ns
    assert listed["log.txt"].time.timestamp() == pytest.approx(log.st_mtime)
    assert all(a.owner is None for a in ArtifactView(spot.at("exp/trial_1", "checkpoint_000001")))


def test_an_experiment(spot):
    first, second = make_trial(spot, "trial_1"), make_trial(spot, "trial_10")
    spot.store("exp").put("experiment_state-1.json", b"{}")
    view = ArtifactView(spot.uri("exp"))
    assert view.trials == ("trial_1", "trial_10")
    assert not view.is_single
    assert view.read_bytes("trial_10/log.txt") == second["newest"]["log.txt"]
    assert read_all(view["trial_1"]) == first["newest"]
    assert view["trial_10"].at("checkpoint_000000").read_text("log.txt") == "1\n"
    assert view.at("checkpoint_000001").read_text("trial_1/log.txt") == "1\n2\n"
    assert [a.trial for a in view.list(include="log.txt")] == ["trial_1", "trial_10"]
    assert view.list(exclude=["*"]) == []
    # The place that holds experiments names them too.
    assert ArtifactView(spot.uri("")).trials == ("exp/trial_1", "exp/trial_10")


def test_files_as_python_sees_them(spot):
    trees = make_trial(spot, big=True)
    view = ArtifactView(spot.uri("exp/trial_1"))
    with view.open("log.txt", "r") as file:
        assert list(file) == ["1\n", "2\n", "3\n"]
    assert view.read_bytes("progress.csv") == b"a,b\n1,2\n"
    for which, version in (("newest", view), ("checkpoint_000000", view.at("checkpoint_000000"))):
        data = trees[which]["big.bin"]
        with version.open("big.bin") as file:
            assert file.seekable()
            assert file.seek(-7, io.SEEK_END) == len(data) - 7
            assert file.read() == data[-7:]
            assert file.read() == b""
            file.seek(5_000_000)
            assert file.read(300_000) == data[5_000_000:5_300_000]
            file.seek(-100_000, io.SEEK_CUR)
            assert file.read(1000) == data[5_200_000:5_201_000]
            file.seek(0)
            assert file.read() == data
            with pytest.raises(ValueError, match="Cannot seek"):
                file.seek(-1)


def test_reading_asks_for_no_more_than_it_must(spot):
    make_trial(spot, big=True)
    if spot.proxy is None:
        pytest.skip("counts requests")
    view = ArtifactView(spot.uri("exp/trial_1"))
    view.list()
    spot.proxy.reset_counts()
    with view.open("big.bin") as file:
        file.seek(BIG // 2)
        file.read(100)
    assert spot.proxy.bytes_out["get_object"] < 1_000_000
    assert not {kind for kind in spot.proxy.counts if kind.startswith(("put", "delete", "create", "upload"))}


def read_to_end(file, given: list[bytes]) -> None:
    while chunk := file.read(1_000_000):
        given.append(chunk)


def test_a_large_file_that_was_replaced_is_refused_at_its_end(tmp_path):
    working_dir, root = tmp_path / "work", tmp_path / "exp/trial"
    working_dir.mkdir()
    session = open_session(working_dir, PosixStore(root), 1)
    (working_dir / "big.bin").write_bytes(b"a" * (2 * BIG))
    session.sync()
    session.close()
    view = ArtifactView(root)
    (root / "big.bin").write_bytes(b"a" * (2 * BIG - 1) + b"b")
    given = []
    with view.open("big.bin") as file:
        assert file.read(1000) == b"a" * 1000  # it cannot be known yet
        with pytest.raises(IntegrityError, match=r"big\.bin .* is nowhere"):
            read_to_end(file, given)
    assert given
    assert not any(b"b" in chunk for chunk in given)
    (root / "big.bin").write_bytes(b"too short")
    with view.open("big.bin") as file, pytest.raises(IntegrityError):
        file.read()


def test_a_small_file_is_verified_before_anything_is_given_out(spot):
    make_trial(spot)
    view = ArtifactView(spot.uri("exp/trial_1"))
    view.list()
    spot.store("exp/trial_1").put("log.txt", b"other\n")
    with pytest.raises(IntegrityError, match="nowhere"):
        view.open("log.txt")
    # What a checkpoint needs of it, and what was preserved, is there all the same.
    assert view.at("checkpoint_000000").read_text("rewritten.txt") == "first"


def test_a_version_that_was_preserved_after_the_listing_is_found(spot):
    make_trial(spot)
    view = ArtifactView(spot.uri("exp/trial_1"))
    view.list()
    session = open_session(
        spot.scratch / "work/exp/trial_1", spot.store("exp/trial_1"), 2, trial="trial_1", set_aside=False
    )
    (spot.scratch / "work/exp/trial_1/sub dir/plot [1].png").write_bytes(b"another")
    session.sync()
    session.close()
    assert view.at("checkpoint_000001").read_bytes("sub dir/plot [1].png") == b"\x89PNG"
    view.refresh()
    assert view.read_bytes("sub dir/plot [1].png") == b"another"


def test_versions(spot):
    make_trial(spot)
    view = ArtifactView(spot.uri("exp/trial_1"))
    versions = view.versions("log.txt")
    assert [(v.size, v.checkpoints, v.is_newest, v.place) for v in versions] == [
        (2, ("checkpoint_000000",), False, "log.txt"),
        (4, ("checkpoint_000001",), False, "log.txt"),
        (6, (), True, "log.txt"),
    ]
    places = [v.place for v in view.versions("rewritten.txt")]
    assert places[2] == "rewritten.txt"
    assert all(place.startswith(layout.OBJECTS) for place in places[:2])
    store = spot.store("exp/trial_1")
    assert [store.read(place) for place in places] == [b"first", b"the second", b"third"]
    store.delete([places[0]])
    view.refresh()
    assert view.versions("rewritten.txt")[0].place == "rewritten.txt"  # as far as a listing can tell
    store.delete(["rewritten.txt"])
    view.refresh()
    assert view.versions("rewritten.txt")[0].place is None
    with pytest.raises(ArtifactNotFoundError, match=r"lists 'none\.txt'"):
        view.versions("none.txt")


@pytest.mark.parametrize("path", ["none.txt", "sub dir", "../progress.csv", ".ray_artifact_sync/writer.json"])
def test_what_is_not_there_cannot_be_opened(spot, path):
    make_trial(spot)
    with pytest.raises(ArtifactNotFoundError, match="There is no artifact"):
        ArtifactView(spot.uri("exp/trial_1")).open(path)


def test_wrong_uses_are_named(spot):
    make_trial(spot)
    make_trial(spot, "trial_3")
    view = ArtifactView(spot.uri("exp"))
    with pytest.raises(ArtifactNotFoundError, match=r"No trial at .* has a checkpoint_000009"):
        view.at("checkpoint_000009")
    with pytest.raises(ArtifactNotFoundError, match=r"'log\.txt' does not begin with the name of a trial .* 'trial_1'"):
        view.open("log.txt")
    with pytest.raises(ConfigurationError, match="mode 'rb' or 'r', not 'w'"):
        view.open("trial_1/log.txt", "w")
    with pytest.raises(ArtifactNotFoundError, match="empty directory"):
        view.open("trial_1/empty dir")
    with pytest.raises(ArtifactNotFoundError, match=r"trial_1 has no checkpoint_000009; .*: checkpoint_000000, checkp"):
        view["trial_1"].at("checkpoint_000009")
    with pytest.raises(KeyError):
        view["trial_2"]
    with pytest.raises(ArtifactNotFoundError, match=r"There is no artifact 'progress\.csv' .* as of checkpoint_000000"):
        view.at("checkpoint_000000").open("trial_1/progress.csv")
    for source in (17, None, object(), ""):
        with pytest.raises(ConfigurationError):
            ArtifactView(source)


def test_a_checkpoint_without_a_snapshot_is_told(spot):
    make_trial(spot)
    spot.store("exp/trial_1").put("checkpoint_000007/model.bin", b"model")
    with pytest.raises(ArtifactNotFoundError, match="checkpoint_000007 of trial_1 has no snapshot"):
        ArtifactView(spot.at("exp/trial_1", "checkpoint_000007"))


def test_a_damaged_head_leaves_checkpoints_readable(spot):
    trees = make_trial(spot)
    spot.store("exp/trial_1").put(layout.MANIFEST, b"{ not json")
    view = ArtifactView(spot.uri("exp/trial_1"))
    with pytest.raises(ManifestError, match="damaged"):
        view.list()
    assert read_all(view.at("checkpoint_000000")) == trees["checkpoint_000000"]


def test_a_newer_format_is_told(spot):
    make_trial(spot)
    store = spot.store("exp/trial_1")
    document = json.loads(store.read(layout.MANIFEST))
    store.put(layout.MANIFEST, json.dumps({**document, "format": 2}).encode())
    with pytest.raises(UnknownFormatError, match="format version 2; this release reads version 1"):
        ArtifactView(spot.uri("exp/trial_1")).list()


def test_a_snapshot_of_another_trial_does_not_count(tmp_path):
    place = tmp_path / "storage"
    session_dir = tmp_path / "work"
    session_dir.mkdir()
    session = open_session(session_dir, PosixStore(place / "exp/renamed"), 1, trial="original")
    (session_dir / "a.txt").write_text("a")
    save(session, "checkpoint_000000")
    session.close()
    view = ArtifactView(place / "exp/renamed")
    assert view.checkpoints == ()
    assert view.read_text("a.txt") == "a"


# --- kinds of places -------------------------------------------------------------------------------


def write_part(filesystem, run_dir: str, part: str, working_dir, checkpoint: str) -> None:
    directory = open_part(filesystem, run_dir, part)
    session = TrialArtifacts(
        str(working_dir), directory.store, trial=directory, token=layout.make_token(1), options=SyncOptions()
    )
    session.begin()
    (working_dir / "log.txt").write_text(f"of {part}\n")
    with directory.part_store.open_checkpoint(checkpoint):
        session.commit_checkpoint(checkpoint, lambda engine: None)
    (working_dir / "log.txt").write_text(f"of {part}\nand more\n")
    session.close()


@pytest.mark.parametrize("where", ["local", pytest.param("s3", marks=pytest.mark.s3)])
def test_a_ray_train_run(where, tmp_path, request):
    if where == "local":
        filesystem, run_dir = pafs.LocalFileSystem(), str(tmp_path / "storage/run")
    else:
        filesystem, run_dir = filesystem_at(request.getfixturevalue("proxy").endpoint), f"{BUCKET}/{tmp_path.name}/run"
    for part in ("rank_0", "rank_1"):
        (tmp_path / part).mkdir()
        write_part(filesystem, run_dir, part, tmp_path / part, "mine")
    view = ArtifactView(run_dir, storage_filesystem=filesystem)
    assert view.trials == ("artifacts/rank_0", "artifacts/rank_1")
    assert view.checkpoints == ("mine",)
    assert view.read_text("artifacts/rank_1/log.txt") == "of rank_1\nand more\n"
    assert view.at("mine").read_text("artifacts/rank_1/log.txt") == "of rank_1\n"
    single = ArtifactView(f"{run_dir}/artifacts/rank_0", storage_filesystem=filesystem)
    assert single.trials == ("rank_0",)
    assert single.at("mine").read_text("log.txt") == "of rank_0\n"


def test_a_directory_that_is_kept_in_sync(tmp_path):
    from ray_artifact_sync import ArtifactSyncer

    (tmp_path / "local").mkdir()
    (tmp_path / "local/a.txt").write_text("a")
    syncer = ArtifactSyncer()
    syncer.sync_up(str(tmp_path / "local"), str(tmp_path / "remote"))
    syncer.wait()
    view = ArtifactView(tmp_path / "remote")
    assert view.read_text("a.txt") == "a"
    assert view.is_single


def test_a_set_of_files(tmp_path):
    from ray_artifact_sync import ShardedUpload

    (tmp_path / "local/checkpoint_000001").mkdir(parents=True)
    (tmp_path / "local/checkpoint_000001/a.txt").write_text("a")
    ShardedUpload(str(tmp_path / "set")).upload(tmp_path / "local")
    view = ArtifactView(tmp_path / "set")
    assert view.read_text("checkpoint_000001/a.txt") == "a"
    assert [v.place for v in view.versions("checkpoint_000001/a.txt")] == ["checkpoint_000001/a.txt"]


def test_relative_paths_and_file_uris(tmp_path, monkeypatch):
    spot = Spot(lambda path="": str(tmp_path / path), None, tmp_path / "scratch")
    make_trial(spot, "trial 1?(2, 3)[4]")
    monkeypatch.chdir(tmp_path)
    assert ArtifactView("exp/trial 1?(2, 3)[4]/").read_text("log.txt") == "1\n2\n3\n"
    assert ArtifactView(f"file://{tmp_path}/exp/trial%201?(2, 3)[4]").read_text("log.txt") == "1\n2\n3\n"
    assert ArtifactView("exp/trial 1?(2, 3)[4]@checkpoint_000000").read_text("log.txt") == "1\n"


# --- notebooks ------------------------------------------------------------------------------------


def test_to_pandas(spot):
    make_trial(spot)
    frame = ArtifactView(spot.uri("exp")).to_pandas()
    assert list(frame.columns) == [
        *("trial", "path", "size", "mtime_ns", "digest", "checkpoint", "owner", "time"),
    ]
    assert frame.set_index("path").loc["log.txt", "size"] == 6
    assert str(frame["time"].dtype).endswith("UTC]")


def test_pandas_is_asked_for_only_then(tmp_path, monkeypatch):
    make_trial(Spot(lambda path="": str(tmp_path / path), None, tmp_path / "scratch"))
    code = (
        "import sys; sys.modules['pandas'] = None; sys.modules['ray'] = None\n"
        "from ray_artifact_sync import ArtifactView, ArtifactSyncError\n"
        f"view = ArtifactView({str(tmp_path / 'exp')!r})\n"
        "assert view.read_text('trial_1/log.txt') == '1\\n2\\n3\\n'\n"
        "try: view.to_pandas()\n"
        "except ArtifactSyncError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "to_pandas() needs pandas: pip install pandas\n", done.stderr


def test_html_is_escaped(tmp_path):
    working_dir = tmp_path / "work"
    working_dir.mkdir()
    session = open_session(working_dir, PosixStore(tmp_path / "exp/trial<i>"), 1, trial="trial<i>")
    (working_dir / "<script>alert(1)<").write_text("x")
    session.sync()
    session.close()
    (tmp_path / "exp/trial<i>/events.out.tfevents.<b>&").write_text("x")
    shown = ArtifactView(tmp_path / "exp")._repr_html_()
    assert "&lt;script&gt;alert(1)&lt;" in shown
    assert "events.out.tfevents.&lt;b&gt;&amp;" in shown
    assert not {"<script", "<b>", "<i>"} & set(shown.split())
    for tag in ("<script", "<b>", "<i>"):
        assert tag not in shown


def test_a_long_listing_is_cut_in_html(tmp_path):
    working_dir = tmp_path / "work"
    working_dir.mkdir()
    for number in range(250):
        (working_dir / f"{number:03}.txt").touch()
    session = open_session(working_dir, PosixStore(tmp_path / "exp/trial"), 1, set_aside=False)
    session.sync()
    session.close()
    shown = ArtifactView(tmp_path / "exp")._repr_html_()
    assert shown.count("<tr>") == 201
    assert "and 50 more files" in shown


def test_files_that_the_driver_stored_have_an_owner(spot):
    """Declared by a callback that only the run knows: the driver's own manifest, above the trials, says so."""
    from ray_artifact_sync.concurrency import Deadline
    from ray_artifact_sync.directory_sync import DirectorySync

    make_trial(spot)
    staging = spot.scratch / "staging"
    (staging / "trial_1/logs").mkdir(parents=True)
    (staging / "trial_1/logs/declared.txt").write_text("x")
    (staging / "experiment_state-1.json").write_text("{}")
    DirectorySync(str(staging), spot.store("exp"), options=SyncOptions(), verify_remote=False).sync_up(Deadline())
    expected = {"progress.csv": "CSVLoggerCallback", "logs/declared.txt": "a callback"}
    for place in ("exp", "exp/trial_1", ""):
        assert {a.path: a.owner for a in ArtifactView(spot.uri(place)) if a.owner} == expected


def test_a_callbacks_files_have_an_owner(tmp_path):
    from ray_artifact_sync.driver_note import write_note

    make_trial(Spot(lambda path="": str(tmp_path / path), None, tmp_path / "scratch"))
    store = PosixStore(tmp_path / "exp/trial_1")
    store.put("summary.json", b"{}")
    store.put("stray.json", b"{}")
    write_note(store, ["summary.json"])
    view = ArtifactView(tmp_path / "exp/trial_1")
    assert {a.path: a.owner for a in view if a.owner} == {
        "progress.csv": "CSVLoggerCallback",
        "summary.json": "a callback",
    }
    assert view.read_text("stray.json") == "{}"
