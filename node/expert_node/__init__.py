"""The `expert-node` daemon: loads its partition and answers dispatches and block fetches."""
