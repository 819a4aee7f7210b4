"""Settings for every test."""

from __future__ import annotations

from hypothesis import settings

# The same examples every time, so that a red run is red again, and no deadline for an example: the
# machine may be busy. `pytest --hypothesis-profile=explore` looks for new ones.
settings.register_profile("suite", deadline=None, derandomize=True)
settings.register_profile("explore", deadline=None, max_examples=2000)
settings.load_profile("suite")
