/* Products with packed weights: out = x * weights + bias. */
#ifndef PRODUCT_H
#define PRODUCT_H

#include "quantized.h"

#define ROW_BLOCK 256 /* rows of x that stay in a core's cache while weights pass by */

typedef struct {
    const weights_of *weights;
    const char *x;
    char *out;
    int64_t rows;
} product_work;

static INLINE void finish_rows(const kind out_kind, const weights_of *w, const float *sums, char *out, int64_t rows, int64_t column) {
    for (int64_t row = 0; row < rows; row++)
        for (int64_t at = column; at < column + PAIR && at < w->columns; at += LANES) {
            v16 sum = load(F32, sums, row * PAIR + at - column, LANES);
            if (w->bias) sum += load(F32, w->bias, at, w->columns - at);
            store(out_kind, out, row * w->columns + at, w->columns - at, sum);
        }
}

static INLINE void product_pairs(const kind t, product_work *w, int64_t pair, int64_t last_pair, int64_t row, int64_t last_row) {
    const weights_of *of = w->weights;
    const kind out_kind = of->is_wide ? F32 : t;
    const int64_t steps = steps_of(t, of->depth), x_stride = of->depth * bytes_of(t), out_stride = of->columns * bytes_of(out_kind);
    const int64_t most = least(ROW_BLOCK, MOST_ROW_BYTES / x_stride / most_rows(t) * most_rows(t)), at_once = most > PAIR ? most : PAIR;
    float sums[ROW_BLOCK * PAIR] __attribute__((aligned(64)));
    for (int64_t block = row; block < last_row; block += at_once)
        for (int64_t p = pair; p < last_pair; p++) {
            const int64_t rows = least(at_once, last_row - block);
            const char *x = w->x + block * x_stride;
            if (of->stored == of->t) multiply_pair(t, x, x_stride, rows, of->tiles + p * steps * 2 * TILE, steps, sums);
            else multiply_codes(t, x, x_stride, rows, of, p, sums);
            if (of->is_wide) finish_rows(F32, of, sums, w->out + block * out_stride, rows, p * PAIR);
            else finish_rows(t, of, sums, w->out + block * out_stride, rows, p * PAIR);
        }
}

#if defined(__AMX_BF16__)
/* Copy rows so that each tile of A is one piece of memory: [blocks of 32 rows][steps][32 rows of 64 bytes]. */
static const char *gather_rows(const char *x, int64_t stride, int64_t rows, int64_t steps) {
    char *to = kept(KEPT_ROWS, round_up(rows, PAIR) * steps * 64);
    if (to)
        for (int64_t r = 0; r < rows; r++)
            for (int64_t k = 0; k < steps; k++) memcpy(to + ((r / PAIR * steps + k) * PAIR + r % PAIR) * 64, x + r * stride + k * 64, 64);
    return to;
}

/* Products of bfloat16 by AMX tiles, whose loads of weights in order the CPU foresees. */
static void product_tiles(product_work *w, int64_t pair, int64_t last_pair, int64_t row, int64_t last_row) {
    const weights_of *of = w->weights;
    const int64_t steps = steps_of(BF16, of->depth), x_stride = of->depth * 2, out_stride = of->columns * bytes_of(of->is_wide ? F32 : BF16);
    float sums[PAIR * PAIR] __attribute__((aligned(64)));
    tile_rows tiles = {0};
    for (int64_t block = row; block < last_row; block += ROW_BLOCK) {
        const char *gathered = NULL;
        if (last_row - block > PAIR) gathered = gather_rows(w->x + block * x_stride, x_stride, least(ROW_BLOCK, last_row - block), steps);
        for (int64_t p = pair; p < last_pair; p++) {
            const panels_of b = {of->tiles + p * steps * 2 * TILE, 2, 2 * TILE, steps};
            for (int64_t r = block; r < least(block + ROW_BLOCK, last_row); r += PAIR) {
                const int64_t rows = least(least(PAIR, block + ROW_BLOCK - r), last_row - r);
                if (gathered) amx_rows(&tiles, gathered + (r - block) * steps * 64, 64, PAIR * 64, rows, b, sums, PAIR);
                else amx_rows(&tiles, w->x + r * x_stride, x_stride, 64, rows, b, sums, PAIR);
                if (of->is_wide) finish_rows(F32, of, sums, w->out + r * out_stride, rows, p * PAIR);
                else finish_rows(BF16, of, sums, w->out + r * out_stride, rows, p * PAIR);
            }
        }
    }
    end_tiles(&tiles);
}
#endif

/* These rows of x times these pairs of panels. */
static void product_part(product_work *w, int64_t pair, int64_t last_pair, int64_t row, int64_t last_row) {
    if (w->weights->t == F32) product_pairs(F32, w, pair, last_pair, row, last_row);
#if defined(__AMX_BF16__)
    else if (w->weights->stored == BF16) product_tiles(w, pair, last_pair, row, last_row);
#endif
    else product_pairs(BF16, w, pair, last_pair, row, last_row);
}

static void product_region(void *data) {
    product_work *w = data;
    const place me = my_place();
    const int64_t pairs = (w->weights->columns + PAIR - 1) / PAIR;
    /* Few columns and many rows: some threads take other rows. */
    int64_t bands = 1;
    while (bands * 2 <= me.count && me.count % (bands * 2) == 0 && pairs * bands < 4 * me.count && w->rows >= 128 * bands) bands *= 2;
    int64_t pair, last_pair, row, last_row;
    share((place){me.number / bands, me.count / bands}, pairs, &pair, &last_pair);
    share((place){me.number % bands, bands}, (w->rows + PAIR - 1) / PAIR, &row, &last_row);
    product_part(w, pair, last_pair, row * PAIR, least(last_row * PAIR, w->rows));
}

/* out [rows, columns] of x's kind, or float32 where the weights are wide. x: [rows, depth], whole steps of 64 bytes deep. */
void product(const weights_of *weights, const void *x, void *out, int64_t rows) {
    product_work w = {weights, x, out, rows};
    run(product_region, &w, rows * weights->columns * weights->depth > 1 << 21 || weights->columns * weights->depth > 1 << 17);
}

typedef struct {
    kind t;
    const char *weight;
    char *tiles;
    int64_t columns, depth;
} pack_work;

static void pack_region(void *data) {
    pack_work *w = data;
    const int64_t steps = steps_of(w->t, w->depth), stride = w->depth * bytes_of(w->t);
    int64_t pair, last;
    share(my_place(), (w->columns + PAIR - 1) / PAIR, &pair, &last);
    for (; pair < last; pair++)
        for (int p = 0; p < 2; p++) {
            const char *rows[LANES];
            for (int i = 0; i < LANES; i++) {
                const int64_t column = pair * PAIR + p * LANES + i;
                rows[i] = column < w->columns ? w->weight + column * stride : NULL;
            }
            pack_panel(rows, stride, w->tiles + (pair * steps * 2 + p) * TILE, 2 * TILE);
        }
}

/* Bytes that weights [columns, depth] take when they are packed. */
int64_t packed_bytes(int64_t t, int64_t columns, int64_t depth) {
    return (columns + PAIR - 1) / PAIR * steps_of((kind)t, depth) * 2 * TILE;
}

/* Pack weights [columns, depth], row by row, into `tiles`. */
void pack(int64_t t, const void *weight, void *tiles, int64_t columns, int64_t depth) {
    pack_work w = {(kind)t, weight, tiles, columns, depth};
    run(pack_region, &w, columns * depth > LARGE);
}

typedef struct {
    const weights_of *weights;
    const int64_t *rows;
    char *out;
    int64_t count, depth;
} unpack_work;

static void unpack_region(void *data) {
    const unpack_work *w = data;
    const int64_t bytes = w->depth * bytes_of((kind)w->weights->t), steps = steps_of((kind)w->weights->t, w->depth);
    int64_t first, last;
    share(my_place(), w->count, &first, &last);
    for (int64_t i = first; i < last; i++) {
        const int64_t row = w->rows[i];
        const char *column = w->weights->tiles + (row / PAIR * steps * 2 + row % PAIR / LANES) * TILE + row % LANES * 4;
        for (int64_t at = 0; at < bytes; at += 4) memcpy(w->out + i * bytes + at, column + at / 64 * 2 * TILE + at % 64 * 16, least(4, bytes - at));
    }
}

/* out [count, depth]: these rows of weights that were packed, as they were before. */
void unpack(const weights_of *weights, const int64_t *rows, char *out, int64_t count, int64_t depth) {
    unpack_work w = {weights, rows, out, count, depth};
    run(unpack_region, &w, count * depth > LARGE);
}

#endif
