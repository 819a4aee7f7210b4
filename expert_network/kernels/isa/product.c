/* Products of some rows of activations with some rows of weights. */
#include "product.h"

void ISA(gemv)(const struct matrix *m, const struct layout *layout, long n, long count,
               const char *x, float *out);

void ISA(product)(const struct matrix *m, const struct layout *layout, long expert, long first,
                  long count, const char *const *x, float *const *out, long rows) {
    const float *bias = m->bias ? m->bias + expert * m->rows + first : NULL;
    long n = expert * m->rows + first;
    for (long r = 0; r < rows; r++) {
        ISA(gemv)(m, layout, n, count, x[r], out[r]);
        for (long c = 0; bias && c < count; c++) out[r][c] += bias[c];
    }
}
