/* Products of some rows of activations with some rows of weights. */
#include "product.h"

void ISA(gemv)(const struct matrix *m, const struct layout *layout, long n, long count,
               const char *x, float *out);
void ISA(gemm)(const struct matrix *m, const struct layout *layout, long n, long count,
               const char *const *x, float *const *out, long rows);

void ISA(product)(const struct matrix *m, const struct layout *layout, long expert, long first,
                  long count, const char *const *x, float *const *out, long rows) {
    const float *bias = m->bias ? m->bias + expert * m->rows + first : NULL;
    long n = expert * m->rows + first;
    if (rows == 1) ISA(gemv)(m, layout, n, count, x[0], out[0]);
    for (long r = 0; rows > 1 && r < rows; r += GEMM_ROWS) {
        long some = rows - r < GEMM_ROWS ? rows - r : GEMM_ROWS;
        ISA(gemm)(m, layout, n, count, x + r, out + r, some);
    }
    for (long r = 0; bias && r < rows; r++)
        for (long c = 0; c < count; c++) out[r][c] += bias[c];
}
