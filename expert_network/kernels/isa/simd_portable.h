/* What any C compiler can do, at whatever speed it finds. */

INLINE vf fma_(vf a, vf b, vf c) { return a * b + c; }

INLINE float f16_value(uint16_t half) {
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, rest = half & 0x7fff;
    float value;
    /* The exponent is moved to float's place, and the power of two repairs its bias. */
    uint32_t bits = rest < 0x7c00 ? rest << 13 : 0x7f800000 | rest << 13;
    memcpy(&value, &bits, sizeof value);
    if (rest < 0x7c00) value *= 0x1p112f;
    memcpy(&bits, &value, sizeof value);
    bits |= sign;
    memcpy(&value, &bits, sizeof value);
    return value;
}

INLINE vf load_f16(const uint8_t *p) {
    vf v;
    for (int l = 0; l < LANES; l++) {
        uint16_t half;
        memcpy(&half, p + 2 * l, sizeof half);
        v[l] = f16_value(half);
    }
    return v;
}

INLINE vb lookup(vb table, vb index) {
    uint8_t of[32], at[32], out[32];
    memcpy(of, &table, 32), memcpy(at, &index, 32);
    for (int i = 0; i < 32; i++) out[i] = of[at[i] & 15];
    return load_bytes(out);
}

INLINE vi words24(const uint8_t *p) {
    vi v;
    for (int l = 0; l < LANES - 1; l++) v[l] = (int32_t)load_word(p + 3 * l);
    v[LANES - 1] = (int32_t)(load_word(p + 20) >> 8);
    return v;
}

typedef vi dots;

INLINE dots dots_add(dots d, vb q, vb x) {
    for (int p = 0; p < 4; p++) {
        vi qs = (vi)((vu)q << (24 - 8 * p) >> 24), xs = (vi)((vu)x << (24 - 8 * p)) >> 24;
        d += qs * xs;
    }
    return d;
}

INLINE vi dots_sum(dots d) { return d; }

INLINE vi dots_wide(vb q, vb x, vi x128) {
    (void)x128;
    return dots_add((dots){0}, q, x);
}
