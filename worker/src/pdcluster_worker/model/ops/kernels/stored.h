/* Rows of keys and values as the cache holds them; ops/stored_kv.py has the same arithmetic in torch. */
#ifndef STORED_H
#define STORED_H

#include "model.h"

typedef int8_t c16 __attribute__((vector_size(16)));

#define LEAST_GREATEST 0x1p-119f /* rows below are 0 */
#define MOST_GREATEST 3e38f      /* numbers above become this one */

static INLINE float top_of(const kind s) { return s == INT8 ? 127.0f : 448.0f; }

/* Elements i to i + n of a stored row without its scale, n <= 16; the other lanes are 0. */
static INLINE v16 load_stored(const kind s, const void *p, int64_t i, int64_t n) {
    if (s == BF16 || s == F32) return load(s, p, i, n);
    c16 bytes = {0};
    if (n >= LANES) memcpy(&bytes, (const char *)p + i, LANES);
    else memcpy(&bytes, (const char *)p + i, n);
    const i16 code = __builtin_convertvector(bytes, i16);
    if (s == INT8) return __builtin_convertvector(code, v16);
    const i16 size = code & 0x7F;
    const v16 normal = (v16)((size << 20) + (120 << 23)), small = __builtin_convertvector(size, v16) * all(0x1p-9f);
    return (v16)((w16)select16(size < 8, small, normal) | ((w16)code & 0x80000000u));
}

/* x to the nearest e4m3, |x| <= 448: ties to even. */
static INLINE i16 code_of(v16 x) {
    const w16 bits = (w16)x & 0x7FFFFFFFu;
    const i16 normal = (i16)((bits + 0x7FFFFu + ((bits >> 20) & 1u)) >> 20) - (120 << 3);
    const i16 small = (i16)((v16)bits * all(512.0f) + all(WHOLE)) - (i16)all(WHOLE);
    return (i16)select16((v16)bits < all(0x1p-6f), (v16)small, (v16)normal) | (i16)(((w16)x & 0x80000000u) >> 24);
}

/* The greatest size in a row; NaN or inf where it has one. */
static INLINE float greatest_size(const kind t, const void *row, int64_t dim) {
    i16 most = {0}; /* sizes of floats are in the order of their bits */
    for (int64_t i = 0; i < dim; i += LANES) {
        const i16 bits = (i16)load(t, row, i, dim - i) & 0x7FFFFFFF;
        most = (i16)select16(bits > most, (v16)bits, (v16)most);
    }
    int32_t lanes[LANES], greatest = 0;
    memcpy(lanes, &most, 64);
    for (int i = 0; i < LANES; i++) greatest = lanes[i] > greatest ? lanes[i] : greatest;
    float size;
    memcpy(&size, &greatest, 4);
    return size;
}

/* Quantize a row; returns its scale. */
static INLINE float quantize_row(const kind t, const kind s, const void *row, int64_t dim, char *to) {
    const float found = greatest_size(t, row, dim), size = found > MOST_GREATEST ? MOST_GREATEST : found, top = top_of(s);
    if (!(found >= LEAST_GREATEST && found < INFINITY)) {
        memset(to, 0, dim);
        return found < INFINITY ? 0 : NAN;
    }
    const v16 factor = all(top / size);
    for (int64_t i = 0; i < dim; i += LANES) {
        const v16 x = clamped(load(t, row, i, dim - i) * factor, -top, top);
        const i16 code = s == INT8 ? __builtin_convertvector((x + all(WHOLE)) - all(WHOLE), i16) : code_of(x);
        const c16 bytes = __builtin_convertvector(code, c16);
        if (dim - i >= LANES) memcpy(to + i, &bytes, LANES);
        else memcpy(to + i, &bytes, dim - i);
    }
    return size * (1.0f / top);
}

/* Store row `offset` of keys or values [block_size][dim] that lie at `half`. */
static INLINE void store_row(const kind t, const model_of *m, const char *row, char *half, int64_t offset) {
    const kind s = (kind)m->stored;
    char *to = half + offset * m->dim * bytes_of(s);
    if (s == t) memcpy(to, row, m->dim * bytes_of(t));
    else if (s == BF16)
        for (int64_t i = 0; i < m->dim; i += LANES) store(BF16, to, i, m->dim - i, load(t, row, i, m->dim - i));
    else {
        const float scale = s == INT8 ? quantize_row(t, INT8, row, m->dim, to) : quantize_row(t, FP8, row, m->dim, to);
        memcpy(half + m->scales + offset * 4, &scale, 4);
    }
}

/* Elements [first, end) of a stored row in their places of a row of the kind; those from dim on are 0. All are exact in bfloat16. */
static INLINE void expand_row(const kind t, const kind s, const char *row, int64_t dim, int64_t first, int64_t end, char *to) {
    for (int64_t i = first; i < end; i += LANES) {
        const v16 x = i < dim ? load_stored(s, row, i, dim - i) : all(0);
        if (t == F32) memcpy(to + i * 4, &x, 64);
        else {
            const h16 half = __builtin_convertvector((w16)x >> 16, h16);
            memcpy(to + i * 2, &half, 32);
        }
    }
}

/* `count` rows of `dim` elements, that follow one another; `depth` bytes apart in `to`. */
static __attribute__((noinline)) void expand_rows(kind t, const model_of *m, const char *rows, int64_t count, int64_t first, int64_t end, char *to, int64_t depth) {
#define EXPAND(t, s) \
    for (int64_t i = 0; i < count; i++) expand_row(t, s, rows + i * m->dim * bytes_of(s), m->dim, first, end, to + i * depth)
    if (t == F32 && m->stored == INT8) EXPAND(F32, INT8);
    else if (t == F32 && m->stored == FP8) EXPAND(F32, FP8);
    else if (t == F32) EXPAND(F32, BF16);
    else if (m->stored == INT8) EXPAND(BF16, INT8);
    else EXPAND(BF16, FP8);
#undef EXPAND
}

/* A weight with its value's scale; a weight of 0 takes nothing, also where the scale is NaN. */
static INLINE v16 with_scale(v16 weight, v16 scale) { return select16(weight == all(0), all(0), weight * scale); }

#endif
