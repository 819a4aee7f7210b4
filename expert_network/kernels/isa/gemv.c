/* Products of one row of activations: weights are used as they come from memory. */
#include "product.h"

/* Rows of weights at once: chains for the processor, and streams for the memory, each through rows
 * that follow one another: neighbours in step would be one stream, which is read half as fast. */
#define STREAMS 4
/* Bytes between what is computed and what is asked for. */
#define AHEAD 2048

/* A prepared row. */
struct row {
    const char *x;
    const float *scales, *sums;
    const int32_t *extra;
};

INLINE struct row row_at(const struct layout *layout, const char *x) {
    return (struct row){x, (const float *)(x + layout->at_scales),
                        (const float *)(x + layout->at_sums),
                        (const int32_t *)(x + layout->at_extra)};
}

/* The scales of a chunk's groups into `out`, their biases into `total`. */
INLINE void take_groups(int precision, const struct matrix *m, long n, const struct chunk *c,
                        const struct row *row, float *out, vf *total) {
    for (long g = 0; g < c->groups; g += LANES) {
        vf scale, bias;
        load_scales(m, n, c->first_group + g, &scale, &bias);
        if (precision) scale *= load(row->scales + c->first_group + g);
        store(out + g, scale);
        *total = fma_(bias, load(row->sums + c->first_group + g), *total);
    }
    /* The lanes beyond the groups of a block that is cut short. */
    store(out + c->groups, all(0));
}

/* total += the block's share of the product; block `block` of the row, `at` of its chunk. */
INLINE void take_block(int format, int precision, int per, int rows, struct blocks w, int shift,
                       const struct row *row, long block, long at,
                       const float scales[STREAMS][CHUNK_GROUPS + LANES], vf *total) {
    long place = block * 32 * format_steps(format);
    vf sum[STREAMS];
    if (precision)
        dot_bytes(format, rows, w, (const int8_t *)row->x + place, row->extra + place / 4, sum);
    else
        dot_floats(format, rows, w, (const float *)row->x + place, sum);
    for (int r = 0; r < rows; r++)
        total[r] = fma_(sum[r], lanes_of(scales[r], at, per, shift), total[r]);
}

/* A row's last block, if it is cut short: of a copy that is followed by zeros. */
INLINE struct blocks whole_blocks(int format, int rows, struct blocks w, int cut,
                                  uint8_t copy[STREAMS][64]) {
    for (int r = 0; r < rows; r++) {
        memset(copy[r], 0, 64);
        memcpy(copy[r], w.first + r * w.stride, (size_t)(cut * format_bits(format) / 8));
    }
    return (struct blocks){copy[0], 64};
}

/* out[r * apart] = weights' row n + r * apart times the row, for r below the constant `rows`. */
INLINE void streams(int format, int precision, int per, int rows, const struct matrix *m,
                    int shift, long n, long apart, const struct row *row, float *out) {
    float scales[STREAMS][CHUNK_GROUPS + LANES];
    vf total[STREAMS];
    for (int r = 0; r < rows; r++) total[r] = all(0);
    for (long at = 0; at < m->cols; at += CHUNK) {
        struct chunk c = chunk_at(format, m, at);
        struct blocks w = {m->weight + (size_t)n * m->row_bytes, (size_t)apart * m->row_bytes};
        w.first += c.first_block * block_bytes(format);
        for (int r = 0; r < rows; r++)
            take_groups(precision, m, n + r * apart, &c, row, scales[r], &total[r]);
        for (long b = 0; b < c.blocks; b++, w.first += block_bytes(format)) {
            for (int r = 0; r < rows; r += 2)
                __builtin_prefetch(w.first + (size_t)(r + (b & 1)) * w.stride + AHEAD);
            take_block(format, precision, per, rows, w, shift, row, c.first_block + b, b, scales,
                       total);
        }
        if (c.cut) {
            uint8_t copy[STREAMS][64];
            w = whole_blocks(format, rows, w, c.cut, copy);
            take_block(format, precision, per, rows, w, shift, row, c.first_block + c.blocks,
                       c.blocks, scales, total);
        }
    }
    for (int r = 0; r < rows; r++) out[r * apart] = sum_lanes(total[r]);
}

INLINE void quantized(int format, int precision, int per, const struct matrix *m,
                      const struct layout *layout, long n, long count, const char *x, float *out) {
    struct row row = row_at(layout, x);
    long apart = count / STREAMS, done = 0;
    for (; done < apart; done++)
        streams(format, precision, per, STREAMS, m, layout->shift, n + done, apart, &row,
                out + done);
    for (done = apart * STREAMS; done < count; done++)
        streams(format, precision, per, 1, m, layout->shift, n + done, 1, &row, out + done);
}

INLINE void plain_streams(enum element element, int rows, const struct matrix *m, long n,
                          long apart, const float *x, float *out) {
    long size = element == F32 ? 4 : 2;
    const uint8_t *w = m->weight + (size_t)n * m->row_bytes;
    size_t stride = (size_t)apart * m->row_bytes;
    vf total[STREAMS];
    for (int r = 0; r < rows; r++) total[r] = all(0);
    for (long k = 0; k < m->cols; k += LANES)
        for (int r = 0; r < rows; r++) {
            const uint8_t *p = w + (size_t)r * stride + k * size;
            __builtin_prefetch(p + AHEAD);
            total[r] = fma_(load_elements(element, p, m->cols - k), load(x + k), total[r]);
        }
    for (int r = 0; r < rows; r++) out[r * apart] = sum_lanes(total[r]);
}

INLINE void plain(enum element element, const struct matrix *m, long n, long count, const float *x,
                  float *out) {
    long apart = count / STREAMS, done = 0;
    for (; done < apart; done++)
        plain_streams(element, STREAMS, m, n + done, apart, x, out + done);
    for (done = apart * STREAMS; done < count; done++)
        plain_streams(element, 1, m, n + done, 1, x, out + done);
}

/* Functions of their own: the compiler sees one loop at a time. */
typedef void gemv(const struct matrix *, const struct layout *, long, long, const char *, float *);

#define KERNEL(format, per, precision)                                                          \
    static void format##_##per##_##precision(const struct matrix *m, const struct layout *layout, \
                                             long n, long count, const char *x, float *out) {     \
        quantized(format, precision, per, m, layout, n, count, x, out);                           \
    }
#define BOTH(format, per) KERNEL(format, per, 0) KERNEL(format, per, 1)
EACH_KERNEL(BOTH)

#define PLAIN_KERNEL(element)                                                            \
    static void plain_##element(const struct matrix *m, const struct layout *layout, long n, \
                                long count, const char *x, float *out) {                     \
        (void)layout;                                                                        \
        plain(element, m, n, count, (const float *)(const void *)x, out);                    \
    }
PLAIN_KERNEL(F32)
PLAIN_KERNEL(BF16)
PLAIN_KERNEL(F16)

static gemv *chosen(const struct matrix *m, const struct layout *layout) {
    if (m->format == PLAIN)
        return m->element == F32 ? plain_F32 : m->element == BF16 ? plain_BF16 : plain_F16;
    switch (KERNEL_KEY(layout->format, layout->per)) {
#define CASE(format, per)         \
    case KERNEL_KEY(format, per): \
        return layout->precision ? format##_##per##_1 : format##_##per##_0;
        EACH_KERNEL(CASE)
    }
    return NULL;
}

void ISA(gemv)(const struct matrix *m, const struct layout *layout, long n, long count,
               const char *x, float *out) {
    chosen(m, layout)(m, layout, n, count, x, out);
}
