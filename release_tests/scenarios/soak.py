"""Half an hour of anything: writes, appends, renames, deletions, kills, stops, pauses, PBT; nothing is ever wrong.

Four trials, on a local disk and on S3, against a model. One of their processes lives all the time: its memory, threads
and open files must stay what they were. `SOAK_MINUTES` and `SOAK_SEED` change length and course.
"""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from pathlib import Path

from release_tests.soak import SoakTrial, Usage, forget
from tests.support.fault_proxy import FaultProxy
from tests.support.independent_reader import posix_place
from tests.support.s3_servers import BUCKET, RcloneServer

NAME = "soak"
quick = False
beside = True  # of the others; it mostly waits

MINUTES = float(os.environ.get("SOAK_MINUTES", "30"))
SEED = int(os.environ.get("SOAK_SEED", "0")) or time.time_ns() % 1_000_000
TIMEOUT = MINUTES * 60 + 300

WARM_UP = 0.2
"""The share of the time after which the first reading is taken."""
MORE_MEMORY = 25e6
MORE_FILES, MORE_THREADS = 4, 4


def run(workdir: Path, *, quick: bool) -> dict[str, object]:
    print(f"SOAK_SEED={SEED}", flush=True)
    with RcloneServer() as server, FaultProxy(server.endpoint) as proxy:
        s3 = Path(server.data, BUCKET, "soak")
        s3.mkdir()

        def local(name: str, number: int, **options: bool) -> SoakTrial:
            root = workdir / "storage" / name
            root.mkdir(parents=True)
            return SoakTrial(name, working, str(root), posix_place(root), seed=SEED + number, **options)

        working = workdir / "working"
        working.mkdir()
        steady = local("steady", 0, violent=False, stoppable=False)
        far = {"endpoint": proxy.endpoint, "prefix": "soak"}
        trials = [
            steady,
            local("killed", 1, violent=True, stoppable=False),
            local("stopped", 2, violent=True, stoppable=True),
            SoakTrial(
                "far",
                working,
                far,
                posix_place(s3),
                seed=SEED + 3,
                violent=True,
                stoppable=False,
                is_quiet=lambda: proxy.in_flight == 0,
            ),
        ]
        started, early = time.monotonic(), None
        dice = random.Random(SEED)
        while (passed := time.monotonic() - started) < MINUTES * 60:
            if early is None and passed > WARM_UP * MINUTES * 60:
                early = Usage(steady.worker.process.pid)
            trial = dice.choice([*trials, steady])  # the one that is never restarted is to do the most
            trial.act([other for other in trials if other is not trial])
            if dice.random() < 0.05:
                trial.check()
                forget(working, {f"{other.name}-{other.node}" for other in trials})
        late = Usage(steady.worker.process.pid)
        for trial in trials:
            trial.end()
        checked = sum(trial.check() for trial in trials)
    did = sum((trial.did for trial in trials), Counter())
    print(did, early, late, flush=True)
    assert late.rss < early.rss + MORE_MEMORY, f"memory: {early}; {late}"
    assert late.descriptors <= early.descriptors + MORE_FILES, f"{early}; {late}"
    assert late.threads <= early.threads + MORE_THREADS, f"{early}; {late}"
    return {
        "minutes": MINUTES,
        "seed": SEED,
        **{f"{kind}s": count for kind, count in sorted(did.items())},
        "checkpoints at the end": checked,
        "process, early": str(early),
        "late": str(late),
    }
