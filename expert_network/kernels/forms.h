/* The forms in which rows travel. */
#ifndef EXPERT_NETWORK_FORMS_H
#define EXPERT_NETWORK_FORMS_H

#include <stdint.h>

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

#endif
