"""What node and driver share about peers: keys, verified fetching, framed blocking streams."""
