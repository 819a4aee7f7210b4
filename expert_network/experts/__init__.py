"""Expert compute: the blocks a process holds in memory and the sums it makes with them."""
