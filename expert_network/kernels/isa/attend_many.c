/* Attention of many rows: blocks in the caches, tiles in registers. */
#include "attend.h"

/* A tile's rows, and its vectors per row: as many as registers hold. */
#if defined(ISA_portable) && defined(__x86_64__)
#define MR 3
#else
#define MR 6
#endif
#define NV 2
#define NR (NV * LANES)

struct many {
    float most[ATTENTION_ROWS], sum[ATTENTION_ROWS];
    float scores[ATTENTION_ROWS][ATTENTION_KEYS];
    float floats[];   /* q [rows][depth], keys [keys / NR][depth][NR], values [keys][padded] */
};

/* c [rows][NR] = or += a [rows][depth] b [depth][NR]; rows is known where it is inlined. */
INLINE void tile(const float *a, long lda, const float *b, long ldb, float *c, long ldc, int rows,
                 long depth, int add) {
    vf sum[MR][NV];
    for (int row = 0; row < rows; row++)
        for (int n = 0; n < NV; n++)
            sum[row][n] = add ? load(c + row * ldc + n * LANES) : (vf){0};
    for (long i = 0; i < depth; i++, b += ldb) {
        vf column[NV];
        for (int n = 0; n < NV; n++) column[n] = load(b + n * LANES);
        for (int row = 0; row < rows; row++) {
            vf value = all(a[row * lda + i]);
            for (int n = 0; n < NV; n++) sum[row][n] = fma_(value, column[n], sum[row][n]);
        }
    }
    for (int row = 0; row < rows; row++)
        for (int n = 0; n < NV; n++) store(c + row * ldc + n * LANES, sum[row][n]);
}

INLINE void tiles(const float *a, long lda, const float *b, long ldb, float *c, long ldc,
                  long rows, long depth, int add) {
    for (; rows >= MR; rows -= MR, a += MR * lda, c += MR * ldc)
        tile(a, lda, b, ldb, c, ldc, MR, depth, add);
    for (; rows >= 2; rows -= 2, a += 2 * lda, c += 2 * ldc)
        tile(a, lda, b, ldb, c, ldc, 2, depth, add);
    if (rows) tile(a, lda, b, ldb, c, ldc, 1, depth, add);
}

static void score_tiles(const float *q, long depth, const float *keys, float *scores, long rows) {
    tiles(q, depth, keys, NR, scores, ATTENTION_KEYS, rows, depth, 0);
}

static void value_tiles(const float *weights, long count, const float *values, long step,
                        float *sums, long sums_step, long rows) {
    tiles(weights, ATTENTION_KEYS, values, step, sums, sums_step, rows, count, 1);
}

#if defined(__AVX2__)
/* LANES keys at depths i.. i + LANES - 1, to out [depth][NR]. */
INLINE void turn(const char *const *k, long i, int stored, float *out) {
    __m256 r[8], s[8], t[8];
    for (int n = 0; n < 8; n++) r[n] = (__m256)load_stored(k[n], i, stored);
    for (int n = 0; n < 8; n += 2) {
        s[n] = _mm256_unpacklo_ps(r[n], r[n + 1]);
        s[n + 1] = _mm256_unpackhi_ps(r[n], r[n + 1]);
    }
    for (int n = 0; n < 8; n += 4)
        for (int m = 0; m < 2; m++) {
            t[n + 2 * m] = _mm256_shuffle_ps(s[n + m], s[n + m + 2], 0x44);
            t[n + 2 * m + 1] = _mm256_shuffle_ps(s[n + m], s[n + m + 2], 0xee);
        }
    for (int n = 0; n < 4; n++) {
        store(out + n * NR, (vf)_mm256_permute2f128_ps(t[n], t[n + 4], 0x20));
        store(out + (n + 4) * NR, (vf)_mm256_permute2f128_ps(t[n], t[n + 4], 0x31));
    }
}
#else
INLINE void turn(const char *const *k, long i, int stored, float *out) {
    for (int n = 0; n < LANES; n++) {
        float lane[LANES];
        store(lane, load_stored(k[n], i, stored));
        for (int m = 0; m < LANES; m++) out[m * NR + n] = lane[m];
    }
}
#endif

/* `count` keys as panels of NR: for each depth the values of NR keys, the last key's past the end. */
INLINE void pack_keys(const struct attention *a, const char *keys, long count, float *out,
                      int stored) {
    long depth = a->depth, whole = depth & -LANES;
    for (long key = 0; key < (count + NR - 1) / NR * NR; key += LANES) {
        float *panel = out + key / NR * depth * NR + key % NR;
        const char *k[LANES];
        for (long n = 0; n < LANES; n++)
            k[n] = keys + (key + n < count ? key + n : count - 1) * a->k_stride[2];
        for (long i = 0; i < whole; i += LANES) turn(k, i, stored, panel + i * NR);
        for (long n = 0; n < LANES && whole < depth; n++) {
            float lane[LANES];
            store(lane, load_part(k[n], whole, stored, depth - whole));
            for (long i = whole; i < depth; i++) panel[i * NR + n] = lane[i - whole];
        }
    }
}

INLINE void pack_values(const struct attention *a, const char *v, long count, float *out,
                        int stored) {
    long whole = a->width & -LANES;
    for (long key = 0; key < count; key++, v += a->v_stride[2], out += a->padded) {
        for (long i = 0; i < whole; i += LANES) store(out + i, load_stored(v, i, stored));
        if (whole < a->width)
            store(out + whole, load_part(v, whole, stored, a->width - whole));
    }
}

static void keys_of(const struct attention *a, const char *k, long count, float *out) {
    switch (a->k_stored) {
    case STORED_F32: pack_keys(a, k, count, out, STORED_F32); break;
    case STORED_F16: pack_keys(a, k, count, out, STORED_F16); break;
    default: pack_keys(a, k, count, out, STORED_BF16);
    }
}

static void values_of(const struct attention *a, const char *v, long count, float *out) {
    switch (a->v_stored) {
    case STORED_F32: pack_values(a, v, count, out, STORED_F32); break;
    case STORED_F16: pack_values(a, v, count, out, STORED_F16); break;
    default: pack_values(a, v, count, out, STORED_BF16);
    }
}

/* Rows below `from` see nothing of these keys. */
static void weigh_rows(const struct attention *a, const struct place *at, struct many *many,
                       long from, long start, long count) {
    for (long row = from; row < at->rows; row++) {
        float *scores = many->scores[row], *sums = at->partial + row * at->partial_stride + 2;
        float before = many->most[row];
        mask_scores(a, at, at->first + row, start, count, scores);
        for (long i = count; i < ATTENTION_KEYS; i++) scores[i] = -INFINITY;
        float sum = weigh(scores, ATTENTION_KEYS, &many->most[row]);
        float kept = before == many->most[row] ? 1 : factor(before, many->most[row]);
        many->sum[row] = many->sum[row] * kept + sum;
        if (kept == 1) continue;
        for (long i = 0; i < a->padded; i += LANES)
            store(sums + i, load(sums + i) * kept);
    }
}

static void many_block(const struct attention *a, const struct place *at, struct many *many,
                       long start, long count) {
    float *q = many->floats, *keys = q + ATTENTION_ROWS * a->depth;
    float *packed = keys + ATTENTION_KEYS * a->depth;
    long from = 0, step = a->padded;
    while (seen(a, at->first + from) <= start) from++;
    from -= from % MR;   /* so that tiles stand where they stand for every block */
    keys_of(a, a->k + at->batch * a->k_stride[0] + at->key_head * a->k_stride[1] +
                   start * a->k_stride[2], count, keys);
    for (long key = 0; key < count; key += NR)
        score_tiles(q + from * a->depth, a->depth, keys + key * a->depth,
                    &many->scores[from][key], at->rows - from);
    weigh_rows(a, at, many, from, start, count);
    const char *v = a->v + at->batch * a->v_stride[0] + at->key_head * a->v_stride[1] +
                    start * a->v_stride[2];
    const float *values = (const float *)v;
    if (a->v_stored == STORED_F32 && a->width == a->padded && a->v_stride[2] % 4 == 0)
        step = a->v_stride[2] / 4;
    else
        values_of(a, v, count, packed), values = packed;
    for (long i = 0; i < a->padded; i += NR)
        value_tiles(many->scores[from], count, values + i, step,
                    at->partial + from * at->partial_stride + 2 + i, at->partial_stride,
                    at->rows - from);
}

void ISA(attend_many)(void *context, long index, int thread) {
    const struct attention *a = context;
    const struct place at = find(a, index);
    struct many *many = (void *)(a->scratch + (size_t)thread * a->scratch_size);
    for (long row = 0; row < at.rows; row++) {
        scale_row(a, &at, at.first + row, many->floats + row * a->depth);
        many->most[row] = -INFINITY, many->sum[row] = 0;
        memset(at.partial + row * at.partial_stride + 2, 0, (size_t)a->padded * sizeof(float));
    }
    /* The last row sees most. */
    long most = seen(a, at.first + at.rows - 1), end = most < at.end ? most : at.end;
    for (long start = at.start; start < end; start += ATTENTION_KEYS)
        many_block(a, &at, many, start,
                   end - start < ATTENTION_KEYS ? end - start : ATTENTION_KEYS);
    for (long row = 0; row < at.rows; row++) {
        at.partial[row * at.partial_stride] = many->most[row];
        at.partial[row * at.partial_stride + 1] = many->sum[row];
    }
}
