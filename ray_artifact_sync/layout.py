"""Names of everything this library keeps in a trial dir (on storage) and in a working dir (on the node). Pure.

<trial dir>/
  <artifacts at their own paths, newest version>
  checkpoint_000003/.ray_artifact_sync-<token>.json     snapshot
  .ray_artifact_sync/
    manifest.json                   head
    writer.json                     who may write: the newest token
    layers/<token>-<n>.json         immutable parts that head and snapshots refer to
    objects/<token>/<digest>        preserved versions
    aside/<token>/manifest.json     newest manifest that a restore superseded
    aside/<token>/files/            files that no manifest listed, and that were in the way of an artifact's directory
    journal/<token>-<n>.jsonl       what each sync, checkpoint and restore of an attempt did (see `journal.py`)
    metadata/<token>.json           what the ranks of a sharded upload say about the set that this token committed
    exploits/<key>.json             own manifest at the moment a checkpoint was restored that does not say which
                                    artifacts belong to it: another trial's, or an own one without a snapshot
    tmp/<token>/                    files being written, on stores that need a rename to be atomic
  .ray_artifact_sync_driver/
    files.json                      files of this trial that the driver writes although no callback declares them
    taking/<key>                    copy of what a path held, while the driver looks what of it must be preserved

<working dir>/
  .ray_artifact_sync/
    lock, alive, token              node-local coordination of overlapping attempts
    set_aside/<token>/              what an earlier attempt left behind
"""

from __future__ import annotations

import re

STATE_DIR = ".ray_artifact_sync"
MANIFEST = f"{STATE_DIR}/manifest.json"
WRITER = f"{STATE_DIR}/writer.json"
LAYERS = f"{STATE_DIR}/layers"
OBJECTS = f"{STATE_DIR}/objects"
ASIDE = f"{STATE_DIR}/aside"
EXPLOITS = f"{STATE_DIR}/exploits"
METADATA = f"{STATE_DIR}/metadata"
JOURNAL = f"{STATE_DIR}/journal"
TMP = f"{STATE_DIR}/tmp"  # noqa: S108  (in the trial dir)

DRIVER_DIR = f"{STATE_DIR}_driver"
"""Beside the state dir, so that the listing of a trial dir's top level, which a checkpoint needs anyway, shows it."""
DRIVER_FILES = f"{DRIVER_DIR}/files.json"
TAKING = f"{DRIVER_DIR}/taking"

SET_ASIDE = f"{STATE_DIR}/set_aside"
LOCK = f"{STATE_DIR}/lock"
ALIVE = f"{STATE_DIR}/alive"
LOCAL_TOKEN = f"{STATE_DIR}/token"

MAX_NOTE_BYTES = 64 * 1024
"""The most that a small JSON file of this library has (the claim, the number of ranks): no more is read."""
MAX_LIST_BYTES = 64 * 1024 * 1024
"""The most that a JSON file has that lists paths or what users said (the driver's note, metadata of ranks)."""

TOKEN_DIGITS = 20
# ASCII digits only: `\d` matches those of every script, and such a "token" would sort behind all real ones.
_TOKEN = re.compile(rf"[0-9]{{{TOKEN_DIGITS}}}")
_CHECKPOINT_DIR = re.compile(r"checkpoint_-?[0-9]+")
_SNAPSHOT = re.compile(rf"\.ray_artifact_sync-([0-9]{{{TOKEN_DIGITS}}})\.json")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_LAYER = re.compile(rf"[0-9]{{{TOKEN_DIGITS}}}-[0-9]{{6,20}}\.json")
_RECORD = re.compile(r"([0-9a-f]{32})\.json")
_JOURNAL = re.compile(rf"([0-9]{{{TOKEN_DIGITS}}})-[0-9]{{6}}\.jsonl")


def make_token(value: int) -> str:
    """The token of an attempt: `value` zero-padded, so that text order is numeric order.

    Raises:
        ValueError: `value` is negative or has too many digits.
    """
    token = f"{value:0{TOKEN_DIGITS}d}"
    if not is_token(token):
        raise ValueError(f"{value!r} cannot be a token: it must have 1 to {TOKEN_DIGITS} digits and no sign.")
    return token


def is_token(text: object) -> bool:
    """Whether `text` is a token."""
    return isinstance(text, str) and _TOKEN.fullmatch(text) is not None


def is_digest(text: str) -> bool:
    """Whether `text` is a digest as preserved versions are named by."""
    return _DIGEST.fullmatch(text) is not None


def is_layer_name(name: str) -> bool:
    """Whether a file of this name below `layers/` can be a layer."""
    return _LAYER.fullmatch(name) is not None


def record_key(name: str) -> str | None:
    """The key in the file name of a record below `exploits/`, or None if the file is none."""
    match = _RECORD.fullmatch(name)
    return match.group(1) if match else None


def is_checkpoint_dir(name: str) -> bool:
    """Whether a directory of this name in a trial dir is one of Ray's checkpoints."""
    return _CHECKPOINT_DIR.fullmatch(name) is not None


def checkpoint_index(name: str) -> int:
    """The number in `checkpoint_000003`."""
    return int(name.removeprefix("checkpoint_"))


def snapshot_name(token: str) -> str:
    """File name of a snapshot inside its checkpoint."""
    return f"{STATE_DIR}-{token}.json"


def snapshot_token(name: str) -> str | None:
    """The token in a snapshot's file name, or None if the file is not a snapshot."""
    match = _SNAPSHOT.fullmatch(name)
    return match.group(1) if match else None


def journal_name(token: str, number: int) -> str:
    """File name of one segment of an attempt's journal; text order is the order of writing."""
    return f"{token}-{number:06d}.jsonl"


def journal_token(name: str) -> str | None:
    """The token in the file name of a journal's segment, or None if the file is none."""
    match = _JOURNAL.fullmatch(name)
    return match.group(1) if match else None


def is_reserved(path: str) -> bool:
    """Whether an artifact path would lie in one of this library's own directories."""
    return path.partition("/")[0] in (STATE_DIR, DRIVER_DIR)


def exploit_path(key: str) -> str:
    """Where the manifest lies that stands for a checkpoint without artifacts of its own."""
    return f"{EXPLOITS}/{key}.json"


def object_path(token: str, digest: str) -> str:
    """Where `token` preserves the version with this digest."""
    return f"{OBJECTS}/{token}/{digest}"


def aside_file_path(token: str, path: str) -> str:
    """Where `token` puts a file that no manifest lists and that is in its way."""
    return f"{ASIDE}/{token}/files/{path}"


def aside_path(token: str) -> str:
    """Where the manifest lies that `token`'s restore superseded."""
    return f"{ASIDE}/{token}/manifest.json"
