/* Attention of few rows: keys and values are read once, as fast as memory gives them. */
#include "attend.h"

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
            vf value = load_stored(k[key], i, stored);
            for (int row = 0; row < rows; row++)
                sum[row][key] = fma_(value, load(q + row * q_step + i), sum[row][key]);
        }
    if (whole < a->depth)
        for (int key = 0; key < 4; key++) {
            vf value = load_part(k[key], whole, stored, a->depth - whole);
            for (int row = 0; row < rows; row++)
                sum[row][key] = fma_(value, load(q + row * q_step + whole), sum[row][key]);
        }
    for (int row = 0; row < rows; row++) {
        float four[4];
        sum_four(four, sum[row][0], sum[row][1], sum[row][2], sum[row][3]);
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
            weight[row][i] = all(weights[row * ATTENTION_CHUNK + i * quarters]);
    long whole = a->width & -LANES;
    for (long i = 0; i < whole; i += LANES) {
        vf value[4];
        for (int key = 0; key < 4; key++) value[key] = load_stored(v[key], i, stored);
        for (int row = 0; row < rows; row++) {
            vf sum = load(sums + row * sums_step + i);
            for (int key = 0; key < 4; key++) sum = fma_(value[key], weight[row][key], sum);
            store(sums + row * sums_step + i, sum);
        }
    }
    if (whole == a->width) return;
    for (int row = 0; row < rows; row++) {
        vf sum = load(sums + row * sums_step + whole);
        for (int key = 0; key < 4; key++)
            sum = fma_(load_part(v[key], whole, stored, a->width - whole),
                         weight[row][key], sum);
        store(sums + row * sums_step + whole, sum);
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

void ISA(attend_few)(void *context, long index, int thread) {
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

/* One row: its chunks put together, and divided by the sum of the weights. */
void ISA(attend_end)(void *context, long index, int thread) {
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
