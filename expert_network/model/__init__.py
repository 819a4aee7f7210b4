"""Model structure from mlx-lm: checkpoints, the seam where experts are replaced, the trunk."""
