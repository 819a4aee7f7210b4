"""Logits of given token ids, written to a file: what `expert-net logits` does."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from expert_driver.config import NetworkConfig
from expert_driver.opening import opened
from expert_network import disk
from expert_network.errors import InputError

_LIST = re.compile(r"\s*-?\d+(\s*,\s*-?\d+)*\s*,?\s*")


def run(store: str | None, config: NetworkConfig, ids: list[int], output: Path) -> None:
    """Write float32 (len(ids), vocabulary) to `output`, which appears whole or not at all."""
    if not output.absolute().parent.is_dir():
        raise InputError(f"{output}: the folder does not exist; make it first, or name another.")
    with opened(store, config, with_text=False) as session, disk.replacing(output) as file:
        for chunk in session.engine.logit_chunks(ids):
            if not file.tell():
                _write_header(file, (len(ids), chunk.shape[1]))
            file.write(np.ascontiguousarray(chunk, "<f4").data)


def _write_header(file: BinaryIO, shape: tuple[int, int]) -> None:
    header = {"descr": np.dtype("<f4").str, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, header)


def read_ids(text: str) -> list[int]:
    """The ids of --ids: "1,2,3", or what a .npy, .json or text file holds. Raises InputError."""
    if _LIST.fullmatch(text):
        return [int(word) for word in re.findall(r"-?\d+", text)]
    file = Path(text).expanduser()
    try:
        values = _read(file)
    except FileNotFoundError:
        raise InputError(
            f"--ids {text!r} is neither a list like 1,2,3 nor a file that exists."
        ) from None
    except (ValueError, RecursionError) as error:
        raise _unreadable(file, str(error)) from error
    if not isinstance(values, list) or not all(type(value) is int for value in values):
        raise _unreadable(file, "it does not hold one flat list of whole numbers")
    return values


def _read(file: Path) -> Any:
    if file.suffix == ".npy":
        array = np.load(file, allow_pickle=False)
        return array.tolist() if np.issubdtype(array.dtype, np.integer) else None
    text = file.read_text(encoding="utf-8")
    return json.loads(text) if file.suffix == ".json" else [int(w) for w in _words(text)]


def _words(text: str) -> list[str]:
    return [word for word in re.split(r"[\s,\[\]]+", text) if word]


def _unreadable(file: Path, why: str) -> InputError:
    return InputError(
        f"{file} cannot be read as token ids ({why}); give a .npy file of integers, a .json list, "
        "or text with spaces or commas between the ids."
    )
