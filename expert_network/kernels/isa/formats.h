/* Each format's blocks and scales as vectors. `format` is a constant wherever these are used. */
#ifndef EXPERT_NETWORK_FORMATS_H
#define EXPERT_NETWORK_FORMATS_H

#include "../matrix.h"
#include "simd.h"

INLINE long block_bytes(int format) { return (long)format_steps(format) * 4 * format_bits(format); }

/* Lane l's lowest four fields of `bits` bits, as its four bytes. */
INLINE vb spread(vu words, int bits) {
    uint32_t field = (1u << bits) - 1;
    vu out = words & field;
    for (int n = 1; n < 4; n++) out |= words << n * (8 - bits) & field << 8 * n;
    return (vb)out;
}

/* Lane l: 4 bytes from `first` + 5l. */
INLINE vu words40(const uint8_t *block, int first) {
    vu v;
    for (int l = 0; l < LANES; l++) v[l] = load_word(block + first + 5 * l);
    return v;
}

/* Twice mxfp4's values, and 12. */
INLINE vb fp4_values(vb codes) {
    const vb twice = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0,
                      12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
    return lookup(twice, codes);
}

/* One step of a block: 4 elements of each lane. Reads no byte beyond block_bytes(format). */
INLINE vb unpack(int format, const uint8_t *block, int step) {
    int bits = format_bits(format);
    if (format == BITS3) return spread((vu)words24(block) >> 12 * step, bits);
    if (format == BITS5) return spread(words40(block, step) >> 12 * step, bits);
    if (format == BITS6) return spread((vu)words24(block), bits);
    if (format == BITS8) return load_bytes(block);
    vb fields = (vb)((vu)load_bytes(block) >> bits * step) & (uint8_t)((1 << bits) - 1);
    return format == FP4 ? fp4_values(fields) : fields;
}

INLINE int element_size(enum element element) {
    return element == F32 ? 4 : element == E8M0 ? 1 : 2;
}

/* `count` elements (8 at most, then 0) as floats. */
INLINE vf load_elements(enum element element, const uint8_t *p, long count) {
    uint8_t whole[32] = {0};
    int size = element_size(element);
    if (count < LANES) {
        memcpy(whole, p, (size_t)(count * size));
        p = whole;
    }
    if (element == F32) return load((const float *)(const void *)p);
    if (element == BF16) return load_bf16(p);
    if (element == F16) return load_f16(p);
    vf v;
    for (int l = 0; l < LANES; l++) {
        /* A power of two; 0 is the one that has no float exponent, and 255 is NaN. */
        uint32_t bits = p[l] == 255 ? 0x7fc00000 : p[l] ? (uint32_t)p[l] << 23 : 0x00400000;
        memcpy((char *)&v + 4 * l, &bits, 4);
    }
    return v;
}

/* The scales and biases of `count` groups (8 at most, then 0): value = q * scale + bias, with q as
 * unpack gives it. `element` is the matrix's: E8M0 is mxfp4's, which has no biases. */
INLINE void load_scales(enum element element, const uint8_t *scales, const uint8_t *biases,
                        long count, vf *scale, vf *bias) {
    *scale = load_elements(element, scales, count);
    if (element != E8M0) {
        *bias = load_elements(element, biases, count);
        return;
    }
    if (count < LANES) {
        const vi place = {0, 1, 2, 3, 4, 5, 6, 7};
        *scale = (vf)((vi)*scale & (place < (int32_t)count));
    }
    *scale *= 0.5f;
    *bias = *scale * -12.0f;
}

/* What the lanes of block `block` are scaled with, from the groups' values: a block has `per`
 * groups (1, 2, 4), or 1 << `shift` blocks are one group. */
INLINE vf lanes_of(const float *groups, long block, int per, int shift) {
    if (per == 1) return all(groups[block >> shift]);
    const float *p = groups + block * per;
    if (per == 2) return (vf){p[0], p[0], p[0], p[0], p[1], p[1], p[1], p[1]};
    return (vf){p[0], p[0], p[1], p[1], p[2], p[2], p[3], p[3]};
}

#endif
