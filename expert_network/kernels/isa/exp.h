/* The exponential of eight floats. */
#ifndef EXPERT_NETWORK_EXP_H
#define EXPERT_NETWORK_EXP_H

#include "simd.h"

#include <math.h>

/* Relative error below 1e-7; 0 where the result would be subnormal, and infinity from 88.37 on. */
INLINE vf exp_(vf x) {
    const float magic = 12582912.0f;   /* 1.5 * 2^23: its sum with x has x rounded in its low bits */
    vf whole = fma_(x, all(1.44269504f), all(magic));
    vu shift = (vu)whole << 23;
    whole -= magic;
    /* ln 2 in two parts; the first has few enough bits that its product with `whole` is exact. */
    vf r = fma_(whole, all(-0.693359375f), x);
    r = fma_(whole, all(2.12194440e-4f), r);
    vf p = all(1.98412698e-4f);
    p = fma_(p, r, all(1.38888889e-3f));
    p = fma_(p, r, all(8.33333333e-3f));
    p = fma_(p, r, all(4.16666667e-2f));
    p = fma_(p, r, all(0.166666667f));
    p = fma_(p, r, all(0.5f));
    p = fma_(p * r, r, r) + 1.0f;
    vf result = (vf)((vu)p + shift);
    result = choose_lanes(x < -87.336544f, all(0.0f), result);
    result = choose_lanes(x > 88.3762626f, all(INFINITY), result);
    return choose_lanes(x == x, result, x);
}

#endif
