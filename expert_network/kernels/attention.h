/* One call of attention: what its tasks share. */
#ifndef EXPERT_NETWORK_ATTENTION_H
#define EXPERT_NETWORK_ATTENTION_H

#include <stddef.h>

enum { MASK_NONE, MASK_BOOL, MASK_ADDED };

#define ATTENTION_FEW 8      /* rows that share a head of keys, up to which these are read once */
#define ATTENTION_ROWS 96    /* of the blocks that more rows are worked on in */
#define ATTENTION_KEYS 64    /* of the blocks that these see at once */
#define ATTENTION_CHUNK 128  /* keys of one task of few rows */
#define ATTENTION_LONG 512   /* the same of more rows, where there are few blocks */
#define ATTENTION_PAD 16     /* accumulators are a multiple of this wide: of two vectors */

/* Strides are bytes, for the axes batch, head, position; the last axis is contiguous. A row is one
 * query head's at one position; the rows that share a key head are numbered position by position. */
struct attention {
    const char *q, *k, *v, *mask;
    float *out;
    const float *sinks;
    long batch, heads, key_heads, length, keys, depth, width;   /* B H Hkv L S D Dv */
    ptrdiff_t q_stride[3], k_stride[3], v_stride[3], mask_stride[4];
    float scale;
    int causal, k_stored, v_stored, mask_kind;
    /* How it is divided: blocks of rows x chunks of keys, whatever the number of threads. */
    long rows, block, blocks, chunk, chunks;
    /* For each head, block, row and chunk: the maximum, the sum and `padded` weighted values. */
    long padded, partial;
    float *partials;
    char *scratch;
    size_t scratch_size;
};

/* Of what precedes `rows`, which was checked. -1 without memory. */
int attention_run(struct attention *attention);

#endif
