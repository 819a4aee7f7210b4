/* One token's way through a trunk layer, up to its experts. */
#ifndef EXPERT_NETWORK_LAYER_H
#define EXPERT_NETWORK_LAYER_H

#include "matrix.h"

/* A linear layer: what it multiplies with, and how activations are rounded for it. */
struct product {
    const struct matrix *matrix;
    int precision;
};

struct norm {
    const float *weight;        /* or NULL */
    float eps;
};

/* Which experts: those of the `each` largest shares, and their order. */
struct choice {
    struct product gate;        /* no matrix: the layer's caller chooses */
    long each;
    int ascending;              /* the largest last, the later of equals preferred; else first */
};

struct layer {
    struct norm before, after;            /* attention */
    struct product query, key, value, output;
    int normed, whole;                    /* queries and keys are normed, over all heads at once */
    struct norm query_norm, key_norm;
    long heads, key_heads, depth, width;  /* of a key, of a value */
    long half;                            /* pairs of elements that rope turns */
    int traditional;
    float rope_scale, scale;
    float *inverse;                       /* radians per position: half, padded to whole vectors */
    struct choice choice;
};

/* A step of the token at `offset`: its row comes in, and goes out as the residual and what the
 * experts are given, with their numbers and shares if the layer chooses. Keys and values (key_heads,
 * room, ...) hold `offset` tokens, float32 or float16, and get this one's. */
struct step {
    const float *row;
    void *keys, *values;
    long room, offset;
    int half;                             /* keys and values are float16 */
    float *residual, *normed, *shares;
    uint32_t *experts;
};

/* 0; -1 without memory; 1 if a number is not finite, or cannot be a float16: then only the room at
 * `offset` and what goes out have changed. */
int layer_run(const struct layer *layer, const struct step *step);

#endif
