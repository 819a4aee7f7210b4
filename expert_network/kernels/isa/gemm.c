/* Products of many rows of activations: weights are unpacked once for all of them, a panel of
 * columns at a time, and multiplied in tiles that stay in registers. */
#include "product.h"

/* A tile is TILE columns of weights by at most MOST_TALL rows of activations, a panel PANEL columns
 * by SPAN bytes of each unpacked column: panel and activations stay in the first cache. */
#define TILE 4
#define PANEL 8
#define SPAN 2048
#define MOST_TALL 3

struct panel {
    vf unpacked[PANEL * SPAN / sizeof(vf)];         /* [tile][block][step (and byte)][column] */
    float scales[PANEL][CHUNK_GROUPS + LANES], biases[PANEL][CHUNK_GROUPS + LANES];
    vf total[GEMM_ROWS][PANEL];
};

/* Where a tile's rows are, at the first of its blocks. */
struct tile {
    const vf *w;
    const char *x[MOST_TALL];
    const int32_t *extra[MOST_TALL];
    const float *row_scales[MOST_TALL];     /* from the chunk's first group on */
    const float (*scales)[CHUNK_GROUPS + LANES];
    vf (*total)[PANEL];
    long blocks, at;                        /* `at`: number of the first in its chunk */
    int steps, per, shift;
};

INLINE void unpack_floats(int format, const uint8_t *w, vf *to) {
    for (int s = 0; s < format_steps(format); s++) {
        vu q = (vu)unpack(format, w, s);
        for (int byte = 0; byte < 4; byte++, to += TILE)
            *to = to_float((vi)(byte == 3 ? q >> 24 : q & 0xffu << 8 * byte));
    }
}

INLINE void unpack_bytes(int format, const uint8_t *w, vf *to) {
    for (int s = 0; s < format_steps(format); s++, to += TILE) *to = (vf)unpack(format, w, s);
}

/* Blocks first..first + count of one column, each TILE * (vectors of a block) apart; the one after
 * the last whole block is cut. */
INLINE void unpack_column(int format, int precision, const struct matrix *m, long column,
                          long first, long count, vf *to) {
    long whole = m->cols / (32 * format_steps(format)), cut = m->cols % (32 * format_steps(format));
    const uint8_t *w = m->weight + (size_t)column * m->row_bytes;
    for (long b = first; b < first + count; b++) {
        uint8_t copy[64] = {0};
        const uint8_t *p = w + b * block_bytes(format);
        if (b == whole) p = memcpy(copy, p, (size_t)(cut * format_bits(format) / 8));
        if (precision) unpack_bytes(format, p, to);
        else unpack_floats(format, p, to);
        to += TILE * format_steps(format) * (precision ? 1 : 4);
    }
}

typedef void unpacker(const struct matrix *, long, long, long, vf *);

#define UNPACKER(format, precision)                                                       \
    static void format##_##precision(const struct matrix *m, long column, long first,     \
                                     long count, vf *to) {                                \
        unpack_column(format, precision, m, column, first, count, to);                    \
    }
#define BOTH(format) UNPACKER(format, 0) UNPACKER(format, 1)
EACH_FORMAT(BOTH)

static unpacker *unpacker_of(const struct layout *layout) {
#define PAIR(format) {format##_0, format##_1},
    static unpacker *const all_of[][2] = {EACH_FORMAT(PAIR)};
    return all_of[layout->format][layout->precision];
}

/* The sums of a block stay in registers, the totals do not: there is one for every sum. `tall` is a
 * constant, and so is `per` where it is 1; else 0 stands for the layout's. */
INLINE void multiply_floats(int tall, int per, const struct tile *t) {
    const vf *w = t->w;
    vf total[MOST_TALL][TILE];
    long at = 0;
    for (int r = 0; r < tall; r++)
        for (int c = 0; c < TILE; c++) total[r][c] = t->total[r][c];
    for (long b = 0; b < t->blocks; b++) {
        vf sum[MOST_TALL][TILE];
        for (int r = 0; r < tall; r++)
            for (int c = 0; c < TILE; c++) sum[r][c] = all(0);
        for (int s = 0; s < 4 * t->steps; s++, at += LANES, w += TILE)
            for (int r = 0; r < tall; r++) {
                vf x = load((const float *)(const void *)t->x[r] + at);
                for (int c = 0; c < TILE; c++) sum[r][c] = fma_(w[c], x, sum[r][c]);
            }
        for (int c = 0; c < TILE; c++) {
            vf scale = lanes_of(t->scales[c], t->at + b, per ? per : t->per, t->shift);
            for (int r = 0; r < tall; r++) total[r][c] = fma_(sum[r][c], scale, total[r][c]);
        }
    }
    for (int r = 0; r < tall; r++)
        for (int c = 0; c < TILE; c++) t->total[r][c] = total[r][c];
}

INLINE void multiply_plain(int tall, const struct tile *t) {
    const vf *w = t->w;
    vf sum[MOST_TALL][TILE];
    for (int r = 0; r < tall; r++)
        for (int c = 0; c < TILE; c++) sum[r][c] = t->total[r][c];
    for (long b = 0; b < t->blocks; b++, w += TILE)
        for (int r = 0; r < tall; r++) {
            vf x = load((const float *)(const void *)t->x[r] + b * LANES);
            for (int c = 0; c < TILE; c++) sum[r][c] = fma_(w[c], x, sum[r][c]);
        }
    for (int r = 0; r < tall; r++)
        for (int c = 0; c < TILE; c++) t->total[r][c] = sum[r][c];
}

/* The same for int8, where `tall` is at most 2 and `steps` a constant: 0 stands for BITS8's one. */
INLINE void multiply_bytes(int steps, int tall, int per, const struct tile *t) {
    float scales[2][TILE][CHUNK_GROUPS + LANES];
    vf total[2][TILE];
    long first = (t->at >> t->shift) * t->per;
    long end = ((t->at + t->blocks - 1) >> t->shift) * t->per + t->per;
    for (int r = 0; r < tall; r++)
        for (int c = 0; c < TILE; c++) {
            for (long g = first; g < end; g += LANES)
                store(&scales[r][c][g], load(&t->scales[c][g]) * load(&t->row_scales[r][g]));
            total[r][c] = t->total[r][c];
        }
    const vf *w = t->w;
    int width = steps ? steps : 1;
    for (long b = 0; b < t->blocks; b++, w += TILE * width)
        for (int c = 0; c < TILE; c++)
            for (int r = 0; r < tall; r++) {
                const char *x = t->x[r] + b * 32 * width;
                vi sum;
                if (steps) {
                    dots part = {0};
                    for (int s = 0; s < steps; s++)
                        part = dots_add(part, (vb)w[s * TILE + c], load_bytes(x + 32 * s));
                    sum = dots_sum(part);
                } else {
                    sum = dots_wide((vb)w[c], load_bytes(x), load_ints(t->extra[r] + b * LANES));
                }
                vf scale = lanes_of(scales[r][c], t->at + b, per ? per : t->per, t->shift);
                total[r][c] = fma_(to_float(sum), scale, total[r][c]);
            }
    for (int r = 0; r < tall; r++)
        for (int c = 0; c < TILE; c++) t->total[r][c] = total[r][c];
}

typedef void multiplier(const struct tile *);

#define PLAIN_TILE(tall) \
    static void plain_##tall(const struct tile *t) { multiply_plain(tall, t); }
#define FLOATS(tall, per) \
    static void floats_##tall##_##per(const struct tile *t) { multiply_floats(tall, per, t); }
#define BYTES(steps, per)                                                                       \
    static void bytes_##steps##_1_##per(const struct tile *t) { multiply_bytes(steps, 1, per, t); } \
    static void bytes_##steps##_2_##per(const struct tile *t) { multiply_bytes(steps, 2, per, t); }
PLAIN_TILE(1) PLAIN_TILE(2) PLAIN_TILE(3)
FLOATS(1, 0) FLOATS(2, 0) FLOATS(3, 0) FLOATS(1, 1) FLOATS(2, 1) FLOATS(3, 1)
BYTES(0, 1) BYTES(1, 1) BYTES(2, 0) BYTES(2, 1) BYTES(4, 0) BYTES(4, 1)

static multiplier *multiplier_of(const struct layout *layout, int tall) {
    static multiplier *const plain[] = {plain_1, plain_2, plain_3};
    static multiplier *const floats[][2] = {
        {floats_1_0, floats_1_1}, {floats_2_0, floats_2_1}, {floats_3_0, floats_3_1}};
    static multiplier *const bytes[][2][2] = {
        {{NULL, bytes_0_1_1}, {NULL, bytes_0_2_1}},
        {{NULL, bytes_1_1_1}, {NULL, bytes_1_2_1}},
        {{bytes_2_1_0, bytes_2_1_1}, {bytes_2_2_0, bytes_2_2_1}},
        {{NULL, NULL}, {NULL, NULL}},
        {{bytes_4_1_0, bytes_4_1_1}, {bytes_4_2_0, bytes_4_2_1}}};
    if (layout->format == PLAIN) return plain[tall - 1];
    if (!layout->precision) return floats[tall - 1][layout->per == 1];
    int steps = layout->format == BITS8 ? 0 : format_steps(layout->format);
    return bytes[steps][tall - 1][layout->per == 1];
}

/* A chunk's scales into the panel, and biases into the totals: group by group, as in gemv. */
static void take_groups(const struct matrix *m, const struct layout *layout, const struct chunk *c,
                        const long *columns, const char *const *x, long rows, struct panel *p) {
    for (long g = 0; g < c->groups; g += LANES)
        for (int n = 0; n < PANEL; n++) {
            size_t at = (size_t)columns[n] * m->scale_bytes +
                        (size_t)((c->first_group + g) * element_size(m->element));
            vf scale, bias;
            load_scales(m->element, m->scales + at, m->biases ? m->biases + at : NULL,
                        c->groups - g, &scale, &bias);
            store(&p->scales[n][g], scale);
            store(&p->biases[n][g], bias);
        }
    for (int n = 0; n < PANEL; n++) store(&p->scales[n][c->groups], all(0));
    for (long r = 0; r < rows; r++) {
        const float *sums = (const float *)(const void *)(x[r] + layout->at_sums) + c->first_group;
        for (int n = 0; n < PANEL; n++)
            for (long g = 0; g < c->groups; g += LANES)
                p->total[r][n] = fma_(load(&p->biases[n][g]), load(sums + g), p->total[r][n]);
    }
}

/* All rows through the blocks that are unpacked: `first` of the row, `at` of its chunk. */
static void multiply_rows(const struct layout *layout, const char *const *x, long rows, long first,
                          long at, long count, long first_group, struct panel *p) {
    long block = layout->format == PLAIN     ? LANES * 4
                 : layout->precision         ? 32L * format_steps(layout->format)
                                             : 128L * format_steps(layout->format);
    int most = layout->precision ? 2 : MOST_TALL;
    for (long r = 0; r < rows;) {
        int tall = rows - r < most ? (int)(rows - r) : most;
        struct tile t = {.blocks = count, .at = at, .steps = format_steps(layout->format),
                         .per = layout->per, .shift = layout->shift};
        for (int n = 0; n < tall; n++) {
            t.x[n] = x[r + n] + first * block;
            t.extra[n] = (const int32_t *)(const void *)(x[r + n] + layout->at_extra) +
                         first * LANES;
            t.row_scales[n] = (const float *)(const void *)(x[r + n] + layout->at_scales) +
                              first_group;
        }
        for (int n = 0; n < PANEL; n += TILE) {
            t.w = p->unpacked + n * count * block / 32;
            t.scales = &p->scales[n];
            t.total = (vf(*)[PANEL]) & p->total[r][n];
            multiplier_of(layout, tall)(&t);
        }
        r += tall;
    }
}

static void quantized(const struct matrix *m, const struct layout *layout, const long *columns,
                      const char *const *x, long rows, struct panel *p) {
    long vectors = format_steps(layout->format) * (layout->precision ? 1 : 4);
    long span = SPAN / 32 / vectors;
    for (long at = 0; at < m->cols; at += CHUNK) {
        struct chunk c = chunk_at(layout->format, m, at);
        long blocks = c.blocks + (c.cut > 0);
        take_groups(m, layout, &c, columns, x, rows, p);
        for (long b = 0; b < blocks; b += span) {
            long count = blocks - b < span ? blocks - b : span;
            for (int n = 0; n < PANEL; n++) {
                vf *to = p->unpacked + (n / TILE) * TILE * count * vectors + n % TILE;
                unpacker_of(layout)(m, columns[n], c.first_block + b, count, to);
            }
            multiply_rows(layout, x, rows, c.first_block + b, b, count, c.first_group, p);
        }
    }
}

static void plain(const struct matrix *m, const struct layout *layout, const long *columns,
                  const char *const *x, long rows, struct panel *p) {
    long size = m->element == F32 ? 4 : 2, blocks = (m->cols + LANES - 1) / LANES;
    for (long b = 0; b < blocks; b += SPAN / 32) {
        long count = blocks - b < SPAN / 32 ? blocks - b : SPAN / 32;
        for (int n = 0; n < PANEL; n++) {
            const uint8_t *w = m->weight + (size_t)columns[n] * m->row_bytes + b * LANES * size;
            vf *to = p->unpacked + (n / TILE) * TILE * count + n % TILE;
            for (long i = 0; i < count; i++)
                to[i * TILE] =
                    load_elements(m->element, w + i * LANES * size, m->cols - (b + i) * LANES);
        }
        multiply_rows(layout, x, rows, b, b, count, 0, p);
    }
}

void ISA(gemm)(const struct matrix *m, const struct layout *layout, long n, long count,
               const char *const *x, float *const *out, long rows) {
    struct panel p;
    for (long first = 0; first < count; first += PANEL) {
        long columns[PANEL], wide = count - first < PANEL ? count - first : PANEL;
        /* A panel is always whole: the last column stands in for those that are not there. */
        for (int i = 0; i < PANEL; i++) columns[i] = n + first + (i < wide ? i : wide - 1);
        for (long r = 0; r < rows; r++)
            for (int i = 0; i < PANEL; i++) p.total[r][i] = all(0);
        if (layout->format == PLAIN) plain(m, layout, columns, x, rows, &p);
        else quantized(m, layout, columns, x, rows, &p);
        for (long r = 0; r < rows; r++)
            for (long i = 0; i < wide; i++) out[r][first + i] = sum_lanes(p.total[r][i]);
    }
}
