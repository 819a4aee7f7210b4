"""What each --wire costs on the demo's model: traffic, error of the logits, perplexity.

python -m tests.driver.wire_report TEXTS.json [COUNT]

TEXTS.json is a list of {"prompt": ..., "response": ...} that the model was not trained on; COUNT of
them are read, whole (as a prompt is) and then, fewer, token by token (as a reply is).
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from expert_driver.config import Computing, NetworkConfig
from expert_driver.demo import STORE
from expert_driver.opening import Session, opened
from expert_network.units import size
from tests.support.nodes import node_processes

WIRES = ("f32", "bf16", "f16", "int8")
#: For each text read token by token, so many are read whole.
WHOLE = 10

Logits = NDArray[np.float32]
Ids = list[int]


@dataclass
class Read:
    """What a run over the texts gave: each text's logits, and the bytes of a token."""

    logits: list[Logits]
    token_bytes: float = 0.0


def main(file: str, count: str = "200") -> None:
    """Print the table, once for whole texts and once token by token."""
    texts = json.loads(Path(file).read_text(encoding="utf-8"))[: int(count)]
    with node_processes("a,b", STORE) as nodes, tempfile.TemporaryDirectory() as home:
        urls = tuple(node.url for node in nodes)
        with session((), None, home) as one:
            pairs = [ids_of(one, text) for text in texts]
            few = pairs[: max(1, len(pairs) // WHOLE)]
            reference = read(one, pairs), read(one, few, by_token=True)
        print(
            f"{len(pairs)} texts whole, {len(few)} by token; one process: {facts(reference, pairs)}"
        )
        print("wire   per token  logits' error  largest  perplexity  by token  same choice")
        for wire in WIRES:
            with session(urls, wire, home) as there:
                found = read(there, pairs), read(there, few, by_token=True)
                print(f"{wire:<5}" + row(found, reference, pairs), flush=True)


@contextmanager
def session(urls: tuple[str, ...], wire: str | None, home: str) -> Iterator[Session]:
    config = NetworkConfig(urls, not urls, wire, None, Path(home), Computing("f32"))
    with opened(str(STORE), config, with_text=True) as found:
        yield found


def ids_of(session: Session, text: dict[str, str]) -> tuple[Ids, int]:
    """The ids of a question with its answer, and where the answer begins."""
    assert session.text is not None
    asked = session.text.encode_chat([{"role": "user", "content": text["prompt"]}])
    answer = session.text.encode(text["response"])
    return [*asked, *answer, *sorted(session.text.eos)[:1]], len(asked)


def read(session: Session, pairs: list[tuple[Ids, int]], by_token: bool = False) -> Read:
    """The logits before each token of each answer."""
    engine, found = session.engine, []
    for ids, start in pairs:
        if by_token:
            context = engine.context()
            rows = [np.array(engine.read(context, [token])[0]) for token in ids]
            logits = np.stack(rows)
        else:
            logits = engine.logits(ids)
        found.append(logits[start - 1 : -1].astype(np.float32))
    return Read(found, session.figures.bytes_per_token if session.figures else 0.0)


def perplexity(found: Read, pairs: list[tuple[Ids, int]]) -> float:
    """Of the answers' tokens, all texts together."""
    losses = []
    for logits, (ids, start) in zip(found.logits, pairs, strict=False):
        exact = logits.astype(np.float64)
        top = exact.max(axis=1)
        total = top + np.log(np.exp(exact - top[:, None]).sum(axis=1))
        losses.append(total - exact[np.arange(len(exact)), ids[start:]])
    return float(np.exp(np.concatenate(losses).mean()))


def facts(found: tuple[Read, Read], pairs: list[tuple[Ids, int]]) -> str:
    """The reference's own figures."""
    tokens = sum(len(logits) for logits in found[0].logits)
    whole, by_token = (perplexity(each, pairs) for each in found)
    return f"perplexity {whole:.4f} over {tokens} tokens, {by_token:.4f} by token"


def row(found: tuple[Read, Read], reference: tuple[Read, Read], pairs: Any) -> str:
    """One wire's figures beside the reference's: mean relative L2 error of a row of logits."""
    errors, same = [], []
    for ours, theirs in zip(found[0].logits, reference[0].logits, strict=True):
        errors.append(np.linalg.norm(ours - theirs, axis=1) / np.linalg.norm(theirs, axis=1))
        same.append(ours.argmax(axis=1) == theirs.argmax(axis=1))
    error = np.concatenate(errors)
    more = [
        perplexity(one, pairs) / perplexity(other, pairs) - 1
        for one, other in zip(found, reference, strict=True)
    ]
    return (
        f"  {size(found[1].token_bytes):>9}  {error.mean():>13.1e}  {error.max():.1e}"
        f"  {more[0]:>+10.4%}  {more[1]:>+8.4%}  {np.concatenate(same).mean():>11.2%}"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
