/* Vectors of 32 bytes, whatever the processor's own width.
 *
 * Algorithms are written with these types and the primitives below; the compiler splits a vector
 * where registers are narrower. What plain C cannot say well stands in a simd_<set>.h, which must
 * define, with INLINE:
 *
 *   vf fma_(vf a, vf b, vf c)              a * b + c, rounded once (twice in portable C)
 *   vf load_f16(const uint8_t *p)          8 float16 values
 *   vb lookup(vb table, vb index)          table[index] bytewise; index < 16, both halves the same
 *   vi words24(const uint8_t *p)           lane l: bytes 3l..3l+2 of p, above them anything
 *   dots                                   a sum on its way: lane l adds up bytes 4l..4l+3
 *   dots dots_add(dots d, vb q, vb x)      d + q * x; q unsigned, x signed, see LIMIT
 *   vi dots_sum(dots d)
 *   vi dots_wide(vb q, vb x, vi x128)      the same for any q; x128 is 128 * each lane's sum of x
 *
 * LIMIT: in a chain of dots_add, the largest q times 254 times the chain's length is below 32768.
 */
#ifndef EXPERT_NETWORK_SIMD_H
#define EXPERT_NETWORK_SIMD_H

#include <stdint.h>
#include <string.h>

#define LANES 8
#define INLINE static inline __attribute__((always_inline))

typedef float vf __attribute__((vector_size(32)));
typedef int32_t vi __attribute__((vector_size(32)));
typedef uint32_t vu __attribute__((vector_size(32)));
typedef int16_t vs __attribute__((vector_size(32)));
typedef int8_t vc __attribute__((vector_size(32)));
typedef uint8_t vb __attribute__((vector_size(32)));
typedef float vf4 __attribute__((vector_size(16)));
typedef int8_t vq __attribute__((vector_size(8)));
typedef uint16_t vh __attribute__((vector_size(16)));

INLINE vf load(const float *p) { vf v; memcpy(&v, p, sizeof v); return v; }
INLINE void store(float *p, vf v) { memcpy(p, &v, sizeof v); }
INLINE vb load_bytes(const void *p) { vb v; memcpy(&v, p, sizeof v); return v; }
INLINE void store_bytes(void *p, vb v) { memcpy(p, &v, sizeof v); }
INLINE vi load_ints(const int32_t *p) { vi v; memcpy(&v, p, sizeof v); return v; }
INLINE uint32_t load_word(const uint8_t *p) { uint32_t v; memcpy(&v, p, sizeof v); return v; }
INLINE vf all(float x) { return (vf){x, x, x, x, x, x, x, x}; }
INLINE vf to_float(vi v) { return __builtin_convertvector(v, vf); }

INLINE vf load_bf16(const uint8_t *p) {
    vh half;
    memcpy(&half, p, sizeof half);
    return (vf)(__builtin_convertvector(half, vu) << 16);
}

/* Always this tree, so that a sum does not depend on who computes it. */
INLINE float sum_lanes(vf v) {
    vf4 low, high;
    memcpy(&low, &v, 16);
    memcpy(&high, (const char *)&v + 16, 16);
    low += high;
    return (low[0] + low[2]) + (low[1] + low[3]);
}

INLINE vf choose_lanes(vi mask, vf yes, vf no) { return (vf)((mask & (vi)yes) | (~mask & (vi)no)); }
INLINE vf smaller(vf a, vf b) { return choose_lanes(a < b, a, b); }
INLINE vf larger(vf a, vf b) { return choose_lanes(a > b, a, b); }

#if defined(ISA_avx2) || defined(ISA_avx512)
#include "simd_avx2.h"
#elif defined(ISA_neon) || defined(ISA_dotprod)
#include "simd_neon.h"
#else
#include "simd_portable.h"
#endif

#endif
