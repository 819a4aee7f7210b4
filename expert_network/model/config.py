"""What a checkpoint's config says, in the words that mlx-lm reads. Pure functions."""

from __future__ import annotations

from typing import Any

Config = dict[str, Any]

# Keys that name Python code inside the checkpoint.
CODE_KEYS = ("auto_map", "model_file")


def code_entry(config: object) -> str | None:
    """The first entry, at any depth, that asks to run code from the checkpoint."""
    if isinstance(config, list):
        return next((found for item in config if (found := code_entry(item))), None)
    if not isinstance(config, dict):
        return None
    for key in CODE_KEYS:
        if config.get(key):
            return key
    return next((found for item in config.values() if (found := code_entry(item))), None)


def normalise_config(config: Config) -> Config:
    """A copy of `config` with everything where mlx-lm looks for it. Idempotent."""
    return dict(config)
