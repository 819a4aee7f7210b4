/* What stands between an expert's first and last product. */
#include "exp.h"

#include "../activation.h"
#include "../table.h"

INLINE vf sigmoid(vf x) { return 1.0f / (1.0f + exp_(-x)); }

/* The normal distribution's cumulative function. -ln(erfc(a)) is close to a polynomial; these
 * coefficients are a fit of ours on [0, 4], beyond which it is 0: 1e-7 absolute. */
INLINE vf normal(vf x) {
    static const float c[] = {1.128379464149475f,    0.6366145014762878f,   0.1028067022562027f,
                              -0.019228314980864525f, -6.597767787752673e-05f, 0.0016163969412446022f,
                              -0.0006351063493639231f, 0.00013228596071712673f,
                              -1.5132134649320506e-05f, 7.447607117683219e-07f};
    vf a = smaller(all(4.0f), (vf)((vi)x & 0x7fffffff) * 0.707106781f), p = all(c[9]);
    for (int n = 8; n >= 0; n--) p = p * a + c[n];
    vf tail = choose_lanes(a == all(4.0f), all(0), 0.5f * exp_(-p * a));
    return choose_lanes(x < 0, tail, 1.0f - tail);
}

INLINE vf gelu_tanh(vf x) {
    /* (1 + tanh(u)) / 2 is sigmoid(2u). */
    vf u = 0.797884561f * (x + 0.044715f * (x * x * x));
    return x * sigmoid(2.0f * u);
}

INLINE vf clip(vf x, float limit) { return larger(all(-limit), smaller(all(limit), x)); }

INLINE vf activated(enum activation kind, const float *p, vf gate, vf up) {
    switch (kind) {
    case SWIGLU: return gate * sigmoid(gate) * up;
    case SWIGLU_CLIPPED: {
        vf clipped = smaller(all(p[0]), gate);
        return clipped * sigmoid(clipped) * clip(up, p[0]);
    }
    case SWIGLU_CLIPPED_AFTER: return smaller(all(p[0]), gate * sigmoid(gate)) * clip(up, p[0]);
    case GPT_OSS: {
        vf clipped = smaller(all(p[1]), gate);
        return (clip(up, p[1]) + 1.0f) * (clipped * sigmoid(p[0] * clipped));
    }
    case GEGLU_TANH: return gelu_tanh(gate) * up;
    case GEGLU_ERF: return gate * normal(gate) * up;
    case GEGLU_FAST: return gate * sigmoid(1.702f * gate) * up;
    case RELU2: {
        vf positive = larger(all(0), up);
        return positive * positive;
    }
    case SILU: return up * sigmoid(up);
    case GELU_TANH: return gelu_tanh(up);
    case GELU_ERF: return up * normal(up);
    case GELU_FAST: return up * sigmoid(1.702f * up);
    }
    return up;
}

INLINE void loop(enum activation kind, const float *p, const float *gate, const float *up,
                 float *out, long count) {
    long n = 0;
    for (; n + LANES <= count; n += LANES)
        store(out + n, activated(kind, p, load(gate + n), load(up + n)));
    if (n == count) return;
    float last[2][LANES] = {{0}};
    memcpy(last[0], gate + n, (size_t)(count - n) * 4);
    memcpy(last[1], up + n, (size_t)(count - n) * 4);
    store(last[1], activated(kind, p, load(last[0]), load(last[1])));
    memcpy(out + n, last[1], (size_t)(count - n) * 4);
}

void ISA(activate)(enum activation kind, const float *parameters, const float *gate,
                   const float *up, float *out, long count) {
    switch (kind) {
#define CASE(kind, name, parameters_, gated) \
    case kind: loop(kind, parameters, gate, up, out, count); return;
        EACH_ACTIVATION(CASE)
    }
}
