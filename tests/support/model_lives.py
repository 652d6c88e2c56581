"""What the attempts of the model do. Short: the number of orders grows with the product of the requests."""

from __future__ import annotations

from tests.support.model import Attempt


def everything(attempt: Attempt) -> None:
    """Overwrites, appends, copies; a file becomes a directory; two checkpoints, of which one is kept."""
    number = attempt.number
    if "log" in attempt.tree:
        attempt.append("log", b"and by %d\n" % number)
    else:
        attempt.write("log", b"by %d\n" % number)
    attempt.write("flag", b"%d" % (number % 2))
    attempt.save(keep=2)
    attempt.write("flag", b"%d" % ((number + 1) % 2))
    if "d/x" in attempt.tree:
        attempt.remove("d/x")
        attempt.write("d", b"a file named d")
    elif "d" in attempt.tree:
        attempt.write("d/x", b"inside of d")
    else:
        attempt.write("d", b"a file named d")
    attempt.sync()
    attempt.write("copy", b"a file named d")
    attempt.write("flag", b"%d" % (number % 2))
    attempt.save(keep=1)
    attempt.append("log", b"end\n")
    attempt.close()


def exploit(attempt: Attempt) -> None:
    """PBT: takes over the checkpoint of another trial between two of its own."""
    number = attempt.number
    attempt.write("flag", b"%d" % (number % 2))
    attempt.save(keep=2)
    attempt.write("flag", b"%d" % ((number + 1) % 2))
    attempt.take_over_a_foreign_checkpoint()
    attempt.write("flag", b"late %d" % number)
    attempt.sync()
    attempt.write("flag", b"later %d" % number)
    attempt.sync()
    attempt.save(keep=1)
    attempt.close()


def rewrites(attempt: Attempt) -> None:
    """The file that the driver writes, too: anew for each checkpoint."""
    _saves_twice(attempt, keep=2)


def grows(attempt: Attempt) -> None:
    """The same; each version begins with the one before."""
    attempt.write("flag", b"0")
    attempt.save(keep=2)
    attempt.append("flag", b"1")
    attempt.sync()
    attempt.append("flag", b"2")
    attempt.save(keep=2)


def _writes_flag(attempt: Attempt) -> None:
    attempt.write("flag", b"0")
    attempt.save(keep=1)
    attempt.write("flag", b"1")
    attempt.sync()


def _overwrites_flag(attempt: Attempt) -> None:
    attempt.write("flag", b"2")
    attempt.sync()


def _saves_over_it(attempt: Attempt) -> None:
    attempt.write("flag", b"2")
    attempt.save(keep=1)


def _saves_twice(attempt: Attempt, keep: int = 1) -> None:
    attempt.write("flag", b"%d" % (2 * attempt.number))
    attempt.save(keep=keep)
    attempt.write("flag", b"%d" % (2 * attempt.number + 1))
    attempt.save(keep=keep)


def _grows_and_changes_kind(attempt: Attempt) -> None:
    attempt.write("log", b"1")
    attempt.write("d", b"file d")
    attempt.save(keep=1)
    attempt.append("log", b"2")
    attempt.write("d/x", b"in d")
    attempt.sync()


def _grows_again(attempt: Attempt) -> None:
    if "log" in attempt.tree:
        attempt.append("log", b"3")
    attempt.write("d/x", b"of another")
    attempt.save(keep=1)


def _exploits(attempt: Attempt) -> None:
    attempt.write("flag", b"0")
    attempt.save(keep=1)
    attempt.write("flag", b"1")
    attempt.take_over_a_foreign_checkpoint()
    attempt.write("flag", b"2")
    attempt.sync()


def _goes_on(attempt: Attempt) -> None:
    attempt.write("flag", b"3")
    attempt.sync()
    attempt.save(keep=1)


PAIRS = {
    "overwrite": (_writes_flag, _overwrites_flag),
    "checkpoint": (_writes_flag, _saves_over_it),
    "two checkpoints": (_saves_twice, _saves_twice),
    "kinds": (_grows_and_changes_kind, _grows_again),
    "exploit": (_exploits, _goes_on),
}
"""The attempt that may be stopped at any moment, and the one that takes its place."""
