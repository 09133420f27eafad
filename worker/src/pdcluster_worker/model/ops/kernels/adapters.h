/* LoRA adapters of a product: out += x * A * scale * B in the rows of a step that have one.
 *
 * Rows of one adapter follow one another in the plan's `adapter_rows`, wherever they are in the step. Sums of a row
 * are in one order, whatever other rows there are, so neither the batch nor the number of threads changes its bits.
 */
#ifndef ADAPTERS_H
#define ADAPTERS_H

#include "model.h"
#include "threads.h"

#define TOGETHER 4 /* rows whose sums do not wait for one another */
#define PIECE 512  /* elements of a row that are float32 at a time */

/* What one adapter adds to `columns` columns from `first` on. a: [panels of 16 ranks][depth][16]; b: [panels of 16
 * columns][rank][16]; rank 0: nothing. */
typedef struct {
    const char *a, *b;
    int64_t rank, first, columns;
    float scale;
} low_rank;

/* All adapters of one product: [adapters][parts]. most_rank: the highest one, in whole vectors. */
typedef struct {
    const low_rank *each;
    int64_t parts, depth, columns, most_rank;
} adapted_of;

/* between: [adapter rows][parts][most_rank], x * A * scale. */
typedef struct {
    kind t;
    const plan_of *plan;
    const adapted_of *of;
    const char *x;
    char *out;
    float *between;
} adapt_work;

static INLINE float *between_of(const adapt_work *w, int64_t at, int64_t part) {
    return w->between + (at * w->of->parts + part) * w->of->most_rank;
}

static INLINE void widen_rows(const kind t, const adapt_work *w, int64_t at, int64_t count, int64_t start, int64_t length, float wide[TOGETHER][PIECE]) {
    for (int64_t r = 0; r < TOGETHER; r++) { /* missing rows are the last one again */
        const int64_t row = w->plan->adapter_rows[at + least(r, count - 1)];
        const char *x = w->x + (row * w->of->depth + start) * bytes_of(t);
        for (int64_t i = 0; i < length; i += LANES) store(F32, wide[r], i, LANES, load(t, x, i, length - i));
    }
}

/* x * A * scale of up to TOGETHER rows. at: the first one's place in `adapter_rows`. */
static INLINE void shrink_rows(const kind t, const adapt_work *w, int64_t at, int64_t count, int64_t part, const low_rank *adapter) {
    const int64_t depth = w->of->depth;
    float wide[TOGETHER][PIECE];
    for (int64_t rank = 0; rank < adapter->rank; rank += LANES) {
        const char *a = adapter->a + rank * depth * bytes_of(t);
        v16 sums[TOGETHER] = {{0}};
        for (int64_t start = 0; start < depth; start += PIECE) {
            const int64_t length = least(PIECE, depth - start);
            widen_rows(t, w, at, count, start, length, wide);
            for (int64_t k = 0; k < length; k++) {
                const v16 ranks = load(t, a, (start + k) * LANES, LANES);
                for (int r = 0; r < TOGETHER; r++) sums[r] = fused(all(wide[r][k]), ranks, sums[r]);
            }
        }
        for (int64_t r = 0; r < count; r++) store(F32, between_of(w, at + r, part), rank, LANES, sums[r] * all(adapter->scale));
    }
}

/* Add what is between * B to 16 columns of up to TOGETHER rows. */
static INLINE void grow_rows(const kind t, const adapt_work *w, int64_t at, int64_t count, int64_t part, const low_rank *adapter, int64_t column) {
    const char *b = adapter->b + column * adapter->rank * bytes_of(t);
    const float *between[TOGETHER];
    for (int64_t r = 0; r < TOGETHER; r++) between[r] = between_of(w, at + least(r, count - 1), part);
    v16 sums[TOGETHER] = {{0}};
    for (int64_t k = 0; k < adapter->rank; k++) {
        const v16 columns = load(t, b, k * LANES, LANES);
        for (int r = 0; r < TOGETHER; r++) sums[r] = fused(all(between[r][k]), columns, sums[r]);
    }
    for (int64_t r = 0; r < count; r++) {
        const int64_t place = w->plan->adapter_rows[at + r] * w->of->columns + adapter->first + column, n = adapter->columns - column;
        store(t, w->out, place, n, load(t, w->out, place, n) + sums[r]);
    }
}

static INLINE void shrink(const kind t, const adapt_work *w, place me) {
    int64_t at = 0, turn = 0;
    for (int64_t run = 0; run < w->plan->num_runs; run++) {
        const int64_t length = w->plan->adapter_runs[2 * run + 1];
        const low_rank *parts = w->of->each + w->plan->adapter_runs[2 * run] * w->of->parts;
        for (int64_t done = 0; done < length; done += TOGETHER)
            for (int64_t part = 0; part < w->of->parts; part++)
                if (parts[part].rank && turn++ % me.count == me.number)
                    shrink_rows(t, w, at + done, least(TOGETHER, length - done), part, parts + part);
        at += length;
    }
}

static INLINE void grow(const kind t, const adapt_work *w, place me) {
    int64_t at = 0;
    for (int64_t run = 0; run < w->plan->num_runs; run++) {
        const int64_t length = w->plan->adapter_runs[2 * run + 1];
        const low_rank *parts = w->of->each + w->plan->adapter_runs[2 * run] * w->of->parts;
        for (int64_t part = 0; part < w->of->parts; part++) {
            int64_t panel, last;
            if (!parts[part].rank) continue;
            share(me, (parts[part].columns + LANES - 1) / LANES, &panel, &last);
            for (; panel < last; panel++)
                for (int64_t done = 0; done < length; done += TOGETHER)
                    grow_rows(t, w, at + done, least(TOGETHER, length - done), part, parts + part, panel * LANES);
        }
        at += length;
    }
}

/* The first half, which needs no `out`. */
static void shrink_region(const adapt_work *w, place me) {
    if (w->t == F32) shrink(F32, w, me);
    else shrink(BF16, w, me);
}

/* The second one, when all threads have done the first, and `out` is there. */
static void grow_region(const adapt_work *w, place me) {
    if (w->t == F32) grow(F32, w, me);
    else grow(BF16, w, me);
}

static void adapt_region(void *data) {
    const adapt_work *w = data;
    const place me = my_place();
    shrink_region(w, me);
    wait_for_all(me);
    grow_region(w, me);
}

/* Add to out [rows, columns] what the adapters make of x [rows, depth]. */
void adapt(const model_of *model, const plan_of *plan, const adapted_of *of, const char *x, char *out, float *between) {
    adapt_work w = {(kind)model->t, plan, of, x, out, between};
    int64_t rows = 0;
    for (int64_t i = 0; i < plan->num_runs; i++) rows += plan->adapter_runs[2 * i + 1];
    run(adapt_region, &w, rows * of->most_rank * (of->depth + of->columns) > LARGE);
}

#endif
