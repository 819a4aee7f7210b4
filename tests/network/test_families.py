"""Every MoE family of mlx-lm: through the seam, and through a store."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from expert_network.backend import detect
from tests.network import families, family_runs

PAGE = Path(__file__).parents[2] / "docs" / "model-families.md"
ROW = re.compile(r"^\| `(\w+)` \| (sum|outputs|not on CPU) \|", re.MULTILINE)

# What the page says of each family. It is the one list of exceptions.
LISTED = dict(ROW.findall(PAGE.read_text(encoding="utf-8")))

BACKEND = detect()
RUNNABLE = [
    name
    for name in families.families()
    if not (BACKEND.name == "mlx-cpu" and LISTED.get(name) == "not on CPU")
]


def test_the_page_lists_every_family() -> None:
    """docs/model-families.md has one row for each MoE family of mlx-lm, and for nothing else."""
    assert sorted(LISTED) == families.families()


@pytest.mark.parametrize("family", RUNNABLE)
def test_behind_the_seam_a_family_computes_the_same(family: str) -> None:
    """Exact mode changes no bit; a sum is within 1e-5, or 2e-2 where bfloat16 travels.

    And which families return sums is what docs/model-families.md says.
    """
    measured = family_runs.measure(family)
    assert measured.layers > 0
    assert measured.seam == LISTED[family]
    assert measured.exact == 0
    assert measured.sum_f32 <= 1e-5
    assert measured.sum_bf16 <= 2e-2


@pytest.mark.skipif(BACKEND.name != "mlx-cpu", reason="about what MLX lacks on CPU")
@pytest.mark.parametrize("family", [name for name, how in LISTED.items() if how == "not on CPU"])
def test_what_the_page_calls_impossible_is(family: str) -> None:
    """A family that is listed as not running on CPU does not, seam or no seam."""
    with pytest.raises(RuntimeError, match="Metal"):
        family_runs.logits(families.build(family))


@pytest.mark.parametrize("family", RUNNABLE)
def test_what_was_saved_once_loads_again(family: str, tmp_path: Path) -> None:
    """mlx-lm reads back a family's own sanitized tensors, and so does the model of a store."""
    reference = family_runs.logits(families.build(family))
    (tmp_path / "saved").mkdir()
    family_runs.save(family, tmp_path / "saved")
    assert family_runs.error(family_runs.reload(tmp_path / "saved"), reference) == 0
    (tmp_path / "store").mkdir()
    store, experts = family_runs.save_trunk(family, tmp_path / "store")
    assert family_runs.error(family_runs.rebuild(store, experts), reference) == 0
