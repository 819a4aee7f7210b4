/* rms_norm, rope and softmax, row by row. */
#include "../norms.h"
#include "../table.h"
#include "exp.h"

#include <math.h>

static float mean_square(const float *x, long size) {
    vf sum[4] = {{0}};
    long i = 0;
    for (; i + 4 * LANES <= size; i += 4 * LANES)
        for (int n = 0; n < 4; n++) {
            vf value = load(x + i + n * LANES);
            sum[n] = fma_(value, value, sum[n]);
        }
    float rest = 0;
    for (; i < size; i++) rest += x[i] * x[i];
    return (sum_lanes((sum[0] + sum[1]) + (sum[2] + sum[3])) + rest) / (float)size;
}

static void rms_row(const float *x, const float *weight, float eps, long size, float *out) {
    float factor = 1.0f / sqrtf(mean_square(x, size) + eps);
    if (weight)
        for (long i = 0; i < size; i++) out[i] = x[i] * factor * weight[i];
    else
        for (long i = 0; i < size; i++) out[i] = x[i] * factor;
}

void ISA(rms_norm)(void *context, long index, int thread) {
    (void)thread;
    const struct rms_norm *norm = context;
    long first = index * norm->group, last = first + norm->group;
    for (long row = first; row < last && row < norm->rows; row++) {
        const char *x = norm->x;
        long rest = row;
        for (int axis = norm->axes - 1; axis >= 0; axis--) {
            x += rest % norm->shape[axis] * norm->stride[axis];
            rest /= norm->shape[axis];
        }
        rms_row((const float *)x, norm->weight, norm->eps, norm->size,
                norm->out + row * norm->size);
    }
}

typedef double vd __attribute__((vector_size(8 * LANES)));
typedef int64_t vl __attribute__((vector_size(8 * LANES)));

/* Sine and cosine, to float32's rounding for angles to a million times a million. */
INLINE void sine_cosine(vf angle, float *sine, float *cosine) {
    const double magic = 6755399441055744.0;   /* 1.5 * 2^52 */
    vd x = __builtin_convertvector(angle, vd);
    vd turns = x * 0.6366197723675814 + magic;
    vi quarter = __builtin_convertvector((vl)turns & 3, vi);
    turns -= magic;
    /* A quarter turn in two parts; the first has 33 bits, so that its product is exact. */
    vf r = __builtin_convertvector((x - turns * 1.5707963267341256) - turns * 6.077100506506192e-11,
                                   vf);
    vf square = r * r;
    vf s = fma_(square, all(2.7557319e-6f), all(-1.9841270e-4f));
    s = fma_(square, s, all(8.3333333e-3f));
    s = fma_(square, s, all(-0.16666667f));
    s = fma_(square * r, s, r);
    vf c = fma_(square, all(-2.7557319e-7f), all(2.4801587e-5f));
    c = fma_(square, c, all(-1.3888889e-3f));
    c = fma_(square, c, all(4.1666667e-2f));
    c = fma_(square, c, all(-0.5f));
    c = fma_(square, c, all(1.0f));
    vi odd = (quarter & 1) != 0;
    vi sine_sign = (quarter & 2) << 30, cosine_sign = ((quarter + 1) & 2) << 30;
    store(sine, (vf)((vi)choose_lanes(odd, c, s) ^ sine_sign));
    store(cosine, (vf)((vi)choose_lanes(odd, s, c) ^ cosine_sign));
}

/* Pair i is at `step` * i and `apart` from there. */
INLINE void turn_pairs(const float *x, const float *sine, const float *cosine, long half, long step,
                       long apart, float *out) {
    for (long i = 0; i < half; i++) {
        float a = x[step * i], b = x[step * i + apart];
        out[step * i] = a * cosine[i] - b * sine[i];
        out[step * i + apart] = a * sine[i] + b * cosine[i];
    }
}

static void turn_row(const struct rope *rope, const float *x, const float *sine,
                     const float *cosine, float *out) {
    long half = rope->half, i = 0;
    if (rope->traditional) {
        turn_pairs(x, sine, cosine, half, 2, 1, out);
    } else {
        for (; i + LANES <= half; i += LANES) {
            vf a = load(x + i), b = load(x + half + i);
            vf s = load(sine + i), c = load(cosine + i);
            store(out + i, a * c - b * s);
            store(out + half + i, a * s + b * c);
        }
        turn_pairs(x + i, sine + i, cosine + i, half - i, 1, half, out + i);
    }
    if (out != x)
        memcpy(out + 2 * half, x + 2 * half, (size_t)(rope->size - 2 * half) * sizeof *x);
}

/* One position of one batch: all its heads. */
void ISA(rope)(void *context, long index, int thread) {
    const struct rope *rope = context;
    long batch = index / rope->length, at = index % rope->length;
    float *sine = rope->scratch + (long)thread * 2 * rope->padded, *cosine = sine + rope->padded;
    float position = (float)at + (float)rope->offsets[rope->one_offset ? 0 : batch];
    position *= rope->scale;
    for (long i = 0; i < rope->padded; i += LANES)
        sine_cosine(load(rope->inverse + i) * position, sine + i, cosine + i);
    long heads = rope->outer * rope->inner;
    for (long head = 0; head < heads; head++) {
        const char *x = rope->x + batch * rope->stride[0] + head / rope->inner * rope->stride[1] +
                        head % rope->inner * rope->stride[2] + at * rope->stride[3];
        turn_row(rope, (const float *)x, sine, cosine,
                 rope->out + ((batch * heads + head) * rope->length + at) * rope->size);
    }
}

/* Eight from x + i on; -infinity beyond the row. */
INLINE vf load_some(const float *x, long i, long size) {
    float some[LANES];
    if (i + LANES <= size) return load(x + i);
    for (int n = 0; n < LANES; n++) some[n] = i + n < size ? x[i + n] : -INFINITY;
    return load(some);
}

void ISA(softmax)(const float *x, long size, float *out) {
    vf most = all(-INFINITY), sum = all(0);
    float lanes[LANES], largest = -INFINITY;
    for (long i = 0; i < size; i += LANES) most = larger(most, load_some(x, i, size));
    store(lanes, most);
    for (int n = 0; n < LANES; n++) largest = lanes[n] > largest ? lanes[n] : largest;
    for (long i = 0; i < size; i += LANES) {
        vf power = exp_(load_some(x, i, size) - largest);
        sum += power;
        store(lanes, power);
        memcpy(out + i, lanes, (size_t)(size - i < LANES ? size - i : LANES) * sizeof *out);
    }
    float whole = sum_lanes(sum);
    for (long i = 0; i < size; i++) out[i] /= whole;
}
