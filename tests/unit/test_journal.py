"""The journal: what is written when, what it costs, and that nothing in it can hurt its reader."""

from __future__ import annotations

import json
import logging
import os
import time
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_artifact_sync import journal_files, layout, trial_dir
from ray_artifact_sync.errors import ArtifactConflictError, IncompleteSyncError, StorageError
from ray_artifact_sync.journal import (
    KEEP_ATTEMPTS,
    KEEP_BYTES,
    KINDS,
    MAX_LINE_BYTES,
    MAX_LISTED,
    MAX_SENT,
    SEGMENT_LINES,
    JournalReader,
    JournalRecord,
    SentFile,
    SkipNote,
    encode_line,
    stale_segments,
)
from ray_artifact_sync.journal_files import JournalWriter, read_journal
from ray_artifact_sync.stores import open_store
from ray_artifact_sync.stores.posix import PosixStore
from tests.support.s3_servers import BUCKET, filesystem_at
from tests.support.sessions import WrappedStore, abandon, open_session, save

ATTEMPT = layout.make_token(7)


def read(*chunks: bytes, limit=1000):
    reader = JournalReader(limit)
    reader.segment(ATTEMPT, chunks)
    return reader.result()


# --- the format -----------------------------------------------------------------------------------

counts = st.integers(0, 2**62)
texts = st.text(max_size=50)
records = st.builds(
    JournalRecord,
    kind=st.sampled_from(KINDS),
    t=st.floats(0, 4e9).map(lambda t: round(t, 3)),
    seconds=st.floats(0, 1e6).map(lambda seconds: round(seconds, 4)),
    host=texts,
    checkpoint=texts,
    files=counts,
    bytes=counts,
    bytes_sent=counts,
    bytes_changed=counts,
    failed=counts,
    error=texts,
    exact=st.booleans(),
    skips=st.lists(st.builds(SkipNote, texts, texts, texts), max_size=3).map(tuple),
    sent=st.lists(st.builds(SentFile, texts, counts, counts), max_size=3).map(tuple),
    attempt=st.just(ATTEMPT),
)


@given(st.lists(records, max_size=5), st.integers(1, 50))
def test_what_is_written_is_read(written, piece):
    data = b"".join(encode_line(record) for record in written)
    journal = read(*(data[start : start + piece] for start in range(0, len(data), piece)))
    assert journal.records == tuple(written)
    assert (journal.damaged, journal.unknown, journal.cut) == (0, 0, False)


def test_a_line_says_only_what_there_is_to_say():
    line = encode_line(JournalRecord(kind="sync", t=1.5, files_sent=2))
    assert json.loads(line) == {"v": 1, "t": 1.5, "kind": "sync", "files_sent": 2}
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1


def test_lines_are_short_whatever_is_in_them():
    record = JournalRecord(
        kind="sync",
        t=1.0,
        error="\N{PILE OF POO}\n" * 10_000,
        checkpoint="c" * 100_000,
        skips=tuple(SkipNote(f"{n}" * 4000, "excluded", "r" * 4000) for n in range(1000)),
        sent=tuple(SentFile("\N{PILE OF POO}" * 4000, n, n) for n in range(1000)),
    )
    line = encode_line(record)
    assert len(line) <= MAX_LINE_BYTES // 2
    (again,) = read(line).records
    assert again.error.startswith("\N{PILE OF POO}\n")
    few = encode_line(JournalRecord(kind="sync", t=1.0, skips=record.skips, sent=()))
    assert len(few) <= MAX_LINE_BYTES // 2


def test_lists_are_bounded():
    record = JournalRecord(
        kind="sync",
        t=1.0,
        skips=tuple(SkipNote(str(n), "owned", "x") for n in range(100)),
        sent=tuple(SentFile(str(n), n, n) for n in range(100)),
    )
    (again,) = read(encode_line(record)).records
    assert (len(again.skips), len(again.sent)) == (MAX_LISTED, MAX_SENT)


def test_text_that_is_not_unicode_can_be_written():
    (again,) = read(encode_line(JournalRecord(kind="failure", t=1.0, error="file \udce4"))).records
    assert again.error == r"file \udce4"


GOOD = b'{"v":1,"t":1,"kind":"sync","files":1}'


@pytest.mark.parametrize(
    "line",
    [
        b"{",
        b"[]",
        b"null",
        b"7",
        b'"text"',
        b"\xff\xfe\x00",
        b"[" * 15_000,
        b'{"a":' * 3_000,
        b"1" * 10_000,
        b'{"v":1,"t":1,"kind":"sync","files":' + b"9" * 5_000 + b"}",
        b'{"v":1,"t":NaN,"kind":"sync"}',
        b'{"v":1,"t":Infinity,"kind":"sync"}',
        b'{"v":1,"t":1e999,"kind":"sync"}',
        b'{"v":1,"t":-1,"kind":"sync"}',
        b'{"v":1,"t":"1","kind":"sync"}',
        b'{"v":1,"t":true,"kind":"sync"}',
        b'{"v":1,"t":1}',
        b'{"v":1,"kind":"sync"}',
        b'{"t":1,"kind":"sync"}',
        b'{"v":0,"t":1,"kind":"sync"}',
        b'{"v":null,"t":1,"kind":"sync"}',
        b'{"v":1,"t":1,"kind":["sync"]}',
        b'{"v":1,"t":1,"kind":null}',
        b'{"v":1,"t":1,"kind":"sync","files":-1}',
        b'{"v":1,"t":1,"kind":"sync","files":1.5}',
        b'{"v":1,"t":1,"kind":"sync","files":true}',
        b'{"v":1,"t":1,"kind":"sync","files":{}}',
        b'{"v":1,"t":1,"kind":"sync","exact":1}',
        b'{"v":1,"t":1,"kind":"sync","error":7}',
        b'{"v":1,"t":1,"kind":"sync","sent":7}',
        b'{"v":1,"t":1,"kind":"sync","sent":[7]}',
        b'{"v":1,"t":1,"kind":"sync","sent":[["a",1]]}',
        b'{"v":1,"t":1,"kind":"sync","sent":[["a",-1,1]]}',
        b'{"v":1,"t":1,"kind":"sync","skips":[["a","b","c","d"]]}',
        b'{"v":1,"t":1,"kind":"sync","skips":[[1,2,3]]}',
        b'{"v":1,"t":1,"kind":"sync","error":"' + b"x" * MAX_LINE_BYTES + b'"}',
    ],
    ids=lambda line: line[:60].decode("ascii", "replace"),
)
def test_damaged_and_hostile_lines_are_skipped_and_counted(line):
    journal = read(GOOD + b"\n" + line + b"\n" + GOOD + b"\n")
    assert [record.files for record in journal.records] == [1, 1]
    assert (journal.damaged, journal.unknown) == (1, 0)


@pytest.mark.parametrize("line", [b'{"v":2,"t":1,"kind":"sync"}', b'{"v":1,"t":1,"kind":"pruned"}', b'{"v":9}'])
def test_lines_of_a_newer_release_are_counted_apart(line):
    journal = read(GOOD + b"\n" + line + b"\n")
    assert len(journal.records) == 1
    assert (journal.damaged, journal.unknown) == (0, 1)


def test_unknown_fields_are_no_damage_and_cannot_say_who_wrote():
    (record,) = read(b'{"v":1,"t":1,"kind":"sync","new_field":[1],"attempt":"forged"}').records
    assert record == JournalRecord(kind="sync", t=1.0, attempt=ATTEMPT)


def test_the_last_line_of_a_killed_process_may_be_half_there():
    journal = read(GOOD + b"\n" + GOOD[:20])
    assert (len(journal.records), journal.damaged) == (1, 1)


def test_a_line_without_end_is_not_held_in_memory():
    def endless():
        yield GOOD + b"\n"
        for _ in range(1000):
            yield b"x" * 10_000
        yield b"\n" + GOOD + b"\n"

    reader = JournalReader()
    reader.segment(ATTEMPT, endless())
    assert len(reader.result().records) == 2
    assert reader.result().damaged == 1


def test_records_are_bounded():
    journal = read((GOOD + b"\n") * 100, limit=10)
    assert (len(journal.records), journal.cut) == (10, True)


# --- which segments stay --------------------------------------------------------------------------


def names(*attempts: int, segments=1):
    return [layout.journal_name(layout.make_token(attempt), n) for attempt in attempts for n in range(segments)]


def test_the_newest_attempts_stay():
    sizes = dict.fromkeys(names(*range(1, KEEP_ATTEMPTS + 4)), 100)
    assert sorted(stale_segments(sizes, layout.make_token(1000))) == names(1, 2, 3)
    assert stale_segments(sizes, layout.make_token(2)) == names(2, 1)  # nothing of newer attempts


def test_the_newest_bytes_stay():
    sizes = dict.fromkeys(names(5, segments=4), KEEP_BYTES // 2)
    assert sorted(stale_segments(sizes, layout.make_token(5))) == names(5, segments=2)


def test_the_newest_segment_stays_and_what_is_not_ours_is_no_garbage():
    (only,) = names(5)
    others = {"notes.txt": 10**12, f"{layout.make_token(1)}.jsonl": 10**12, f"x{only}": 10**12}
    assert stale_segments({only: 10**12, **others}, layout.make_token(9)) == []


# --- on storage -----------------------------------------------------------------------------------


class RefusingStore(WrappedStore):
    """Refuses, or lets through, what is done to the journal; counts it."""

    def __init__(self, inner):
        super().__init__(inner)
        self.refuse: Exception | None = None
        self.counts: Counter[str] = Counter()

    def around(self, verb, path, act):
        if path.startswith(layout.JOURNAL) and verb in ("put", "append"):
            self.counts[verb] += 1
            if self.refuse is not None:
                raise self.refuse
        return act()


class BucketLike(RefusingStore):
    """A directory that does not append, as on object stores."""

    def __init__(self, inner):
        super().__init__(inner)
        self.can_append = False


def kinds(store):
    return [record.kind for record in read_journal(store).records]


def test_the_life_of_a_trial(tmp_path):
    work, store = tmp_path / "work", PosixStore(tmp_path / "t")
    session = open_session(work, store, 1)
    (work / "log.txt").write_bytes(b"x" * 1000)
    (work / "plot.png").write_bytes(b"y" * 500)
    os.mkfifo(work / "pipe")
    session.sync()
    with open(work / "log.txt", "ab") as file:
        file.write(b"x" * 100)
    (work / "plot.png").write_bytes(b"z" * 600)
    for _ in range(3):
        session.sync()
    assert save(session, "checkpoint_000000")
    abandon(session)  # as by kill -9: what was done is in the journal
    second = open_session(work, store, 2)
    second.restore("checkpoint_000000", fresh=True)
    second.close()

    journal = read_journal(store)
    assert (journal.damaged, journal.unknown, journal.cut) == (0, 0, False)
    began, first, changed, saved, began_again, restored, closed = journal.records
    assert [record.attempt for record in journal.records] == [layout.make_token(1)] * 4 + [layout.make_token(2)] * 3
    assert (began.kind, began_again.kind, closed.kind) == ("begin", "begin", "close")
    assert began.host
    assert (first.files_sent, first.bytes_sent, first.bytes_changed) == (2, 1500, 1500)
    assert (first.files, first.bytes, first.requests, first.retries) == (2, 1500, 2, 0)
    assert [(skip.path, skip.kind) for skip in first.skips] == [("pipe", "unsupported")]
    assert [(file.path, file.size, file.bytes_sent) for file in first.sent] == [
        ("log.txt", 1000, 1000),
        ("plot.png", 500, 500),
    ]
    # A grown file counts for what it grew by, a rewritten one as a whole.
    assert (changed.files_sent, changed.bytes_sent, changed.bytes_changed) == (2, 700, 700)
    assert changed.skips == ()
    assert saved.idle == 3  # two syncs and that of the checkpoint found nothing to do
    assert (saved.kind, saved.checkpoint, saved.exact, saved.files, saved.bytes) == (
        "checkpoint",
        "checkpoint_000000",
        True,
        2,
        1700,
    )
    assert (restored.kind, restored.checkpoint, restored.exact, restored.files_local) == (
        "restore",
        "checkpoint_000000",
        True,
        2,
    )
    assert all(abs(record.t - time.time()) < 600 for record in journal.records)


def test_bytes_sent_show_where_the_store_cannot_append(tmp_path):
    work, store = tmp_path / "work", BucketLike(PosixStore(tmp_path / "t"))
    session = open_session(work, store, 1)
    (work / "log.txt").write_bytes(b"x" * 100_000)
    session.sync()
    with open(work / "log.txt", "ab") as file:
        file.write(b"x" * 10)
    session.sync()
    session.close()
    *_, grown, _closed = read_journal(store).records
    assert (grown.bytes_sent, grown.bytes_changed) == (100_010, 10)


def test_failures_are_in_it_and_no_secrets(tmp_path):
    work = tmp_path / "work"

    class Broken(WrappedStore):
        def around(self, verb, path, act):
            if verb == "put" and path == "b.txt":
                raise StorageError("PUT https://user:hunter2@host/b.txt?X-Amz-Signature=abcdef refused")
            return act()

    session = open_session(work, Broken(PosixStore(tmp_path / "t")), 1)
    (work / "a.txt").write_text("a")
    (work / "b.txt").write_text("b")
    with pytest.raises(IncompleteSyncError):
        session.sync()
    assert save(session, "checkpoint_000000") is False
    session.close()
    journal = read_journal(session.store)
    partial, checkpoint = journal.records[1], journal.records[3]
    assert (partial.kind, partial.files_sent, partial.failed) == ("sync", 1, 1)
    assert partial.error.startswith("StorageError: ")
    assert (checkpoint.kind, checkpoint.exact, checkpoint.checkpoint) == ("checkpoint", False, "checkpoint_000000")
    text = b"".join(path.read_bytes() for path in (tmp_path / "t" / layout.JOURNAL).iterdir())
    assert b"hunter2" not in text
    assert b"abcdef" not in text


def test_a_journal_that_cannot_be_written_costs_no_sync(tmp_path, caplog):
    work, store = tmp_path / "work", RefusingStore(PosixStore(tmp_path / "t"))
    store.refuse = StorageError("no journals here")
    session = open_session(work, store, 1)
    caplog.set_level(logging.INFO, logger="ray_artifact_sync")
    for n in range(3):
        (work / f"{n}.txt").write_text("x")
        assert session.sync().files_sent == 1
    assert save(session, "checkpoint_000000")
    assert session.stats.failed_syncs == 0
    assert caplog.text.count("no journals here") == 1
    store.refuse = None
    session.close()  # and what waited is written
    assert kinds(store) == ["begin", "sync", "sync", "sync", "checkpoint", "close"]


def test_lines_that_wait_are_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(journal_files, "MAX_BUFFERED", 5)
    store = RefusingStore(PosixStore(tmp_path / "t"))
    store.refuse = StorageError("later")
    writer = JournalWriter(store, ATTEMPT)
    for n in range(20):
        writer.add(JournalRecord(kind="sync", t=float(n)))
        writer.write()
    store.refuse = None
    writer.write()
    written = read_journal(store).records
    assert [record.t for record in written] == [15, 16, 17, 18, 19]
    assert written[0].dropped == 15


def test_the_same_failure_again_only_counts(tmp_path):
    store = BucketLike(PosixStore(tmp_path / "t"))
    writer = JournalWriter(store, ATTEMPT)
    for n in range(10):
        writer.add(JournalRecord(kind="failure", t=float(n), error="StorageError: down"))
    writer.add(JournalRecord(kind="failure", t=10.0, error="StorageError: other"))
    writer.write()
    first, second = read_journal(store).records
    assert (first.t, first.repeats, second.repeats) == (9.0, 9, 0)


@pytest.mark.parametrize("kind", [RefusingStore, BucketLike])
def test_segments_are_bounded_and_cheap(tmp_path, kind):
    store = kind(PosixStore(tmp_path / "t"))
    writer = JournalWriter(store, ATTEMPT)
    for n in range(SEGMENT_LINES + 10):
        writer.add(JournalRecord(kind="sync", t=float(n)))
        writer.write()
    assert len(store.list_files(layout.JOURNAL)) == 2
    assert [record.t for record in read_journal(store).records] == list(range(SEGMENT_LINES + 10))


def test_half_a_line_of_a_failed_append_harms_no_other(tmp_path):
    class HalfWay(WrappedStore):
        broken = True

        def append(self, path, offset, data, **options):
            whole = b"".join(data)
            if self.broken and path.startswith(layout.JOURNAL):
                self.broken = False
                self.inner.append(path, offset, [whole[:10]])
                raise StorageError("disk full")
            return self.inner.append(path, offset, [whole], **options)

    store = HalfWay(PosixStore(tmp_path / "t"))
    writer = JournalWriter(store, ATTEMPT)
    for n in range(4):
        writer.add(JournalRecord(kind="sync", t=float(n)))
        writer.write()
    journal = read_journal(store)
    assert [record.t for record in journal.records] == [0, 1, 2, 3]
    assert journal.damaged == 1


def test_a_replaced_attempt_writes_no_more(tmp_path):
    work, store = tmp_path / "work", PosixStore(tmp_path / "t")
    old = open_session(work, store, 1)
    (work / "a.txt").write_text("a")
    old.sync()
    new = open_session(tmp_path / "work2", PosixStore(tmp_path / "t"), 2)
    new.sync()
    mine = tmp_path / "t" / layout.JOURNAL / layout.journal_name(layout.make_token(1), 0)
    before = mine.read_bytes()
    (work / "b.txt").write_text("b")
    with pytest.raises(ArtifactConflictError):
        old.sync()
    old.close()
    assert mine.read_bytes() == before
    new.close()
    assert mine.read_bytes() == before


def test_old_journals_go_with_the_garbage_and_nothing_else(tmp_path):
    work, store = tmp_path / "work", PosixStore(tmp_path / "t")
    for attempt in range(1, KEEP_ATTEMPTS + 6):
        session = open_session(work, store, attempt)
        (work / "log.txt").write_text(f"{attempt}")
        session.close()
    store.put(f"{layout.JOURNAL}/mine.txt", b"not this library's")
    session = open_session(work, store, 100)
    (work / "log.txt").write_text("100")
    assert save(session, "checkpoint_000000")
    session.close()
    left = {file.path.rpartition("/")[2] for file in store.list_files(layout.JOURNAL)}
    assert left == {"mine.txt", *names(*range(7, KEEP_ATTEMPTS + 6), 100)}


def test_reading_is_bounded(tmp_path):
    store = PosixStore(tmp_path / "t")
    for attempt in range(1, 6):
        lines = b"".join(encode_line(JournalRecord(kind="sync", t=float(n))) for n in range(100))
        store.put(f"{layout.JOURNAL}/{layout.journal_name(layout.make_token(attempt), 0)}", lines)
    store.put(f"{layout.JOURNAL}/notes.txt", b"x")
    whole = read_journal(store)
    assert (len(whole.records), whole.cut, whole.damaged) == (500, False, 0)
    newest = read_journal(store, limit_bytes=len(lines) * 2)
    assert {record.attempt for record in newest.records} == {layout.make_token(4), layout.make_token(5)}
    assert newest.cut


def test_an_attempt_that_does_nothing_writes_nothing(tmp_path):
    work, store = tmp_path / "work", PosixStore(tmp_path / "t")
    session = open_session(work, store, 1)
    (work / "log.txt").write_text("x")
    session.close()
    before = {file.path: file.etag for file in store.list(layout.JOURNAL)}
    assert len(before) == 1
    second = open_session(work, store, 2, set_aside=False)
    second.sync()
    second.close()
    assert {file.path: file.etag for file in store.list(layout.JOURNAL)} == before


def test_a_trial_without_a_journal_has_none(tmp_path):
    assert read_journal(PosixStore(tmp_path / "nothing")).records == ()


# --- what it costs on an object store ----------------------------------------------------------------


@pytest.mark.s3
def test_syncs_and_checkpoints_cost_no_request_more(moto_proxy, tmp_path, monkeypatch):
    proxy = moto_proxy
    monkeypatch.setattr(trial_dir, "LEASE_SECONDS", 1000.0)
    work = tmp_path / "work"
    place = f"{BUCKET}/journal/{tmp_path.name}"

    def costs(token, **options):
        session = open_session(work, open_store(filesystem_at(proxy.endpoint), f"{place}/{token}"), token, **options)
        found = []
        for n in range(3):
            (work / "log.txt").write_text(f"{token} {n}\n" * 100)
            proxy.reset_counts()
            session.sync()
            assert save(session, f"checkpoint_{n:06d}")
            found.append(+Counter(proxy.counts))
        proxy.reset_counts()
        session.close()
        return found, +Counter(proxy.counts), session

    without, end_without, _ = costs(1, journal=False)
    with_it, end_with, session = costs(2)
    # The first sync finds out what the server can do, while the trial dir is being opened.
    assert with_it[0]["put_object"] == without[0]["put_object"]
    assert with_it[1:] == without[1:]
    assert end_with - end_without == Counter(put_object=1)  # all lines at once, at the end
    assert kinds(session.store) == ["begin", *["sync", "checkpoint"] * 3, "close"]


def test_lines_that_are_old_are_written_in_the_background(tmp_path, monkeypatch):
    work, store = tmp_path / "work", BucketLike(PosixStore(tmp_path / "t"))
    session = open_session(work, store, 1, sync_period=0.05)
    (work / "log.txt").write_text("x")
    session.sync()
    assert store.counts["put"] == 0
    monkeypatch.setattr(journal_files, "PATIENCE", 0.0)
    ends = time.monotonic() + 30
    while kinds(store) != ["begin", "sync"]:
        assert time.monotonic() < ends, kinds(store)
        time.sleep(0.01)
    abandon(session)


# --- who else is told -----------------------------------------------------------------------------


def test_an_observer_is_told_everything_and_may_fail(tmp_path, caplog):
    from ray_artifact_sync.options import SyncOptions
    from ray_artifact_sync.session import TrialArtifacts

    told = []

    def observer(record):
        told.append(record)
        if record.kind == "checkpoint":
            raise RuntimeError("a fault of the observer's")

    session = TrialArtifacts(
        str(tmp_path / "work"),
        PosixStore(tmp_path / "t"),
        trial="t",
        token=ATTEMPT,
        options=SyncOptions(sync_period=0, journal=False),
        observer=observer,
    )
    session.begin()
    (tmp_path / "work/a.txt").write_text("abc")
    session.sync()
    session.sync()
    assert save(session, "checkpoint_000000")
    session.close()
    assert [(record.kind, record.bytes_sent) for record in told] == [
        ("begin", 0),
        ("sync", 3),
        ("sync", 0),
        ("sync", 0),
        ("checkpoint", 0),
    ]
    assert caplog.text.count("a fault of the observer's") == 1
    assert not (tmp_path / "t" / layout.JOURNAL).exists()


def test_log_records_carry_their_facts(tmp_path, caplog):
    caplog.set_level(logging.DEBUG, logger="ray_artifact_sync")
    work = tmp_path / "work"
    session = open_session(work, PosixStore(tmp_path / "t"), 1)
    os.mkfifo(work / "pipe")
    (work / "a.txt").write_text("abc")
    session.sync()
    session._log.failure(StorageError("down"))
    session.close()
    prefix = "artifact_sync_"
    facts = [
        {name.removeprefix(prefix): value for name, value in vars(record).items() if name.startswith(prefix)}
        for record in caplog.records
    ]
    facts = [fact for fact in facts if fact]
    assert all(fact["trial"] == "trial" and fact["attempt"] == layout.make_token(1) for fact in facts)
    by_event = {fact["event"]: fact for fact in reversed(facts)}
    assert (by_event["sync_done"]["bytes_sent"], by_event["sync_done"]["files_sent"]) == (3, 1)
    assert (by_event["file_skipped"]["path"], by_event["file_skipped"]["kind"]) == ("pipe", "unsupported")
    assert (by_event["sync_failed"]["error"], by_event["sync_failed"]["failed_syncs"]) == ("StorageError", 1)
    assert "close_done" in by_event
