"""Keeps responses for `previous_response_id`, retrieval and references, within a bound of bytes.

SQLite, in memory or in a file. A response belongs to the key that asked for it: another key's is as
unknown as one that never was. When the bound is reached the oldest go, so a chain that is not
continued for long enough ends in a clear 400.

All methods may be called from any thread, and take it for as long as the disk does.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import orjson

_SCHEMA = """
CREATE TABLE IF NOT EXISTS responses (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    owner TEXT NOT NULL,
    bytes INTEGER NOT NULL,
    record BLOB NOT NULL
);
CREATE TABLE IF NOT EXISTS items (
    id TEXT NOT NULL,
    response INTEGER NOT NULL REFERENCES responses (number) ON DELETE CASCADE,
    item BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS items_by_id ON items (id);
CREATE INDEX IF NOT EXISTS items_by_response ON items (response);
"""

#: How long a start waits for a server that is about to end to let go of the file.
_LOCK_SECONDS = 2.0


class StoreError(Exception):
    """The file cannot be used; the message says why."""


class ResponseStore:
    """See the module's text.

    Args:
        path: of the file; ":memory:" for none.
        max_bytes: most that the records may take, together.

    Raises:
        StoreError: the file cannot be opened, is none of ours, or another process has it.
    """

    def __init__(self, path: str, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        try:
            self._database = sqlite3.connect(
                path, timeout=_LOCK_SECONDS, check_same_thread=False, isolation_level=None
            )
            try:
                # One process's count of bytes knows nothing of another's rows.
                self._database.execute("PRAGMA locking_mode = EXCLUSIVE")
                self._database.execute("PRAGMA foreign_keys = ON")
                self._database.execute("PRAGMA journal_mode = WAL")
                self._database.executescript(_SCHEMA)
                self._bytes = self._measure()
            except sqlite3.Error:
                self._database.close()
                raise
        except sqlite3.Error as error:
            taken = getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_BUSY
            why = "another process has it; a file is one server's" if taken else str(error)
            raise StoreError(f"store {path}: {why}") from error

    def put(self, response_id: str, owner: str, record: bytes) -> None:
        """Keep a response, in place of an earlier state of it; the oldest make room.

        Args:
            response_id: its id.
            owner: name of the key it belongs to.
            record: JSON with `input`, `output` and `response`, as parsers.Exchange.record gives it.
                One that is larger than the whole bound is not kept.

        Raises:
            StoreError: the disk is full, or gone.
        """
        output = orjson.loads(record)["output"]
        named = [(item["id"], orjson.dumps(item)) for item in output if item.get("id")]
        size = 2 * len(record)  # the items are there twice
        with self._lock, self._transaction():
            self._remove("id = ? AND owner = ?", response_id, owner)
            if size > self._max_bytes:
                return
            while self._bytes + size > self._max_bytes:
                self._remove("number = (SELECT MIN(number) FROM responses)")
            added = self._database.execute(
                "INSERT INTO responses (id, owner, bytes, record) VALUES (?, ?, ?, ?)",
                (response_id, owner, size, record),
            )
            self._bytes += size
            self._database.executemany(
                "INSERT INTO items (id, response, item) VALUES (?, ?, ?)",
                [(item_id, added.lastrowid, item) for item_id, item in named],
            )

    def get(self, response_id: str, owner: str) -> bytes | None:
        """Return the record of a response, None where the owner has none of that id."""
        with self._lock:
            row = self._one(
                "SELECT record FROM responses WHERE id = ? AND owner = ?", response_id, owner
            )
        return None if row is None else row[0]

    def delete(self, response_id: str, owner: str) -> bool:
        """Forget a response; says whether there was one."""
        with self._lock, self._transaction():
            return self._remove("id = ? AND owner = ?", response_id, owner)

    def find_item(self, item_id: str, owner: str) -> bytes | None:
        """Return the JSON of an output item of one of the owner's responses."""
        with self._lock:
            row = self._one(
                "SELECT item FROM items JOIN responses ON response = number"
                " WHERE items.id = ? AND owner = ? ORDER BY number DESC LIMIT 1",
                item_id,
                owner,
            )
        return None if row is None else row[0]

    def __len__(self) -> int:
        with self._lock:
            row = self._one("SELECT COUNT(*) FROM responses")
        return int(row[0]) if row else 0

    def close(self) -> None:
        """Let go of the file."""
        with self._lock:
            self._database.close()

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        try:
            with self._database:
                self._database.execute("BEGIN")
                yield
        except sqlite3.Error as error:
            self._bytes = self._measure()
            raise StoreError(f"the store of responses: {error}") from error

    def _measure(self) -> int:
        row = self._database.execute("SELECT COALESCE(SUM(bytes), 0) FROM responses").fetchone()
        return int(row[0])

    def _remove(self, where: str, *values: str) -> bool:
        rows = self._database.execute(
            f"DELETE FROM responses WHERE {where} RETURNING bytes",  # our own words, no input
            values,
        ).fetchall()
        self._bytes -= sum(size for (size,) in rows)
        return bool(rows)

    def _one(self, query: str, *values: str) -> tuple[bytes, ...] | None:
        found: tuple[bytes, ...] | None = self._database.execute(query, values).fetchone()
        return found
