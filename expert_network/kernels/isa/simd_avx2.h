/* AVX2, FMA and F16C; with VNNI bytes are multiplied and summed in one instruction. */
#include <immintrin.h>

INLINE vf fma_(vf a, vf b, vf c) { return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }

INLINE vf load_f16(const uint8_t *p) {
    return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
}

INLINE vb lookup(vb table, vb index) {
    return (vb)_mm256_shuffle_epi8((__m256i)table, (__m256i)index);
}

INLINE vi words24(const uint8_t *p) {
    /* The upper half begins at byte 12; it is read from 8 on, so as not to pass the end. */
    const __m256i spread = _mm256_setr_epi8(
        0, 1, 2, -1, 3, 4, 5, -1, 6, 7, 8, -1, 9, 10, 11, -1,
        4, 5, 6, -1, 7, 8, 9, -1, 10, 11, 12, -1, 13, 14, 15, -1);
    __m256i both = _mm256_inserti128_si256(
        _mm256_castsi128_si256(_mm_loadu_si128((const __m128i *)p)),
        _mm_loadu_si128((const __m128i *)(p + 8)), 1);
    return (vi)_mm256_shuffle_epi8(both, spread);
}

#if defined(__AVX512VNNI__) && defined(__AVX512VL__)

typedef vi dots;

INLINE dots dots_add(dots d, vb q, vb x) {
    return (vi)_mm256_dpbusd_epi32((__m256i)d, (__m256i)q, (__m256i)x);
}

INLINE vi dots_sum(dots d) { return d; }

INLINE vi dots_wide(vb q, vb x, vi x128) {
    (void)x128;
    return dots_add((dots){0}, q, x);
}

#else

typedef vs dots;

INLINE dots dots_add(dots d, vb q, vb x) {
    return d + (vs)_mm256_maddubs_epi16((__m256i)q, (__m256i)x);
}

INLINE vi dots_sum(dots d) {
    return (vi)_mm256_madd_epi16((__m256i)d, _mm256_set1_epi16(1));
}

INLINE vi dots_wide(vb q, vb x, vi x128) {
    /* |q - 128| * 127 * 2 is just below 32768, which q * 127 * 2 is not. */
    __m256i w = _mm256_xor_si256((__m256i)q, _mm256_set1_epi8(-128));
    __m256i pairs =
        _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8((__m256i)x, w));
    return (vi)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1)) + x128;
}

#endif
