#include "matrix.h"

static size_t up_to(size_t n, size_t step) { return (n + step - 1) / step * step; }

void layout_of(const struct matrix *matrix, int precision, struct layout *layout) {
    int steps = format_steps(matrix->format);
    struct layout made = {.format = matrix->format, .cols = matrix->cols, .group = matrix->group};
    if (matrix->format == PLAIN) {
        /* Zeros up to a whole vector. */
        made.bytes = up_to((size_t)matrix->cols * 4, 64);
        *layout = made;
        return;
    }
    long width = 32 * steps;
    made.precision = precision;
    made.per = matrix->group < width ? (int)(width / matrix->group) : 1;
    while (width << made.shift < matrix->group) made.shift++;
    made.blocks = (matrix->cols + width - 1) / width;
    made.groups = matrix->cols / matrix->group;
    size_t elements = (size_t)(made.blocks * width), groups = up_to((size_t)made.groups, 8);
    made.at_scales = up_to(elements * (precision ? 1 : 4), 64);
    made.at_sums = made.at_scales + (precision ? groups * 4 : 0);
    made.at_extra = made.at_sums + groups * 4;
    int extra = precision && matrix->format == BITS8;
    made.bytes = up_to(made.at_extra + (extra ? (size_t)made.blocks * 32 : 0), 64);
    *layout = made;
}

int layout_same(const struct layout *a, const struct layout *b) {
    return a->format == b->format && a->precision == b->precision && a->cols == b->cols &&
           a->group == b->group;
}
