"""A folder in the system's temporary directory for one process; what a killed one has left is removed by the next.

`crew.py` keeps the logs of its processes there, and the file in which they meet. They are not in the run's folder,
since that may lie on a network file system, where such a file does not work.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

PREFIX = "whet-"
LOCK = "lock"
NEW = "new"


def scratch_folder() -> tuple[Path, int]:
    """The folder, and the handle that keeps it: the system closes that when the process ends, however it ends."""
    for lock in Path(tempfile.gettempdir()).glob(f"{PREFIX}*/{LOCK}"):
        _remove_abandoned(lock)
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    handle = os.open(folder / NEW, os.O_RDWR | os.O_CREAT)
    fcntl.flock(handle, fcntl.LOCK_EX)
    # other processes look for it by this name, so it is held first
    os.rename(folder / NEW, folder / LOCK)
    return folder, handle


def _remove_abandoned(lock: Path) -> None:
    """Remove the folder of a lock that no process holds."""
    # it may just have been removed by its process, or be another user's
    with contextlib.suppress(OSError):
        handle = os.open(lock, os.O_RDWR | os.O_NOFOLLOW)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(handle).st_uid == os.getuid():
                shutil.rmtree(lock.parent)
        finally:
            os.close(handle)
