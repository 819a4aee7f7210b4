/* What the tasks of attention share: where one works, what its rows see, and their softmax.
 *
 * Keys are worked on in blocks, each with the maximum that its weights are relative to. Nothing
 * depends on the number of threads, so neither do the bits of the result. */
#ifndef EXPERT_NETWORK_ATTEND_H
#define EXPERT_NETWORK_ATTEND_H

#include "../attention.h"
#include "../table.h"
#include "exp.h"
#include "stored.h"

#include <float.h>

/* Where a task works. */
struct place {
    long batch, key_head, first, rows, start, end;   /* its rows, and its keys */
    float *partial;                                  /* of its first row */
    long partial_stride;
};

INLINE struct place find(const struct attention *a, long index) {
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

INLINE long position(const struct attention *a, long row) {
    return row / (a->heads / a->key_heads);
}

INLINE long head_of(const struct attention *a, long key_head, long row) {
    long repeats = a->heads / a->key_heads;
    return key_head * repeats + row % repeats;
}

/* Keys that a row sees, from the first. Where queries outnumber keys the first see none, which MLX
 * makes the mean of all values: then all are looked at. */
INLINE long seen(const struct attention *a, long row) {
    if (!a->causal || a->length > a->keys) return a->keys;
    return position(a, row) + a->keys - a->length + 1;
}

/* Scores of `count` keys from `start`: what is masked becomes the smallest number, as in MLX. */
INLINE void mask_scores(const struct attention *a, const struct place *at, long row, long start,
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
INLINE float weigh(float *scores, long count, float *most) {
    vf top = all(*most), sum = {0};
    for (long i = 0; i < count; i += LANES) top = larger(load(scores + i), top);
    *most = largest_lane(top);
    float from = *most == -INFINITY ? 0 : *most;
    for (long i = 0; i < count; i += LANES) {
        vf weight = exp_(load(scores + i) - from);
        store(scores + i, weight);
        sum += weight;
    }
    return sum_lanes(sum);
}

INLINE float factor(float from, float to) {
    float lane[LANES];
    store(lane, exp_(all(from - (to == -INFINITY ? 0 : to))));
    return lane[0];
}

INLINE void scale_row(const struct attention *a, const struct place *at, long row, float *out) {
    const char *q = a->q + at->batch * a->q_stride[0] +
                    head_of(a, at->key_head, row) * a->q_stride[1] +
                    position(a, row) * a->q_stride[2];
    for (long i = 0; i < a->depth; i++) out[i] = ((const float *)q)[i] * a->scale;
}

#endif
