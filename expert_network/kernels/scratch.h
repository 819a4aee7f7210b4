/* Memory for the length of a call. */
#ifndef EXPERT_NETWORK_SCRATCH_H
#define EXPERT_NETWORK_SCRATCH_H

#include <stddef.h>
#include <stdlib.h>

/* Aligned to 64; NULL without memory. Freed with free. */
static inline void *scratch(size_t bytes) {
    void *memory = NULL;
    return posix_memalign(&memory, 64, bytes ? bytes : 64) ? NULL : memory;
}

#endif
