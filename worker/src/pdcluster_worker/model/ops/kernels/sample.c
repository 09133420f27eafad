/* Chooses one token a row of logits: the same tokens as model/picking.py, bit for bit.
 *
 * A row is worked on by one thread.  Nothing it depends on lies outside it: weights are multiples
 * of QUANTUM whose sums in double are exact in any order, and tokens have one order (the greater
 * logit first, of equal logits the lower id).  No list is sorted: a cut, and the draw itself, is
 * the shortest prefix of an order that holds a given sum, found by partitions (`keep_first`).
 *
 * Compile without contraction and without -ffast-math: every product and sum is rounded once, and
 * NaN and infinities mean what they say.  Loops over GROUP are written for the compiler to
 * vectorise.
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define GROUP 64
#define SUMS 8
#define QUANTUM 0x1p-34 /* with ROUND_BELOW and LOWEST as in model/weights.py */
#define ROUND_BELOW 0x1p-11f
#define LOWEST -32.0f
#define SURELY_NOTHING -25.0f /* exp of this rounds to no QUANTUM */
#define LOG2_E 1.44269504088896340736f
#define LN2_HIGH (355.0f / 512.0f)
#define LN2_LOW ((float)(0.693147180559945309417 - 355.0 / 512.0))
#define TO_INTEGER 0x1.8p23f /* added and subtracted, it leaves the nearest integer */

enum { PICKED = 0, NOT_FINITE = 1, NOTHING_LEFT = 2, NO_MEMORY = 3 };

/* Rows of a batch; see Rows and Picks in Python.  stride: floats from one row to the next. */
typedef struct {
    const float *logits;
    int64_t stride, vocab_size;
    const float *inverse_temperature;
    const int64_t *top_k;
    const double *top_p;
    const float *min_p;
    const double *u;
    int64_t *token_ids, *status;
} sample_work;

/* Rows whose first `count` tokens are wanted; see Ranks in Python.  rows: [R] their places in the batch. */
typedef struct {
    const float *logits;
    int64_t stride, vocab_size, count;
    const int64_t *rows;
    int64_t *ids;
    float *best;
    double *total;
} rank_work;

/* A token in an order: a greater key comes first.  id: the token. */
typedef struct {
    uint64_t key;
    float weight;
    uint32_t id;
} candidate;

/* One row, and what has been found of it.  top: ordered bits of each group's best logit; sums: of its weights. */
typedef struct {
    const float *logits;
    int64_t vocab_size, groups;
    float best, inverse_temperature, min_p;
    int32_t *top;
    double *sums;
    candidate *list;
} row_of;

/* --- logits and weights --- */

/* The bits of floats as integers of the same order; a negative zero equals a positive one. */
static void ordered_bits(const float *x, int32_t *out) {
    float y[GROUP];
    for (int i = 0; i < GROUP; i++) y[i] = x[i] + 0.0f;
    memcpy(out, y, sizeof y);
    for (int i = 0; i < GROUP; i++) out[i] ^= (out[i] >> 31) & 0x7FFFFFFF;
}

static int32_t ordered_bit(float x) {
    int32_t bits;
    x += 0.0f;
    memcpy(&bits, &x, 4);
    return bits ^ ((bits >> 31) & 0x7FFFFFFF);
}

static float from_ordered(int32_t ordered) {
    const int32_t bits = ordered ^ ((ordered >> 31) & 0x7FFFFFFF);
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

/* A group of logits; the last one is filled up with -inf in `space`. */
static const float *group_at(const row_of *row, int64_t group, float *space) {
    const int64_t left = row->vocab_size - group * GROUP;
    if (left >= GROUP) return row->logits + group * GROUP;
    for (int i = 0; i < GROUP; i++) space[i] = i < left ? row->logits[group * GROUP + i] : -INFINITY;
    return space;
}

/* Find each group's best logit and the row's; 0, or why the row has no token. */
static int scan(row_of *row) {
    int32_t most = INT32_MIN, least = INT32_MAX;
    float space[GROUP];
    int32_t bits[GROUP];
    for (int64_t g = 0; g < row->groups; g++) {
        int32_t top = INT32_MIN, low = INT32_MAX;
        ordered_bits(group_at(row, g, space), bits);
        for (int i = 0; i < GROUP; i++) top = bits[i] > top ? bits[i] : top;
        for (int i = 0; i < GROUP; i++) low = bits[i] < low ? bits[i] : low;
        row->top[g] = top;
        most = top > most ? top : most;
        least = low < least ? low : least;
    }
    /* NaN lies beyond the infinity of its sign. */
    if (most >= ordered_bit(INFINITY) || least < ordered_bit(-INFINITY)) return NOT_FINITE;
    row->best = from_ordered(most);
    return most == ordered_bit(-INFINITY) ? NOTHING_LEFT : PICKED;
}

static uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}

/* exp((logit - best) / temperature) of a group in multiples of QUANTUM, 0 below min_p.
 *
 * Choices are made between the bits of floats of one sign, which have the order of integers: a
 * choice by comparing floats can raise a flag, so compilers leave it as a branch. */
static void weigh(const row_of *row, const float *logits, float *weights) {
    const uint32_t lowest = bits_of(LOWEST), round_below = bits_of(ROUND_BELOW), min_p = bits_of(row->min_p);
    float x[GROUP], y[GROUP];
    uint32_t bits[GROUP], rounded[GROUP];
    for (int i = 0; i < GROUP; i++) x[i] = (logits[i] - row->best) * row->inverse_temperature;
    memcpy(bits, x, sizeof x);
    for (int i = 0; i < GROUP; i++) bits[i] = bits[i] > lowest ? lowest : bits[i];
    memcpy(x, bits, sizeof x);
    for (int i = 0; i < GROUP; i++) {
        const float n = (x[i] * LOG2_E + TO_INTEGER) - TO_INTEGER;
        const float r = (x[i] - n * LN2_HIGH) - n * LN2_LOW;
        float series = r * (float)(1.0 / 5040) + (float)(1.0 / 720);
        series = series * r + (float)(1.0 / 120);
        series = series * r + (float)(1.0 / 24);
        series = series * r + (float)(1.0 / 6);
        series = series * r + 0.5f;
        series = series * r + 1.0f;
        y[i] = series * r + 1.0f;
        bits[i] = (uint32_t)(int32_t)((n + 127.0f) * 0x1p23f); /* of 2**n */
    }
    memcpy(x, bits, sizeof x);
    for (int i = 0; i < GROUP; i++) {
        x[i] *= y[i];
        y[i] = (x[i] + ROUND_BELOW) - ROUND_BELOW;
    }
    memcpy(bits, x, sizeof x);
    memcpy(rounded, y, sizeof y);
    for (int i = 0; i < GROUP; i++) {
        const uint32_t weight = bits[i] < round_below ? rounded[i] : bits[i];
        bits[i] = weight >= min_p ? weight : 0;
    }
    memcpy(weights, bits, sizeof bits);
}

static double sum_of(const float *weights) {
    double lanes[SUMS] = {0}, sum = 0;
    for (int i = 0; i < GROUP; i += SUMS)
        for (int k = 0; k < SUMS; k++) lanes[k] += (double)weights[i + k];
    for (int k = 0; k < SUMS; k++) sum += lanes[k];
    return sum;
}

/* Sum the weights of each group; returns their total. */
static double weigh_all(const row_of *row) {
    float space[GROUP], weights[GROUP];
    double total = 0;
    for (int64_t g = 0; g < row->groups; g++) {
        row->sums[g] = 0;
        if ((from_ordered(row->top[g]) - row->best) * row->inverse_temperature < SURELY_NOTHING) continue;
        weigh(row, group_at(row, g, space), weights);
        total += row->sums[g] = sum_of(weights);
    }
    return total;
}

/* --- orders --- */

static uint64_t key_of(int32_t ordered, int64_t id) {
    return (uint64_t)((uint32_t)ordered ^ 0x80000000u) << 32 | (0xFFFFFFFFu - (uint32_t)id);
}

/* Move the shortest prefix, in the order of keys, that holds `wanted` to the front: returns its length.
 *
 * What a token counts is its weight, or 1.  Pivots are pseudo-random: they decide the time alone. */
static int64_t keep_first(candidate *list, int64_t count, double wanted, int by_weight) {
    int64_t low = 0, high = count;
    double before = 0;
    uint64_t state = 0x9E3779B97F4A7C15u;
    while (low < high) {
        state ^= state << 13, state ^= state >> 7, state ^= state << 17;
        const int64_t at = low + (int64_t)(state % (uint64_t)(high - low));
        const candidate pivot = list[at];
        int64_t middle = low;
        double left = 0;
        list[at] = list[high - 1];
        for (int64_t i = low; i < high - 1; i++) {
            const candidate one = list[i];
            const int is_first = one.key > pivot.key;
            list[i] = list[middle];
            list[middle] = one;
            middle += is_first;
            left += is_first ? (by_weight ? (double)one.weight : 1.0) : 0.0;
        }
        list[high - 1] = list[middle];
        list[middle] = pivot;
        const double with_pivot = before + left + (by_weight ? (double)pivot.weight : 1.0);
        if (before + left >= wanted) {
            high = middle;
        } else if (with_pivot >= wanted) {
            return middle + 1;
        } else {
            low = middle + 1;
            before = with_pivot;
        }
    }
    return low;
}

/* List the tokens of a group that `is_kept`, with their weights where there are any; returns the new count. */
static int64_t list_group(const row_of *row, int64_t g, const int32_t *bits, const float *weights, const uint8_t *is_kept, int64_t count) {
    for (int64_t part = 0; part < GROUP; part += 8) {
        uint64_t any;
        memcpy(&any, is_kept + part, 8);
        if (!any) continue; /* most are not */
        for (int64_t i = part; i < part + 8; i++) {
            const int64_t id = g * GROUP + i;
            row->list[count] = (candidate){key_of(bits[i], id), weights ? weights[i] : 0, (uint32_t)id};
            count += is_kept[i] && id < row->vocab_size;
        }
    }
    return count;
}

/* List the first `count` tokens of a row, in no order. */
static int64_t list_first(const row_of *row, int64_t count) {
    float space[GROUP];
    int32_t bits[GROUP], floor = INT32_MIN;
    uint8_t is_kept[GROUP];
    int64_t listed = 0;
    if (count < row->groups) { /* as many groups have a token that is no worse than the last of them */
        for (int64_t g = 0; g < row->groups; g++)
            row->list[g] = (candidate){key_of(row->top[g], g), 0, (uint32_t)g};
        keep_first(row->list, row->groups, (double)count, 0);
        floor = INT32_MAX;
        for (int64_t i = 0; i < count; i++) {
            const int32_t top = row->top[row->list[i].id];
            floor = top < floor ? top : floor;
        }
    }
    for (int64_t g = 0; g < row->groups; g++) {
        if (row->top[g] < floor) continue;
        ordered_bits(group_at(row, g, space), bits);
        for (int i = 0; i < GROUP; i++) is_kept[i] = bits[i] >= floor;
        listed = list_group(row, g, bits, NULL, is_kept, listed);
    }
    return keep_first(row->list, listed, (double)count, 0);
}

/* Give the listed tokens their weights; returns the sum. */
static double weigh_list(const row_of *row, int64_t count) {
    float logits[GROUP], weights[GROUP];
    double total = 0;
    for (int64_t i = 0; i < count; i += GROUP) {
        const int64_t n = count - i < GROUP ? count - i : GROUP;
        for (int64_t k = 0; k < GROUP; k++) logits[k] = k < n ? row->logits[row->list[i + k].id] : -INFINITY;
        weigh(row, logits, weights);
        for (int64_t k = 0; k < n; k++) total += row->list[i + k].weight = weights[k];
    }
    return total;
}

/* List every token that weighs at least `floor`, which is over 0, with its weight. */
static int64_t list_heavy(const row_of *row, float floor) {
    float space[GROUP], weights[GROUP];
    int32_t bits[GROUP];
    uint8_t is_kept[GROUP];
    int64_t count = 0;
    for (int64_t g = 0; g < row->groups; g++) {
        if (row->sums[g] < (double)floor) continue;
        const float *logits = group_at(row, g, space);
        weigh(row, logits, weights);
        ordered_bits(logits, bits);
        for (int i = 0; i < GROUP; i++) is_kept[i] = weights[i] >= floor;
        count = list_group(row, g, bits, weights, is_kept, count);
    }
    return count;
}

/* --- choices --- */

static int64_t greedy(const row_of *row) {
    const int32_t most = ordered_bit(row->best);
    int64_t g = 0;
    while (row->top[g] != most) g++;
    int64_t id = g * GROUP;
    while (ordered_bit(row->logits[id]) != most) id++;
    return id;
}

/* u * total can round up to the total, which no sum exceeds. */
static double share_of(double u, double total) {
    const double share = u * total;
    return share < total - QUANTUM ? share : total - QUANTUM;
}

/* The token whose weight takes the running sum, in the order of ids, over the share. */
static int64_t draw_all(const row_of *row, double u) {
    const double share = share_of(u, weigh_all(row));
    float space[GROUP], weights[GROUP];
    double sum = 0;
    int64_t g = 0;
    while (sum + row->sums[g] <= share) sum += row->sums[g++];
    weigh(row, group_at(row, g, space), weights);
    int i = 0;
    while ((sum += (double)weights[i]) <= share) i++;
    return g * GROUP + i;
}

static int64_t draw_listed(const row_of *row, int64_t count, double u) {
    double total = 0;
    for (int64_t i = 0; i < count; i++) {
        total += (double)row->list[i].weight;
        row->list[i].key = 0xFFFFFFFFu - row->list[i].id;
    }
    /* The least sum that is over the share: sums are multiples of QUANTUM. */
    const double wanted = (floor(share_of(u, total) / QUANTUM) + 1) * QUANTUM;
    const int64_t kept = keep_first(row->list, count, wanted, 1);
    int64_t last = 0;
    for (int64_t i = 0; i < kept; i++) last = row->list[i].id > last ? row->list[i].id : last;
    return last;
}

static int64_t cut_and_draw(const row_of *row, int64_t top_k, double top_p, double u) {
    int64_t count;
    double total;
    if (top_k > 0) {
        count = list_first(row, top_k);
        total = weigh_list(row, count);
    } else {
        total = weigh_all(row);
        /* All tokens lighter than this weigh less than what top_p leaves out; half of it, so that no rounding matters. */
        const double light = (1 - top_p) * total / (double)row->vocab_size / 2;
        count = list_heavy(row, light > QUANTUM ? (float)light : (float)QUANTUM);
    }
    if (top_p < 1) count = keep_first(row->list, count, top_p * total, 1);
    return draw_listed(row, count, u);
}

/* --- rows --- */

/* Memory for the rows of one call, to be freed by its `list`; 0 when there is none. */
static int open_rows(row_of *row, int64_t vocab_size) {
    const int64_t groups = (vocab_size + GROUP - 1) / GROUP;
    /* One candidate more: writers store before they know that a token counts. */
    char *memory = malloc((size_t)((vocab_size + GROUP) * (int64_t)sizeof(candidate) + groups * (int64_t)(sizeof(double) + sizeof(int32_t))));
    if (!memory) return 0;
    memset(row, 0, sizeof *row);
    row->vocab_size = vocab_size;
    row->groups = groups;
    row->list = (candidate *)memory;
    row->sums = (double *)(row->list + vocab_size + GROUP);
    row->top = (int32_t *)(row->sums + groups);
    return 1;
}

/* Choose the tokens of rows first to last - 1; calls for other rows may run at the same time. */
void sample_rows(const sample_work *work, int64_t first, int64_t last) {
    row_of row;
    const int is_open = open_rows(&row, work->vocab_size);
    for (int64_t r = first; r < last; r++) {
        work->token_ids[r] = 0;
        work->status[r] = NO_MEMORY;
        if (!is_open) continue;
        row.logits = work->logits + r * work->stride;
        row.inverse_temperature = work->inverse_temperature[r];
        row.min_p = work->min_p[r];
        if ((work->status[r] = scan(&row)) != PICKED) continue;
        if (row.inverse_temperature == 0) work->token_ids[r] = greedy(&row);
        else if (work->top_k[r] == 0 && work->top_p[r] >= 1) work->token_ids[r] = draw_all(&row, work->u[r]);
        else work->token_ids[r] = cut_and_draw(&row, work->top_k[r], work->top_p[r], work->u[r]);
    }
    if (is_open) free(row.list);
}

static int is_before(const void *a, const void *b) {
    const uint64_t one = ((const candidate *)a)->key, other = ((const candidate *)b)->key;
    return one < other ? 1 : one > other ? -1 : 0;
}

/* Order the first tokens of rows first to last - 1, all finite, and weigh each row at temperature 1.
 *
 * total: 0 where there was no memory. */
void rank_rows(const rank_work *work, int64_t first, int64_t last) {
    row_of row;
    const int is_open = open_rows(&row, work->vocab_size);
    for (int64_t r = first; r < last; r++) {
        work->total[r] = 0;
        if (!is_open) continue;
        row.logits = work->logits + work->rows[r] * work->stride;
        row.inverse_temperature = 1;
        scan(&row);
        work->best[r] = row.best;
        work->total[r] = weigh_all(&row);
        if (work->count == 0) continue;
        const int64_t count = list_first(&row, work->count);
        qsort(row.list, (size_t)count, sizeof(candidate), is_before);
        for (int64_t i = 0; i < count; i++) work->ids[r * work->count + i] = row.list[i].id;
    }
    if (is_open) free(row.list);
}
