"""Run every MoE family of mlx-lm through the seam and print what it showed.

python -m tests.network.families_report [FAMILY ...]
"""

from __future__ import annotations

import sys

from expert_network.backend import detect
from tests.network import families
from tests.network.family_runs import Measured, measure

HEAD = f"{'family':<22} layers  seam     exact    sum f32  sum bf16  rerouted"


def line(found: Measured) -> str:
    """One family's row of the table."""
    return (
        f"{found.family:<22} {found.layers:>6}  {found.seam:<7}  {found.exact:.1e}  "
        f"{found.sum_f32:.1e}  {found.sum_bf16:.1e}  {found.rerouted:>8}"
    )


def main() -> None:
    """Print the table, a family that cannot run with its reason, and the worst figures."""
    print(detect().numerics("float32"))
    print(HEAD)
    measured = []
    for family in sys.argv[1:] or families.families():
        try:
            measured.append(measure(family))
            print(line(measured[-1]), flush=True)
        except RuntimeError as error:
            print(f"{family:<22} cannot run here: {error}", flush=True)
    worst = max(m.exact for m in measured), max(m.sum_f32 for m in measured)
    print(
        f"{len(measured)} families ran; worst relative L2 error of the logits: exact {worst[0]:.1e}"
    )
    print(f"sum with f32 rows {worst[1]:.1e}, with bf16 {max(m.sum_bf16 for m in measured):.1e}")


if __name__ == "__main__":
    main()
