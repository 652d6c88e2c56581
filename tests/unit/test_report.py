"""The report: what it says about real trials, on a disk and on a real S3 server; hostile names; limits; the file."""

from __future__ import annotations

import base64
import hashlib
import html.parser
import json
import os
import re

import pytest

from ray_artifact_sync import layout, report, report_data
from ray_artifact_sync.journal import JournalRecord, SentFile, SkipNote, encode_line
from ray_artifact_sync.report_json import _events
from ray_artifact_sync.stores.posix import PosixStore
from tests.support.experiments import curve, heat, make_experiment, make_trial
from tests.support.looking import make_trial as make_small_trial
from tests.support.sessions import open_session, save

WRITES = (
    *("put_object", "upload_part", "upload_part_copy", "create_multipart", "complete_multipart", "abort_multipart"),
    *("copy_object", "delete", "delete_many", "marker", "other"),
)


class Page(html.parser.HTMLParser):
    """What a browser would find in a page: its elements, and the text of scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict]] = []
        self.texts: list[tuple[str, dict, str]] = []
        self._inside = False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self._inside = tag in ("script", "style")

    def handle_endtag(self, tag):
        self._inside = False

    def handle_data(self, data):
        if self._inside:
            self.texts.append((*self.elements[-1], data))

    @property
    def data(self) -> dict:
        blocks = {attributes.get("id"): text for _, attributes, text in self.texts}
        data = json.loads(blocks["data"])
        for number, trial in enumerate(data["trials"]):
            trial["events"] = json.loads(blocks[f"events-{number}"])
        return data

    @property
    def files(self) -> dict[str, bytes]:
        blocks = [(attributes.get("id", ""), text) for tag, attributes, text in self.texts if tag == "script"]
        return {name: base64.b64decode(text, validate=True) for name, text in blocks if name.startswith("file-")}


@pytest.fixture
def make_report(command, tmp_path):
    """A function that makes the report of a place, and reads it."""

    def make(uri, *options):
        ran = command("report", uri, "-o", tmp_path / "report.html", *options)
        assert ran.code == 0, ran.err
        return Page((tmp_path / "report.html").read_text())

    return make


# --- what it says ---------------------------------------------------------------------------------


def test_the_report_of_real_trials(spot, command, make_report):
    make_small_trial(spot, "trial_1")
    make_small_trial(spot, "trial_2")
    if spot.proxy is not None:
        spot.proxy.reset_counts()
    page = make_report(spot.uri("exp"))
    if spot.proxy is not None:
        assert not any(spot.proxy.counts[kind] for kind in WRITES)
    first, second = page.data["trials"]
    assert (first["name"], second["name"]) == ("trial_1", "trial_2")
    assert [event["kind"] for event in first["events"]] == [
        *("begin", "sync", "checkpoint", "sync", "checkpoint", "sync", "close"),
    ]
    assert [one["name"] for one in first["checkpoints"]] == ["checkpoint_000000", "checkpoint_000001"]
    assert [one["files_changed"] for one in first["checkpoints"]] == [5, 2]
    assert (first["files"], first["bytes"]) == (4, 15)
    assert first["totals"]["checkpoints"] == 2
    assert first["totals"]["bytes_changed"] <= first["totals"]["bytes_sent"]
    assert first["largest"][0]["path"] in ("log.txt", "rewritten.txt")
    assert [one["path"] for one in first["growing"]] == ["log.txt"]
    (attempt,) = first["attempts"]
    assert attempt["closed"]
    assert attempt["host"]
    sorts = {file["path"]: (file["sort"], file["left_out"]) for file in first["embedded"]}
    assert sorts["log.txt"] == ("text", "")
    assert sorts["sub dir/plot [1].png"] == ("picture", "it is not what its name says")
    assert b"1\n2\n3\n" in page.files.values()


def test_the_data_as_json(spot, command):
    make_small_trial(spot, "trial_1")
    ran = command("report", spot.uri("exp/trial_1"), "--json")
    assert (ran.code, ran.err) == (0, "")
    assert (ran.json["command"], ran.json["format"], ran.json["name"]) == ("report", 1, "trial_1")
    assert ran.json["trials"][0]["files"] == 4
    assert not os.path.exists("report.html")


def test_pictures_and_texts_are_embedded(tmp_path, make_report):
    make_trial(tmp_path / "exp/t_1", tmp_path / "work", 3)
    page = make_report(tmp_path / "exp")
    (trial,) = page.data["trials"]
    embedded = {file["path"]: (number, file) for number, file in enumerate(trial["embedded"])}
    assert {path: file["sort"] for path, (_, file) in embedded.items()} == {
        "plots/confusion.png": "picture",
        "plots/loss.svg": "picture",
        "config.json": "text",
        "train.log": "text",
        "predictions.csv": "table",
    }
    for path, content in (("plots/confusion.png", heat(3)), ("plots/loss.svg", curve(3))):
        assert page.files[f"file-0-{embedded[path][0]}"] == content
    assert trial["totals"]["failures"] == trial["failures_in_all"]
    assert trial["skipped"][0]["reason"]


def test_a_run_without_a_journal_says_so(tmp_path, make_report):
    make_trial(tmp_path / "exp/t_1", tmp_path / "work", 3, journal=False)
    (trial,) = make_report(tmp_path / "exp").data["trials"]
    assert trial["journal"] is None
    assert "No journal" in trial["note"]
    assert len(trial["checkpoints"]) == 3
    assert all(one["t"] for one in trial["checkpoints"])
    assert {one["path"] for one in trial["growing"]} == {"train.log", "predictions.csv"}


def test_damaged_and_hostile_journals(tmp_path, make_report):
    make_small_trial_at(tmp_path / "exp/t_1", tmp_path / "work")
    lines = [
        encode_line(JournalRecord(kind="sync", t=5.0, bytes_sent=7, bytes_changed=7)),
        b"{" * 100_000 + b"\n",
        b'{"v":1,"t":1e400,"kind":"sync"}\n',
        b'{"v":7,"t":1,"kind":"sync"}\n',
        b"\xff\xfe\n",
    ]
    PosixStore(tmp_path / "exp/t_1").put(
        f"{layout.JOURNAL}/{layout.journal_name(layout.make_token(1), 7)}", b"".join(lines)
    )
    (trial,) = make_report(tmp_path / "exp").data["trials"]
    assert trial["journal"] == {"damaged": 3, "unknown": 1, "cut": False}
    assert trial["totals"]["bytes_sent"] == 7 + len("hello")


def make_small_trial_at(directory, work, files=None):
    session = open_session(work, PosixStore(directory), 1, trial=directory.name)
    for path, data in (files or {"a.txt": b"hello"}).items():
        target = work / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
    assert save(session, "checkpoint_000000")
    session.close()


def test_trials_that_cannot_be_read_are_named(tmp_path, command):
    make_small_trial_at(tmp_path / "exp/good", tmp_path / "work")
    make_small_trial_at(tmp_path / "exp/damaged", tmp_path / "work2")
    (tmp_path / "exp/damaged" / layout.MANIFEST).write_text("{not json")
    ran = command("report", tmp_path / "exp", "-o", tmp_path / "r.html")
    assert ran.code == 0
    damaged, good = Page((tmp_path / "r.html").read_text()).data["trials"]
    assert (damaged["damaged"], good["damaged"]) == (True, False)
    assert "manifest.json" in damaged["note"]
    assert len(damaged["checkpoints"]) == 1


# --- hostile names and contents ------------------------------------------------------------------

ATTACK = "</script><script>alert(1)</script><img src=x onerror=alert(1)>{{data}} & \u202etxt.exe\u200b"


def test_nothing_from_storage_becomes_markup(tmp_path, make_report):
    name = ATTACK.replace("/", "_")
    files = {
        f"{name}.txt": b"</script><script>alert(1)</script>",
        "evil.svg": b'<svg xmlns="http://www.w3.org/2000/svg"><script>alert(1)</script></svg>',
    }
    make_small_trial_at(tmp_path / f"exp {name}" / f"trial {name}", tmp_path / "work", files)
    store = PosixStore(tmp_path / f"exp {name}" / f"trial {name}")
    record = JournalRecord(
        kind="sync", t=1.0, error=ATTACK, skips=(SkipNote(ATTACK, ATTACK, ATTACK),), sent=(SentFile(ATTACK, 1, 1),)
    )
    store.put(f"{layout.JOURNAL}/{layout.journal_name(layout.make_token(9), 0)}", encode_line(record))
    page = make_report(tmp_path / f"exp {name}")
    tags = [tag for tag, _ in page.elements]
    assert "img" not in tags
    scripts = [attributes for tag, attributes in page.elements if tag == "script"]
    assert [attributes.get("type") for attributes in scripts] == [
        *("application/json", "application/json"),  # the data, the events
        *("text/plain", "text/plain"),  # the files
        None,  # the page's own
    ]
    assert not any(name.startswith("on") for _, attributes in page.elements for name in attributes)
    (trial,) = page.data["trials"]
    shown = trial["failures"][0]["error"]
    assert "<script>alert(1)</script>" in shown
    assert "\\u202etxt.exe\\u200b" in shown  # what cannot be seen, or reorders, is spelled out
    assert page.data["name"].startswith("exp <")


def test_a_policy_forbids_everything_but_the_own_script_and_style(tmp_path, make_report):
    make_small_trial_at(tmp_path / "exp/t", tmp_path / "work")
    page = make_report(tmp_path / "exp")
    (policy,) = [a["content"] for tag, a in page.elements if a.get("http-equiv") == "Content-Security-Policy"]
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'"
    assert rules["img-src"] == "data:"
    for tag in ("style", "script"):
        (text,) = [text for one, attributes, text in page.texts if one == tag and not attributes]
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert rules[f"{tag}-src"] == f"'sha256-{digest}'"
    for _, attributes in page.elements:
        assert not any(re.match(r"(https?:)?//", str(value)) for value in attributes.values())
        assert "style" not in attributes


# --- limits ---------------------------------------------------------------------------------------


def test_what_is_embedded_is_bounded_and_what_is_not_is_said(tmp_path, make_report, monkeypatch):
    monkeypatch.setattr(report_data, "MAX_TEXT_BYTES", 2000)
    monkeypatch.setattr(report_data, "MAX_EMBEDDED", 5)
    files = {f"note{number}.txt": b"x" * 900 for number in range(7)}
    make_small_trial_at(tmp_path / "exp/t_1", tmp_path / "work1", {**files, "big.txt": b"y" * 2001})
    make_small_trial_at(tmp_path / "exp/t_2", tmp_path / "work2", {"a.txt": b"z" * 900})
    page = make_report(tmp_path / "exp", "--max-embed-mb", "0.003")
    first, second = page.data["trials"]
    assert sum(map(len, page.files.values())) <= 3000
    assert not second["embedded"][0]["left_out"]  # every trial gets its first before any gets its second
    reasons = [file["left_out"] for file in first["embedded"]]
    assert len(reasons) == 5
    assert sum("--max-embed-mb" in reason for reason in reasons) >= 2
    assert first["not_embedded"] == {"pictures": 0, "texts": 3}
    assert not make_report(tmp_path / "exp", "--max-embed-mb", "0").files


def test_large_files_are_left_out_by_their_size(tmp_path, make_report, monkeypatch):
    monkeypatch.setattr(report_data, "MAX_PICTURE_BYTES", 1024 * 1024)
    make_small_trial_at(tmp_path / "exp/t", tmp_path / "work", {"big.png": b"\x89PNG\r\n\x1a\n" + b"x" * 1024 * 1024})
    (trial,) = make_report(tmp_path / "exp").data["trials"]
    assert trial["embedded"][0]["left_out"] == "larger than 1 MiB"


def test_events_are_merged_and_bounded():
    syncs = [JournalRecord(kind="sync", t=float(n), bytes_sent=1, attempt="a") for n in range(1000)]
    events = _events(syncs, 100)
    assert len(events) <= 100
    assert sum(event["bytes_sent"] for event in events) == 1000
    assert sum(event.get("syncs", 1) for event in events) == 1000
    mixed = [
        record
        for n in range(300)
        for record in (
            JournalRecord(kind="sync", t=float(n), bytes_sent=1, attempt="a"),
            JournalRecord(kind="sync", t=n + 0.5, bytes_sent=1, attempt="a"),
            JournalRecord(kind="checkpoint", t=n + 0.7, checkpoint=f"checkpoint_{n:06d}", attempt="a"),
        )
    ]
    events = _events(mixed, 700)
    assert [event["checkpoint"] for event in events if event["kind"] == "checkpoint"] == [
        f"checkpoint_{n:06d}" for n in range(300)
    ]
    assert len(_events(mixed, 100)) == 200  # what cannot be merged: the newest


# --- the file -------------------------------------------------------------------------------------


def test_only_a_report_is_replaced(tmp_path, command):
    make_small_trial_at(tmp_path / "exp/t", tmp_path / "work")
    mine = tmp_path / "mine.html"
    mine.write_text("my own page")
    ran = command("report", tmp_path / "exp", "-o", mine)
    assert ran.code == 2
    assert "is there already and is no report" in ran.err
    assert mine.read_text() == "my own page"
    assert command("report", tmp_path / "exp", "-o", mine, "--force").code == 0
    assert command("report", tmp_path / "exp", "-o", mine).code == 0
    assert mine.read_text().startswith("<!doctype html>")
    assert not list(tmp_path.glob("*.tmp"))


@pytest.mark.parametrize(
    ("output", "options", "said"),
    [
        ("no/such/directory/r.html", (), "there is no directory"),
        (".", (), "is a directory; name a file"),
        ("r.html", ("--max-embed-mb", "-1"), "--max-embed-mb must be a number from 0 to 1000"),
        ("r.html", ("--max-embed-mb", "nan"), "--max-embed-mb must be a number from 0 to 1000"),
    ],
)
def test_what_cannot_be_written_is_said_in_one_sentence(tmp_path, command, output, options, said):
    make_small_trial_at(tmp_path / "exp/t", tmp_path / "work")
    ran = command("report", tmp_path / "exp", "-o", tmp_path / output, *options)
    assert (ran.code, ran.out) == (2, "")
    assert said in ran.err
    assert len(ran.err.splitlines()) == 1


def test_nothing_there(tmp_path, command):
    ran = command("report", tmp_path / "nowhere", "-o", tmp_path / "r.html")
    assert ran.code == 2
    assert "There is nothing at" in ran.err
    assert not (tmp_path / "r.html").exists()


def test_the_parts_of_the_page_are_read_from_the_package():
    assert report._part("page.js").startswith("// Draws the report")


def test_many_trials_are_one_page(tmp_path, make_report):
    page = make_report(make_experiment(tmp_path, 5, events=10))
    assert len(page.data["trials"]) == 5
    assert all(trial["totals"]["syncs"] for trial in page.data["trials"])
