/* The forms in which rows travel. */
#include "../forms.h"
#include "../table.h"
#include "stored.h"

typedef int8_t v8c __attribute__((vector_size(LANES)));

/* Infinities and NaNs have all bits of the exponent. */
INLINE vi not_finite(vu bits, uint32_t exponent) { return (bits & exponent) == exponent; }

static int all_clear(vi bad) {
    int32_t lane[LANES], any = 0;
    memcpy(lane, &bad, sizeof bad);
    for (int i = 0; i < LANES; i++) any |= lane[i];
    return !any;
}

/* Both are whole vectors here: ends are padded by what stands below. */
INLINE vu to_bf16(vu bits) {
    vu rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    vu nan = (vu)((bits & 0x7fffffff) > 0x7f800000);
    return (nan & (bits >> 16 | 0x40)) | (~nan & rounded);
}

INLINE vh to_f16(vf x) {
#if defined(__F16C__)
    return (vh)_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT);
#else
    vu sign = (vu)x >> 16 & 0x8000, size = (vu)x & 0x7fffffff;
    vu normal = (size - (112u << 23) + 0xfff + (size >> 13 & 1)) >> 13;
    vu small = (vu)((vf)size + 0.5f) - 0x3f000000;   /* the sum rounds at the smallest's place */
    vu is_small = (vu)(size < 0x38800000), is_large = (vu)(size >= 0x47800000);
    vu large = 0x7c00 | ((vu)(size > 0x7f800000) & 0x200);
    vu value = (is_small & small) | (~is_small & normal);
    value = (is_large & large) | (~is_large & value);
    return __builtin_convertvector(value | sign, vh);
#endif
}

static float scale_of(const uint8_t *scales, long block, uint16_t *bits) {
    uint32_t wide;
    float scale;
    memcpy(bits, scales + 2 * block, sizeof *bits);
    wide = (uint32_t)*bits << 16;
    memcpy(&scale, &wide, sizeof scale);
    return scale;
}

static int encode_int8_block(const float *x, uint8_t *values, uint8_t *scale) {
    vu most = {0};
    for (int i = 0; i < ROW_BLOCK; i += LANES) {
        vu size = (vu)load(x + i) & 0x7fffffff;
        vu over = (vu)(size > most);
        most = (over & size) | (~over & most);
    }
    uint32_t lane[LANES], largest = 0;
    memcpy(lane, &most, sizeof most);
    for (int i = 0; i < LANES; i++) largest = lane[i] > largest ? lane[i] : largest;
    float wanted;
    memcpy(&wanted, &largest, sizeof wanted);
    wanted /= 127.0f;
    uint16_t bits;
    memcpy(lane, &wanted, sizeof wanted);
    bits = (uint16_t)((lane[0] + 0x7fff + (lane[0] >> 16 & 1)) >> 16);
    if (wanted < 0x1p-100f) bits = 0;
    if (!(wanted <= 0x1p120f)) bits = 0x7fc0;
    memcpy(scale, &bits, sizeof bits);
    if (bits == 0 || bits == 0x7fc0) {
        memset(values, 0, ROW_BLOCK);
        return bits == 0;
    }
    float inverse = 1.0f / scale_of(scale, 0, &bits);
    for (int i = 0; i < ROW_BLOCK; i += LANES) {
        /* 1.5 * 2^23: the sum has the rounded product in its low bits. */
        vi rounded = (vi)(load(x + i) * inverse + 12582912.0f) - 0x4b400000;
        v8c narrow = __builtin_convertvector(__builtin_convertvector(rounded, vh), v8c);
        memcpy(values + i, &narrow, sizeof narrow);
    }
    return 1;
}

/* LANES values from i on. */
INLINE vf form_load(const uint8_t *values, float scale, long i, int form) {
    if (form == ROW_F32) return load_stored(values, i, STORED_F32);
    if (form == ROW_BF16) return load_stored(values, i, STORED_BF16);
    if (form == ROW_F16) return load_stored(values, i, STORED_F16);
    v8c narrow;
    memcpy(&narrow, values + i, sizeof narrow);
    return __builtin_convertvector(__builtin_convertvector(narrow, vi), vf) * scale;
}

INLINE vi form_store(vf x, uint8_t *values, long i, int form) {
    if (form == ROW_F32) {
        memcpy(values + 4 * i, &x, sizeof x);
        return not_finite((vu)x, 0x7f800000);
    }
    vh half = form == ROW_BF16 ? __builtin_convertvector(to_bf16((vu)x), vh) : to_f16(x);
    memcpy(values + 2 * i, &half, sizeof half);
    vu bits = __builtin_convertvector(half, vu);
    return not_finite(bits, form == ROW_BF16 ? 0x7f80 : 0x7c00);
}

static long bytes_of(int form) { return form == ROW_F32 ? 4 : form == ROW_INT8 ? 1 : 2; }

INLINE int encode_whole(const float *x, long size, uint8_t *values, uint8_t *scales, int form) {
    int fine = 1;
    vi bad = {0};
    if (form == ROW_INT8)
        for (long i = 0; i < size; i += ROW_BLOCK)
            fine &= encode_int8_block(x + i, values + i, scales + i / ROW_BLOCK * 2);
    else
        for (long i = 0; i < size; i += LANES) bad |= form_store(load(x + i), values, i, form);
    return fine && all_clear(bad);
}

INLINE int encode_form(const float *x, long size, uint8_t *values, uint8_t *scales, int form) {
    long whole = size & -ROW_BLOCK, rest = size - whole;
    int fine = encode_whole(x, whole, values, scales, form);
    if (!rest) return fine;
    float part[ROW_BLOCK] = {0};
    uint8_t coded[ROW_BLOCK * 4];
    memcpy(part, x + whole, (size_t)rest * sizeof *x);
    fine &= encode_whole(part, ROW_BLOCK, coded, scales + whole / ROW_BLOCK * 2, form);
    memcpy(values + whole * bytes_of(form), coded, (size_t)(rest * bytes_of(form)));
    return fine;
}

enum { CHECK, STORE, ADD };

/* Checks, stores or adds to `out`; only int8's scales can be other than finite. */
INLINE int decode_whole(const uint8_t *values, const uint8_t *scales, long size, float *out,
                        int form, int what) {
    vi bad = {0};
    int fine = 1;
    for (long block = 0; block < size / ROW_BLOCK; block++) {
        uint16_t bits = 0;
        float scale = form == ROW_INT8 ? scale_of(scales, block, &bits) : 0;
        fine &= bits <= 0x7b80;
        if (form == ROW_INT8 && what == CHECK) continue;
        for (long i = block * ROW_BLOCK; i < (block + 1) * ROW_BLOCK; i += LANES) {
            vf x = form_load(values, scale, i, form);
            if (form != ROW_INT8) bad |= not_finite((vu)x, 0x7f800000);
            if (what == STORE) store(out + i, x);
            if (what == ADD) store(out + i, load(out + i) + x);
        }
    }
    return fine && all_clear(bad);
}

INLINE int decode_form(const uint8_t *values, const uint8_t *scales, long size, float *out,
                       int form, int what) {
    long whole = size & -ROW_BLOCK, rest = size - whole;
    int fine = decode_whole(values, scales, whole, out, form, what);
    if (!rest) return fine;
    float part[ROW_BLOCK] = {0};
    uint8_t coded[ROW_BLOCK * 4] = {0};
    memcpy(coded, values + whole * bytes_of(form), (size_t)(rest * bytes_of(form)));
    if (what == ADD) memcpy(part, out + whole, (size_t)rest * sizeof *out);
    fine &= decode_whole(coded, scales + whole / ROW_BLOCK * 2, ROW_BLOCK, part, form, what);
    if (what != CHECK) memcpy(out + whole, part, (size_t)rest * sizeof *out);
    return fine;
}

#define FORM(name, form)                                                                        \
    static int encode_##name(const float *x, long size, uint8_t *values, uint8_t *scales) {     \
        return encode_form(x, size, values, scales, form);                                      \
    }                                                                                           \
    static int decode_##name(const uint8_t *v, const uint8_t *s, long size, float *out) {       \
        return decode_form(v, s, size, out, form, STORE);                                       \
    }                                                                                           \
    static int finite_##name(const uint8_t *v, const uint8_t *s, long size) {                   \
        return decode_form(v, s, size, NULL, form, CHECK);                                      \
    }                                                                                           \
    static void add_##name(const uint8_t *v, const uint8_t *s, long size, float *total) {       \
        decode_form(v, s, size, total, form, ADD);                                              \
    }
FORM(f32, ROW_F32)
FORM(bf16, ROW_BF16)
FORM(f16, ROW_F16)
FORM(int8, ROW_INT8)
#define FUNCTIONS(name) {encode_##name, decode_##name, finite_##name, add_##name}

const struct row_form ISA(row_forms)[ROW_FORMS] = {
    FUNCTIONS(f32),
    FUNCTIONS(bf16),
    FUNCTIONS(f16),
    FUNCTIONS(int8),
};
