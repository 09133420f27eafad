/* A layer's experts: a router chooses some of them for each row, and their results are summed with its weights.
 *
 * Rows of one expert are gathered, so each product reads an expert's weights once a step.  A row's sum goes in the order
 * of its experts' numbers, so its bits depend on the row alone.
 */
#ifndef EXPERTS_H
#define EXPERTS_H

#include "product.h"
#include "rows.h"

/* See Experts in experts.py. gate_up, down: of this rank's experts, [first, first + own) of `count`. */
typedef struct {
    const weights_of *router, *const *gate_up, *const *down;
    int64_t count, chosen, first, own, normalizes;
} experts_of;

/* x, out: [rows, width], which may be one. logits: [rows, count]; ids, weights, places: [rows, chosen].
 * A place is a row of `gathered` [total, width] and of `both` and `gated`, -1 of another rank's expert; starts [own + 1]: the
 * first place of each expert. */
typedef struct {
    const experts_of *of;
    kind t;
    const char *x;
    char *out;
    int64_t rows, width, inner, activation, total;
    float *logits, *weights;
    int32_t *ids, *places;
    int64_t *starts;
    char *gathered, *both, *gated;
} experts_work;

/* By the thread that called. Returns 0, or 1 where memory is out. */
static int lay_out_experts(experts_work *w) {
    const int64_t each = w->rows * w->of->chosen, element = bytes_of(w->t);
    w->inner = w->of->down[0]->depth;
    const int64_t sizes[] = {w->rows * w->of->count * 4, each * 4, each * 4, each * 4, (w->of->own + 1) * 8, each * w->width * element,
                             2 * each * w->inner * element, each * w->inner * element};
    int64_t starts[9] = {0};
    for (int i = 0; i < 8; i++) starts[i + 1] = starts[i] + round_up(sizes[i], 64);
    char *memory = kept(KEPT_EXPERTS, starts[8]);
    if (!memory) return 1;
    w->logits = (float *)memory;
    w->weights = (float *)(memory + starts[1]);
    w->ids = (int32_t *)(memory + starts[2]);
    w->places = (int32_t *)(memory + starts[3]);
    w->starts = (int64_t *)(memory + starts[4]);
    w->gathered = memory + starts[5];
    w->both = memory + starts[6];
    w->gated = memory + starts[7];
    return 0;
}

/* The greatest logits, of equal ones the lower expert's, as pairs of `weights` and `ids`, greatest first. */
static int64_t choose_greatest(const float *logits, int64_t count, int64_t most, float *weights, int32_t *ids) {
    int64_t found = 0;
    for (int64_t i = 0; i < count; i++) {
        if (found == most && !(logits[i] > weights[most - 1])) continue;
        int64_t at = found < most ? found++ : most - 1;
        for (; at > 0 && weights[at - 1] < logits[i]; at--) weights[at] = weights[at - 1], ids[at] = ids[at - 1];
        weights[at] = logits[i], ids[at] = (int32_t)i;
    }
    return found;
}

/* values = e ** (values - top), whose sum is returned. */
static float exponentials(float *values, int64_t count, float top) {
    v16 sum = {0};
    for (int64_t i = 0; i < count; i += LANES) {
        const v16 x = exp_of(F32, load(F32, values, i, count - i) - all(top));
        store(F32, values, i, count - i, x);
        for (int64_t lane = 0; lane < least(LANES, count - i); lane++) sum[lane] += x[lane];
    }
    return sum_of(sum);
}

static void sort_by_id(float *weights, int32_t *ids, int64_t count) {
    for (int64_t i = 1; i < count; i++) {
        const float weight = weights[i];
        const int32_t id = ids[i];
        int64_t at = i;
        for (; at > 0 && ids[at - 1] > id; at--) weights[at] = weights[at - 1], ids[at] = ids[at - 1];
        weights[at] = weight, ids[at] = id;
    }
}

/* The experts of a row in order, and their weights: NaN where a logit is. */
static INLINE void choose_row(const kind t, const experts_work *w, int64_t row) {
    const int64_t count = w->of->count, chosen = w->of->chosen;
    float *logits = w->logits + row * count, *weights = w->weights + row * chosen;
    int is_bad = 0;
    for (int64_t i = 0; i < count; i += LANES) store(F32, logits, i, count - i, rounded(t, load(F32, logits, i, count - i)));
    for (int64_t i = 0; i < count; i++)
        if (logits[i] != logits[i]) logits[i] = -INFINITY, is_bad = 1;
    choose_greatest(logits, count, chosen, weights, w->ids + row * chosen);
    const float top = weights[0], sum = exponentials(weights, chosen, top);
    const float total = is_bad ? NAN : w->of->normalizes ? sum : exponentials(logits, count, top);
    for (int64_t i = 0; i < chosen; i++) weights[i] /= total;
    sort_by_id(weights, w->ids + row * chosen, chosen);
}

/* Give each row and expert of this rank its place: rows of one expert follow one another. */
static void place_rows(experts_work *w) {
    const int64_t each = w->rows * w->of->chosen, own = w->of->own;
    memset(w->starts, 0, (own + 1) * 8);
    for (int64_t i = 0; i < each; i++) {
        const int64_t expert = w->ids[i] - w->of->first;
        if (expert >= 0 && expert < own) w->starts[expert + 1]++;
    }
    for (int64_t expert = 0; expert < own; expert++) w->starts[expert + 1] += w->starts[expert];
    w->total = w->starts[own];
    for (int64_t i = 0; i < each; i++) {
        const int64_t expert = w->ids[i] - w->of->first;
        w->places[i] = expert >= 0 && expert < own ? (int32_t)w->starts[expert]++ : -1;
    }
    memmove(w->starts + 1, w->starts, own * 8);
    w->starts[0] = 0;
}

static void gather_for_experts(const experts_work *w, place me) {
    const int64_t bytes = w->width * bytes_of(w->t);
    int64_t first, last;
    share(me, w->rows, &first, &last);
    for (int64_t i = first * w->of->chosen; i < last * w->of->chosen; i++)
        if (w->places[i] >= 0) memcpy(w->gathered + w->places[i] * bytes, w->x + i / w->of->chosen * bytes, bytes);
}

/* The products of all experts with their rows; threads share pairs of columns by the rows that each multiplies. */
static void multiply_experts(const experts_work *w, const weights_of *const *weights, const char *x, char *out, place me) {
    const int64_t columns = weights[0]->columns, depth = weights[0]->depth, pairs = (columns + PAIR - 1) / PAIR, element = bytes_of(w->t);
    int64_t first, last, before = 0;
    share(me, w->total * pairs, &first, &last);
    for (int64_t expert = 0; expert < w->of->own; expert++) {
        const int64_t start = w->starts[expert], rows = w->starts[expert + 1] - start;
        if (!rows) continue;
        const int64_t from = first > before ? (first - before + rows - 1) / rows : 0, to = last > before ? (last - before + rows - 1) / rows : 0;
        product_work product = {weights[expert], x + start * depth * element, out + start * columns * element, rows};
        if (from < least(to, pairs)) product_part(&product, from, least(to, pairs), 0, rows);
        before += rows * pairs;
    }
}

static INLINE void sum_experts(const kind t, const experts_work *w, place me) {
    const int64_t bytes = w->width * bytes_of(t), chosen = w->of->chosen;
    int64_t first, last;
    share(me, w->rows, &first, &last);
    for (int64_t row = first; row < last; row++)
        for (int64_t at = 0; at < w->width; at += LANES) {
            v16 sum = {0};
            for (int64_t i = row * chosen; i < (row + 1) * chosen; i++)
                if (w->places[i] >= 0) sum += all(w->weights[i]) * load(t, w->gathered + w->places[i] * bytes, at, w->width - at);
            store(t, w->out + row * bytes, at, w->width - at, sum);
        }
}

/* After lay_out_experts; the threads do not wait at the end. */
static void experts_region(void *data) {
    experts_work *w = data;
    const place me = my_place();
    int64_t first, last;
    share(me, w->rows, &first, &last);
    product_region(&(product_work){w->of->router, w->x, (char *)w->logits, w->rows});
    wait_for_all(me);
    for (int64_t row = first; row < last; row++)
        if (w->t == F32) choose_row(F32, w, row);
        else choose_row(BF16, w, row);
    wait_for_all(me);
    if (me.number == 0) place_rows(w);
    wait_for_all(me);
    gather_for_experts(w, me);
    wait_for_all(me);
    multiply_experts(w, w->of->gate_up, w->gathered, w->both, me);
    wait_for_all(me);
    gate_region(&(gate_work){w->t, w->both, w->gated, w->total, w->inner, w->activation});
    wait_for_all(me);
    multiply_experts(w, w->of->down, w->gated, w->gathered, me);
    wait_for_all(me);
    if (w->t == F32) sum_experts(F32, w, me);
    else sum_experts(BF16, w, me);
}

/* out [rows, width] of x [rows, width]; depths are whole steps of 64 bytes. Returns 0, or 1 where memory is out. */
int64_t experts(int64_t t, const experts_of *of, const void *x, void *out, int64_t rows, int64_t width, int64_t activation) {
    experts_work w = {.of = of, .t = (kind)t, .x = x, .out = out, .rows = rows, .width = width, .activation = activation};
    if (lay_out_experts(&w)) return 1;
    run(experts_region, &w, 1);
    return 0;
}

#endif
