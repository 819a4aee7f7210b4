"""Rosters, rendezvous owner order, and the difference between two rosters: pure functions."""
