/* LoRA adapters of a product: out += x * A * scale * B in the rows of a step that have one.
 *
 * Rows of one adapter follow one another in the plan's `adapter_rows`, wherever they are in the step. A and B are
 * panels of 16 columns in the words of multiply.h; sums are float32, x * A is rounded once. Sums of a row are in one
 * order, whatever other rows there are, so neither the batch nor the number of threads changes its bits.
 */
#ifndef ADAPTERS_H
#define ADAPTERS_H

#include "model.h"
#include "multiply.h"
#include "threads.h"

/* Rows that read A and B together; sums of one row, and panels of B, that do not wait for one another. */
#if defined(__AVX512F__)
#define TOGETHER 4
#define CHAINS 4
#define PANELS 4
#else
#define TOGETHER 2
#define CHAINS 2
#define PANELS 2
#endif
#define AHEAD 2048 /* bytes of A that are asked for before they are read */

/* What one adapter adds to `columns` columns from `first` on. a: [panels of ranks][words of x]; b: [panels of columns]
 * [words of ranks]; rank 0: nothing. */
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

/* between: x * A * scale, [adapter rows][parts][most_rank]. */
typedef struct {
    kind t;
    const plan_of *plan;
    const adapted_of *of;
    const char *x;
    char *out, *between;
} adapt_work;

/* Words of `length` elements. */
static INLINE int64_t words_of(const kind t, int64_t length) { return t == F32 ? length : (length + 1) / 2; }

static INLINE char *between_of(const kind t, const adapt_work *w, int64_t at, int64_t part) {
    return w->between + (at * w->of->parts + part) * w->of->most_rank * bytes_of(t);
}

static INLINE w16 word_of(const char *x, int64_t word, int64_t bytes) {
    uint32_t found = 0;
    memcpy(&found, x + word * 4, bytes);
    return all_words(found);
}

/* Add the products of `words` words from `from` on, one for each chain. */
static INLINE void shrink_words(const kind t, const int rows, const char *const *x, int64_t from, int words, int64_t bytes, const char *a, v16 sums[TOGETHER][CHAINS]) {
    for (int chain = 0; chain < words; chain++) {
        w16 ranks;
        memcpy(&ranks, a + (from + chain) * 64, 64);
        for (int r = 0; r < rows; r++) sums[r][chain] = add_words(t, word_of(x[r], from + chain, bytes), ranks, sums[r][chain]);
    }
    if (words == CHAINS)
        for (int line = 0; line < CHAINS; line++) __builtin_prefetch(a + from * 64 + AHEAD + line * 64);
}

/* x * A * scale of some rows. at: the first one's place in `adapter_rows`. */
static INLINE void shrink_rows(const kind t, const int rows, const adapt_work *w, int64_t at, int64_t part, const low_rank *adapter) {
    const int64_t words = words_of(t, w->of->depth), whole = w->of->depth * bytes_of(t) / 4;
    const char *x[TOGETHER];
    for (int r = 0; r < rows; r++) x[r] = w->x + w->plan->adapter_rows[at + r] * w->of->depth * bytes_of(t);
    for (int64_t rank = 0; rank < adapter->rank; rank += LANES) {
        const char *a = adapter->a + rank / LANES * words * 64;
        v16 sums[TOGETHER][CHAINS] = {{{0}}};
        int64_t word = 0;
        for (; whole - word >= CHAINS; word += CHAINS) shrink_words(t, rows, x, word, CHAINS, 4, a, sums);
        for (; word < whole; word++) shrink_words(t, rows, x, word, 1, 4, a, sums);
        if (word < words) shrink_words(t, rows, x, word, 1, 2, a, sums);
        for (int r = 0; r < rows; r++) {
            for (int chain = 1; chain < CHAINS; chain++) sums[r][0] += sums[r][chain];
            store(t, between_of(t, w, at + r, part), rank, LANES, sums[r][0] * all(adapter->scale));
        }
    }
}

/* Add what is between * B to some panels of some rows. */
static INLINE void grow_rows(const kind t, const int rows, const int panels, const adapt_work *w, int64_t at, int64_t part, const low_rank *adapter, int64_t panel) {
    const int64_t words = words_of(t, adapter->rank);
    const char *b = adapter->b + panel * words * 64;
    v16 sums[TOGETHER][PANELS] = {{{0}}};
    for (int64_t word = 0; word < words; word++) {
        w16 between[TOGETHER];
        for (int r = 0; r < rows; r++) between[r] = word_of(between_of(t, w, at + r, part), word, 4);
        for (int p = 0; p < panels; p++) {
            w16 columns;
            memcpy(&columns, b + (p * words + word) * 64, 64);
            for (int r = 0; r < rows; r++) sums[r][p] = add_words(t, between[r], columns, sums[r][p]);
            __builtin_prefetch(b + (panels * words + word * panels + p) * 64);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int p = 0; p < panels; p++) {
            const int64_t from = (panel + p) * LANES, n = adapter->columns - from;
            const int64_t place = w->plan->adapter_rows[at + r] * w->of->columns + adapter->first + from;
            store(t, w->out, place, n, load(t, w->out, place, n) + sums[r][p]);
        }
}

static INLINE void grow_panels(const kind t, const int rows, const adapt_work *w, int64_t at, int64_t part, const low_rank *adapter, int64_t panel, int64_t last) {
    for (; last - panel >= PANELS; panel += PANELS) grow_rows(t, rows, PANELS, w, at, part, adapter, panel);
    for (; panel < last; panel++) grow_rows(t, rows, 1, w, at, part, adapter, panel);
}

static INLINE void shrink(const kind t, const adapt_work *w, place me) {
    int64_t at = 0, turn = 0;
    for (int64_t run = 0; run < w->plan->num_runs; run++) {
        const int64_t length = w->plan->adapter_runs[2 * run + 1];
        const low_rank *parts = w->of->each + w->plan->adapter_runs[2 * run] * w->of->parts;
        for (int64_t done = 0, rows; done < length; done += rows) {
            rows = length - done < TOGETHER ? 1 : TOGETHER;
            for (int64_t part = 0; part < w->of->parts; part++) {
                if (!parts[part].rank || turn++ % me.count != me.number) continue;
                if (rows == 1) shrink_rows(t, 1, w, at + done, part, parts + part);
                else shrink_rows(t, TOGETHER, w, at + done, part, parts + part);
            }
        }
        at += length;
    }
}

static INLINE void grow(const kind t, const adapt_work *w, place me) {
    int64_t at = 0;
    for (int64_t run = 0; run < w->plan->num_runs; run++) {
        const int64_t length = w->plan->adapter_runs[2 * run + 1];
        const low_rank *parts = w->of->each + w->plan->adapter_runs[2 * run] * w->of->parts;
        for (int64_t part = 0; part < w->of->parts; part++) {
            int64_t first, last, done = 0;
            if (!parts[part].rank) continue;
            share(me, (parts[part].columns + LANES - 1) / LANES, &first, &last);
            for (; length - done >= TOGETHER; done += TOGETHER) grow_panels(t, TOGETHER, w, at + done, part, parts + part, first, last);
            for (; done < length; done++) grow_panels(t, 1, w, at + done, part, parts + part, first, last);
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
void adapt(const model_of *model, const plan_of *plan, const adapted_of *of, const char *x, char *out, char *between) {
    adapt_work w = {(kind)model->t, plan, of, x, out, between};
    int64_t rows = 0;
    for (int64_t i = 0; i < plan->num_runs; i++) rows += plan->adapter_runs[2 * i + 1];
    run(adapt_region, &w, rows * of->most_rank * (of->depth + of->columns) > LARGE);
}

#endif
