"""Checksums of files, and what --no-checksum and --checksums make of them."""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Iterable, NamedTuple

from experiments.datasets import PrepareError

_HEX_LENGTHS = {32: "md5", 40: "sha1", 64: "sha256"}


class Digest(NamedTuple):
    """What is known about a file; every field is optional."""

    size: int | None = None
    algorithm: str = ""
    value: str = ""  # in hex digits


UNKNOWN = Digest()


def hash_file(path: Path, algorithm: str = "sha256") -> str:
    """Hex digest of a file, which is read once as long as it does not change."""
    found = path.stat()
    return _hash(path, algorithm, found.st_size, found.st_mtime_ns)


@functools.lru_cache(maxsize=None)
def _hash(path: Path, algorithm: str, size: int, changed: int) -> str:
    state = hashlib.new(algorithm)
    with open(path, "rb") as stream:
        for block in iter(lambda: stream.read(1 << 20), b""):
            state.update(block)
    return state.hexdigest()


def hash_files(paths: Iterable[Path]) -> dict[str, str]:
    """SHA-256 of files by their names: the inputs of a stamp."""
    return {path.name: hash_file(path) for path in sorted(set(paths))}


@dataclass(frozen=True)
class Checks:
    """Which checksums are verified. `skip` has file names; "*" means all of them."""

    skip: frozenset[str] = frozenset()
    override: dict[str, Digest] = field(default_factory=dict)

    def digest(self, name: str, builtin: Digest) -> Digest:
        """The digest that `name` must have with the user's flags; may be empty."""
        if "*" in self.skip or name in self.skip:
            return UNKNOWN
        return self.override.get(name, builtin)

    def mismatch(self, path: Path, digest: Digest) -> str | None:
        """Why the file is not the expected one, or None if it is."""
        size = path.stat().st_size
        if digest.size is not None and size != digest.size:
            return f"wrong size: {size} bytes, expected {digest.size}"
        _, algorithm, expected = digest
        got = hash_file(path, algorithm) if algorithm else ""
        return (
            None if got == expected else f"wrong checksum: {algorithm} {got}, expected {expected}"
        )

    def require(self, path: Path, name: str, builtin: Digest) -> None:
        """Raise unless the user's file `path` has the checksum of `name`."""
        reason = self.mismatch(path, self.digest(name, builtin))
        if reason is not None:
            raise PrepareError(
                f"{path}: {reason}; replace the file, or pass --no-checksum {name} if it is "
                "meant to differ"
            )


def read_checksum_file(path: Path) -> dict[str, Digest]:
    """Read lines of `HEX  NAME` as sha256sum, sha1sum and md5sum write them."""
    found: dict[str, Digest] = {}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise PrepareError(f"--checksums {path}: cannot be read: {error}") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip() or line.startswith("#"):
            continue
        parts = line.split(None, 1)
        algorithm = _HEX_LENGTHS.get(len(parts[0]))
        if len(parts) != 2 or algorithm is None:
            raise PrepareError(f"--checksums {path}: line {number} is not 'HEX  NAME': {line!r}")
        name = parts[1].strip().lstrip("*").rsplit("/", 1)[-1]
        found[name] = Digest(None, algorithm, parts[0].lower())
    return found
