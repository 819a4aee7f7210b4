"""Text to token ids and back, with the tokenizer and the chat template that a store carries."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from expert_network.errors import InputError, StoreError
from expert_network.store.reader import Store

Message = dict[str, str]


class Text:
    """A store's tokenizer. `eos` are the ids that end a reply."""

    def __init__(self, tokenizer: Any, eos: frozenset[int]) -> None:
        self._tokenizer, self.eos = tokenizer, eos

    @classmethod
    def open(cls, store: Store) -> Text:
        """Load the tokenizer from the store's files alone: no hub, no code of the store's own.

        Raises StoreError if there is none, or if it cannot be read.
        """
        if not store.has_tokenizer:
            raise StoreError(
                store.path,
                "it has no tokenizer, so it cannot take text",
                "use `expert-net logits` with token ids, or convert a checkpoint that has one",
            )
        # transformers takes two seconds to import; only text needs it.
        from mlx_lm.utils import load_tokenizer
        from transformers.utils import logging

        # It warns of long conversations in words of its own; the chat says that itself.
        logging.set_verbosity_error()  # type: ignore[no-untyped-call]

        eos = end_of_text_ids(store)
        try:
            tokenizer = load_tokenizer(  # type: ignore[no-untyped-call]
                store.path,
                {"trust_remote_code": False, "local_files_only": True},
                eos_token_ids=sorted(eos) or None,
            )
        except Exception as error:  # whatever transformers meets in a damaged file
            reason = " ".join(str(error).split())
            problem = f"its tokenizer cannot be loaded ({type(error).__name__}: {reason})"
            raise StoreError(store.path, problem, "convert the checkpoint again") from error
        return cls(tokenizer, eos | frozenset(tokenizer.eos_token_ids))

    @property
    def has_template(self) -> bool:
        """Whether the model was made to chat."""
        return bool(self._tokenizer.has_chat_template)

    def encode(self, text: str) -> list[int]:
        """The ids of plain text, as the tokenizer begins a document."""
        return list(self._tokenizer.encode(text))

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """The ids of a conversation up to where the model replies.

        Without a chat template this is the plain text of the messages. Raises InputError if the
        template refuses them (some allow no system prompt).
        """
        if not self.has_template:
            return self.encode("\n".join(message["content"] for message in messages))
        try:
            ids = self._tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=True, tokenize=True
            )
        except Exception as error:  # a template raises what it likes
            raise InputError(
                f"this model's chat template refuses the conversation ({error}); try it without "
                "--system-prompt."
            ) from error
        return [int(token) for token in ids]

    def pieces(self, ids: Iterable[int]) -> Iterator[str]:
        """The text of `ids`, piece by piece as they come; a character is never cut in two."""
        detokenizer = self._tokenizer.detokenizer
        for token in ids:
            detokenizer.add_token(token)
            if piece := detokenizer.last_segment:
                yield piece
        detokenizer.finalize()
        if piece := detokenizer.last_segment:
            yield piece


def end_of_text_ids(store: Store) -> frozenset[int]:
    """What config.json and generation_config.json say ends a text."""
    from mlx_lm.utils import load_config

    config = load_config(store.path)
    found = config.get("eos_token_id", (config.get("text_config") or {}).get("eos_token_id"))
    ids = found if isinstance(found, list) else [found]
    return frozenset(token for token in ids if isinstance(token, int))
