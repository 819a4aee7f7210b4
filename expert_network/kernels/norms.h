/* What the tasks of rms_norm and rope are given. */
#ifndef EXPERT_NETWORK_NORMS_H
#define EXPERT_NETWORK_NORMS_H

#include "pool.h"

#include <stddef.h>
#include <stdint.h>

#define MOST_AXES 8
/* Room for `half` angles, in whole vectors. */
#define ROPE_PADDED(half) (((half) + 15) & -16L)

struct rms_norm {
    const char *x;
    const float *weight;
    float *out;
    float eps;
    long rows, size, group;              /* of `group` rows is a task */
    int axes;                            /* before the last */
    long shape[MOST_AXES];
    ptrdiff_t stride[MOST_AXES];         /* in bytes, as all strides here */
};

/* x (batch, outer, inner, length, size): a task is one position of one batch, with all its heads. */
struct rope {
    const char *x;
    float *out;
    long batch, outer, inner, length, size, half, padded;   /* half: pairs; padded: room for them */
    ptrdiff_t stride[4];
    int traditional;
    float scale;
    const int32_t *offsets;
    int one_offset;
    const float *inverse;                /* padded: radians per position */
    float *scratch;                      /* 2 * padded per thread */
};

/* Radians per position, rounded where MLX rounds them: `half` of them. Called with the GIL. */
void rope_inverse(float base, long half, float *inverse);

#endif
