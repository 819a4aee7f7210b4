"""The driver's copy of a store, fetched from its nodes: all but the blocks."""
