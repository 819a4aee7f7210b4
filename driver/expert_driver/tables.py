"""Tables on the terminal."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import TextIO

UNBROKEN = 1000  # columns where no terminal says how many there are: one line for each row


def show(
    headers: Sequence[str],
    rows: Iterable[Sequence[str]],
    stream: TextIO,
    numbers: Collection[str] = (),
) -> None:
    """Write a table; where `stream` is a file or a pipe, without colours and never wrapped.

    The columns whose headers are in `numbers` are aligned to the right.
    """
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Column, Table
    from rich.text import Text

    columns = [Column(name, justify="right" if name in numbers else "left") for name in headers]
    table = Table(*columns, box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for row in rows:
        # Text, since rich would read [brackets] in a plain string as its markup.
        table.add_row(*(Text(cell) for cell in row))
    width = None if stream.isatty() else UNBROKEN
    Console(file=stream, width=width, highlight=False).print(table)
