/* Attention: the work divided, and run on the pool. */
#include "attention.h"

#include <stdlib.h>

#include "pool.h"
#include "table.h"

static long up(long n, long step) { return (n + step - 1) / step; }

/* By shapes alone: the same division, and so the same bits, for every number of threads. */
static void divide(struct attention *a) {
    a->rows = a->heads / a->key_heads * a->length;
    int few = a->rows <= ATTENTION_FEW;
    a->block = few ? ATTENTION_FEW : ATTENTION_ROWS;
    a->blocks = up(a->rows, a->block);
    long items = a->batch * a->key_heads * a->blocks;
    a->chunk = few ? ATTENTION_CHUNK : items < 32 ? ATTENTION_LONG : a->keys;
    a->chunks = up(a->keys, a->chunk);
    a->padded = up(a->width, ATTENTION_PAD) * ATTENTION_PAD;
    a->partial = a->padded + 2;
    size_t floats = few ? ATTENTION_FEW * (up(a->depth, 16) * 16 + ATTENTION_CHUNK)
                        : ATTENTION_ROWS * (a->depth + ATTENTION_KEYS + 2) +
                              ATTENTION_KEYS * (a->depth + a->padded);
    a->scratch_size = (floats * sizeof(float) + 255) & ~(size_t)127;
}

/* Over the pool, unless one thread is done with so many products before another would wake. */
static void spread(pool_task task, struct attention *a, long count, long products) {
    if (products > ALONE)
        pool_run(task, a, count);
    else
        for (long index = 0; index < count; index++) task(a, index, 0);
}

int attention_run(struct attention *a) {
    if (!a->batch || !a->heads || !a->length || !a->width) return 0;
    divide(a);
    long heads = a->batch * a->key_heads, all = heads * a->rows;
    int threads = pool_threads();
    size_t floats = (size_t)all * (size_t)a->chunks * (size_t)a->partial;
    char *memory = floats > PTRDIFF_MAX / 8 ? NULL
        : malloc(floats * sizeof(float) + (size_t)threads * a->scratch_size + 128);
    if (!memory) return -1;
    a->scratch = (char *)(((uintptr_t)memory + 127) & ~(uintptr_t)127);
    a->partials = (float *)(a->scratch + (size_t)threads * a->scratch_size);
    spread(a->rows <= ATTENTION_FEW ? kernels->attend_few : kernels->attend_many, a,
           heads * a->blocks * a->chunks, all * a->keys * (a->depth + a->width));
    spread(kernels->attend_end, a, all, all * a->chunks * a->width);
    free(memory);
    return 0;
}
