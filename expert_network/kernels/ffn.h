/* The routed experts of a dispatch. */
#ifndef EXPERT_NETWORK_FFN_H
#define EXPERT_NETWORK_FFN_H

#include <stdint.h>

#include "activation.h"
#include "matrix.h"

/* rows (R, gate's cols); row r has the pairs offsets[r] to offsets[r + 1], each a slot and, where
 * `weights` is not NULL, a weight. out: (R, down's rows) with weights, else (P, down's rows). */
struct ffn {
    const struct matrix *gate, *up, *down;      /* gate may be NULL */
    enum activation activation;
    float parameters[4];
    int precision;
    long rows;
    const float *x;
    const uint32_t *offsets, *slots;
    const float *weights;
    float *out;
};

/* -1 without memory. All arguments were checked. */
int ffn_run(const struct ffn *ffn);

#endif
