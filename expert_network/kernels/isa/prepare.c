/* A row of activations in the order in which a format's blocks unpack. */
#include "product.h"

/* The scale of `count` values, and the values as int8 in `out`. NaN where one is not finite. */
static float quantize(const float *x, long count, int8_t *out) {
    const float to_integer = 12582912.0f;   /* 1.5 * 2^23: adding it rounds to nearest even */
    vf most = all(0), bad = all(0);
    for (long i = 0; i < count; i += LANES) {
        vf v = load(x + i), size = (vf)((vi)v & 0x7fffffff);
        most = larger(size, most);
        bad += v - v;
    }
    float top = 0;
    for (int l = 0; l < LANES; l++) top = most[l] > top ? most[l] : top;
    float scale = top / 127.0f + sum_lanes(bad);
    /* Below this, 1 / scale is no longer finite, and the values are nothing beside others. */
    float inverse = top > 1e-35f ? 127.0f / top : 0;
    for (long i = 0; i < count; i += LANES) {
        vf near = (load(x + i) * inverse + to_integer) - to_integer;
        vq n = __builtin_convertvector(__builtin_convertvector(near, vi), vq);
        memcpy(out + i, &n, sizeof n);
    }
    return scale;
}

static float sum(const float *x, long count) {
    vf total = all(0);
    for (long i = 0; i < count; i += LANES) total += load(x + i);
    return sum_lanes(total);
}

static long sum_bytes(const int8_t *q, long count) {
    long total = 0;
    for (long i = 0; i < count; i++) total += q[i];
    return total;
}

/* Where in its block the element stands that is byte `byte` of lane `lane` in a step. */
INLINE int place_of(int format, int step, int lane, int byte) {
    return lane * 4 * format_steps(format) + format_place(format, step, byte);
}

/* Floats, [block][step][byte][lane]. Bytes stay where they are in a word while weights become
 * floats, so they count 256^byte there; the topmost is shifted down. */
INLINE void order_floats(int format, const float *x, long left, float *out) {
    static const float repair[] = {1, 0x1p-8f, 0x1p-16f, 1};
    for (int s = 0; s < format_steps(format); s++)
        for (int byte = 0; byte < 4; byte++)
            for (int l = 0; l < LANES; l++) {
                int place = place_of(format, s, l, byte);
                *out++ = place < left ? x[place] * repair[byte] : 0;
            }
}

/* int8, [block][step][lane][byte]. */
INLINE void order_bytes(int format, const int8_t *q, long left, int8_t *out) {
    for (int s = 0; s < format_steps(format); s++)
        for (int l = 0; l < LANES; l++)
            for (int byte = 0; byte < 4; byte++) {
                int place = place_of(format, s, l, byte);
                *out++ = place < left ? q[place] : 0;
            }
}

INLINE void prepare_floats(int format, const struct layout *layout, const float *x, char *row) {
    long width = 32 * format_steps(format);
    float *sums = (float *)(row + layout->at_sums);
    for (long g = 0; g < layout->groups; g++) sums[g] = sum(x + g * layout->group, layout->group);
    for (long b = 0; b < layout->blocks; b++) {
        long at = b * width, left = layout->cols - at;
        order_floats(format, x + at, left, (float *)row + at);
    }
}

INLINE void prepare_bytes(int format, const struct layout *layout, const float *x, char *row) {
    long width = 32 * format_steps(format), group = layout->group;
    float *scales = (float *)(row + layout->at_scales), *sums = (float *)(row + layout->at_sums);
    int32_t *extra = (int32_t *)(row + layout->at_extra);
    /* A block and the groups that it touches: at most 128 elements either way. */
    int8_t q[128];
    long step = group > width ? group : width;
    for (long at = 0; at < layout->cols; at += step) {
        long left = layout->cols - at < step ? layout->cols - at : step;
        for (long i = 0; i < left; i += group) {
            long g = (at + i) / group;
            scales[g] = quantize(x + at + i, group, q + i);
            sums[g] = scales[g] * (float)sum_bytes(q + i, group);
        }
        long i = 0;
        for (; i + width <= left; i += width)
            order_bytes(format, q + i, width, (int8_t *)row + at + i);
        if (i < left) order_bytes(format, q + i, left - i, (int8_t *)row + at + i);
        if (format == BITS8)
            for (long i = 0; i < left; i += 4)
                extra[(at + i) / 4] = 128 * (int32_t)sum_bytes(q + i, 4);
    }
}

/* The groups beyond the last are 0, up to a whole vector of them. */
static void clear_groups(const struct layout *layout, char *row) {
    memset(row + layout->at_scales, 0, layout->bytes - layout->at_scales);
}

void ISA(prepare)(const struct layout *layout, const float *x, char *row) {
    if (layout->format == PLAIN) {
        size_t used = (size_t)layout->cols * 4;
        memcpy(row, x, used);
        memset(row + used, 0, layout->bytes - used);
        return;
    }
    clear_groups(layout, row);
    switch (layout->format) {
#define CASE(format)                                                      \
    case format:                                                          \
        if (layout->precision) prepare_bytes(format, layout, x, row);     \
        else prepare_floats(format, layout, x, row);                      \
        return;
        EACH_FORMAT(CASE)
    }
}
