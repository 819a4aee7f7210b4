/* A layer's experts, ready for rows that come one by one. */
#ifndef EXPERT_NETWORK_EXPERTS_H
#define EXPERT_NETWORK_EXPERTS_H

#include "module.h"

#include <stdint.h>

#define MOST_PAIRS 256      /* of a row */

struct experts;

/* The experts of a capsule that kernels.experts made, for rows of `hidden` values. NULL and
 * ValueError otherwise. */
const struct experts *experts_of(PyObject *capsule, long hidden);

/* The weighted sum of a row's pairs, at most MOST_PAIRS, into `out`; neither `ids` nor `weights`
 * need be aligned. -1 without memory, or for an expert that is not there. Without the GIL. */
int experts_sum(const struct experts *experts, const float *row, long pairs, const uint8_t *ids,
                const uint8_t *weights, int precise, float *out);

#endif
