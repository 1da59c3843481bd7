"""Refuses to write where another user may have laid a trap: what is theirs in a folder that everybody writes to.

Linux refuses to open such links and files if fs.protected_symlinks and fs.protected_regular are set, but not to rename
onto what a link names, nor to use such a folder.
"""

import errno
import os
import stat
from pathlib import Path


def refuse_planted(path: Path) -> None:
    """Raises OSError if another user owns `path`, or a folder or link on the way to it, in a sticky folder that
    everybody may write to, such as /tmp. What root or the owner of that folder made is none."""
    if not hasattr(os, "geteuid"):  # Windows has no sticky folders
        return
    path = path.absolute()
    for below in (path, *path.parents):
        try:
            there, folder = below.lstat(), below.parent.stat()
        except OSError:  # not made yet; or it cannot be written to either
            continue
        public = folder.st_mode & stat.S_ISVTX and folder.st_mode & stat.S_IWOTH
        if public and there.st_uid not in (os.geteuid(), folder.st_uid, 0):
            why = f"{below} is another user's, in a folder that everybody may write to"
            raise PermissionError(errno.EPERM, why, str(path))
