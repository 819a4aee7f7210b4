"""A store's tokenizer: loaded from its own files alone, streamed without cutting characters."""

from __future__ import annotations

import json
import shutil
import socket
from pathlib import Path

import pytest

from expert_driver.text import Text
from expert_network.errors import StoreError
from expert_network.store.manifest import MANIFEST, canonical
from expert_network.store.reader import Store
from tests.driver.programs import DEMO_STORE

END = 2  # <|im_end|> of the demo's vocabulary


@pytest.fixture(scope="module")
def text() -> Text:
    return Text.open(Store.open(DEMO_STORE))


def test_the_hub_is_never_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading a tokenizer opens no connection and looks no name up."""
    asked: list[object] = []

    def refuse(*arguments: object, **_: object) -> None:
        asked.append(arguments)
        raise OSError("no network in this test")

    for name in ("connect", "connect_ex"):
        monkeypatch.setattr(socket.socket, name, refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    assert Text.open(Store.open(DEMO_STORE)).has_template
    assert asked == []


def test_the_ids_that_end_a_reply(text: Text) -> None:
    """End-of-text ids come from the configs and from the tokenizer."""
    assert text.eos == frozenset({END})


def test_a_chat_ends_where_the_model_replies(text: Text) -> None:
    """The template's marks are in the ids, the assistant's turn open at the end."""
    ids = text.encode_chat([{"role": "user", "content": "Hi"}])
    assert "".join(text.pieces(ids)).endswith("<|im_start|>assistant\n")
    assert END in ids


@pytest.mark.parametrize("words", ["Once upon a time.", "Größe, naïve, 你好, 🐙!"])
def test_pieces_make_up_the_text(text: Text, words: str) -> None:
    """Pieces join to the text, each of whole characters."""
    pieces = list(text.pieces(text.encode(words)))
    assert "".join(pieces) == words
    assert len(pieces) > 1 and not any("\ufffd" in piece for piece in pieces)


def test_a_damaged_tokenizer_is_a_sentence(tmp_path: Path) -> None:
    """A tokenizer that cannot be read names the store and what to do."""
    store = tmp_path / "store"
    shutil.copytree(DEMO_STORE, store)
    (store / "tokenizer.json").write_text("{}")
    manifest = json.loads((store / MANIFEST).read_bytes())
    manifest["files"]["tokenizer.json"]["size"] = 2
    (store / MANIFEST).write_bytes(canonical(manifest))
    with pytest.raises(StoreError, match=r"its tokenizer cannot be loaded.*convert"):
        Text.open(Store.open(store))
