"""The store of responses: bounded, owned, and the same as a dictionary that forgets the oldest."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given, strategies as st

from gateway.store import ResponseStore, StoreError


def record(text: str = "", *items: str) -> bytes:
    output = [{"id": item, "type": "message", "text": text} for item in items]
    return orjson.dumps({"input": [], "output": output, "response": {"text": text}})


@pytest.fixture
def store() -> Any:
    store = ResponseStore(":memory:", 10_000)
    yield store
    store.close()


def test_what_is_put_is_got_by_its_owner_alone(store: ResponseStore) -> None:
    """Another key's response is as unknown as none."""
    store.put("r1", "a", record("x", "m1"))

    assert store.get("r1", "a") == record("x", "m1")
    assert store.get("r1", "b") is None
    assert store.get("r2", "a") is None
    assert store.find_item("m1", "b") is None
    assert not store.delete("r1", "b")
    assert store.get("r1", "a") is not None


def test_a_second_put_replaces_the_first(store: ResponseStore) -> None:
    """A background response is put twice: as begun, and as ended."""
    store.put("r1", "a", record("x", "m1"))
    store.put("r1", "a", record("y", "m2"))

    assert store.get("r1", "a") == record("y", "m2")
    assert store.find_item("m1", "a") is None
    assert store.find_item("m2", "a") is not None
    assert len(store) == 1


def test_items_go_with_their_response(store: ResponseStore) -> None:
    """A reference into a deleted response finds nothing."""
    store.put("r1", "a", record("x", "m1", "m2"))
    assert orjson.loads(store.find_item("m2", "a") or b"")["id"] == "m2"
    assert store.delete("r1", "a")
    assert store.find_item("m2", "a") is None
    assert not store.delete("r1", "a")
    assert store._database.execute("SELECT COUNT(*) FROM items").fetchone() == (0,)


def test_a_record_beyond_the_bound_is_not_kept(store: ResponseStore) -> None:
    """One huge response does not push out all others."""
    store.put("r1", "a", record("x"))
    store.put("r2", "a", record("y" * 20_000))

    assert store.get("r1", "a") is not None
    assert store.get("r2", "a") is None


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["put", "put", "put", "delete"]),
        st.sampled_from("abcdefgh"),
        st.integers(0, 300),
    ),
    max_size=40,
)


@given(ACTIONS)
def test_it_is_a_dictionary_that_forgets_the_oldest(actions: list[tuple[str, str, int]]) -> None:
    """Against the obvious twin: the same keys after any sequence, never more bytes than allowed."""
    bound, kept = 1000, {}
    store = ResponseStore(":memory:", bound)
    for action, key, size in actions:
        if action == "delete":
            assert store.delete(key, "o") == (kept.pop(key, None) is not None)
            continue
        value = record("x" * size)
        store.put(key, "o", value)
        kept.pop(key, None)
        if 2 * len(value) <= bound:
            kept[key] = value
        while sum(2 * len(v) for v in kept.values()) > bound:
            kept.pop(next(iter(kept)))
        assert {k: store.get(k, "o") for k in "abcdefgh" if store.get(k, "o")} == kept
    store.close()


def test_a_file_keeps_its_bound_over_a_restart(tmp_path: Path) -> None:
    """What an earlier server left counts."""
    path = str(tmp_path / "r.sqlite")
    first = ResponseStore(path, 1000)
    first.put("r1", "a", record("x" * 200))
    first.close()
    second = ResponseStore(path, 1000)
    second.put("r2", "a", record("y" * 300))

    assert second.get("r1", "a") is None
    assert second.get("r2", "a") is not None
    second.close()


def test_a_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    """The error names the file."""
    path = tmp_path / "r.sqlite"
    path.write_text("no database" * 100)

    with pytest.raises(StoreError, match=r"r\.sqlite"):
        ResponseStore(str(path), 1000)


def test_a_file_is_one_servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second server is refused at its start, until the first has ended."""
    monkeypatch.setattr("gateway.store._LOCK_SECONDS", 0.01)
    path = str(tmp_path / "responses.db")
    for _ in range(2):  # a new file, and one that is there
        first = ResponseStore(path, 1000)
        with pytest.raises(StoreError, match="another process has it; a file is one server's"):
            ResponseStore(path, 1000)
        first.put("r1", "a", record("x"))
        first.close()
    again = ResponseStore(path, 1000)
    assert again.get("r1", "a") == record("x")
    again.close()


def test_a_failed_write_leaves_no_half(store: ResponseStore) -> None:
    """An item that cannot be written takes its response with it, and the bound stays right."""
    store.put("r1", "a", record("x"))
    store._database.execute("DROP TABLE items")

    with pytest.raises(StoreError):
        store.put("r2", "a", record("y", "m1"))
    assert store.get("r2", "a") is None
    assert store._bytes == 2 * len(record("x"))
    assert isinstance(store._database, sqlite3.Connection)
