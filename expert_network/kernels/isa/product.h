/* What the products share: one order of summation.
 *
 * A product of a row of weights and a row of activations is summed in 8 lanes. It goes through the
 * row in chunks: first the chunk's groups, bias times sum of activations, 8 groups at a time; then
 * its blocks: the sum over a lane's elements in a block, times the lane's scale. Last the lanes are
 * added (sum_lanes). Every function does this, and so bits do not depend on which one is called. */
#ifndef EXPERT_NETWORK_PRODUCT_H
#define EXPERT_NETWORK_PRODUCT_H

#include "formats.h"
#include "../table.h"

/* Elements of a chunk: 8 groups of 128 at least, so that vectors of groups are never cut. */
#define CHUNK 1024
#define CHUNK_GROUPS (CHUNK / 32)

/* Every quantized format with the groups that a block of it can have. */
#define EACH_KERNEL(X)                                                                        \
    X(BITS2, 1) X(BITS2, 2) X(BITS2, 4) X(BITS3, 1) X(BITS3, 2) X(BITS4, 1) X(BITS4, 2)       \
    X(BITS5, 1) X(BITS5, 2) X(BITS6, 1) X(BITS8, 1) X(FP4, 1) X(FP4, 2)
#define KERNEL_KEY(format, per) ((format) * 8 + (per))

/* The blocks and groups of a chunk. `cut`: elements in one block more, the row's last; 0 if none. */
struct chunk {
    long first_block, blocks, first_group, groups;
    int cut;
};

INLINE struct chunk chunk_at(int format, const struct matrix *m, long at) {
    long width = 32 * format_steps(format), end = at + CHUNK < m->cols ? at + CHUNK : m->cols;
    return (struct chunk){at / width, (end - at) / width, at / m->group, (end - at) / m->group,
                          (int)((end - at) % width)};
}

/* The block at `p`, of which the row has `cut` elements. */
INLINE void unpack_cut(int format, const uint8_t *p, int cut, vb *steps) {
    uint8_t whole[64] = {0};
    memcpy(whole, p, (size_t)(cut * format_bits(format) / 8));
    unpack(format, whole, steps);
}

/* A lane's share of a block: sum of q * x. */
INLINE vf dot_floats(int format, const vb *steps, const float *x) {
    vf sum = all(0);
    for (int s = 0; s < format_steps(format); s++, x += 32) {
        vu q = (vu)steps[s];
        sum = fma_(to_float((vi)(q & 0xff)), load(x), sum);
        sum = fma_(to_float((vi)(q & 0xff00)), load(x + 8), sum);
        sum = fma_(to_float((vi)(q & 0xff0000)), load(x + 16), sum);
        sum = fma_(to_float((vi)(q >> 24)), load(x + 24), sum);
    }
    return sum;
}

INLINE vf dot_bytes(int format, const vb *steps, const int8_t *x, const int32_t *extra) {
    if (format == BITS8) return to_float(dots_wide(steps[0], load_bytes(x), load_ints(extra)));
    dots sum = {0};
    for (int s = 0; s < format_steps(format); s++)
        sum = dots_add(sum, steps[s], load_bytes(x + 32 * s));
    return to_float(dots_sum(sum));
}

#endif
