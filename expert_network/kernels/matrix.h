/* Weights as MLX packs them, and rows made ready for products with them. */
#ifndef EXPERT_NETWORK_MATRIX_H
#define EXPERT_NETWORK_MATRIX_H

#include <stddef.h>
#include <stdint.h>

enum element { F32, BF16, F16, E8M0 };

/* The quantized formats come first. */
enum format { BITS2, BITS3, BITS4, BITS5, BITS6, BITS8, FP4, PLAIN };

/* `count` matrices of `rows` rows: row n of matrix e stands at weight + (e * rows + n) * row_bytes,
 * and its groups' scales and biases likewise. */
struct matrix {
    enum format format;
    enum element element;       /* of plain weights, else of scales and biases */
    long count, rows, cols;
    long group;                 /* elements per scale, 1 << group_shift; 0 in plain weights */
    int group_shift;
    size_t row_bytes, scale_bytes;   /* scale_bytes: of a row's scales, or of its biases */
    const uint8_t *weight, *scales, *biases;
    const float *bias;          /* (count, rows) or NULL */
};

/* A block is what a format unpacks at once: 8 lanes with a run of elements each. In each of its
 * STEPS a lane gives 4 elements, as unsigned bytes. */
static inline int format_steps(int format) {
    static const int steps[] = {4, 2, 2, 2, 1, 1, 2, 0};
    return steps[format];
}
static inline int format_bits(int format) {
    static const int bits[] = {2, 3, 4, 5, 6, 8, 4, 0};
    return bits[format];
}
/* The place in its lane's run of the element that is byte `byte` in step `step`. */
static inline int format_place(int format, int step, int byte) {
    if (format == BITS3 || format == BITS5) return step * 4 + byte;
    return byte * format_steps(format) + step;
}

/* How a prepared row is laid out. Rows of equal layouts can be shared between matrices. */
struct layout {
    int format;                 /* a quantized one, or PLAIN */
    int precision;              /* 0: floats, 1: int8 */
    long cols, group, blocks, groups;
    int per, shift;             /* a block has `per` groups, or 1 << shift blocks are a group */
    size_t at_scales, at_sums, at_extra;   /* of floats, of floats, of int32 (BITS8, int8 only) */
    size_t bytes;               /* a multiple of 64 */
};

/* Rows of weights that one row of activations goes through at once: chains for the processor, and
 * streams for the memory, each through rows that follow one another. (Neighbours in step would be
 * one stream, which is read half as fast.) */
#define STREAMS 4
/* Bytes between what is computed and what is asked for: of weights, and of scales and biases. */
#define AHEAD 2048
#define SCALES_AHEAD 128

static inline void ask_lines(const uint8_t *p, size_t bytes) {
    for (size_t at = 0; at < bytes; at += 64) __builtin_prefetch(p + at);
}

/* Ask for the beginnings of the streams through rows first..first + count of matrix `expert`, some
 * microseconds before they are multiplied by one row: nothing else can see that they come next. */
static inline void ask_for(const struct matrix *m, long expert, long first, long count) {
    size_t rows = (size_t)(count / STREAMS), bytes = rows * m->row_bytes;
    for (size_t s = 0; s < STREAMS; s++) {
        size_t row = (size_t)(expert * m->rows + first) + s * rows;
        ask_lines(m->weight + row * m->row_bytes, bytes < AHEAD ? bytes : AHEAD);
        if (m->scales) ask_lines(m->scales + row * m->scale_bytes, SCALES_AHEAD);
        if (m->biases) ask_lines(m->biases + row * m->scale_bytes, SCALES_AHEAD);
    }
}

void layout_of(const struct matrix *matrix, int precision, struct layout *layout);
int layout_same(const struct layout *a, const struct layout *b);

#endif
