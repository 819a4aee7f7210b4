"""What tests of native kernels share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from expert_network import kernels


@pytest.fixture(params=kernels.isas() if kernels.available() else ())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each instruction set that runs here; afterwards set and threads are what they were."""
    before, threads = kernels.isa(), kernels.threads()
    kernels.use_isa(request.param)
    yield request.param
    kernels.use_isa(before)
    kernels.set_threads(threads)
