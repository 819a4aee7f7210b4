/* Products of one row of activations: weights are used as they come from memory. */
#include "product.h"

/* Rows of weights at once: streams for the memory, chains for the processor. */
#define STREAMS 4

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
}

INLINE vf dot(int format, int precision, const vb *q, const struct row *row, long block) {
    long at = block * 32 * format_steps(format);
    if (precision) return dot_bytes(format, q, (const int8_t *)row->x + at, row->extra + at / 4);
    return dot_floats(format, q, (const float *)row->x + at);
}

/* out[0..rows) = weights' rows n.. times the row; `rows` is a constant, at most STREAMS. */
INLINE void streams(int format, int precision, int per, int rows, const struct matrix *m,
                    int shift, long n, const struct row *row, float *out) {
    float scales[STREAMS][CHUNK_GROUPS + LANES] = {{0}};
    vf total[STREAMS];
    vb q[MOST_STEPS];
    for (int r = 0; r < rows; r++) total[r] = all(0);
    for (long at = 0; at < m->cols; at += CHUNK) {
        struct chunk c = chunk_at(format, m, at);
        const uint8_t *w = m->weight + (size_t)n * m->row_bytes;
        w += c.first_block * block_bytes(format);
        for (int r = 0; r < rows; r++)
            take_groups(precision, m, n + r, &c, row, scales[r], &total[r]);
        for (long b = 0; b < c.blocks; b++, w += block_bytes(format))
            for (int r = 0; r < rows; r++) {
                const uint8_t *p = w + (size_t)r * m->row_bytes;
                __builtin_prefetch(p + STREAMS * m->row_bytes);
                unpack(format, p, q);
                vf sum = dot(format, precision, q, row, c.first_block + b);
                total[r] = fma_(sum, lanes_of(scales[r], b, per, shift), total[r]);
            }
        for (int r = 0; c.cut && r < rows; r++) {
            unpack_cut(format, w + (size_t)r * m->row_bytes, c.cut, q);
            vf sum = dot(format, precision, q, row, c.first_block + c.blocks);
            total[r] = fma_(sum, lanes_of(scales[r], c.blocks, per, shift), total[r]);
        }
    }
    for (int r = 0; r < rows; r++) out[r] = sum_lanes(total[r]);
}

INLINE void quantized(int format, int precision, int per, const struct matrix *m,
                      const struct layout *layout, long n, long count, const char *x, float *out) {
    struct row row = row_at(layout, x);
    long done = 0;
    for (; done + STREAMS <= count; done += STREAMS)
        streams(format, precision, per, STREAMS, m, layout->shift, n + done, &row, out + done);
    for (; done < count; done++)
        streams(format, precision, per, 1, m, layout->shift, n + done, &row, out + done);
}

INLINE void plain_streams(enum element element, int rows, const struct matrix *m, long n,
                          const float *x, float *out) {
    long size = element == F32 ? 4 : 2;
    const uint8_t *w = m->weight + (size_t)n * m->row_bytes;
    vf total[STREAMS];
    for (int r = 0; r < rows; r++) total[r] = all(0);
    for (long k = 0; k < m->cols; k += LANES)
        for (int r = 0; r < rows; r++) {
            const uint8_t *p = w + (size_t)r * m->row_bytes + k * size;
            __builtin_prefetch(p + STREAMS * m->row_bytes);
            total[r] = fma_(load_elements(element, p, m->cols - k), load(x + k), total[r]);
        }
    for (int r = 0; r < rows; r++) out[r] = sum_lanes(total[r]);
}

INLINE void plain(enum element element, const struct matrix *m, long n, long count, const float *x,
                  float *out) {
    long done = 0;
    for (; done + STREAMS <= count; done += STREAMS)
        plain_streams(element, STREAMS, m, n + done, x, out + done);
    for (; done < count; done++) plain_streams(element, 1, m, n + done, x, out + done);
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
