/* Products with pairs of panels by vectors.
 *
 * Some steps of a pair stay in a core's caches while all rows pass by; what they have summed waits in C.
 * Meanwhile the next steps come from memory: asked for evenly, because all at once would hold up the sums.
 */
#ifndef PAIRS_H
#define PAIRS_H

#include "multiply.h"

#define PAIR 32 /* columns that are packed side by side */

#define STEPS_AT_ONCE (12 * MOST_PANELS) /* of 2 KiB; two panels at once read them half as often */
#define MOST_ROW_BYTES (300 << 10) /* of rows that stay in a core's second cache while weights pass by */

static INLINE void group_of_rows(const kind t, int64_t rows, int adds, asked_for *ahead, const char *a, int64_t a_stride, panels_of b, float *c) {
#define ROWS(n) \
    case n: vector_block(t, n <= most_rows(t) ? n : 1, MOST_PANELS, adds, ahead, a, a_stride, b, c, PAIR); return;
    switch (rows) { ROWS(1) ROWS(2) ROWS(3) ROWS(4) ROWS(5) ROWS(6) ROWS(7) ROWS(8) ROWS(9) ROWS(10) ROWS(11) ROWS(12) }
#undef ROWS
}

/* Groups in which rows are multiplied. */
static INLINE int64_t groups_of(const kind t, int64_t rows) { return (rows + most_rows(t) - 1) / most_rows(t); }

static INLINE void multiply_kind(const kind t, int64_t rows, int adds, asked_for *ahead, const char *a, int64_t a_stride, const char *tiles, int64_t steps, float *c) {
    const int64_t groups = groups_of(t, rows), most = (rows + groups - 1) / groups;
    for (int64_t row = 0; row < rows; row += most)
        for (int p = 0; p < 2; p += MOST_PANELS) {
            const panels_of b = {tiles + p * TILE, MOST_PANELS, 2 * TILE, steps};
            group_of_rows(t, least(most, rows - row), adds, ahead, a + row * a_stride, a_stride, b, c + row * PAIR + p * LANES);
        }
}

/* Products of some steps of a pair, added to what C has where `adds`. */
static __attribute__((noinline)) void multiply_steps(kind t, int64_t rows, int adds, asked_for *ahead, const char *a, int64_t a_stride, const char *tiles, int64_t steps, float *c) {
    if (t == F32) multiply_kind(F32, rows, adds, ahead, a, a_stride, tiles, steps, c);
    else multiply_kind(BF16, rows, adds, ahead, a, a_stride, tiles, steps, c);
}

/* C [rows][PAIR] = A [rows, a_stride bytes apart] * B, a pair of panels. */
static INLINE void multiply_pair(const kind t, const char *a, int64_t a_stride, int64_t rows, const char *tiles, int64_t steps, float *c) {
    const int64_t groups = groups_of(t, rows);
    for (int64_t k = 0; k < steps; k += STEPS_AT_ONCE, tiles += STEPS_AT_ONCE * 2 * TILE) {
        const int64_t count = least(STEPS_AT_ONCE, steps - k);
        asked_for ahead = {tiles + count * 2 * TILE, (64 + groups - 1) / groups};
        multiply_steps(t, rows, k > 0, &ahead, a + k * 64, a_stride, tiles, count, c);
    }
}

#endif
