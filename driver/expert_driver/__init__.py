"""The `expert-net` program: trunk, routing and sampling here, experts on the nodes."""
