/* The one product that linear layers, scores and values are made of: C = A * B in float32.
 *
 * A is rows of elements.  B is panels of 16 columns in words of 32 bits: [steps][panels][16 words][16 columns], a word
 * being one float32 or a pair of bfloat16 that follow one another in a column.  A step is 64 bytes of a row of A.
 * An element of C depends on its row of A and its column of B alone, so neither the number of rows nor that of threads
 * changes its bits.
 */
#ifndef MULTIPLY_H
#define MULTIPLY_H

#include "vectors.h"

#define TILE 1024 /* bytes of a panel in one step */

/* B: `panels` (1 or 2) panels whose tiles lie `stride` bytes apart from step to step. */
typedef struct {
    const char *tiles;
    int64_t panels, stride, steps;
} panels_of;

#if defined(__AMX_BF16__)
typedef struct {
    int first, second;
} tile_rows; /* the configuration that the thread has: rows of the two tiles of A */

static void configure(tile_rows *now, int first, int second) {
    if (now->first == first && now->second == second) return;
    struct {
        uint8_t palette, start, reserved[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } c = {.palette = 1};
    const int rows[8] = {first, first, second, second, first, second, 16, 16};
    for (int i = 0; i < 8; i++) c.bytes[i] = 64, c.rows[i] = (uint8_t)rows[i];
    _tile_loadconfig(&c);
    *now = (tile_rows){first, second};
}

static INLINE void end_tiles(tile_rows *now) {
    if (now->first) _tile_release();
}

/* Up to 32 rows by up to 32 columns in 4 tiles. */
static INLINE void amx_block(const int two_rows, const int two_panels, const char *a, int64_t a_stride, int64_t a_step, panels_of b, float *c,
                             int64_t c_stride) {
    const char *tile = b.tiles;
    _tile_zero(0);
    if (two_panels) _tile_zero(1);
    if (two_rows) _tile_zero(2);
    if (two_rows && two_panels) _tile_zero(3);
    for (int64_t k = 0; k < b.steps; k++, a += a_step, tile += b.stride) {
        _tile_loadd(6, tile, 64);
        _tile_loadd(4, a, a_stride);
        _tile_dpbf16ps(0, 4, 6);
        if (two_panels) {
            _tile_loadd(7, tile + TILE, 64);
            _tile_dpbf16ps(1, 4, 7);
        }
        if (two_rows) {
            _tile_loadd(5, a + 16 * a_stride, a_stride);
            _tile_dpbf16ps(2, 5, 6);
            if (two_panels) _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, c, c_stride * 4);
    if (two_panels) _tile_stored(1, c + LANES, c_stride * 4);
    if (two_rows) _tile_stored(2, c + 16 * c_stride, c_stride * 4);
    if (two_rows && two_panels) _tile_stored(3, c + 16 * c_stride + LANES, c_stride * 4);
}

static void amx_rows(tile_rows *now, const char *a, int64_t a_stride, int64_t a_step, int64_t rows, panels_of b, float *c, int64_t c_stride) {
    if (rows > 16) configure(now, 16, (int)rows - 16);
    else configure(now, (int)rows, now->second ? now->second : 16);
    const int two = b.panels == 2;
    if (rows > 16 && two) amx_block(1, 1, a, a_stride, a_step, b, c, c_stride);
    else if (rows > 16) amx_block(1, 0, a, a_stride, a_step, b, c, c_stride);
    else if (two) amx_block(0, 1, a, a_stride, a_step, b, c, c_stride);
    else amx_block(0, 0, a, a_stride, a_step, b, c, c_stride);
}
#else
typedef char tile_rows;
static INLINE void end_tiles(tile_rows *now) { (void)now; }
#endif

#if defined(__AVX512F__)
#define MOST_ROWS 12
#define MOST_PANELS 2
#elif defined(__AVX2__)
#define MOST_ROWS 6
#define MOST_PANELS 1
#elif defined(__aarch64__)
#define MOST_ROWS 4
#define MOST_PANELS 1
#else
#define MOST_ROWS 2
#define MOST_PANELS 1
#endif

/* Rows of a block. Splitting pairs of bfloat16 takes vectors of AVX2's 16 as well. */
static INLINE int most_rows(const kind t) { return t == BF16 && MOST_ROWS == 6 ? 4 : MOST_ROWS; }

static INLINE w16 all_words(uint32_t a) { return (w16){a, a, a, a, a, a, a, a, a, a, a, a, a, a, a, a}; }

/* Add the products of words that lie in the same lanes. */
static INLINE v16 add_words(const kind t, w16 a, w16 b, v16 sum) {
    if (t == F32) return fused((v16)a, (v16)b, sum);
#if defined(__AVX512BF16__)
    return (v16)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#else
    sum = fused((v16)(a << 16), (v16)(b << 16), sum);
    return fused((v16)(a & 0xFFFF0000u), (v16)(b & 0xFFFF0000u), sum);
#endif
}

/* Memory to ask for beside the product: `hop` bytes on at each word of a panel. */
typedef struct {
    const char *next;
    int64_t hop;
} asked_for;

/* adds: to what C has. ahead: NULL asks for nothing; it is moved on. */
static INLINE void vector_block(const kind t, const int rows, const int panels, int adds, asked_for *ahead, const char *a, int64_t a_stride, panels_of b,
                                float *c, int64_t c_stride) {
    v16 sums[MOST_ROWS][MOST_PANELS] = {{{0}}};
    if (adds)
        for (int r = 0; r < rows; r++)
            for (int p = 0; p < panels; p++) memcpy(&sums[r][p], c + r * c_stride + p * LANES, 64);
    const char *tile = b.tiles;
    for (int64_t k = 0; k < b.steps; k++, a += 64, tile += b.stride) {
        for (int word = 0; word < 16; word++) {
            w16 columns[MOST_PANELS];
            for (int p = 0; p < panels; p++) memcpy(&columns[p], tile + p * TILE + word * 64, 64);
            for (int p = 0; ahead && p < panels; p++) {
                __builtin_prefetch(ahead->next);
                ahead->next += ahead->hop;
            }
            for (int r = 0; r < rows; r++) {
                uint32_t x;
                memcpy(&x, a + r * a_stride + word * 4, 4);
                for (int p = 0; p < panels; p++) sums[r][p] = add_words(t, all_words(x), columns[p], sums[r][p]);
            }
        }
    }
    for (int r = 0; r < rows; r++)
        for (int p = 0; p < panels; p++) memcpy(c + r * c_stride + p * LANES, &sums[r][p], 64);
}

static INLINE void vector_panels(const kind t, const int panels, const char *a, int64_t a_stride, int64_t rows, panels_of b, float *c,
                                 int64_t c_stride) {
    int64_t done = 0;
#define BLOCKS(n) \
    for (; n <= most_rows(t) && rows - done >= n; done += n) \
        vector_block(t, n, panels, 0, NULL, a + done * a_stride, a_stride, b, c + done * c_stride, c_stride)
    BLOCKS(MOST_ROWS);
    BLOCKS(8);
    BLOCKS(4);
    BLOCKS(2);
    BLOCKS(1);
#undef BLOCKS
}

/* C [rows][c_stride] = A [rows, a_stride bytes apart] * B. */
static INLINE void multiply(const kind t, tile_rows *now, const char *a, int64_t a_stride, int64_t rows, panels_of b, float *c, int64_t c_stride) {
#if defined(__AMX_BF16__)
    if (t == BF16) {
        for (int64_t done = 0; done < rows; done += 32)
            amx_rows(now, a + done * a_stride, a_stride, 64, least(32, rows - done), b, c + done * c_stride, c_stride);
        return;
    }
#endif
    (void)now;
    if (MOST_PANELS == 2 && b.panels == 2) {
        vector_panels(t, MOST_PANELS, a, a_stride, rows, b, c, c_stride);
        return;
    }
    for (int64_t p = 0; p < b.panels; p++, b.tiles += TILE) vector_panels(t, 1, a, a_stride, rows, b, c + p * LANES, c_stride);
}

/* Write a panel of B from up to 16 columns; rows[i] are `bytes` bytes of column i, NULL a column of zeros. */
static INLINE void pack_panel(const char *const *rows, int64_t bytes, char *tiles, int64_t stride) {
    for (int64_t done = 0; done < bytes; done += 64, tiles += stride) {
        w16 words[16];
        for (int i = 0; i < 16; i++) {
            words[i] = (w16){0};
            if (rows[i]) {
                if (bytes - done >= 64) memcpy(&words[i], rows[i] + done, 64);
                else memcpy(&words[i], rows[i] + done, bytes - done);
            }
        }
        transpose(words);
        memcpy(tiles, words, TILE);
    }
}

#endif
