"""Wire frames, codecs and the two connection state machines: bytes in, events out, no I/O."""
