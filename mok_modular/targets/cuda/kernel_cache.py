"""The folder of compiled kernels: `$MOK_CACHE_DIR`, or `mok_modular` under the user's cache folder.

What is in it runs on the GPU with the rights of whoever loads it. So a folder that every user can write is refused, and
one of another user is warned of, unless it is shared on purpose: writable by a group of this user's. Files have the
permissions of the folder, so that those who share it can read each other's.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import stat
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

VARIABLE = "MOK_CACHE_DIR"


class CacheError(OSError):
    """The folder cannot be used; the text names it, and says why and what to do. `filename`: the folder."""

    def __init__(self, folder: Path, text: str) -> None:
        super().__init__(f"{folder}{f' ({VARIABLE})' if os.environ.get(VARIABLE) else ''} {text}")
        self.filename = str(folder)

    def __str__(self) -> str:
        return str(self.args[0])


def cache_dir() -> Path:
    """$MOK_CACHE_DIR, or mok_modular under the user's cache folder."""
    if os.environ.get(VARIABLE):
        return Path(os.environ[VARIABLE])
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "mok_modular"


def find_or_build(name: str, build: Callable[[], tuple[bytes, str]]) -> tuple[bytes, str, Path, bool]:
    """Code and log of the file `name`, its path, and whether it was there. `build` makes them where it was not, or was
    damaged; it runs under the lock of this file, so it must not ask for it itself.

    Raises CacheError.
    """
    folder = cache_dir()
    permissions = _check_folder(folder)
    path = folder / name
    found = _read(path)
    if found is not None:
        return *found, path, True
    with _lock(path.with_suffix(".lock"), permissions):  # one process of a node compiles it, the others find its result
        found = _read(path)
        if found is not None:
            return *found, path, True
        data, log = build()
        _write(path, data, log, permissions)
        return data, log, path, False


def _check_folder(folder: Path) -> int:
    """Makes the folder if need be; returns the permissions of its files."""
    try:
        folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise CacheError(folder, "is no folder: compiled kernels are kept there") from error
    except OSError as error:
        raise _not_writable(folder, error) from error
    status = folder.stat()
    if status.st_mode & stat.S_IWOTH:
        raise CacheError(
            folder,
            "can be written by every user, and what is in it runs on your GPU: take that right away (chmod o-w), and "
            "to share it, give it to a group (chgrp, chmod g+ws)",
        )
    is_shared = status.st_mode & stat.S_IWGRP and status.st_gid in (os.getegid(), *os.getgroups())
    if status.st_uid not in (os.geteuid(), 0) and not is_shared:
        _warn_of_owner(folder, status.st_uid)
    return status.st_mode & 0o666


@cache
def _warn_of_owner(folder: Path, uid: int) -> None:
    """Once a process."""
    warnings.warn(
        f"{folder} belongs to another user (uid {uid}), and what is in it runs on your GPU: set {VARIABLE} to a folder "
        "of yours, or share it with a group (chgrp, chmod g+ws)",
        UserWarning,
        stacklevel=2,
    )


def _not_writable(folder: Path, error: OSError) -> CacheError:
    return CacheError(
        folder,
        f"cannot be written ({error.strerror}), and a kernel that is not there must be kept there: set {VARIABLE} to a "
        "folder of yours",
    )


def _read(path: Path) -> tuple[bytes, str] | None:
    """Code and log of a file, None where it is missing, damaged or not readable: then it is compiled again."""
    try:
        content = path.read_bytes()
    except (FileNotFoundError, PermissionError):
        return None
    digest, _, rest = content.partition(b"\n")
    if hashlib.sha256(rest).hexdigest().encode() != digest:
        return None
    num_log, _, body = rest.partition(b"\n")
    return body[int(num_log) :], body[: int(num_log)].decode()


def _write(path: Path, data: bytes, log: str, permissions: int) -> None:
    """Atomically: a reader sees the whole file or none."""
    text = log.encode()
    rest = str(len(text)).encode() + b"\n" + text + data
    name = None
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=".writing-")
        with os.fdopen(handle, "wb") as file:
            os.fchmod(handle, permissions)
            file.write(hashlib.sha256(rest).hexdigest().encode() + b"\n" + rest)
        Path(name).replace(path)
    except BaseException as error:
        if name is not None:
            Path(name).unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise _not_writable(path.parent, error) from error
        raise


@contextmanager
def _lock(path: Path, permissions: int) -> Iterator[None]:
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, permissions)
        os.fchmod(handle, permissions)  # whatever the umask is
    except FileExistsError:
        handle = os.open(path, os.O_RDONLY)  # may be another user's; a lock needs no more
    except OSError as error:
        raise _not_writable(path.parent, error) from error
    with os.fdopen(handle) as file:
        with suppress(OSError):  # where the file system has no locks, two processes may compile the same kernel
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
