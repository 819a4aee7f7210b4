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
#define CHUNK 4096
#define CHUNK_GROUPS (CHUNK / 32)

/* Every quantized format with the groups that a block of it can have. */
#define EACH_KERNEL(X)                                                                        \
    X(BITS2, 1) X(BITS2, 2) X(BITS2, 4) X(BITS3, 1) X(BITS3, 2) X(BITS4, 1) X(BITS4, 2)       \
    X(BITS5, 1) X(BITS5, 2) X(BITS6, 1) X(BITS8, 1) X(FP4, 1) X(FP4, 2)
#define EACH_FORMAT(X) X(BITS2) X(BITS3) X(BITS4) X(BITS5) X(BITS6) X(BITS8) X(FP4)
#define KERNEL_KEY(format, per) ((format) * 8 + (per))

/* The blocks and groups of a chunk. `cut`: elements in one block more, the row's last; 0 if none. */
struct chunk {
    long first_block, blocks, first_group, groups;
    int cut;
};

INLINE struct chunk chunk_at(int format, const struct matrix *m, long at) {
    long width = 32 * format_steps(format), end = at + CHUNK < m->cols ? at + CHUNK : m->cols;
    return (struct chunk){at / width, (end - at) / width, at >> m->group_shift,
                          (end - at) >> m->group_shift, (int)((end - at) % width)};
}

/* Rows of activations that share an unpacked panel. */
#define GEMM_ROWS 96

/* Rows of weights that are multiplied in step with each other, at most. */
#define MOST_ROWS 4

/* Blocks of some rows of weights, `stride` apart. */
struct blocks {
    const uint8_t *first;
    size_t stride;
};

/* Each lane's share of a block of `rows` rows: sums of q * x. Rows go in step with each other: a
 * chain of sums is long, and a processor sees only so far ahead. */
INLINE void dot_floats(int format, int rows, struct blocks w, const float *x, vf *sum) {
    for (int r = 0; r < rows; r++) sum[r] = all(0);
    for (int s = 0; s < format_steps(format); s++, x += 32) {
        vu q[MOST_ROWS];
        for (int r = 0; r < rows; r++) q[r] = (vu)unpack(format, w.first + r * w.stride, s);
        for (int byte = 0; byte < 4; byte++) {
            vf some = load(x + 8 * byte);
            for (int r = 0; r < rows; r++) {
                vu one = byte == 3 ? q[r] >> 24 : q[r] & 0xffu << 8 * byte;
                sum[r] = fma_(to_float((vi)one), some, sum[r]);
            }
        }
    }
}

INLINE void dot_bytes(int format, int rows, struct blocks w, const int8_t *x, const int32_t *extra,
                      vf *sum) {
    if (format == BITS8) {
        for (int r = 0; r < rows; r++) {
            vb q = load_bytes(w.first + r * w.stride);
            sum[r] = to_float(dots_wide(q, load_bytes(x), load_ints(extra)));
        }
        return;
    }
    dots whole[MOST_ROWS];
    for (int r = 0; r < rows; r++) whole[r] = (dots){0};
    for (int s = 0; s < format_steps(format); s++)
        for (int r = 0; r < rows; r++) {
            vb q = unpack(format, w.first + r * w.stride, s);
            whole[r] = dots_add(whole[r], q, load_bytes(x + 32 * s));
        }
    for (int r = 0; r < rows; r++) sum[r] = to_float(dots_sum(whole[r]));
}

#endif
