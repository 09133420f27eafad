/* Vectors of 16 floats by the compiler's own vector types, so that one source serves AVX-512, AVX2, SSE and NEON.
 *
 * A kernel takes the kind of its elements as a constant; inlining makes one copy for each kind.
 * Compiled without contraction: a product and a sum are fused only where `fused` says so.
 */
#ifndef VECTORS_H
#define VECTORS_H

#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define INLINE inline __attribute__((always_inline))
#define LANES 16

typedef float v16 __attribute__((vector_size(64)));
typedef int32_t i16 __attribute__((vector_size(64)));
typedef uint32_t w16 __attribute__((vector_size(64)));
typedef uint16_t h16 __attribute__((vector_size(32)));

/* The elements of a tensor: bfloat16 or float32; of stored keys and values also integers, and e4m3 (without inf). */
typedef enum { BF16 = 0, F32 = 1, INT8 = 2, FP8 = 3 } kind;

static INLINE int64_t bytes_of(const kind t) { return t == F32 ? 4 : t == BF16 ? 2 : 1; }

static INLINE int64_t round_up(int64_t x, int64_t step) { return (x + step - 1) / step * step; }

static INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

static INLINE v16 all(float x) { return (v16){x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }

static INLINE v16 select16(i16 mask, v16 a, v16 b) { return (v16)(((i16)a & mask) | ((i16)b & ~mask)); }

/* b where a is NaN. */
static INLINE v16 greater(v16 a, v16 b) {
#if defined(__AVX512F__)
    return (v16)_mm512_max_ps((__m512)a, (__m512)b);
#else
    return select16(a > b, a, b);
#endif
}

static INLINE v16 fused(v16 a, v16 b, v16 c) { /* a * b + c */
#if defined(__AVX512F__)
    return (v16)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    typedef float v8 __attribute__((vector_size(32)));
    union { v16 whole; v8 half[2]; } x = {a}, y = {b}, z = {c};
    for (int i = 0; i < 2; i++) z.half[i] = (v8)_mm256_fmadd_ps((__m256)x.half[i], (__m256)y.half[i], (__m256)z.half[i]);
    return z.whole;
#elif defined(__aarch64__) && defined(__clang__)
    return __builtin_elementwise_fma(a, b, c);
#else
    return a * b + c;
#endif
}

static INLINE v16 widen(h16 x) { return (v16)(__builtin_convertvector(x, w16) << 16); }

/* To the nearest, ties to even; NaN stays NaN. */
static INLINE h16 narrow(v16 x) {
#if defined(__AVX512BF16__)
    return (h16)_mm512_cvtneps_pbh((__m512)x);
#else
    const w16 bits = (w16)x, rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16, quiet = (bits >> 16) | 0x40u;
    const w16 is_nan = (w16)(x != x);
    return __builtin_convertvector((quiet & is_nan) | (rounded & ~is_nan), h16);
#endif
}

/* x as the kind's own elements hold it. */
static INLINE v16 rounded(const kind t, v16 x) { return t == F32 ? x : widen(narrow(x)); }

/* Elements i to i + n of p, n <= 16; the other lanes are 0. */
static INLINE v16 load(const kind t, const void *p, int64_t i, int64_t n) {
    const char *from = (const char *)p + i * bytes_of(t);
    v16 wide = {0};
    h16 half = {0};
    if (n >= LANES) {
        if (t == F32) memcpy(&wide, from, 64);
        else memcpy(&half, from, 32);
    } else {
        if (t == F32) memcpy(&wide, from, n * 4);
        else memcpy(&half, from, n * 2);
    }
    return t == F32 ? wide : widen(half);
}

static INLINE void store(const kind t, void *p, int64_t i, int64_t n, v16 x) {
    char *to = (char *)p + i * bytes_of(t);
    if (t == F32) {
        if (n >= LANES) memcpy(to, &x, 64);
        else memcpy(to, &x, n * 4);
    } else {
        const h16 half = narrow(x);
        if (n >= LANES) memcpy(to, &half, 32);
        else memcpy(to, &half, n * 2);
    }
}

static INLINE float sum_of(v16 x) { /* in one order on every machine */
    float part[LANES];
    memcpy(part, &x, 64);
    for (int step = 8; step; step /= 2)
        for (int i = 0; i < step; i++) part[i] += part[i + step];
    return part[0];
}

/* 2 ** r for |r| <= 1, relative error 1e-7, or 1e-6 where bfloat16 is what becomes of it. */
static INLINE v16 power(const kind t, v16 r) {
    v16 p = all(1.535336188e-4f);
    if (t == F32) p = fused(p, r, all(1.339887440e-3f));
    else p = all(1.339887440e-3f);
    p = fused(p, r, all(9.618437357e-3f));
    p = fused(p, r, all(5.550332471e-2f));
    p = fused(p, r, all(2.402264791e-1f));
    p = fused(p, r, all(6.931472028e-1f));
    return fused(p, r, all(1.0f));
}

/* p * 2 ** whole; beyond the range of floats inf and 0. */
static INLINE v16 scaled(v16 p, v16 whole) {
#if defined(__AVX512F__)
    return (v16)_mm512_scalef_ps((__m512)p, (__m512)whole);
#else
    /* Two factors, because one would overflow at both ends. */
    const i16 n = __builtin_convertvector(whole, i16), half = n >> 1;
    return p * (v16)((half + 127) << 23) * (v16)((n - half + 127) << 23);
#endif
}

static INLINE v16 clamped(v16 x, float low, float high) { /* NaN stays NaN */
    x = select16(x < all(low), all(low), x);
    return select16(x > all(high), all(high), x);
}

#define WHOLE 12582912.0f /* 1.5 * 2**23: a sum with it is rounded to a whole number */

/* 2 ** x; NaN stays NaN. */
static INLINE v16 exp2_of(const kind t, v16 x) {
#if defined(__AVX512DQ__)
    const v16 r = (v16)_mm512_reduce_ps((__m512)x, 8); /* x less the nearest whole number; 0 for inf */
    return scaled(power(t, r), (v16)_mm512_sub_ps((__m512)x, (__m512)r));
#else
    x = clamped(x, -151.0f, 129.0f);
    const v16 whole = (x + all(WHOLE)) - all(WHOLE);
    return scaled(power(t, x - whole), whole);
#endif
}

/* e ** x; NaN stays NaN. */
static INLINE v16 exp_of(const kind t, v16 x) {
    if (t == BF16) return exp2_of(t, x * all(1.44269504f));
    x = clamped(x, -104.5f, 89.0f);
    const v16 whole = fused(x, all(1.44269504f), all(WHOLE)) - all(WHOLE);
    v16 r = fused(whole, all(-0.693359375f), x);
    r = fused(whole, all(2.12194440e-4f), r);
    return scaled(power(t, r * all(1.44269504f)), whole);
}

/* x / y for y >= 1; where bfloat16 is what becomes of it, by an approximate reciprocal and one step of Newton. */
static INLINE v16 ratio(const kind t, v16 x, v16 y) {
#if defined(__AVX512F__)
    if (t == BF16) {
        const v16 guess = (v16)_mm512_rcp14_ps((__m512)y);
        const v16 better = fused(guess, fused(-y, guess, all(1.0f)), guess);
        /* At the end of the range the step would be inf * 0. */
        return x * select16(y > all(1e37f), guess, better);
    }
#endif
    return x / y;
}

#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)

/* Turn 16 rows of 16 words so that row i has word i of each. */
static INLINE void transpose(w16 *x) {
    w16 y[16];
    for (int i = 0; i < 16; i += 2) {
        y[i] = SHUFFLE(x[i], x[i + 1], 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29);
        y[i + 1] = SHUFFLE(x[i], x[i + 1], 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
    }
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; j++) {
            x[i + 2 * j] = SHUFFLE(y[i + j], y[i + 2 + j], 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29);
            x[i + 2 * j + 1] = SHUFFLE(y[i + j], y[i + 2 + j], 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
        }
    /* Row 4 * g + j has, in its quarter q, words 4 * q + j of rows 4 * g to 4 * g + 3. */
    for (int i = 0; i < 16; i += 8)
        for (int j = 0; j < 4; j++) {
            y[i + j] = SHUFFLE(x[i + j], x[i + 4 + j], 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27);
            y[i + 4 + j] = SHUFFLE(x[i + j], x[i + 4 + j], 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
        }
    for (int j = 0; j < 8; j++) {
        x[j] = SHUFFLE(y[j], y[j + 8], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23);
        x[j + 8] = SHUFFLE(y[j], y[j + 8], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    }
}

#endif
