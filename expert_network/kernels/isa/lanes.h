/* Float vectors as wide as the instruction set's, in the compiler's own vector types. */
#ifndef EXPERT_NETWORK_LANES_H
#define EXPERT_NETWORK_LANES_H

#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX2__)
#define LANES 8
#else
#define LANES 4
#endif

typedef float vf __attribute__((vector_size(4 * LANES)));
typedef int32_t vi __attribute__((vector_size(4 * LANES)));
typedef uint32_t vu __attribute__((vector_size(4 * LANES)));
typedef uint16_t vh __attribute__((vector_size(2 * LANES)));
typedef int8_t vb __attribute__((vector_size(LANES)));

#define INLINE static inline __attribute__((always_inline, unused))

INLINE vf vf_all(float x) { return x - (vf){0}; }   /* not 0 + x: that loses the sign of zero */
INLINE vi vi_all(int32_t x) { return x + (vi){0}; }
INLINE vu vu_all(uint32_t x) { return x + (vu){0}; }
INLINE vf vf_load(const float *p) { vf v; memcpy(&v, p, sizeof v); return v; }
INLINE void vf_store(float *p, vf v) { memcpy(p, &v, sizeof v); }
INLINE vf vf_select(vi mask, vf a, vf b) { return (vf)((mask & (vi)a) | (~mask & (vi)b)); }
/* As a > b ? a : b of scalars: of b where either is a NaN. */
INLINE vf vf_max(vf a, vf b) { return vf_select(a > b, a, b); }

INLINE vf vf_fma(vf a, vf b, vf c) {
#if defined(__AVX512F__)
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__ARM_NEON)
    return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

INLINE float vf_sum(vf v) {
    float lane[LANES];
    vf_store(lane, v);
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) lane[i] += lane[i + half];
    return lane[0];
}

INLINE float vf_most(vf v) {
    float lane[LANES];
    vf_store(lane, v);
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++)
            lane[i] = lane[i] > lane[i + half] ? lane[i] : lane[i + half];
    return lane[0];
}

/* The sums of four vectors. */
INLINE void vf_sum4(float *out, vf a, vf b, vf c, vf d) {
#if LANES == 8 && defined(__AVX2__)
    __m256 pairs = _mm256_hadd_ps(_mm256_hadd_ps((__m256)a, (__m256)b),
                                  _mm256_hadd_ps((__m256)c, (__m256)d));
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(pairs), _mm256_extractf128_ps(pairs, 1)));
#elif LANES == 4 && defined(__aarch64__)
    vst1q_f32(out, vpaddq_f32(vpaddq_f32((float32x4_t)a, (float32x4_t)b),
                              vpaddq_f32((float32x4_t)c, (float32x4_t)d)));
#else
    out[0] = vf_sum(a), out[1] = vf_sum(b), out[2] = vf_sum(c), out[3] = vf_sum(d);
#endif
}

/* e to the power of x; relative error below 2e-7. 0 where it would be subnormal. */
INLINE vf vf_exp(vf x) {
    const float magic = 12582912.0f;   /* 1.5 * 2^23: its sum with x has x rounded in its low bits */
    vf whole = vf_fma(x, vf_all(1.44269504f), vf_all(magic));
    vu shift = (vu)whole << 23;
    whole -= magic;
    /* ln 2 in two parts; the first has few enough bits that its product with `whole` is exact. */
    vf r = vf_fma(whole, vf_all(-0.693359375f), x);
    r = vf_fma(whole, vf_all(2.12194440e-4f), r);
    vf p = vf_all(1.98412698e-4f);
    p = vf_fma(p, r, vf_all(1.38888889e-3f));
    p = vf_fma(p, r, vf_all(8.33333333e-3f));
    p = vf_fma(p, r, vf_all(4.16666667e-2f));
    p = vf_fma(p, r, vf_all(0.166666667f));
    p = vf_fma(p, r, vf_all(0.5f));
    p = vf_fma(p * r, r, r) + 1.0f;
    vf result = (vf)((vu)p + shift);
    result = vf_select(x < -87.336544f, vf_all(0.0f), result);
    result = vf_select(x > 88.3762626f, vf_all(INFINITY), result);
    return vf_select(x == x, result, x);
}

/* How values are stored. */
enum { STORED_F32, STORED_F16, STORED_BF16 };

INLINE vf vf_from_bf16(const void *p) {
    vh half;
    memcpy(&half, p, sizeof half);
    return (vf)(__builtin_convertvector(half, vu) << 16);
}

INLINE vf vf_from_f16(const void *p) {
#if LANES == 16
    return (vf)_mm512_cvtph_ps(_mm256_loadu_si256(p));
#elif defined(__F16C__)
    return (vf)_mm256_cvtph_ps(_mm_loadu_si128(p));
#elif defined(__aarch64__)
    return (vf)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)));
#else
    vh half;
    memcpy(&half, p, sizeof half);
    vu bits = __builtin_convertvector(half, vu), size = bits & 0x7fff;
    /* Too small an exponent by 112; the product also makes subnormals normal. */
    vu value = (vu)((vf)(size << 13) * 0x1p112f);
    value |= (vu)(size >= 0x7c00) & 0x7f800000;
    return (vf)(value | (bits & 0x8000) << 16);
#endif
}

INLINE vf vf_stored(const void *p, long i, int kind) {
    if (kind == STORED_F32) return vf_load((const float *)p + i);
    const uint16_t *half = (const uint16_t *)p + i;
    return kind == STORED_F16 ? vf_from_f16(half) : vf_from_bf16(half);
}

/* The same of the `count` values, fewer than LANES, at i; zeros after them. */
INLINE vf vf_stored_part(const void *p, long i, int kind, long count) {
    float lane[LANES] = {0};
    int size = kind == STORED_F32 ? 4 : 2;
    memcpy(lane, (const char *)p + i * size, (size_t)(count * size));
    return vf_stored(lane, 0, kind);
}

#endif
