"""All benchmarks, each in a process of its own, then the table: `python -m release_tests.benchmarks.run_all`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from release_tests.benchmarks import table


def main() -> None:
    for name in sys.argv[1:] or table.ORDER:
        print(f"== {name}", flush=True)
        subprocess.run(
            [sys.executable, "-W", "ignore", "-m", f"release_tests.benchmarks.{name}"],
            check=True,
            cwd=Path(__file__).parents[2],
        )
    table.main()


if __name__ == "__main__":
    main()
