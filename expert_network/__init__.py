"""What node and driver share: errors, the store, the seam, expert compute and verified peers."""

__version__ = "0.1.0"
