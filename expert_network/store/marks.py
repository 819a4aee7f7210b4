"""Which blocks a layer file holds if it is a part of them: bin/layer_NN.have, a byte a block.

Without that file a layer is whole. A byte is written after the block that it speaks of, so that it
never speaks of bytes that are not there: not after a kill, since files outlive a process, and
after a power cut WRITTEN says that the block has to be looked at, SYNCED that it need not.
"""

from __future__ import annotations

import os
from pathlib import Path

from expert_network import disk
from expert_network.store.manifest import LayerSpec

ABSENT, WRITTEN, SYNCED = range(3)


class Marks:
    """The marks of one layer of the store at `store`. Holds no file open: any thread may use it."""

    def __init__(self, store: Path, spec: LayerSpec) -> None:
        self._layer, self._path, self._spec = store / spec.file, store / spec.marks, spec

    def read(self) -> bytes | None:
        """A byte for each block, ABSENT for one that is not there; None for a whole layer."""
        try:
            return self._path.read_bytes()
        except FileNotFoundError:
            return None

    def mark(self, experts: list[int], value: int) -> None:
        """Note `value` of these blocks. Raises OSError."""
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            for expert in experts:
                disk.write_at(descriptor, bytes([value]), expert)
            if value == SYNCED:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def lay_out(self) -> None:
        """Begin a layer that holds nothing, unless there is one. Raises OSError."""
        if self._layer.exists():
            return
        self._layer.parent.mkdir(exist_ok=True)
        # The marks first: a layer file without any is taken for whole.
        with disk.replacing(self._path) as file:
            file.write(bytes([ABSENT]) * self._spec.experts)
        with disk.replacing(self._layer) as file:
            file.truncate(self._spec.file_bytes)

    def sync(self) -> None:
        """Have what is WRITTEN on the disk, and note it. Raises OSError."""
        marks = self.read() or b""
        written = [expert for expert, mark in enumerate(marks) if mark == WRITTEN]
        if written:
            disk.sync(self._layer)
            self.mark(written, SYNCED)
