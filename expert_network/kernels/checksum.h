/* The crc32 of frames, as zlib computes it. */
#ifndef EXPERT_NETWORK_CHECKSUM_H
#define EXPERT_NETWORK_CHECKSUM_H

#include <stddef.h>
#include <stdint.h>

/* Goes on from `crc`, that of what stands before the data; 0 at first. */
uint32_t checksum(uint32_t crc, const void *data, size_t size);

#endif
