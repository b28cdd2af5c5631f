"""Bytes of text: their source, the held-out part, and batch i as a pure function of (seed, i)."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import os
import stat
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from models.errors import InputError

VOCABULARY = 256
MAX_BYTES = 64 << 20
PIECE_BYTES = 64 << 10
HELD_OUT_FRACTION = 0.05
# Bytes at the beginning of a file in which a zero byte says that the file is no text.
_LOOKED_AT = 8192

# Not program text: third-party packages, the tests' fixtures, and tables of code points.
_NOT_LIBRARY = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "encodings", "__pycache__"}
)


@dataclasses.dataclass(frozen=True)
class Corpus:
    """The bytes to train on and the held-out bytes.

    Attributes:
      train: (N,) uint8.
      held_out: (M,) uint8. No piece of text is in both.
      num_files: number of files read.
      nbytes: N + M.
      truncated: whether the files hold more than `max_bytes`.
      sha256: hash of the bytes of both parts.
      notes: sentences for the user: files that look like no text, and files left out.
    """

    train: np.ndarray
    held_out: np.ndarray
    num_files: int
    nbytes: int
    truncated: bool
    sha256: str
    notes: tuple[str, ...] = ()


def load(paths: Sequence[str | os.PathLike] = (), *, max_bytes: int = MAX_BYTES) -> Corpus:
    """Reads the corpus and splits it.

    Args:
      paths: files, read as they are, and folders, searched at any depth for text files that are not hidden.
        Empty: the running Python's own standard library.
      max_bytes: limit on the bytes read.

    Returns:
      A `Corpus`, equal for equal bytes in any folder.

    Raises:
      InputError: a path is missing, unreadable, or neither file nor folder, or all files are empty.

    Example:
      >>> from models import data
      >>> corpus = data.load(max_bytes=100_000)
      >>> corpus.nbytes, corpus.truncated
      (100000, True)
    """
    left_out: list[str] = []
    files = [f for path in paths for f in _expand(path, left_out)] if paths else _standard_library()
    documents: list[bytes] = []
    notes: list[str] = []
    left = max_bytes
    truncated = False
    for file, required in files:
        document = _read(file, left + 1, required, left_out if paths else [])
        if not document:
            continue
        if left == 0:
            truncated = True
            break
        if b"\0" in document[:_LOOKED_AT]:
            notes.append(f"{file} looks like no text: it has a zero byte. Its bytes are trained on.")
        truncated = len(document) > left
        documents.append(document[:left])
        left -= len(documents[-1])
    if left_out:
        notes.append(f"{_list_some(left_out)} left out.")
    if not documents:
        where = ", ".join(map(str, paths)) or "the standard library"
        raise InputError(
            f"Training needs at least one byte of text, got none in {where}. {' '.join(notes)} Of a folder, "
            "text files at any depth count that are not hidden."
        )
    train, held_out = split(documents)
    digest = hashlib.sha256(len(train).to_bytes(8, "little"))
    digest.update(train)
    digest.update(held_out)
    nbytes = len(train) + len(held_out)
    return Corpus(train, held_out, len(documents), nbytes, truncated, digest.hexdigest(), tuple(notes))


def _list_some(texts: Sequence[str]) -> str:
    others = f" and {len(texts) - 3} more" * (len(texts) > 3)
    return f"{', '.join(texts[:3])}{others}"


def _standard_library() -> list[tuple[Path, bool]]:
    root = Path(sysconfig.get_path("stdlib"))
    files = [p for p in root.rglob("*.py") if not _NOT_LIBRARY.intersection(p.relative_to(root).parts)]
    return [(p, False) for p in sorted(files, key=lambda p: p.relative_to(root).as_posix())]


def _expand(given: str | os.PathLike, left_out: list[str]) -> list[tuple[Path, bool]]:
    """Lists the files of a path, each with whether the user named the file, which then must be readable.

    Args:
      given: the path.
      left_out: gets each folder that cannot be read.
    """
    if not os.fspath(given):
        raise InputError("--data takes files and folders, got ''. Leave it out for Python's library.")
    path = Path(given)
    try:
        kind = path.stat().st_mode
    except FileNotFoundError:
        raise InputError(
            f"--data takes files and folders that exist, got {str(path)!r}, which does not."
        ) from None
    except OSError as error:
        raise _unreadable(path, error) from None
    if not stat.S_ISDIR(kind):
        if not stat.S_ISREG(kind):
            raise InputError(f"--data takes files and folders, got {str(path)!r}, a pipe or a device.")
        return [(path, True)]
    found = []

    def leave_out(error: OSError) -> None:
        if error.filename == str(path):
            raise _unreadable(path, error)
        left_out.append(f"{error.filename} (cannot be read)")

    for folder, folders, names in os.walk(path, onerror=leave_out):
        folders[:] = [f for f in folders if not f.startswith(".")]
        found += [Path(folder, name) for name in names if not name.startswith(".")]
    found = [p for p in found if os.path.isfile(p)]  # no sockets, pipes or broken links
    return [(p, False) for p in sorted(found, key=lambda p: p.relative_to(path).as_posix())]


def _unreadable(path: Path, error: OSError) -> InputError:
    why = error.strerror or error
    return InputError(f"--data takes files and folders that can be read, got {str(path)!r}: {why}.")


def _read(path: Path, at_most: int, required: bool, left_out: list[str]) -> bytes | None:
    """Reads a file; None for a file found in a folder that holds no text or is unreadable."""
    try:
        with path.open("rb") as stream:
            content = stream.read(at_most)
    except OSError as error:
        if required:
            raise _unreadable(path, error) from None
        left_out.append(f"{path} (cannot be read)")
        return None
    if required or b"\0" not in content[:_LOOKED_AT]:
        return content
    left_out.append(f"{path} (no text)")
    return None


def split(
    documents: Sequence[bytes], *, fraction: float = HELD_OUT_FRACTION, piece_bytes: int = PIECE_BYTES
) -> tuple[np.ndarray, np.ndarray]:
    """Splits documents into bytes to train on and bytes held out, without a leak.

    Documents are cut into pieces of at most `piece_bytes` or 1/40 of all bytes, whichever is less. Pieces are
    ranked by the hash of their content, and the first ranks are held out. Copies of a piece share a rank, so
    all of them end in the same part.

    Args:
      documents: bytes of each document.
      fraction: least share of all bytes to hold out.
      piece_bytes: length of the longest piece.

    Returns:
      (train, held_out), each (n,) uint8, in the documents' order. `held_out` is empty where all pieces are
      equal.
    """
    total = sum(map(len, documents))
    size = max(1, min(piece_bytes, total // 40))
    pieces = [d[i : i + size] for d in documents for i in range(0, len(d), size)]
    digests = [hashlib.sha256(p).digest() for p in pieces]
    weights: dict[bytes, int] = {}
    for digest, piece in zip(digests, pieces, strict=True):
        weights[digest] = weights.get(digest, 0) + len(piece)

    chosen: set[bytes] = set()
    held = 0
    for digest in sorted(weights):
        # A piece with copies all over the corpus stays in training.
        if held < fraction * total and held + weights[digest] <= 2 * fraction * total:
            chosen.add(digest)
            held += weights[digest]
    if not chosen and len(weights) > 1:
        chosen.add(min(weights, key=lambda digest: (weights[digest], digest)))

    sides: tuple[list[bytes], list[bytes]] = ([], [])
    for digest, piece in zip(digests, pieces, strict=True):
        sides[digest in chosen].append(piece)
    return _as_array(b"".join(sides[0])), _as_array(b"".join(sides[1]))


def _as_array(content: bytes) -> np.ndarray:
    return np.frombuffer(content, np.uint8)


@dataclasses.dataclass(frozen=True)
class Batches:
    """Batches of windows in a shuffled order without state: batch i is a pure function of (seed, i).

    Each epoch visits every window of `seq` targets once, in the order of a keyed permutation, from an offset
    drawn for the epoch.

    Attributes:
      tokens: (N,) uint8.
      batch: B, windows a batch.
      seq: S, targets a window.
      seed: key of the order.
    """

    tokens: np.ndarray
    batch: int
    seq: int
    seed: int

    def __post_init__(self):
        if len(self.tokens) < self.seq + 1:
            raise InputError(
                f"A sequence of {self.seq} needs {self.seq + 1} bytes, got {len(self.tokens)} to train on. "
                "Give more data or a shorter --seq."
            )

    @property
    def num_windows(self) -> int:
        """Windows an epoch."""
        return max(1, len(self.tokens) // self.seq - 1)

    def __getitem__(self, index: int) -> np.ndarray:
        """Batch `index`: (B, S + 1) int32."""
        samples = np.arange(index * self.batch, (index + 1) * self.batch, dtype=np.int64)
        epochs, positions = np.divmod(samples, self.num_windows)
        starts = np.empty(self.batch, np.int64)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            key = int.from_bytes(hashlib.sha256(f"{self.seed}/{epoch}".encode()).digest()[:8], "little")
            offset = key % (len(self.tokens) - self.num_windows * self.seq)
            starts[here] = permute(positions[here], self.num_windows, key) * self.seq + offset
        return self.tokens[starts[:, None] + np.arange(self.seq + 1)].astype(np.int32)


def held_out_windows(tokens: np.ndarray, *, batch: int, seq: int, num_batches: int) -> np.ndarray:
    """Picks windows spread evenly over the held-out bytes, no target twice.

    Returns:
      (K, B', S + 1) int32, with K <= num_batches; B' < batch only where the held-out bytes fill no batch.

    Raises:
      InputError: the held-out bytes fill no window.
    """
    windows = (len(tokens) - 1) // seq if len(tokens) else 0
    if windows < 1:
        raise InputError(
            f"A sequence of {seq} needs {seq + 1} held-out bytes, got {len(tokens)}: "
            f"{HELD_OUT_FRACTION:.0%} of the data is held out. Give more data or a shorter --seq."
        )
    batch = min(batch, windows)
    count = min(num_batches, windows // batch)
    starts = np.linspace(0, windows - 1, count * batch).astype(np.int64) * seq
    return tokens[starts[:, None] + np.arange(seq + 1)].astype(np.int32).reshape(count, batch, seq + 1)


def byte_frequency_loss(windows: np.ndarray) -> float:
    """The entropy of the targets, in nats a byte: the loss of the best model of byte frequencies alone."""
    counts = np.bincount(windows[..., 1:].ravel(), minlength=VOCABULARY)
    p = counts[counts > 0] / counts.sum()
    return float(-(p * np.log(p)).sum())


def bits(nats: float) -> float:
    return nats / math.log(2)


def permute(index: np.ndarray, n: int, key: int) -> np.ndarray:
    """Evaluates a keyed permutation of range(n) at `index` alone.

    A Feistel network permutes the next even power of two and is applied until its output is below n. The
    permutation is independent of numpy's generators, whose streams may change between releases.

    Args:
      index: integers below n.
      n: length of the permuted range.
      key: selects the permutation.

    Returns:
      int64 of index's shape, a bijection of range(n).
    """
    half = np.uint64(max(1, ((n - 1).bit_length() + 1) // 2))
    mask = np.uint64((1 << int(half)) - 1)

    def encrypt(x: np.ndarray) -> np.ndarray:
        left, right = x >> half, x & mask
        for stage in range(4):
            left, right = (
                right,
                left ^ (_mix(right ^ np.uint64((key + stage * 0x9E3779B97F4A7C15) % 2**64)) & mask),
            )
        return (left << half) | right

    out = encrypt(np.asarray(index).astype(np.uint64))
    while (outside := out >= n).any():
        out = np.where(outside, encrypt(out), out)
    return out.astype(np.int64)


def _mix(x: np.ndarray) -> np.ndarray:
    """Applies splitmix64's finaliser."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
