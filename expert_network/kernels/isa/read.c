/* Reading and nothing else: the line that the products are measured against. */
#include "simd.h"

#include "../table.h"

uint64_t ISA(read)(const uint8_t *memory, long streams, size_t bytes) {
    vb sum[4] = {{0}};
    for (size_t at = 0; at < bytes; at += 128)
        for (long s = 0; s < streams; s++) {
            const uint8_t *p = memory + (size_t)s * bytes + at;
            __builtin_prefetch(p + 1024);
            __builtin_prefetch(p + 1088);
            for (int n = 0; n < 4; n++) sum[n] ^= load_bytes(p + 32 * n);
        }
    uint64_t words[4];
    vb all_of = sum[0] ^ sum[1] ^ sum[2] ^ sum[3];
    memcpy(words, &all_of, sizeof words);
    return words[0] ^ words[1] ^ words[2] ^ words[3];
}
