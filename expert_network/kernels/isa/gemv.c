/* Products of one row of activations: weights are used as they come from memory. */
#include "product.h"

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

typedef float groups[STREAMS][CHUNK_GROUPS + LANES];

/* Where a chunk's groups begin: of the first stream and the row. */
struct source {
    const uint8_t *scales, *biases;
    size_t stride;
    const float *row_scales, *sums;
};

/* The scales of `count` groups of the streams into `out`, their biases into `total`. */
INLINE void take_some(enum element element, int precision, struct source from, long g, long count,
                      groups out, vf *total) {
    for (int r = 0; r < STREAMS; r++) {
        size_t at = r * from.stride + (size_t)(g * element_size(element));
        vf scale, bias;
        load_scales(element, from.scales + at, from.biases + at, count, &scale, &bias);
        if (precision) scale *= load(from.row_scales + g);
        store(out[r] + g, scale);
        total[r] = fma_(bias, load(from.sums + g), total[r]);
    }
}

/* All of a chunk's; what rows that follow have in their place is asked for. */
INLINE void take_groups(enum element element, int precision, struct source from, long count,
                        groups out, vf *total) {
    for (long at = 0; at < count * element_size(element); at += 64)
        for (int r = 0; r < STREAMS; r++) {
            size_t ahead = r * from.stride + (size_t)at + SCALES_AHEAD;
            __builtin_prefetch(from.scales + ahead);
            if (element != E8M0) __builtin_prefetch(from.biases + ahead);
        }
    vf sum[STREAMS];
    for (int r = 0; r < STREAMS; r++) sum[r] = total[r];
    long g = 0;
    for (; g + LANES <= count; g += LANES) take_some(element, precision, from, g, LANES, out, sum);
    if (g < count) take_some(element, precision, from, g, count - g, out, sum);
    for (int r = 0; r < STREAMS; r++) {
        total[r] = sum[r];
        /* The lanes beyond the groups of a block that is cut short. */
        store(out[r] + count, all(0));
    }
}

/* The same, compiled for each kind of element: telling them apart takes longer than a group. */
static __attribute__((noinline)) void take_chunk(int precision, const struct matrix *m, long n,
                                                 long apart, const struct chunk *c,
                                                 const struct row *row, groups out, vf *total) {
    size_t at = (size_t)n * m->scale_bytes + (size_t)(c->first_group * element_size(m->element));
    struct source from = {m->scales + at, m->biases ? m->biases + at : m->scales,
                          (size_t)apart * m->scale_bytes, row->scales + c->first_group,
                          row->sums + c->first_group};
    switch (m->element) {
#define CASE(element) \
    case element: take_groups(element, precision, from, c->groups, out, total); return;
        CASE(F32) CASE(BF16) CASE(F16) CASE(E8M0)
#undef CASE
    }
}

/* total += the block's share of the product; block `block` of the row, `at` of its chunk. */
INLINE void take_block(int format, int precision, int per, struct blocks w, int shift,
                       const struct row *row, long block, long at,
                       groups scales, vf *total) {
    long place = block * 32 * format_steps(format);
    vf sum[STREAMS];
    if (precision)
        dot_bytes(format, STREAMS, w, (const int8_t *)row->x + place, row->extra + place / 4, sum);
    else
        dot_floats(format, STREAMS, w, (const float *)row->x + place, sum);
    for (int r = 0; r < STREAMS; r++)
        total[r] = fma_(sum[r], lanes_of(scales[r], at, per, shift), total[r]);
}

/* A row's last block, if it is cut short: of copies that are followed by zeros. */
static __attribute__((noinline)) void take_cut_block(int format, int precision, int per,
                                                     const struct matrix *m, struct blocks w,
                                                     int shift, const struct row *row,
                                                     const struct chunk *c, groups scales,
                                                     vf *total) {
    uint8_t copy[STREAMS][64] = {{0}};
    long block = c->first_block + c->blocks;
    for (int r = 0; r < STREAMS; r++)
        memcpy(copy[r], w.first + r * w.stride, (size_t)(c->cut * format_bits(format) / 8));
    w = (struct blocks){copy[0], 64};
    switch (m->format) {
#define CUT(format)                                                                       \
    case format:                                                                          \
        if (precision) take_block(format, 1, per, w, shift, row, block, c->blocks, scales, total); \
        else take_block(format, 0, per, w, shift, row, block, c->blocks, scales, total);  \
        return;
        EACH_FORMAT(CUT)
    case PLAIN: return;
    }
}

/* Each line once: half of the streams at a time. */
INLINE void ask_ahead(struct blocks w, long block) {
    for (int r = 0; r < STREAMS; r += 2)
        __builtin_prefetch(w.first + (size_t)(r + (block & 1)) * w.stride + AHEAD);
}

/* out[r * apart] = weights' row n + r * apart times the row, for r below STREAMS. */
INLINE void streams(int format, int precision, int per, const struct matrix *m,
                    int shift, long n, long apart, const struct row *row, float *out) {
    groups scales;
    vf until[STREAMS];
    for (int r = 0; r < STREAMS; r++) until[r] = all(0);
    for (long at = 0; at < m->cols; at += CHUNK) {
        struct chunk c = chunk_at(format, m, at);
        struct blocks w = {m->weight + (size_t)n * m->row_bytes, (size_t)apart * m->row_bytes};
        w.first += c.first_block * block_bytes(format);
        take_chunk(precision, m, n, apart, &c, row, scales, until);
        vf total[STREAMS];
        for (int r = 0; r < STREAMS; r++) total[r] = until[r];
        for (long b = 0; b < c.blocks; b++, w.first += block_bytes(format)) {
            ask_ahead(w, b);
            take_block(format, precision, per, w, shift, row, c.first_block + b, b, scales, total);
        }
        for (int r = 0; r < STREAMS; r++) until[r] = total[r];
        if (c.cut) take_cut_block(format, precision, per, m, w, shift, row, &c, scales, until);
    }
    for (int r = 0; r < STREAMS; r++) out[r * apart] = sum_lanes(until[r]);
}

INLINE void plain_streams(enum element element, const struct matrix *m, long n, long apart,
                          const float *x, float *out) {
    long size = element == F32 ? 4 : 2;
    const uint8_t *w = m->weight + (size_t)n * m->row_bytes;
    size_t stride = (size_t)apart * m->row_bytes;
    vf total[STREAMS];
    for (int r = 0; r < STREAMS; r++) total[r] = all(0);
    for (long k = 0; k < m->cols; k += LANES)
        for (int r = 0; r < STREAMS; r++) {
            const uint8_t *p = w + (size_t)r * stride + k * size;
            __builtin_prefetch(p + AHEAD);
            total[r] = fma_(load_elements(element, p, m->cols - k), load(x + k), total[r]);
        }
    for (int r = 0; r < STREAMS; r++) out[r * apart] = sum_lanes(total[r]);
}

/* Functions of their own: the compiler sees one loop at a time. */
typedef void kernel(const struct matrix *, const struct layout *, long, long, const char *, float *);

#define KERNEL(format, per, precision)                                                            \
    static void format##_##per##_##precision(const struct matrix *m, const struct layout *layout, \
                                             long n, long apart, const char *x, float *out) {     \
        struct row row = row_at(layout, x);                                                       \
        streams(format, precision, per, m, layout->shift, n, apart, &row, out);                   \
    }
#define BOTH(format, per) KERNEL(format, per, 0) KERNEL(format, per, 1)
EACH_KERNEL(BOTH)

#define PLAIN_KERNEL(element)                                                                \
    static void plain_##element(const struct matrix *m, const struct layout *layout, long n, \
                                long apart, const char *x, float *out) {                     \
        (void)layout;                                                                        \
        plain_streams(element, m, n, apart, (const float *)(const void *)x, out);            \
    }
PLAIN_KERNEL(F32)
PLAIN_KERNEL(BF16)
PLAIN_KERNEL(F16)

static kernel *chosen(const struct matrix *m, const struct layout *layout) {
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
    kernel *multiply = chosen(m, layout);
    long apart = count / STREAMS;
    for (long done = 0; done < apart; done++)
        multiply(m, layout, n + done, apart, x, out + done);
    /* Rows that are left are computed with some that were, or each as all four: to the same bits. */
    if (apart && count % STREAMS)
        multiply(m, layout, n + count - STREAMS, 1, x, out + count - STREAMS);
    for (long left = 0; !apart && left < count; left++)
        multiply(m, layout, n + left, 0, x, out + left);
}
