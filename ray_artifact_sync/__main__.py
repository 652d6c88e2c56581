"""`python -m ray_artifact_sync`: the command."""

from ray_artifact_sync.cli import main

main()
