/* Scores and values of a decode, from keys and values as they lie in their blocks.
 *
 * An element is summed over dims, and over keys, in the order of multiply.h: its bits are those of a chunk's row.
 * Keys come in runs of RUN. Queries come in fours: a vector of scores is a QUAD, 4 keys by 4 queries.
 */
#ifndef DECODE_PRODUCTS_H
#define DECODE_PRODUCTS_H

#define RUN 16
#define FOUR 4
#define MOST_QUERIES 16 /* of one tile of AMX */

#if defined(__AVX512BF16__)
#define PAIRED(t) ((t) == BF16) /* weights and values are multiplied in pairs of keys */
#else
#define PAIRED(t) 0
#endif
#if defined(__AMX_BF16__)
#define IN_TILES(t) ((t) == BF16)
#else
#define IN_TILES(t) 0
#endif

typedef uint32_t w4 __attribute__((vector_size(16)));
typedef uint32_t w8 __attribute__((vector_size(32)));

/* Four words of each of four rows. */
static INLINE w16 join(const char *rows, int64_t stride) {
    w4 x[FOUR];
    for (int i = 0; i < FOUR; i++) memcpy(&x[i], rows + i * stride, 16);
    const w8 low = SHUFFLE(x[0], x[1], 0, 1, 2, 3, 4, 5, 6, 7), high = SHUFFLE(x[2], x[3], 0, 1, 2, 3, 4, 5, 6, 7);
    return SHUFFLE(low, high, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
}

/* Word i of each row of `join`, for four queries. */
static INLINE w16 turn(const int i, w16 x) {
    if (i == 0) return SHUFFLE(x, x, 0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12);
    if (i == 1) return SHUFFLE(x, x, 1, 1, 1, 1, 5, 5, 5, 5, 9, 9, 9, 9, 13, 13, 13, 13);
    if (i == 2) return SHUFFLE(x, x, 2, 2, 2, 2, 6, 6, 6, 6, 10, 10, 10, 10, 14, 14, 14, 14);
    return SHUFFLE(x, x, 3, 3, 3, 3, 7, 7, 7, 7, 11, 11, 11, 11, 15, 15, 15, 15);
}

static INLINE w16 repeat(const char *words) {
    w4 x;
    memcpy(&x, words, 16);
    return SHUFFLE(x, x, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3);
}

/* Scores of one run in quads; queries: [words][FOUR]. later: two runs to ask for meanwhile: the next keys, and the values of these. */
static INLINE void score_run(const kind t, const char *keys, int64_t depth, const char *queries, const char *const *later, float *quads) {
    v16 sums[FOUR] = {{0}};
    for (int64_t at = 0; at < depth; at += 16, queries += 64) {
        for (int i = 0; i < RUN / 4; i++) {
            __builtin_prefetch(later[0] + at * RUN + i * 64);
            __builtin_prefetch(later[1] + at * RUN + i * 64, 0, 2);
        }
        w16 rows[FOUR];
        for (int g = 0; g < FOUR; g++) rows[g] = join(keys + FOUR * g * depth + at, depth);
#define WORD(i)                                     \
    {                                               \
        const w16 query = repeat(queries + (i)*16); \
        for (int g = 0; g < FOUR; g++) sums[g] = add_words(t, turn(i, rows[g]), query, sums[g]); \
    }
        WORD(0) WORD(1) WORD(2) WORD(3)
#undef WORD
    }
    memcpy(quads, sums, sizeof sums);
}

/* Four queries as `score_run` wants them; rows[i] NULL is a query of zeros. */
static INLINE void pack_four(const char *const *rows, int64_t bytes, int64_t depth, char *queries) {
    memset(queries, 0, depth * FOUR);
    for (int i = 0; i < FOUR; i++)
        for (int64_t at = 0; rows[i] && at < bytes; at += 4) memcpy(queries + at * FOUR + i * 4, rows[i] + at, least(4, bytes - at));
}

#if defined(__AVX512BF16__)
/* Words of two keys' values: 16 dims that `in_order` puts right. */
static INLINE w16 low_words(w16 even, w16 odd) { return (w16)_mm512_unpacklo_epi16((__m512i)even, (__m512i)odd); }
static INLINE w16 high_words(w16 even, w16 odd) { return (w16)_mm512_unpackhi_epi16((__m512i)even, (__m512i)odd); }
#endif

/* 32 sums in the order of the dims; those of pairs come as the halves of `low_words` and `high_words`. */
static INLINE void in_order(const kind t, v16 *x) {
    if (!PAIRED(t)) return;
    const v16 low = x[0], high = x[1];
    x[0] = SHUFFLE(low, high, 0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    x[1] = SHUFFLE(low, high, 8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
}

/* Sums of one run's values: `vectors` (an even number of pairs) of dims from `dim` on, for `queries` queries.
 * weights: [RUN][FOUR] floats, or [RUN / 2][FOUR] pairs. */
static INLINE void add_run(const kind t, const int queries, const int vectors, const char *values, int64_t depth, const char *weights, v16 (*sums)[4]) {
    const int step = PAIRED(t) ? 2 : 1;
    for (int key = 0; key < RUN; key += step, values += step * depth, weights += 16) {
        v16 x[4];
        for (int v = 0; v < vectors; v++) {
#if defined(__AVX512BF16__)
            if (PAIRED(t)) {
                w16 even, odd;
                memcpy(&even, values + v / 2 * 64, 64);
                memcpy(&odd, values + depth + v / 2 * 64, 64);
                x[v] = (v16)(v % 2 ? high_words(even, odd) : low_words(even, odd));
                continue;
            }
#endif
            x[v] = load(t, values, v * LANES, LANES);
        }
        for (int q = 0; q < queries; q++) {
            uint32_t word;
            memcpy(&word, weights + q * 4, 4);
            const w16 weight = all_words(word);
            for (int v = 0; v < vectors; v++) sums[q][v] = add_words(PAIRED(t) ? BF16 : F32, weight, (w16)x[v], sums[q][v]);
        }
    }
}

#if defined(__AMX_BF16__)
/* Tiles 0 to 3 and 5 have a row for each query, the others 16. */
static void configure_decode(tile_rows *now, int queries) {
    if (now->first == -queries) return;
    struct {
        uint8_t palette, start, reserved[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } c = {.palette = 1};
    for (int i = 0; i < 8; i++) c.bytes[i] = 64, c.rows[i] = (uint8_t)(i < 4 || i == 5 ? queries : 16);
    _tile_loadconfig(&c);
    *now = (tile_rows){-queries, 0};
}

/* Scores [RUN][16] of one run; queries: a panel. */
static INLINE void score_tile(const char *keys, int64_t depth, const char *queries, float *scores) {
    _tile_zero(7);
    for (int64_t at = 0; at < depth; at += 64, queries += TILE) {
        _tile_loadd(4, keys + at, depth);
        _tile_loadd(6, queries, 64);
        _tile_dpbf16ps(7, 4, 6);
    }
    _tile_stored(7, scores, 64);
}

/* Words of two runs' values, `halves` times 32 dims: [2 * halves][16 pairs][16]. */
static INLINE void weave(const int halves, const char *first, const char *second, int64_t depth, char *woven) {
    for (int pair = 0; pair < 16; pair++) {
        const char *row = (pair < 8 ? first : second) + pair % 8 * 2 * depth;
        for (int half = 0; half < halves; half++) {
            w16 even, odd;
            memcpy(&even, row + half * 64, 64);
            memcpy(&odd, row + depth + half * 64, 64);
            const w16 low = low_words(even, odd), high = high_words(even, odd);
            memcpy(woven + half * 2 * TILE + pair * 64, &low, 64);
            memcpy(woven + half * 2 * TILE + TILE + pair * 64, &high, 64);
        }
    }
}

/* Add 32 keys' values to tiles 0 to 3. weights: [queries][64 bytes]. */
static INLINE void add_tiles(const int halves, const char *woven, const char *weights) {
    _tile_loadd(5, weights, 64);
    _tile_loadd(4, woven, 64);
    _tile_dpbf16ps(0, 5, 4);
    _tile_loadd(6, woven + TILE, 64);
    _tile_dpbf16ps(1, 5, 6);
    if (halves == 1) return;
    _tile_loadd(7, woven + 2 * TILE, 64);
    _tile_dpbf16ps(2, 5, 7);
    _tile_loadd(4, woven + 3 * TILE, 64);
    _tile_dpbf16ps(3, 5, 4);
}
#endif

#endif
