/* Floats in the forms that they are stored in, as vectors; and what else attention and rows need. */
#ifndef EXPERT_NETWORK_STORED_H
#define EXPERT_NETWORK_STORED_H

#include "simd.h"

enum { STORED_F32, STORED_F16, STORED_BF16 };

INLINE vf load_stored(const void *p, long i, int kind) {
    if (kind == STORED_F32) return load((const float *)p + i);
    const uint8_t *half = (const uint8_t *)p + 2 * i;
    return kind == STORED_F16 ? load_f16(half) : load_bf16(half);
}

/* The same of the `count` values, fewer than LANES, at i; zeros after them. */
INLINE vf load_part(const void *p, long i, int kind, long count) {
    float lane[LANES] = {0};
    int size = kind == STORED_F32 ? 4 : 2;
    memcpy(lane, (const char *)p + i * size, (size_t)(count * size));
    return load_stored(lane, 0, kind);
}

INLINE float largest_lane(vf v) {
    float lane[LANES];
    store(lane, v);
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++)
            lane[i] = lane[i] > lane[i + half] ? lane[i] : lane[i + half];
    return lane[0];
}

/* The sums of four vectors. */
INLINE void sum_four(float *out, vf a, vf b, vf c, vf d) {
#if defined(__AVX2__)
    __m256 pairs = _mm256_hadd_ps(_mm256_hadd_ps((__m256)a, (__m256)b),
                                  _mm256_hadd_ps((__m256)c, (__m256)d));
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(pairs), _mm256_extractf128_ps(pairs, 1)));
#else
    out[0] = sum_lanes(a), out[1] = sum_lanes(b), out[2] = sum_lanes(c), out[3] = sum_lanes(d);
#endif
}

#endif
