"""The disk: files that are whole or not there, folders that one process holds, what goes wrong.

Everything that writes goes through here, so that a crash at any moment leaves either the old or the
new, never a half.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import secrets
import shutil
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from expert_network.errors import DiskFull, StoreError

_FULL = (errno.ENOSPC, errno.EDQUOT)
# Of Linux's fallocate and of macOS's fcntl.
_KEEP_SIZE, _PUNCH_HOLE, _F_PUNCHHOLE = 1, 2, 99
_SECTOR = 512  # bytes: what st_blocks counts, on every system


@contextmanager
def errors(path: Path) -> Iterator[None]:
    """Turn what the system says about writing `path` into DiskFull or StoreError."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise DiskFull(path, None, free(path)) from error
        reason = error.strerror or str(error)
        problem = f"it cannot be written ({reason})"
        raise StoreError(path, problem, "check the disk and the permissions") from error


def free(path: Path) -> int:
    """Bytes free where `path` is or would be; none if even that cannot be asked."""
    for folder in (path, *path.parents):
        try:
            return shutil.disk_usage(folder).free
        except OSError:
            continue
    return 0


def sizes(folder: Path) -> tuple[int, int]:
    """Bytes of all files below `folder`: as they look, and what the disk holds of them."""
    stats = [file.stat() for file in folder.rglob("*") if file.is_file()]
    return sum(stat.st_size for stat in stats), sum(stat.st_blocks * _SECTOR for stat in stats)


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file to write that becomes `path` at the end, or nothing if an error comes before it."""
    # A name of its own: two processes may write the same file, and the last one wins.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    try:
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        rename(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def rename(source: Path, target: Path) -> None:
    """Put `source` in the place of `target`, on the disk before going on."""
    os.replace(source, target)
    sync(target.parent)


def sync(path: Path) -> None:
    """Have a file's bytes, or a folder's entries, on the disk before going on."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_at(descriptor: int, data: memoryview | bytes | bytearray, offset: int) -> None:
    """Write all of `data` from `offset` on."""
    rest = memoryview(data).cast("B")
    while rest:
        count = os.pwrite(descriptor, rest, offset)
        offset, rest = offset + count, rest[count:]


def punch(descriptor: int, offset: int, length: int) -> None:
    """Give the disk back what it holds of these bytes, which read as zeros from now on.

    A file system that cannot do it keeps them. Raises OSError for anything else.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if sys.platform == "darwin":
        hole = struct.pack("=IIqq", 0, 0, offset, length)
        failed = libc.fcntl(descriptor, _F_PUNCHHOLE, ctypes.c_char_p(hole))
    else:
        at, size = ctypes.c_int64(offset), ctypes.c_int64(length)
        failed = libc.fallocate(descriptor, _KEEP_SIZE | _PUNCH_HOLE, at, size)
    code = ctypes.get_errno()
    if failed and code not in (errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS):
        raise OSError(code, os.strerror(code))


def lock(folder: Path) -> int | None:
    """Create `folder` if need be, and hold it against other processes; None if one holds it.

    The descriptor holds it until it is closed. The folder may be renamed meanwhile.
    """
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:  # its holder finished in between, and removed it
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        # Whoever held it may have renamed or removed it just now.
        if is_at(descriptor, folder):
            return descriptor
        os.close(descriptor)


def is_at(descriptor: int, path: Path) -> bool:
    """Whether the open file or folder is what stands at `path`."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
