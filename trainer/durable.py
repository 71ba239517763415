"""Folders that are there whole or not at all: fsync, a manifest with the hash of each file, and its verification.

No function here follows a symbolic link: neither on the folder nor on a file in it.
"""

import hashlib
import json
import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
SAFE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_BLOCK_BYTES = 2**20


def checked_name(name: str) -> str:
    """`name` itself; raises ValueError unless it is a plain file name."""
    if not SAFE_NAME.fullmatch(name):
        raise ValueError(f"{name!r} is not a safe file name: want {SAFE_NAME.pattern}")
    return name


def write_bytes(path: Path, content: bytes) -> None:
    """Creates the file, mode 0600, and flushes it to the disk; raises OSError when it exists."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def read_bytes(path: Path) -> bytes:
    """The content of a regular file; raises OSError when it is a link or no regular file."""
    with _open(path) as file:
        return file.read()


def sync(path: Path) -> None:
    """Flushes a file or a folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def measured(path: Path) -> dict[str, Any]:
    """Flushes a file; gives its size and sha256."""
    sync(path)
    return _size_and_hash(path)


def seal(folder: Path, facts: dict[str, Any], *, measured_before: Mapping[str, dict[str, Any]] | None = None) -> None:
    """Flushes every file of `folder`, then writes its manifest: `facts`, and size and sha256 of each file.

    measured_before: what other processes, which wrote some of the files, found by `measured`; OSError where they are
    not here.
    """
    known = measured_before or {}
    for name, found in known.items():
        if os.lstat(folder / name).st_size != found["size"]:
            raise OSError(0, "is not as it was written", str(folder / name))
    names = sorted(os.listdir(folder))
    files = {name: known.get(name) or measured(folder / checked_name(name)) for name in names}
    body = {**facts, "files": files}
    write_bytes(folder / MANIFEST, _json({**body, "checksum": _checksum(body)}))
    sync(folder)


def replace_text(path: Path, text: str, *, suffix: str) -> None:
    """Swaps the content of a small file in one step; the new one is written beside it, with `suffix` on its name."""
    fresh = path.with_name(path.name + suffix)
    fresh.unlink(missing_ok=True)
    write_bytes(fresh, text.encode())
    os.replace(fresh, path)
    sync(path.parent)


def problems(folder: Path, *, rank: int = 0, size: int = 1) -> list[str]:
    """What is wrong with a sealed folder, one sentence naming each broken file; empty when it is whole.

    size: so many processes share the files among them, and each looks at the manifest.
    """
    if folder.is_symlink() or not folder.is_dir():
        return [f"{folder} is not a folder"]
    try:
        files = _manifest_files(folder)
    except (OSError, ValueError) as error:
        return [f"{folder / MANIFEST}: {error}"]
    share = list(files.items())[rank::size]
    found = (_problem(folder / name, expected) for name, expected in share)
    return [problem for problem in found if problem]


def _manifest_files(folder: Path) -> dict[str, dict[str, Any]]:
    body = json.loads(read_bytes(folder / MANIFEST))
    if not isinstance(body, dict) or body.pop("checksum", None) != _checksum(body):
        raise ValueError("does not match its own checksum")
    return {checked_name(name): expected for name, expected in body["files"].items()}


def _problem(path: Path, expected: dict[str, Any]) -> str | None:
    try:
        found = _size_and_hash(path)
    except OSError as error:
        return f"{path}: {error.strerror}"
    for key, unit in (("size", "bytes"), ("sha256", "as sha256")):
        if found[key] != expected[key]:
            return f"{path}: {found[key]} {unit}, its manifest says {expected[key]}"
    return None


def _size_and_hash(path: Path) -> dict[str, Any]:
    digest = hashlib.sha256()
    size = 0
    with _open(path) as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
            size += len(block)
    return {"size": size, "sha256": digest.hexdigest()}


def _open(path: Path) -> Any:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(0, "not a regular file", str(path))
    return os.fdopen(descriptor, "rb")


def _checksum(body: dict[str, Any]) -> str:
    return hashlib.sha256(_json(body)).hexdigest()


def _json(body: dict[str, Any]) -> bytes:
    return json.dumps(body, sort_keys=True, indent=1).encode()
