"""Writing small files that matter: whole or not at all, secret from the first moment, owned by who uses them.

Owns: that one function. Must not know: what is written.
"""

from __future__ import annotations

import os
from pathlib import Path


def write_file(path: Path, text: str, mode: int = 0o600) -> None:
    """Replace ``path`` in one step by a file with these permissions, which nobody can read more of in between.

    Written by root, it belongs to the owner of its folder: a service must be able to read what `sudo` has written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(path.name + ".new")
    new.unlink(missing_ok=True)
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(descriptor, "w") as stream:
        stream.write(text)
    # Past the umask, which may have taken some away.
    new.chmod(mode)
    if os.geteuid() == 0:
        owner = path.parent.stat()
        os.chown(new, owner.st_uid, owner.st_gid)
    os.replace(new, path)
