"""The folder of compiled kernels: who may write it, who can read it, and what is said where it cannot be used."""

from __future__ import annotations

import os
import threading
import time
import warnings
from pathlib import Path

import pytest

from mok_modular.targets.cuda import kernel_cache
from mok_modular.targets.cuda.kernel_cache import CacheError, cache_dir, find_or_build

OTHER_UID, OTHER_GID = 54321, 54322


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    kernel_cache._warn_of_owner.cache_clear()
    monkeypatch.setenv("MOK_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def build() -> tuple[bytes, str]:
    return b"code", "log"


def never() -> tuple[bytes, str]:
    raise AssertionError("it is there")


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o7777


def test_built_once(folder: Path) -> None:
    path = folder / "a.cubin"
    assert find_or_build("a.cubin", build) == (b"code", "log", path, False)
    assert find_or_build("a.cubin", never) == (b"code", "log", path, True)
    path.write_bytes(path.read_bytes()[:-1])
    assert find_or_build("a.cubin", build) == (b"code", "log", path, False)  # a damaged file is made again
    assert sorted(each.name for each in folder.iterdir()) == ["a.cubin", "a.lock"]


def test_where_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MOK_CACHE_DIR", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_dir() == tmp_path / "mok_modular"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_dir() == tmp_path / ".cache" / "mok_modular"


@pytest.mark.parametrize(
    ("of_folder", "of_files"), [(0o755, 0o644), (0o700, 0o600), (0o2775, 0o664), (0o2770, 0o660), (0o750, 0o640)]
)
@pytest.mark.parametrize("umask", [0o022, 0o077, 0o000])
def test_files_have_the_folders_permissions(folder: Path, of_folder: int, of_files: int, umask: int) -> None:
    folder.mkdir()
    folder.chmod(of_folder)
    before = os.umask(umask)
    try:
        find_or_build("a.cubin", build)
    finally:
        os.umask(before)
    assert mode(folder / "a.cubin") == mode(folder / "a.lock") == of_files


def test_a_new_folder_is_never_for_everybody(folder: Path) -> None:
    before = os.umask(0)
    try:
        find_or_build("a.cubin", build)
    finally:
        os.umask(before)
    assert mode(folder) & 0o022 == 0


@pytest.mark.parametrize("of_folder", [0o777, 0o1777, 0o757])
def test_a_folder_that_everybody_can_write_is_refused(folder: Path, of_folder: int) -> None:
    folder.mkdir()
    folder.chmod(of_folder)
    with pytest.raises(CacheError, match=r"cache \(MOK_CACHE_DIR\) can be written by every user.*chmod o-w"):
        find_or_build("a.cubin", build)
    assert list(folder.iterdir()) == []


def test_a_folder_of_somebody_else_is_warned_of(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once; not if it is shared on purpose, or root's."""
    folder.mkdir()
    owner, group = folder.stat().st_uid, folder.stat().st_gid
    monkeypatch.setattr(os, "getegid", lambda: OTHER_GID)
    monkeypatch.setattr(os, "getgroups", list)

    def warned(uid: int) -> list[str]:
        monkeypatch.setattr(os, "geteuid", lambda: uid)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            find_or_build("a.cubin", build)
            find_or_build("b.cubin", build)
        return [str(each.message) for each in caught]

    assert warned(owner) == []
    if owner == 0:
        assert warned(OTHER_UID) == []  # root's
        if not hasattr(os, "chown"):
            return
        os.chown(folder, OTHER_UID + 1, group)
        owner = OTHER_UID + 1
    (text,) = warned(OTHER_UID)
    assert f"belongs to another user (uid {owner})" in text
    assert "set MOK_CACHE_DIR to a folder of yours" in text
    kernel_cache._warn_of_owner.cache_clear()
    folder.chmod(0o2775)
    assert len(warned(OTHER_UID)) == 1  # writable by a group that is not this user's
    kernel_cache._warn_of_owner.cache_clear()
    monkeypatch.setattr(os, "getgroups", lambda: [group])
    assert warned(OTHER_UID) == []


def test_a_file_in_place_of_the_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.write_text("")
    with pytest.raises(CacheError, match=r"cache \(MOK_CACHE_DIR\) is no folder") as caught:
        find_or_build("a.cubin", build)
    assert caught.value.filename == str(folder)
    monkeypatch.setenv("MOK_CACHE_DIR", str(folder / "below"))
    with pytest.raises(CacheError, match="is no folder"):
        find_or_build("a.cubin", build)


@pytest.mark.parametrize("what", ["make", "lock", "write"])
def test_a_folder_that_cannot_be_written(folder: Path, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it holds can be used all the same. (As root nothing is forbidden, so the calls are told to fail.)"""

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", str(folder))

    if what != "make":
        find_or_build("there.cubin", build)
    if what == "make":
        monkeypatch.setattr(Path, "mkdir", refuse)
    elif what == "lock":
        monkeypatch.setattr(os, "open", refuse)
    else:
        monkeypatch.setattr(kernel_cache.tempfile, "mkstemp", refuse)
    with pytest.raises(CacheError, match=r"cannot be written \(Permission denied\).*set MOK_CACHE_DIR to a folder"):
        find_or_build("a.cubin", build)
    if what != "make":
        assert find_or_build("there.cubin", never)[3]


def test_what_cannot_be_read_is_made_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find_or_build("a.cubin", build)
    read = Path.read_bytes

    def refuse(path: Path) -> bytes:
        if path.name == "a.cubin":
            raise PermissionError(13, "Permission denied", str(path))
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", refuse)
    assert not find_or_build("a.cubin", build)[3]


def test_the_lock_of_another_user_is_one(folder: Path) -> None:
    """Which only its owner may write: one build all the same."""
    folder.mkdir()
    (folder / "a.lock").touch()
    (folder / "a.lock").chmod(0o444)
    num_built = 0

    def slow() -> tuple[bytes, str]:
        nonlocal num_built
        num_built += 1
        time.sleep(0.05)
        return b"code", "log"

    threads = [threading.Thread(target=find_or_build, args=("a.cubin", slow)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert num_built == 1


def test_an_error_of_a_build_leaves_nothing(folder: Path) -> None:
    def fail() -> tuple[bytes, str]:
        raise RuntimeError("no such instruction")

    with pytest.raises(RuntimeError, match="no such instruction"):
        find_or_build("a.cubin", fail)
    assert [each.name for each in folder.iterdir()] == ["a.lock"]
