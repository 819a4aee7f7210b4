/* NEON, which every 64-bit Arm processor has; with dotprod bytes are multiplied and summed at once.
 *
 * A vector of 32 bytes is two of NEON's. */
#include <arm_neon.h>

#define HALVES(type) union { type whole; float32x4_t f[2]; uint8x16_t b[2]; int16x8_t s[2]; int32x4_t i[2]; }

INLINE vf fma_(vf a, vf b, vf c) {
    HALVES(vf) x = {a}, y = {b}, z = {c};
    for (int h = 0; h < 2; h++) z.f[h] = vfmaq_f32(z.f[h], x.f[h], y.f[h]);
    return z.whole;
}

INLINE vf load_f16(const uint8_t *p) {
    uint16_t half[LANES];
    memcpy(half, p, sizeof half);
    HALVES(vf) v;
    for (int h = 0; h < 2; h++) v.f[h] = vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(half + 4 * h)));
    return v.whole;
}

INLINE vb lookup(vb table, vb index) {
    HALVES(vb) t = {table}, i = {index};
    for (int h = 0; h < 2; h++) i.b[h] = vqtbl1q_u8(t.b[0], i.b[h]);
    return i.whole;
}

INLINE vi words24(const uint8_t *p) {
    /* The upper half begins at byte 12; it is read from 8 on, so as not to pass the end. */
    static const uint8_t spread[2][16] = {
        {0, 1, 2, 255, 3, 4, 5, 255, 6, 7, 8, 255, 9, 10, 11, 255},
        {4, 5, 6, 255, 7, 8, 9, 255, 10, 11, 12, 255, 13, 14, 15, 255},
    };
    HALVES(vi) v;
    for (int h = 0; h < 2; h++) v.b[h] = vqtbl1q_u8(vld1q_u8(p + 8 * h), vld1q_u8(spread[h]));
    return v.whole;
}

/* Of bytes that are signed both. */
INLINE int16x8_t products(int8x16_t q, int8x16_t x) {
    return vpaddq_s16(vmull_s8(vget_low_s8(q), vget_low_s8(x)), vmull_high_s8(q, x));
}

#if defined(__ARM_FEATURE_DOTPROD)

typedef vi dots;

INLINE dots dots_add(dots d, vb q, vb x) {
    HALVES(vi) sum = {d};
    HALVES(vb) a = {q}, b = {x};
    for (int h = 0; h < 2; h++)
        sum.i[h] = vdotq_s32(sum.i[h], vreinterpretq_s8_u8(a.b[h]), vreinterpretq_s8_u8(b.b[h]));
    return sum.whole;
}

INLINE vi dots_sum(dots d) { return d; }

INLINE vi dots_wide(vb q, vb x, vi x128) { return dots_add(x128, q ^ (uint8_t)128, x); }

#else

typedef vs dots;

/* LIMIT keeps q below 128, and so signed. */
INLINE dots dots_add(dots d, vb q, vb x) {
    HALVES(vs) sum = {d};
    HALVES(vb) a = {q}, b = {x};
    for (int h = 0; h < 2; h++) {
        int16x8_t pairs = products(vreinterpretq_s8_u8(a.b[h]), vreinterpretq_s8_u8(b.b[h]));
        sum.s[h] = vaddq_s16(sum.s[h], pairs);
    }
    return sum.whole;
}

INLINE vi dots_sum(dots d) {
    HALVES(vs) pairs = {d};
    HALVES(vi) sum;
    for (int h = 0; h < 2; h++) sum.i[h] = vpaddlq_s16(pairs.s[h]);
    return sum.whole;
}

INLINE vi dots_wide(vb q, vb x, vi x128) {
    HALVES(vi) sum = {x128};
    HALVES(vb) a = {q ^ (uint8_t)128}, b = {x};
    for (int h = 0; h < 2; h++) {
        int8x16_t w = vreinterpretq_s8_u8(a.b[h]), v = vreinterpretq_s8_u8(b.b[h]);
        /* Two products of 128 * 127 just fit into 16 bits. */
        sum.i[h] = vaddq_s32(sum.i[h], vpaddlq_s16(products(w, v)));
    }
    return sum.whole;
}

#endif

#undef HALVES
