/* What the tasks over rows are given: rms_norm, rope, and the forms in which rows travel. */
#ifndef EXPERT_NETWORK_ROWS_H
#define EXPERT_NETWORK_ROWS_H

#include "pool.h"

#include <stddef.h>
#include <stdint.h>

#define MOST_AXES 8

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

#define ROW_BLOCK 64                     /* values that share a scale in int8 rows */

/* The forms in which values travel, as expert_protocol.dtypes defines them. `scales` belongs to
 * int8 and stands where the first value's scale does. What returns an int says whether every
 * value is finite. */
struct row_form {
    int (*encode)(const float *x, long size, uint8_t *values, uint8_t *scales);
    int (*decode)(const uint8_t *values, const uint8_t *scales, long size, float *out);
    int (*finite)(const uint8_t *values, const uint8_t *scales, long size);
    void (*add)(const uint8_t *values, const uint8_t *scales, long size, float *total);
};

enum { ROW_F32, ROW_BF16, ROW_F16, ROW_INT8, ROW_FORMS };

struct row_tasks {
    pool_task rms_norm, rope;
    struct row_form form[ROW_FORMS];
};

#endif
