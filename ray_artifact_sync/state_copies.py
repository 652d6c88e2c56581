"""Copies of the experiment's state files, made while nobody writes to them.

Ray's driver writes `experiment_state-*.json` and the like in place, starts a sync, and goes on: by the time the sync
reads them, the driver may have begun to write the next ones. A reader then sees a file that is empty or ends in the
middle, and an experiment whose driver dies at that moment could not be restored. When the sync is started, in the
driver's own thread, the files are whole.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Mapping

from ray_artifact_sync import layout

logger = logging.getLogger(__name__)

MAX_BYTES = 256 * 1024 * 1024
"""Larger files are read where they are: a copy would keep the driver waiting."""


def copy_state(local_dir: str) -> Mapping[str, str]:
    """Copies the files of a staging directory as they are now, in the place of those of the sync before.

    Those in its directories are left alone: they are the trials', and only grow. Never raises.

    Args:
        local_dir: The driver's staging directory.

    Returns:
        Path in the staging directory to the copy. Files that cannot be copied are not among them.
    """
    directory = os.path.join(local_dir, layout.STATE_DIR, "state")
    copies: dict[str, str] = {}
    try:
        shutil.rmtree(directory, ignore_errors=True)
        os.makedirs(directory)
        with os.scandir(local_dir) as entries:
            for entry in entries:
                if entry.is_file(follow_symlinks=False) and entry.stat().st_size <= MAX_BYTES:
                    copies[entry.name] = shutil.copy2(entry.path, os.path.join(directory, entry.name))
    except OSError as error:  # a full disk
        logger.debug("The experiment's state is sent without a copy: %s", error)
    return copies
