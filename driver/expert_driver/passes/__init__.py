"""Passes of the model over chunks of tokens: in order, and two at once where that is possible."""
