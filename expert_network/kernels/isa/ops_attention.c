/* Attention by blocks of keys with a running maximum: tasks over heads, rows and chunks of keys.
 *
 * Nothing here depends on the number of threads, so neither do the bits of the result. */
#include "../attention.h"
#include "../table.h"
#include "lanes.h"

#include <float.h>

#define MR 6                 /* rows of a tile in registers, and its vectors per row */
#if defined(__aarch64__)
#define NV 4
#else
#define NV 2
#endif
#define NR (NV * LANES)

/* Where a task works. */
struct place {
    long batch, key_head, first, rows, start, end;   /* its rows, and its keys */
    float *partial;                                  /* of its first row */
    long partial_stride;
};

static struct place find(const struct attention *a, long index) {
    long chunk = index % a->chunks, head = index / a->chunks / a->blocks;
    /* Causal rows that come last have most to do: they go first. */
    long block = a->blocks - 1 - index / a->chunks % a->blocks, first = block * a->block;
    long rows = a->rows - first < a->block ? a->rows - first : a->block;
    long start = chunk * a->chunk, end = start + a->chunk < a->keys ? start + a->chunk : a->keys;
    return (struct place){
        .batch = head / a->key_heads, .key_head = head % a->key_heads,
        .first = first, .rows = rows, .start = start, .end = end,
        .partial = a->partials + ((head * a->rows + first) * a->chunks + chunk) * a->partial,
        .partial_stride = a->chunks * a->partial,
    };
}

static long position(const struct attention *a, long row) {
    return row / (a->heads / a->key_heads);
}

static long head_of(const struct attention *a, long key_head, long row) {
    long repeats = a->heads / a->key_heads;
    return key_head * repeats + row % repeats;
}

/* Keys that a row sees, from the first. Where queries outnumber keys the first see none, which MLX
 * makes the mean of all values: then all are looked at. */
static long seen(const struct attention *a, long row) {
    if (!a->causal || a->length > a->keys) return a->keys;
    return position(a, row) + a->keys - a->length + 1;
}

/* Scores of `count` keys from `start`: what is masked becomes the smallest number, as in MLX. */
static void mask_scores(const struct attention *a, const struct place *at, long row, long start,
                        long count, float *scores) {
    if (a->causal) {
        long last = position(a, row) + a->keys - a->length + 1 - start;
        for (long i = last < 0 ? 0 : last; i < count; i++) scores[i] = -FLT_MAX;
    }
    if (a->mask_kind == MASK_NONE) return;
    ptrdiff_t step = a->mask_stride[3];
    const char *mask = a->mask + at->batch * a->mask_stride[0] +
                       head_of(a, at->key_head, row) * a->mask_stride[1] +
                       position(a, row) * a->mask_stride[2] + start * step;
    if (a->mask_kind == MASK_BOOL && step == 1) {
        for (long i = 0; i < count; i++) scores[i] = mask[i] ? scores[i] : -FLT_MAX;
    } else if (a->mask_kind == MASK_BOOL) {
        for (long i = 0; i < count; i++) scores[i] = mask[i * step] ? scores[i] : -FLT_MAX;
    } else {
        for (long i = 0; i < count; i++) {
            float added;
            memcpy(&added, mask + i * step, sizeof added);
            scores[i] += added;
        }
    }
}

/* Scores (a multiple of LANES of them, -inf past the end) become weights; the sum of these, and the
 * maximum that they are relative to, which is at least `most`. */
static float weigh(float *scores, long count, float *most) {
    vf top = vf_all(*most), sum = {0};
    for (long i = 0; i < count; i += LANES) top = vf_max(vf_load(scores + i), top);
    *most = vf_most(top);
    float from = *most == -INFINITY ? 0 : *most;
    for (long i = 0; i < count; i += LANES) {
        vf weight = vf_exp(vf_load(scores + i) - from);
        vf_store(scores + i, weight);
        sum += weight;
    }
    return vf_sum(sum);
}

static float factor(float from, float to) {
    float lane[LANES];
    vf_store(lane, vf_exp(vf_all(from - (to == -INFINITY ? 0 : to))));
    return lane[0];
}

static void scale_row(const struct attention *a, const struct place *at, long row, float *out) {
    const char *q = a->q + at->batch * a->q_stride[0] +
                    head_of(a, at->key_head, row) * a->q_stride[1] +
                    position(a, row) * a->q_stride[2];
    for (long i = 0; i < a->depth; i++) out[i] = ((const float *)q)[i] * a->scale;
}

/* ---- few rows: keys and values are read once, as fast as memory gives them ---- */

struct few {
    float scores[ATTENTION_FEW][ATTENTION_CHUNK];
    float q[];   /* [ATTENTION_FEW][padded depth] */
};

static long padded_depth(const struct attention *a) { return (a->depth + LANES - 1) & -LANES; }

/* Four streams of keys, each a quarter of the task's: memory gives one core more that way. Those
 * past the end are the last key again, of no weight. */
static long quarter(long count) { return (count + 3) / 4; }

INLINE void streams(const char *first, ptrdiff_t step, long key, long count, const char **at) {
    for (long i = 0; i < 4; i++, key += quarter(count))
        at[i] = first + (key < count ? key : count - 1) * step;
}

/* Products of four keys with one or two rows of q. */
INLINE void dot4(const struct attention *a, const char *const *k, const float *q, long q_step,
                 int rows, float *out, long out_step, int stored) {
    vf sum[2][4] = {{{0}}};
    long whole = a->depth & -LANES;
    for (long i = 0; i < whole; i += LANES)
        for (int key = 0; key < 4; key++) {
            vf value = vf_stored(k[key], i, stored);
            for (int row = 0; row < rows; row++)
                sum[row][key] = vf_fma(value, vf_load(q + row * q_step + i), sum[row][key]);
        }
    if (whole < a->depth)
        for (int key = 0; key < 4; key++) {
            vf value = vf_stored_part(k[key], whole, stored, a->depth - whole);
            for (int row = 0; row < rows; row++)
                sum[row][key] = vf_fma(value, vf_load(q + row * q_step + whole), sum[row][key]);
        }
    for (int row = 0; row < rows; row++) {
        float four[4];
        vf_sum4(four, sum[row][0], sum[row][1], sum[row][2], sum[row][3]);
        for (int key = 0; key < 4; key++) out[row * ATTENTION_CHUNK + key * out_step] = four[key];
    }
}

INLINE void few_scores(const struct attention *a, const struct place *at, struct few *few,
                       int stored) {
    long count = at->end - at->start, quarters = quarter(count), step = padded_depth(a);
    const char *keys = a->k + at->batch * a->k_stride[0] + at->key_head * a->k_stride[1] +
                       at->start * a->k_stride[2];
    for (long key = 0; key < quarters; key++) {
        const char *k[4];
        streams(keys, a->k_stride[2], key, count, k);
        long row = 0;
        for (; row + 2 <= at->rows; row += 2)
            dot4(a, k, few->q + row * step, step, 2, &few->scores[row][key], quarters, stored);
        if (row < at->rows)
            dot4(a, k, few->q + row * step, step, 1, &few->scores[row][key], quarters, stored);
    }
}

/* Adds four weighted values to the sums of one or two rows. */
INLINE void add4(const struct attention *a, const char *const *v, const float *weights,
                 long quarters, int rows, float *sums, long sums_step, int stored) {
    vf weight[2][4];
    for (int row = 0; row < rows; row++)
        for (int i = 0; i < 4; i++)
            weight[row][i] = vf_all(weights[row * ATTENTION_CHUNK + i * quarters]);
    long whole = a->width & -LANES;
    for (long i = 0; i < whole; i += LANES) {
        vf value[4];
        for (int key = 0; key < 4; key++) value[key] = vf_stored(v[key], i, stored);
        for (int row = 0; row < rows; row++) {
            vf sum = vf_load(sums + row * sums_step + i);
            for (int key = 0; key < 4; key++) sum = vf_fma(value[key], weight[row][key], sum);
            vf_store(sums + row * sums_step + i, sum);
        }
    }
    if (whole == a->width) return;
    for (int row = 0; row < rows; row++) {
        vf sum = vf_load(sums + row * sums_step + whole);
        for (int key = 0; key < 4; key++)
            sum = vf_fma(vf_stored_part(v[key], whole, stored, a->width - whole),
                         weight[row][key], sum);
        vf_store(sums + row * sums_step + whole, sum);
    }
}

INLINE void few_values(const struct attention *a, const struct place *at, const struct few *few,
                       float *sums, long sums_step, int stored) {
    long count = at->end - at->start, quarters = quarter(count);
    const char *values = a->v + at->batch * a->v_stride[0] + at->key_head * a->v_stride[1] +
                         at->start * a->v_stride[2];
    for (long key = 0; key < quarters; key++) {
        const char *v[4];
        streams(values, a->v_stride[2], key, count, v);
        long row = 0;
        for (; row + 2 <= at->rows; row += 2)
            add4(a, v, &few->scores[row][key], quarters, 2, sums + row * sums_step, sums_step,
                 stored);
        if (row < at->rows)
            add4(a, v, &few->scores[row][key], quarters, 1, sums + row * sums_step, sums_step,
                 stored);
    }
}

static void few_task(void *context, long index, int thread) {
    const struct attention *a = context;
    const struct place at = find(a, index);
    struct few *few = (void *)(a->scratch + (size_t)thread * a->scratch_size);
    long step = padded_depth(a), count = at.end - at.start;
    long filled = quarter(count) * 4, looked_at = (count + LANES - 1) & -LANES;
    for (long row = 0; row < at.rows; row++) {
        float *q = few->q + row * step;
        memset(q + step - LANES, 0, LANES * sizeof *q);
        scale_row(a, &at, at.first + row, q);
    }
    switch (a->k_stored) {
    case STORED_F32: few_scores(a, &at, few, STORED_F32); break;
    case STORED_F16: few_scores(a, &at, few, STORED_F16); break;
    default: few_scores(a, &at, few, STORED_BF16);
    }
    for (long row = 0; row < at.rows; row++) {
        float *scores = few->scores[row], *partial = at.partial + row * at.partial_stride;
        mask_scores(a, &at, at.first + row, at.start, count, scores);
        for (long i = count; i < looked_at || i < filled; i++) scores[i] = -INFINITY;
        partial[0] = -INFINITY;
        partial[1] = weigh(scores, looked_at, partial);
        for (long i = looked_at; i < filled; i++) scores[i] = 0;
        memset(partial + 2, 0, (size_t)a->padded * sizeof *partial);
    }
    switch (a->v_stored) {
    case STORED_F32: few_values(a, &at, few, at.partial + 2, at.partial_stride, STORED_F32); break;
    case STORED_F16: few_values(a, &at, few, at.partial + 2, at.partial_stride, STORED_F16); break;
    default: few_values(a, &at, few, at.partial + 2, at.partial_stride, STORED_BF16);
    }
}

/* ---- many rows: blocks in the caches, tiles in registers ---- */

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
            sum[row][n] = add ? vf_load(c + row * ldc + n * LANES) : (vf){0};
    for (long i = 0; i < depth; i++, b += ldb) {
        vf column[NV];
        for (int n = 0; n < NV; n++) column[n] = vf_load(b + n * LANES);
        for (int row = 0; row < rows; row++) {
            vf value = vf_all(a[row * lda + i]);
            for (int n = 0; n < NV; n++) sum[row][n] = vf_fma(value, column[n], sum[row][n]);
        }
    }
    for (int row = 0; row < rows; row++)
        for (int n = 0; n < NV; n++) vf_store(c + row * ldc + n * LANES, sum[row][n]);
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

#if LANES == 8
/* LANES keys at depths i.. i + LANES - 1, to out [depth][NR]. */
INLINE void turn(const char *const *k, long i, int stored, float *out) {
    __m256 r[8], s[8], t[8];
    for (int n = 0; n < 8; n++) r[n] = (__m256)vf_stored(k[n], i, stored);
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
        vf_store(out + n * NR, (vf)_mm256_permute2f128_ps(t[n], t[n + 4], 0x20));
        vf_store(out + (n + 4) * NR, (vf)_mm256_permute2f128_ps(t[n], t[n + 4], 0x31));
    }
}
#else
INLINE void turn(const char *const *k, long i, int stored, float *out) {
    for (int n = 0; n < LANES; n++) {
        float lane[LANES];
        vf_store(lane, vf_stored(k[n], i, stored));
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
            vf_store(lane, vf_stored_part(k[n], whole, stored, depth - whole));
            for (long i = whole; i < depth; i++) panel[i * NR + n] = lane[i - whole];
        }
    }
}

INLINE void pack_values(const struct attention *a, const char *v, long count, float *out,
                        int stored) {
    long whole = a->width & -LANES;
    for (long key = 0; key < count; key++, v += a->v_stride[2], out += a->padded) {
        for (long i = 0; i < whole; i += LANES) vf_store(out + i, vf_stored(v, i, stored));
        if (whole < a->width)
            vf_store(out + whole, vf_stored_part(v, whole, stored, a->width - whole));
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
            vf_store(sums + i, vf_load(sums + i) * kept);
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

static void many_task(void *context, long index, int thread) {
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

/* ---- */

/* One row: its chunks put together, and divided by the sum of the weights. */
static void end_task(void *context, long index, int thread) {
    (void)thread;
    const struct attention *a = context;
    long head = index / a->rows, row = index % a->rows, key_head = head % a->key_heads;
    long query_head = head_of(a, key_head, row);
    const float *partials = a->partials + index * a->chunks * a->partial;
    float *out = a->out + ((head / a->key_heads * a->heads + query_head) * a->length +
                           position(a, row)) * a->width;
    float most = a->sinks ? a->sinks[query_head] : -INFINITY, sum = 0;
    for (long n = 0; n < a->chunks; n++)
        most = partials[n * a->partial] > most ? partials[n * a->partial] : most;
    if (a->sinks) sum = factor(a->sinks[query_head], most);
    for (long n = 0; n < a->chunks; n++) {
        const float *partial = partials + n * a->partial;
        float kept = factor(partial[0], most);
        sum += kept * partial[1];
        for (long i = 0; i < a->width; i++)
            out[i] = n ? out[i] + kept * partial[2 + i] : kept * partial[2 + i];
    }
    for (long i = 0; i < a->width; i++) out[i] /= sum;
}

const struct attention_tasks ISA(attention_tasks) = {few_task, many_task, end_task};
