"""One file a scenario: `NAME`, `quick` (part of `--quick`), `run(workdir, *, quick) -> figures`; it fails by raising.

With `quick`, `run` does the short form. What cannot be run here gives `{"skipped": reason}`.

Optional: `TIMEOUT`, seconds; `beside`, whether it runs beside the others; `by_name`, whether it runs only
if it is named.
"""
