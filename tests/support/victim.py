"""A trial that is going to be killed: changes files, syncs, saves checkpoints, deletes old ones, until SIGKILL.

Prints a line for each thing that the parent has to know, flushed: `registered <name>` once a checkpoint counts,
`deleted <name>` before one goes, `digests <json>` with what the working dir held when the checkpoint was saved.

Usage: python -m tests.support.victim '<json>' with working_dir, storage (a path or `{"endpoint", "prefix", "server"}`),
token, registered (index or -1), restore (name or null), seed.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import sys

from blake3 import blake3

from ray_artifact_sync import trial_dir
from ray_artifact_sync.stores import open_store
from ray_artifact_sync.stores.posix import PosixStore
from tests.support.sessions import open_session, read_tree, save

PATHS = ["log.txt", "events/a.tfevents", "events/b", "state", "plots/1.png", "plots/2.png", "toggle"]


def store_of(storage):
    if isinstance(storage, str):
        return PosixStore(storage)
    if storage.get("server") == "azurite":
        from tests.support.azure_server import CONTAINER, azure_filesystem_at

        return open_store(azure_filesystem_at(storage["endpoint"]), f"{CONTAINER}/{storage['prefix']}")
    from tests.support.s3_servers import BUCKET, filesystem_at

    return open_store(filesystem_at(storage["endpoint"]), f"{BUCKET}/{storage['prefix']}")


def say(word: str, text: str) -> None:
    print(f"{word} {text}", flush=True)


def mutate(root: str, dice: random.Random) -> None:
    for _ in range(dice.randint(1, 5)):
        path = os.path.join(root, dice.choice(PATHS))
        os.makedirs(os.path.dirname(path), exist_ok=True)
        match dice.randint(0, 6):
            case 0 | 1:
                with open(path, "ab") as file:
                    file.write(dice.randbytes(dice.choice([10, 1000, 200_000])))
            case 2:
                with open(path, "wb") as file:
                    file.write(dice.randbytes(dice.choice([0, 5, 70_000, 2_000_000])))
            case 3:
                with open(path, "wb") as file:
                    file.write(dice.choice([b"0", b"1"]))
            case 4 if os.path.exists(path):
                os.truncate(path, os.path.getsize(path) // 2)
            case 5 if os.path.exists(path):
                shutil.copyfile(path, os.path.join(root, "copy"))
            case 6 if os.path.exists(path):
                os.unlink(path)


def delete_checkpoint(store, name: str) -> None:
    say("deleted", name)
    store.delete([file.path for file in store.list(name)])


def main() -> None:
    job = json.loads(sys.argv[1])
    # A new attempt waits for so long where nothing else stops the old one; the kills are to come later than that.
    trial_dir.LEASE_SECONDS = 0.1
    dice = random.Random(job["seed"])
    store = store_of(job["storage"])
    root = job["working_dir"]
    session = open_session(
        root, store_of(job["storage"]), job["token"], registered=job["registered"], sync_period=0.05, retries=5
    )
    index = job["registered"]
    kept = list(job["kept"])
    if job["restore"]:
        report = session.restore(job["restore"], fresh=True)
        say("restored", json.dumps([job["restore"], report.exact]))
        say("holds", json.dumps(digests(root)))
    say("running", str(os.getpid()))
    while True:
        mutate(root, dice)
        if dice.random() < 0.5:
            session.sync()
        if dice.random() < 0.6:
            index += 1
            name = f"checkpoint_{index:06d}"
            held = digests(root)
            if not save(session, name, {"model": dice.randbytes(1000), "sub/more": b"x"}):
                raise SystemExit(f"{name} has no snapshot")
            say("registered", json.dumps([name, held]))
            kept.append(name)
            while len(kept) > 3:
                delete_checkpoint(store, kept.pop(0))


def digests(root: str) -> dict[str, str | None]:
    return {path: None if data is None else blake3(data).hexdigest() for path, data in read_tree(root).items()}


if __name__ == "__main__":
    main()
