"""Prints the table of the last results, and writes it to README.md: `python -m release_tests.benchmarks.table`."""

from __future__ import annotations

import json
from pathlib import Path

from release_tests.benchmarks.common import RESULTS

README = Path(__file__).with_name("README.md")
ORDER = (
    "small_files",
    "large_files",
    "local_files",
    "changes",
    "s3_append",
    "driver",
    "memory",
    "blocked_time",
    "report_page",
    "history",
)
BEGIN, END = "<!-- table -->", "<!-- end of table -->"


def table() -> str:
    lines = ["| work | must reach | measured | reached |", "|---|---|---|---|"]
    footnotes, about = [], []
    for name in ORDER:
        path = RESULTS / f"{name}.json"
        if not path.exists():
            continue
        body = json.loads(path.read_text())
        machine = body["machine"]
        about.append(f"`{name}`: {body['when']}, in {machine['directory']}, load average {body['load']}")
        for row in body["rows"]:
            reached = {True: "yes", False: "**no**", None: ""}[row["ok"]]
            lines.append(f"| {row['work']} | {row['target']} | {row['measured']} | {reached} |")
            if row["note"]:
                footnotes.append(f"- {row['work']}: {row['note']}")
    versions = ", ".join(
        f"{name} {value}" for name, value in machine.items() if name not in ("cpu", "memory", "system", "directory")
    )
    return "\n".join(
        [
            *lines,
            "",
            *footnotes,
            "",
            f"Machine: {machine['cpu']}, {machine['memory']}, Linux {machine['system']}; {versions}.",
            "",
            "Runs: " + "; ".join(about) + ".",
        ]
    )


def main() -> None:
    found = table()
    print(found)
    text = README.read_text()
    before, _, rest = text.partition(BEGIN)
    after = rest.partition(END)[2]
    README.write_text(f"{before}{BEGIN}\n{found}\n{END}{after}")


if __name__ == "__main__":
    main()
