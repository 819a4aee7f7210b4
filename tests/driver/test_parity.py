"""Token ids in, a file of logits out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from expert_driver.cli import main
from expert_driver.parity import read_ids
from expert_network.errors import InputError
from tests.driver.programs import DEMO_STORE

VOCABULARY = 8192


@pytest.mark.parametrize("text", ["1,2,3", " 1, 2 ,3 ", "1,2,3,"])
def test_ids_as_a_list(text: str) -> None:
    """Ids can stand on the command line."""
    assert read_ids(text) == [1, 2, 3]


def test_ids_from_files(tmp_path: Path) -> None:
    """Ids can stand in a .npy, a .json or a text file."""
    np.save(tmp_path / "ids.npy", np.array([1, 2, 3], np.uint16))
    (tmp_path / "ids.json").write_text("[1, 2, 3]")
    (tmp_path / "ids.txt").write_text("1 2\n3\n")
    (tmp_path / "ids").write_text("[1, 2, 3]")
    for name in ("ids.npy", "ids.json", "ids.txt", "ids"):
        assert read_ids(str(tmp_path / name)) == [1, 2, 3]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("ids.json", b'{"ids": [1]}'),
        ("ids.json", b"[1.5]"),
        ("ids.json", b"[true]"),
        ("ids.json", b"[" * 100_000),
        ("ids.txt", b"1 two"),
        ("ids.txt", b"\xff\xfe"),
        ("ids.npy", b"not numpy"),
    ],
)
def test_what_is_no_ids_is_refused(tmp_path: Path, name: str, content: bytes) -> None:
    """A file that holds something else is named, with the forms that are read."""
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=r"ids.*cannot be read as token ids"):
        read_ids(str(tmp_path / name))


@pytest.mark.parametrize("array", [np.ones(3), np.ones((2, 2), int), np.array(["a"], object)])
def test_an_array_of_something_else_is_refused(tmp_path: Path, array: Any) -> None:
    """Arrays of floats, of two dimensions or of pickled objects are refused."""
    np.save(tmp_path / "ids.npy", array)
    with pytest.raises(InputError):
        read_ids(str(tmp_path / "ids.npy"))


def test_a_file_that_is_not_there_is_refused() -> None:
    """What is neither a list nor a file says so."""
    with pytest.raises(InputError, match="neither a list"):
        read_ids("ids.npz.typo")


def logits(*arguments: str | Path) -> int:
    return main(["logits", str(DEMO_STORE), *map(str, arguments)])


def test_logits_are_written(tmp_path: Path) -> None:
    """The file is float32, a row for each id; the same ids give the same bits."""
    ids = tmp_path / "ids.json"
    ids.write_text(json.dumps([1, 5, 9, 700]))
    for name, given in (("one.npy", str(ids)), ("two.npy", "1,5,9,700")):
        assert logits("--ids", given, "-o", tmp_path / name) == 0
    one, two = (np.load(tmp_path / name) for name in ("one.npy", "two.npy"))
    assert one.dtype == np.float32 and one.shape == (4, VOCABULARY)
    assert np.array_equal(one, two) and np.isfinite(one).all()


@pytest.mark.parametrize("ids", ["8192", "-1", "1,99999"])
def test_ids_outside_the_vocabulary_write_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, ids: str
) -> None:
    """An id the model does not know is a sentence, exit code 3, and no file."""
    assert logits(f"--ids={ids}", "-o", tmp_path / "out.npy") == 3
    assert "vocabulary of 8192" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_missing_folder_is_said_before_anything_is_loaded(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Where the output cannot stand is an error at once."""
    assert logits("--ids", "1", "-o", tmp_path / "no" / "out.npy") == 3
    assert "the folder does not exist" in capsys.readouterr().err
