/* Packed weights in 8 bits: they become words of the kind in registers, or for many rows panels in a core's first cache.
 *
 * An element is its code times its scale, rounded to the kind, so products have the bits of those with dequantized weights.
 */
#ifndef QUANTIZED_H
#define QUANTIZED_H

#include "pairs.h"
#include "stored.h"
#include "threads.h"

#define CODE_STEPS 8      /* of 2 KiB of panels */
#define FEW_ROWS 4        /* for which panels would cost more than they save */
#define CODES_AHEAD 4096  /* bytes of codes to ask for ahead */

/* Weights [columns, depth] as [pairs][steps][2 panels][TILE]; bias: [columns] float32 or NULL.
 * stored: t, or the kind of codes, which lie in the same order, a byte each. scales: [pairs][depth / group, up][PAIR] of codes. */
typedef struct {
    const char *tiles;
    const float *bias, *scales;
    int64_t t, stored, columns, depth, group, is_wide;
} weights_of;

static INLINE int64_t steps_of(const kind t, int64_t depth) { return (depth * bytes_of(t) + 63) / 64; }

/* Bytes of a panel in one step, as codes. */
static INLINE int64_t code_bytes(const kind t) { return TILE / bytes_of(t); }

/* 16 codes as numbers; those of FP8 less `missing_factor`. */
static INLINE v16 values_of(const kind s, const char *codes) {
#if defined(__AVX512F__)
    const __m128i bytes = _mm_loadu_si128((const void *)codes);
    if (s == INT8) return (v16)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
    /* Its bits within those of a half, whose exponents are 8 less. */
    const __m256i wide = _mm256_cvtepi8_epi16(bytes), size = _mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16(0x3F80));
    return (v16)_mm512_cvtph_ps(_mm256_or_si256(size, _mm256_and_si256(wide, _mm256_set1_epi16((short)0x8000))));
#else
    return load_stored(s, codes, 0, LANES);
#endif
}

static INLINE float missing_factor(const kind s) {
#if defined(__AVX512F__)
    if (s == FP8) return 256.0f;
#endif
    return 1.0f;
}

/* Factors of the codes of a word: of its first 16 and of its last. */
typedef struct {
    v16 first, last;
} factors;

static INLINE factors factors_of(const kind t, const kind s, const float *scales) {
    const v16 x = load(F32, scales, 0, LANES) * all(missing_factor(s));
    if (t == F32) return (factors){x, x};
    return (factors){SHUFFLE(x, x, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7), SHUFFLE(x, x, 8, 8, 9, 9, 10, 10, 11, 11, 12, 12, 13, 13, 14, 14, 15, 15)};
}

static INLINE w16 expand_word(const kind t, const kind s, const char *codes, factors by) {
    const v16 first = values_of(s, codes) * by.first;
    if (t == F32) return (w16)first;
    const v16 last = values_of(s, codes + LANES) * by.last;
#if defined(__AVX512BF16__)
    return (w16)_mm512_cvtne2ps_pbh((__m512)last, (__m512)first);
#else
    const h16 left = narrow(first), right = narrow(last);
    return (w16)SHUFFLE(left, right, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31);
#endif
}

/* Where a pair's codes and scales of a step begin. */
static INLINE const char *codes_at(const kind t, const weights_of *w, int64_t pair, int64_t step) {
    return w->tiles + (pair * steps_of(t, w->depth) + step) * 2 * code_bytes(t);
}

static INLINE const float *scales_at(const kind t, const weights_of *w, int64_t pair, int64_t step) {
    const int64_t groups = (w->depth + w->group - 1) / w->group;
    return w->scales + (pair * groups + step * 64 / bytes_of(t) / w->group) * PAIR;
}

static INLINE void expand_kind(const kind t, const kind s, const weights_of *w, int64_t pair, int64_t first, int64_t count, char *to) {
    const char *codes = codes_at(t, w, pair, first);
    for (int64_t k = first; k < first + count; k++)
        for (int p = 0; p < 2; p++) {
            const factors by = factors_of(t, s, scales_at(t, w, pair, k) + p * LANES);
            for (int word = 0; word < 16; word++, codes += code_bytes(t) / 16, to += 64) {
                const w16 x = expand_word(t, s, codes, by);
                memcpy(to, &x, 64);
            }
        }
}

/* C [rows][PAIR] of a few rows: each word is expanded in registers, and used at once. */
static INLINE void code_block(const kind t, const kind s, const int rows, const char *a, int64_t a_stride, const weights_of *w, int64_t pair, float *c) {
    const int64_t steps = steps_of(t, w->depth), bytes = code_bytes(t) / 16;
    const char *codes = codes_at(t, w, pair, 0);
    v16 sums[FEW_ROWS][2] = {{{0}}};
    for (int64_t k = 0; k < steps; k++, a += 64, codes += 2 * code_bytes(t)) {
        const float *scales = scales_at(t, w, pair, k);
        const factors by[2] = {factors_of(t, s, scales), factors_of(t, s, scales + LANES)};
        for (int word = 0; word < 16; word++) {
            __builtin_prefetch(codes + CODES_AHEAD + word * 2 * bytes);
            const w16 left = expand_word(t, s, codes + word * bytes, by[0]);
            const w16 right = expand_word(t, s, codes + code_bytes(t) + word * bytes, by[1]);
            for (int r = 0; r < rows; r++) {
                uint32_t x;
                memcpy(&x, a + r * a_stride + word * 4, 4);
                sums[r][0] = add_words(t, all_words(x), left, sums[r][0]);
                sums[r][1] = add_words(t, all_words(x), right, sums[r][1]);
            }
        }
    }
    for (int r = 0; r < rows; r++) memcpy(c + r * PAIR, sums[r], 128);
}

static INLINE void few_rows(const kind t, const kind s, const char *a, int64_t a_stride, int64_t rows, const weights_of *w, int64_t pair, float *c) {
    if (rows == 1) code_block(t, s, 1, a, a_stride, w, pair, c);
    else if (rows == 2) code_block(t, s, 2, a, a_stride, w, pair, c);
    else if (rows == 3) code_block(t, s, 3, a, a_stride, w, pair, c);
    else code_block(t, s, 4, a, a_stride, w, pair, c);
}

/* Steps [first, first + count) of a pair as panels. */
static __attribute__((noinline)) void expand_steps(kind t, const weights_of *w, int64_t pair, int64_t first, int64_t count, char *to) {
    if (t == F32 && w->stored == INT8) expand_kind(F32, INT8, w, pair, first, count, to);
    else if (t == F32) expand_kind(F32, FP8, w, pair, first, count, to);
    else if (w->stored == INT8) expand_kind(BF16, INT8, w, pair, first, count, to);
    else expand_kind(BF16, FP8, w, pair, first, count, to);
}

/* C [rows][PAIR] = A [rows, a_stride bytes apart] * B, a pair of panels of codes. */
static INLINE void multiply_codes(const kind t, const char *a, int64_t a_stride, int64_t rows, const weights_of *w, int64_t pair, float *c) {
    if (rows <= FEW_ROWS) {
        if (w->stored == INT8) few_rows(t, INT8, a, a_stride, rows, w, pair, c);
        else few_rows(t, FP8, a, a_stride, rows, w, pair, c);
        return;
    }
    const int64_t groups = groups_of(t, rows), steps = steps_of(t, w->depth);
    char panels[CODE_STEPS * 2 * TILE] __attribute__((aligned(64)));
    for (int64_t k = 0; k < steps; k += CODE_STEPS) {
        const int64_t count = least(CODE_STEPS, steps - k);
        asked_for ahead = {codes_at(t, w, pair, k + count), (64 / bytes_of(t) + groups - 1) / groups};
        expand_steps(t, w, pair, k, count, panels);
        multiply_steps(t, rows, k > 0, &ahead, a + k * 64, a_stride, panels, count, c);
    }
}

typedef struct {
    kind t;
    const char *codes;
    char *tiles;
    int64_t columns, depth;
} pack_codes_work;

static void pack_codes_region(void *data) {
    const pack_codes_work *w = data;
    const int64_t steps = steps_of(w->t, w->depth), elements = 64 / bytes_of(w->t), of_word = 4 / bytes_of(w->t);
    int64_t pair, last;
    share(my_place(), (w->columns + PAIR - 1) / PAIR, &pair, &last);
    memset(w->tiles + pair * steps * 2 * code_bytes(w->t), 0, (last - pair) * steps * 2 * code_bytes(w->t));
    for (int64_t column = pair * PAIR; column < least(last * PAIR, w->columns); column++)
        for (int64_t k = 0; k < w->depth; k += of_word) {
            const int64_t panel = (column / PAIR * steps + k / elements) * 2 + column % PAIR / LANES;
            const int64_t word = k % elements / of_word * LANES + column % LANES;
            memcpy(w->tiles + panel * code_bytes(w->t) + word * of_word, w->codes + column * w->depth + k, least(of_word, w->depth - k));
        }
}

/* Pack codes [columns, depth], row by row, for products of kind t; they take packed_bytes / bytes_of(t). */
void pack_codes(int64_t t, const void *codes, void *tiles, int64_t columns, int64_t depth) {
    pack_codes_work w = {(kind)t, codes, tiles, columns, depth};
    run(pack_codes_region, &w, columns * depth > LARGE);
}

#endif
