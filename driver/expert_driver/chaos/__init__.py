"""A bad network on purpose: a proxy between a driver and its nodes that does harm to order."""
