/* crc32() as zlib computes it, in a fifth of the time: a frame of the token loop is summed at both
 * ends, twice for each node. */
#include "checksum.h"
#include "module.h"

#include <stdint.h>
#include <string.h>

#define POLYNOMIAL 0xedb88320u   /* that of zlib and Ethernet, lowest power first */
#define ALONE (256 << 10)        /* bytes that are summed before another thread would have woken */

typedef uint32_t (*sum)(uint32_t crc, const uint8_t *data, size_t size);

/* ---- anywhere: eight bytes a step, each through a table of its own ---- */

static uint32_t steps[8][256];

static void fill_steps(void) {
    for (uint32_t byte = 0; byte < 256; byte++) {
        uint32_t crc = byte;
        for (int bit = 0; bit < 8; bit++) crc = crc >> 1 ^ (crc & 1 ? POLYNOMIAL : 0);
        steps[0][byte] = crc;
    }
    for (int n = 1; n < 8; n++)
        for (int byte = 0; byte < 256; byte++)
            steps[n][byte] = steps[n - 1][byte] >> 8 ^ steps[0][steps[n - 1][byte] & 255];
}

static uint32_t sum_anywhere(uint32_t crc, const uint8_t *data, size_t size) {
    for (; size >= 8; size -= 8, data += 8) {
        crc ^= (uint32_t)data[0] | (uint32_t)data[1] << 8 | (uint32_t)data[2] << 16 |
               (uint32_t)data[3] << 24;
        crc = steps[7][crc & 255] ^ steps[6][crc >> 8 & 255] ^ steps[5][crc >> 16 & 255] ^
              steps[4][crc >> 24] ^ steps[3][data[4]] ^ steps[2][data[5]] ^ steps[1][data[6]] ^
              steps[0][data[7]];
    }
    while (size--) crc = crc >> 8 ^ steps[0][(crc ^ *data++) & 255];
    return crc;
}

#if defined(__x86_64__)
/* ---- x86-64: 64 bytes a step, multiplied without carries ----
 * As in Intel's paper "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ Instruction"
 * (2009). A constant is x^n modulo the polynomial, bits reversed, with n from the distance over
 * which it folds. */
#include <immintrin.h>

#define CARRYLESS __attribute__((target("pclmul,sse4.1")))

CARRYLESS static inline __m128i folded(__m128i far, __m128i by, __m128i near) {
    return _mm_xor_si128(near, _mm_xor_si128(_mm_clmulepi64_si128(far, by, 0x00),
                                             _mm_clmulepi64_si128(far, by, 0x11)));
}

CARRYLESS static inline __m128i at(const uint8_t *data) {
    return _mm_loadu_si128((const __m128i *)data);
}

CARRYLESS static uint32_t sum_carryless(uint32_t crc, const uint8_t *data, size_t size) {
    if (size < 64) return sum_anywhere(crc, data, size);
    const __m128i by_64 = _mm_set_epi64x(0x1c6e41596, 0x154442bd4);
    const __m128i by_16 = _mm_set_epi64x(0x0ccaa009e, 0x1751997d0);
    __m128i lane[4];
    for (int n = 0; n < 4; n++) lane[n] = at(data + 16 * n);
    lane[0] = _mm_xor_si128(lane[0], _mm_cvtsi32_si128((int)crc));
    for (data += 64, size -= 64; size >= 64; data += 64, size -= 64)
        for (int n = 0; n < 4; n++) lane[n] = folded(lane[n], by_64, at(data + 16 * n));
    __m128i one = lane[0];
    for (int n = 1; n < 4; n++) one = folded(one, by_16, lane[n]);
    for (; size >= 16; data += 16, size -= 16) one = folded(one, by_16, at(data));
    /* 128 bits to 64, to 32, and what is left of them modulo the polynomial (Barrett). */
    const __m128i low = _mm_set_epi32(0, 0, 0, -1);
    const __m128i by_8 = _mm_set_epi64x(0, 0x163cd6124);
    const __m128i divide = _mm_set_epi64x(0x1f7011641, 0x1db710641);
    one = _mm_xor_si128(_mm_srli_si128(one, 8), _mm_clmulepi64_si128(one, by_16, 0x10));
    one = _mm_xor_si128(_mm_srli_si128(one, 4),
                        _mm_clmulepi64_si128(_mm_and_si128(one, low), by_8, 0x00));
    __m128i quotient = _mm_clmulepi64_si128(_mm_and_si128(one, low), divide, 0x10);
    quotient = _mm_clmulepi64_si128(_mm_and_si128(quotient, low), divide, 0x00);
    crc = (uint32_t)_mm_extract_epi32(_mm_xor_si128(one, quotient), 1);
    return sum_anywhere(crc, data, size);
}

static sum best(void) {
    return __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1") ? sum_carryless
                                                                                : sum_anywhere;
}

#elif defined(__aarch64__) && defined(__ARM_FEATURE_CRC32)
#include <arm_acle.h>

static uint32_t sum_by_instruction(uint32_t crc, const uint8_t *data, size_t size) {
    uint64_t word;
    for (; size >= 8; size -= 8, data += 8) {
        memcpy(&word, data, 8);
        crc = __crc32d(crc, word);
    }
    while (size--) crc = __crc32b(crc, *data++);
    return crc;
}

static sum best(void) { return sum_by_instruction; }

#else
static sum best(void) { return sum_anywhere; }
#endif

uint32_t checksum(uint32_t crc, const void *data, size_t size) {
    static sum chosen;   /* by whichever thread: all choose alike */
    if (!chosen) {
        fill_steps();
        chosen = best();
    }
    return ~chosen(~crc, data, size);
}

static PyObject *crc32(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    (void)module;
    if (count < 1 || count > 2) {
        PyErr_SetString(PyExc_TypeError, "crc32: a buffer, and a crc32 to go on from");
        return NULL;
    }
    unsigned long start = count > 1 ? PyLong_AsUnsignedLongMask(arguments[1]) : 0;
    Py_buffer view;
    if (PyErr_Occurred() || PyObject_GetBuffer(arguments[0], &view, PyBUF_SIMPLE)) return NULL;
    uint32_t crc = (uint32_t)start;
    if (view.len < ALONE) {
        crc = checksum(crc, view.buf, (size_t)view.len);
    } else {
        Py_BEGIN_ALLOW_THREADS
        crc = checksum(crc, view.buf, (size_t)view.len);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&view);
    return PyLong_FromUnsignedLong(crc);
}

PyMethodDef checksum_methods[] = {
    {"crc32", (PyCFunction)(void (*)(void))crc32, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};
