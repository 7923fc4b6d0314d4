"""A folder of evidence: files that are added and never changed, each known by its own hash.

A file is JSON Lines, one row a line, named `<arch>-<first 16 digits of its SHA-256>.jsonl`.
`index.json` lists the files with their whole hash and number of rows. Every read hashes every file.

A writer puts the file first and then the index, each whole, under a lock of the folder. Where it is
stopped between the two, the file is there and named after its content: it is adopted, and that is
said. Readers need no lock and no right to write.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import time
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stream_attention.core.atomic_files import read_file, replace_file
from stream_attention.core.errors import shown
from stream_attention.core.ir import is_int
from stream_attention.core.json_text import parse_json
from stream_attention.planner.evidence import EvidenceRow, PairRow, Row, plain_of, row_from_plain
from stream_attention.planner.plain import canonical_json

INDEX = "index.json"
INDEX_SCHEMA = "stream_attention.evidence_index/1"
LOCK = ".lock"
SUFFIX = ".jsonl"
_ARCH = re.compile(r"[a-z0-9_]{1,32}")
_NAME = re.compile(r"[a-z0-9_]{1,32}-([0-9a-f]{16})\.jsonl")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_POLL_S = 0.02
# What a broken text makes json or a row raise; RecursionError where it is nested without end.
_UNREADABLE = (ValueError, TypeError, RecursionError)


class EvidenceStoreError(RuntimeError):
    """A store cannot be trusted, read or written; the message names every file with the reason."""


class EvidenceStoreWarning(UserWarning):
    """A store was repaired."""


@dataclass(frozen=True, slots=True)
class _Entry:
    """A file as the index has it."""

    sha256: str
    rows: int


@dataclass(frozen=True, slots=True)
class _Known:
    """A row, its id, and what it is found by."""

    row: Row
    id: str
    cell_digest: str
    contenders: tuple[str, ...]
    environment_digest: str


class EvidenceStore:
    """The evidence in one folder.

    path: the folder; the first `append` makes it, in a folder that exists. lock_timeout_s: how long
    `append` waits for another writer. May be used by several threads and processes at a time.
    """

    __slots__ = ("_parsed", "lock_timeout_s", "path")

    def __init__(self, path: str | os.PathLike[str], *, lock_timeout_s: float = 60.0) -> None:
        self.path = Path(path)
        self.lock_timeout_s = lock_timeout_s
        self._parsed: dict[str, tuple[_Known, ...]] = {}  # by hash: what is hashed does not change

    def append(self, rows: Iterable[Row]) -> str:
        """Add rows as one file and return its name; the same rows again are the same file.

        Raises `ValueError` for no rows, rows of more than one architecture, and a row that cannot
        be read back. Raises `EvidenceStoreError` where the file or the index could not be written:
        it says whether the rows are in the store, and what was there before is as it was.
        """
        name, content, count = _file_of(tuple(rows))
        entry = _Entry(hashlib.sha256(content).hexdigest(), count)
        with self._locked():
            self._write_file(name, content)
            try:
                index = self._index()
                if index.setdefault(name, entry) != entry:
                    raise EvidenceStoreError(f"{name}: is in {INDEX} with another hash")
                index.update(self._adopted(index, self._names(), []))
                self._write_index(index)
            except (OSError, EvidenceStoreError) as error:
                raise EvidenceStoreError(
                    f"evidence={str(self.path)!r}: {name} is written, {INDEX} is not "
                    f"({_reason(error)}); what reads or appends next adopts the file"
                ) from error
        return name

    def rows(self) -> tuple[Row, ...]:
        """All rows, file by file in order of their names; a row of two files comes once.

        Raises `EvidenceStoreError` that names every file which was changed, is not in the index and
        not named after its content, or is missing; nothing is read of such a store.
        """
        return tuple(known.row for known in self._all())

    def find(
        self,
        cell_digest: str,
        requested: str | tuple[str, str],
        environment_digest: str | None = None,
        commit: str | None = None,
    ) -> tuple[Row, ...]:
        """Rows of that cell and contender, or of that pair `(first, second)`, of any outcome.

        environment_digest, commit: `None` = of any. Raises as `rows` does.
        """
        contenders = (requested,) if isinstance(requested, str) else tuple(requested)
        return tuple(
            known.row
            for known in self._all()
            if known.cell_digest == cell_digest
            and known.contenders == contenders
            and environment_digest in (None, known.environment_digest)
            and commit in (None, known.row.commit)
        )

    def files(self) -> tuple[tuple[str, str], ...]:
        """`(name, sha256)` of every file, in order of their names. Raises as `rows` does."""
        return tuple((name, entry.sha256) for name, entry, _ in self._verified())

    def _all(self) -> Iterator[_Known]:
        found = {known.id: known for _, _, file in self._verified() for known in file}
        return iter(found.values())

    def _verified(self) -> list[tuple[str, _Entry, tuple[_Known, ...]]]:
        """Every file with its entry and its rows."""
        faults: list[str] = []
        try:
            index = self._index()  # before the folder: a file is there before the index has it
            index.update(self._adopted(index, self._names(), faults))
        except OSError as error:
            raise EvidenceStoreError(
                f"evidence={str(self.path)!r}: could not be read ({_reason(error)})"
            ) from error
        found = []
        for name, entry in sorted(index.items()):
            try:
                found.append((name, entry, self._file(name, entry)))
            except (*_UNREADABLE, OSError, EvidenceStoreError) as error:
                faults.append(f"{name}: {_reason(error)}")
        if faults:
            head = f"evidence={str(self.path)!r}: cannot be trusted"
            raise EvidenceStoreError("\n  ".join([head, *sorted(faults)]))
        return found

    def _file(self, name: str, entry: _Entry) -> tuple[_Known, ...]:
        """The rows of a file that is as the index has it."""
        try:
            content = read_file(self.path / name)
        except FileNotFoundError:
            raise EvidenceStoreError(f"is in {INDEX}, and not there") from None
        sha256 = hashlib.sha256(content).hexdigest()
        if sha256 != entry.sha256:
            raise EvidenceStoreError(
                f"was changed: its SHA-256 is {sha256[:16]}…, {INDEX} has {entry.sha256[:16]}…"
            )
        if sha256 not in self._parsed:
            self._parsed[sha256] = _parsed(content)
        known = self._parsed[sha256]
        _check_arch(name, known)
        if len(known) != entry.rows:
            raise EvidenceStoreError(f"has {len(known)} rows, {INDEX} has {entry.rows}")
        return known

    def _names(self) -> list[str]:
        return sorted(path.name for path in self.path.iterdir() if path.suffix == SUFFIX)

    def _adopted(
        self, index: dict[str, _Entry], names: list[str], faults: list[str]
    ) -> dict[str, _Entry]:
        """Those of the files that are not in the index, and are named after their content.

        What is wrong with the others goes to `faults`.
        """
        found = {}
        for name in names:
            if name in index:
                continue
            try:
                found[name] = self._unlisted(name)
            except (*_UNREADABLE, OSError, EvidenceStoreError) as error:
                rule = f"is not in {INDEX}, and no file of rows that is named after its content"
                faults.append(f"{name}: {rule} ({_reason(error)})")
        if found:
            warnings.warn(
                f"evidence={str(self.path)!r}: {', '.join(found)} not in {INDEX}, named after "
                "their content: adopted; their writer was stopped before the index, or is at it",
                EvidenceStoreWarning,
                stacklevel=2,
            )
        return found

    def _unlisted(self, name: str) -> _Entry:
        """What the index would have of a file. Raises where it may not."""
        match = _NAME.fullmatch(name)
        if match is None:
            raise EvidenceStoreError("its name is none of a file of rows")
        content = read_file(self.path / name)
        sha256 = hashlib.sha256(content).hexdigest()
        if not sha256.startswith(match[1]):
            raise EvidenceStoreError(f"its SHA-256 is {sha256[:16]}…")
        known = _parsed(content)
        _check_arch(name, known)
        return _Entry(sha256, len(known))

    def _index(self) -> dict[str, _Entry]:
        """The index; empty where there is none. Raises for one that is broken."""
        try:
            text = read_file(self.path / INDEX)
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise EvidenceStoreError(
                f"evidence={str(self.path)!r}: {INDEX} could not be read ({_reason(error)})"
            ) from error
        try:
            return _index_of(parse_json(text))
        except _UNREADABLE as error:
            raise EvidenceStoreError(
                f"evidence={str(self.path)!r}: {INDEX} is broken ({_reason(error)}); remove it to "
                "have one made of the files that are named after their content"
            ) from None

    def _write_file(self, name: str, content: bytes) -> None:
        path = self.path / name
        try:
            if path.exists():
                self._check_same(path, content)
                return
            replace_file(path, content)
        except OSError as error:
            # There all the same: its folder could not be synced, or a network lost the answer.
            there = os.path.exists(path)
            raise EvidenceStoreError(
                f"evidence={str(self.path)!r}: {name} "
                + (
                    f"is written, and may not outlast a crash ({_reason(error)}); what reads or "
                    "appends next adopts the file"
                    if there
                    else f"could not be written ({_reason(error)}): the rows are not in the store"
                )
            ) from error

    def _check_same(self, path: Path, content: bytes) -> None:
        """Raise where what bears the name of a new file is another."""
        try:
            fault = "" if read_file(path) == content else "with other content"
        except OSError as error:
            fault = f"and is no file of rows ({_reason(error)})"
        if fault:
            raise EvidenceStoreError(
                f"evidence={str(self.path)!r}: {path.name} is there {fault}, the rows are not in "
                "the store; move it away"
            )

    def _write_index(self, index: dict[str, _Entry]) -> None:
        files = {name: {"sha256": e.sha256, "rows": e.rows} for name, e in index.items()}
        text = json.dumps({"schema": INDEX_SCHEMA, "files": files}, sort_keys=True, indent=1)
        replace_file(self.path / INDEX, f"{text}\n".encode())

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the folder against other writers."""
        try:
            self.path.mkdir(exist_ok=True)
            handle = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise self._unlocked(_reason(error)) from error
        try:
            deadline = time.monotonic() + self.lock_timeout_s
            while True:
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() >= deadline:
                        waited = f"another writer has held {LOCK} for {self.lock_timeout_s:g} s"
                        raise self._unlocked(waited) from None
                    time.sleep(_POLL_S)
                except OSError as error:
                    raise self._unlocked(_reason(error)) from error
            yield
        finally:
            os.close(handle)

    def _unlocked(self, reason: str) -> EvidenceStoreError:
        return EvidenceStoreError(
            f"evidence={str(self.path)!r}: could not be locked for writing ({reason}): the rows "
            "are not in the store"
        )


def _file_of(rows: tuple[Row, ...]) -> tuple[str, bytes, int]:
    """Name, content and number of rows of the file that holds `rows`."""
    if not rows:
        raise ValueError("rows=(): needs at least one row")
    bad = [row for row in rows if not isinstance(row, (EvidenceRow, PairRow))]
    if bad:
        raise ValueError(f"rows={shown(bad[0])}: must be EvidenceRow or PairRow")
    (arch, *others) = sorted({row.environment.arch for row in rows})
    if others or not _ARCH.fullmatch(arch):
        raise ValueError(
            f"rows: of {', '.join(map(repr, [arch, *others]))}: must be of one architecture, such "
            "as 'sm_90'"
        )
    content = "".join(map(_line_of, range(len(rows)), rows)).encode()
    _parsed(content)  # what could not be read back is refused before it is written
    return f"{arch}-{hashlib.sha256(content).hexdigest()[:16]}{SUFFIX}", content, len(rows)


def _line_of(index: int, row: Row) -> str:
    try:
        return f"{canonical_json(plain_of(row))}\n"
    except (*_UNREADABLE, OverflowError) as error:
        raise ValueError(f"rows[{index}]: has no text ({_reason(error)})") from None


def _check_arch(name: str, rows: tuple[_Known, ...]) -> None:
    """Raise where a file is named after another architecture than that of its rows."""
    named, found = name.rpartition("-")[0], {known.row.environment.arch for known in rows}
    if found != {named}:
        raise EvidenceStoreError(
            f"is named after {named!r}, and has rows of {', '.join(map(repr, sorted(found)))}"
        )


def _parsed(content: bytes) -> tuple[_Known, ...]:
    """The rows of a file. Raises `ValueError` that says which line is none."""
    *lines, rest = content.decode("ascii").split("\n")
    if rest or not lines:
        raise ValueError("is cut off: a file has one row a line, and ends with the end of one")
    found = []
    for number, line in enumerate(lines, 1):
        try:
            row = row_from_plain(parse_json(line))
            if canonical_json(plain_of(row)) != line:
                raise ValueError("must be the canonical text of its row")
        except _UNREADABLE as error:
            raise ValueError(f"line {number}: {_reason(error)}") from None
        found.append(_known(row))
    return tuple(found)


def _known(row: Row) -> _Known:
    contenders = (row.first, row.second) if isinstance(row, PairRow) else (row.requested,)
    return _Known(row, row.id, row.cell.digest, contenders, row.environment.digest)


def _index_of(plain: Any) -> dict[str, _Entry]:
    if not isinstance(plain, dict) or plain.get("schema") != INDEX_SCHEMA:
        raise ValueError(f"must be of schema {INDEX_SCHEMA!r}")
    files = plain.get("files")
    if set(plain) != {"schema", "files"} or not isinstance(files, dict):
        raise ValueError("must have the keys schema and files alone")
    found = {}
    for name, entry in files.items():
        match = _NAME.fullmatch(name)
        if match is None or not isinstance(entry, dict) or set(entry) != {"sha256", "rows"}:
            raise ValueError(f"{name!r} is no entry of a file")
        sha256, rows = entry["sha256"], entry["rows"]
        hashed = isinstance(sha256, str) and _SHA256.fullmatch(sha256)
        if not (hashed and sha256.startswith(match[1]) and is_int(rows) and rows >= 1):
            raise ValueError(f"{name!r} has a hash or a number of rows that cannot be")
        found[name] = _Entry(sha256, rows)
    return found


def _reason(error: BaseException) -> str:
    """What to say of an error: the system's words, or its own first 300 letters."""
    text = (isinstance(error, OSError) and error.strerror) or str(error) or type(error).__name__
    text = " ".join(text.split())
    return text if len(text) <= 300 else f"{text[:297]}..."
