"""One file a scenario: `NAME`, `quick` (part of `--quick`), `run(workdir) -> figures`; it fails by raising.

Optional: `TIMEOUT`, seconds.
"""
