"""The data plane of the driver: links to nodes, who owns what, and the fan-out of each layer."""
