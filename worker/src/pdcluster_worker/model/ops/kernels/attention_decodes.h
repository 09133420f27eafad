/* Decodes: a thread takes one part of one KV head of one sequence at a time; the parts are merged at the end. */
#ifndef ATTENTION_DECODES_H
#define ATTENTION_DECODES_H

#include "decode_products.h"

/* Query heads [first, first + count) of KV head `head` of sequence s. */
typedef struct {
    int64_t s, head, first, count;
} query_tile;

/* What a tile has gathered: [MOST_QUERIES] greatest score (in powers of 2), [MOST_QUERIES] sum, [count][wide] values. */
typedef struct {
    float *top, *total, *values;
} decode_state;

/* A desk's memory as a decode uses it. */
typedef struct {
    char *copies, *woven; /* two runs that were copied; values of two runs, woven */
    float *scores;        /* of one run, by tiles */
} scratch;

static INLINE scratch scratch_of(const attend_work *w, const desk *d) {
    char *woven = d->part + 2 * RUN * w->size.depth;
    return (scratch){d->part, woven, (float *)(woven + 4 * TILE)};
}

static INLINE decode_state decode_state_at(char *memory) {
    float *f = (float *)memory;
    return (decode_state){f, f + MOST_QUERIES, f + 2 * MOST_QUERIES};
}

static INLINE int64_t most_queries(const kind t) { return IN_TILES(t) ? MOST_QUERIES : FOUR; }

static INLINE int64_t query_tiles(const attend_work *w) {
    const int64_t most = most_queries((kind)w->m->t);
    return (w->size.group + most - 1) / most;
}

static INLINE query_tile query_tile_at(const attend_work *w, item i, int64_t index) {
    const int64_t most = most_queries((kind)w->m->t);
    return (query_tile){i.s, i.head, index * most, least(most, w->size.group - index * most)};
}

/* Parts of the decodes, which come first among the sequences; returns their number, and that of their tiles. */
static int64_t list_items(const attend_work *w, item *items, int64_t *records) {
    int64_t count = 0;
    *records = 0;
    for (int64_t s = 0; s < w->num_decodes; s++)
        for (int64_t head = 0; head < w->m->kv_heads; head++)
            for (int64_t part = first_part(w, s); part < end_part(w, s); part++, count++) {
                if (items) items[count] = (item){(int32_t)s, (int32_t)head, (int32_t)part, (int32_t)*records};
                *records += query_tiles(w);
            }
    return count;
}

static INLINE part_of part_at(const attend_work *w, item i) {
    const int64_t context = w->plan->contexts[i.s];
    return make_part(table_of(w, i.s), i.head, i.part, seen_from(w, context - 1), context);
}

static INLINE char *record_of(const attend_work *w, item i) { return w->records + i.record * w->size.state_bytes; }

/* Are RUN keys from `at` on all read, and in one block? */
static INLINE int is_one_piece(const attend_work *w, const part_of *p, int64_t at) {
    return w->m->block_size % RUN == 0 && at >= p->skip && at + RUN <= p->count;
}

/* Expand dims [first, end) of RUN keys from `at` on, or of their values; zeros for those that are not read. */
static __attribute__((noinline)) void expand_run(kind t, const attend_work *w, const part_of *p, int64_t at, int64_t offset, int64_t first, int64_t end, char *copy) {
    const int64_t depth = w->size.depth, bytes = bytes_of(t);
    const int is_whole = is_one_piece(w, p, at);
    const int64_t count = is_whole ? RUN : 1;
    for (int64_t i = 0; i < RUN; i += count) {
        char *to = copy + i * depth;
        if (!is_whole && (at + i < p->skip || at + i >= p->count)) {
            memset(to + first * bytes, 0, (end - first) * bytes);
            continue;
        }
        expand_rows(t, w->m, key_at(w, p, at + i) + offset, count, first, end, to, depth);
    }
}

/* RUN keys from `at` on (offset 0), or their values, `depth` bytes apart: where they lie, or copied with zeros for those that are not read.
 * [first, end): the dims that are wanted. */
static INLINE const char *run_at(const kind t, const attend_work *w, const part_of *p, int64_t at, int64_t offset, int64_t first, int64_t end, char *copy) {
    const int64_t bytes = w->m->dim * bytes_of(t), depth = w->size.depth;
    if (w->m->stored != (int64_t)t) {
        expand_run(t, w, p, at, offset, first, end, copy);
        return copy;
    }
    if (depth == bytes && is_one_piece(w, p, at)) return key_at(w, p, at) + offset;
    memset(copy, 0, RUN * depth);
    for (int64_t i = 0; i < RUN; i++)
        if (at + i >= p->skip && at + i < p->count) memcpy(copy + i * depth, key_at(w, p, at + i) + offset, bytes);
    return copy;
}

/* The key at `at`, or the nearest that is seen. */
static INLINE const char *seen_at(const attend_work *w, const part_of *p, int64_t at) {
    const int64_t first = at < p->skip ? p->skip : at;
    return key_at(w, p, least(first, p->count - 1));
}

static INLINE void pack_tile_queries(const kind t, const attend_work *w, query_tile tile, char *queries) {
    const int64_t bytes = w->m->dim * bytes_of(t);
    const char *rows[MOST_QUERIES] = {NULL}, *row = w->qkv + w->plan->firsts[tile.s] * w->size.stride;
    for (int64_t i = 0; i < tile.count; i++) rows[i] = row + (tile.head * w->size.group + tile.first + i) * bytes;
    if (IN_TILES(t)) pack_panel(rows, bytes, queries, TILE);
    else pack_four(rows, bytes, w->size.depth, queries);
}

/* Ask for two runs of rows that are expanded later. */
static INLINE void ask_for_run(const attend_work *w, const char *const *later) {
    const int64_t bytes = RUN * w->m->dim * bytes_of((kind)w->m->stored);
    for (int64_t line = 0; line < bytes; line += 64) {
        __builtin_prefetch(later[0] + line);
        __builtin_prefetch(later[1] + line, 0, 2);
    }
}

/* Scores of a part in quads [fours][PART / FOUR][16]. */
static INLINE void score_part(const kind t, const attend_work *w, desk *d, const part_of *p, int64_t from, int64_t end, int64_t fours) {
    const scratch own = scratch_of(w, d);
    for (int64_t at = from; at < end; at += RUN) {
        const char *later[] = {seen_at(w, p, at + RUN), seen_at(w, p, at) + w->m->half_bytes};
        if (w->m->stored != (int64_t)t) {
            ask_for_run(w, later);
            later[0] = later[1] = own.copies;
        }
        const char *keys = run_at(t, w, p, at, 0, 0, w->size.wide, own.copies);
        float *quads = d->scores + at * FOUR;
#if defined(__AMX_BF16__)
        if (IN_TILES(t)) {
            score_tile(keys, w->size.depth, d->queries, own.scores);
            for (int64_t f = 0; f < fours; f++)
                for (int64_t g = 0; g < RUN / FOUR; g++) {
                    const w16 quad = join((const char *)(own.scores + g * FOUR * 16 + f * FOUR), 64);
                    memcpy(quads + f * PART * FOUR + g * 16, &quad, 64);
                }
            continue;
        }
#endif
        score_run(t, keys, w->size.depth, d->queries, later, quads);
    }
}

static INLINE v16 swap_halves(v16 x) { return SHUFFLE(x, x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7); }
static INLINE v16 swap_quarters(v16 x) { return SHUFFLE(x, x, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11); }

/* Scales of four keys, each for four queries. */
static INLINE v16 spread(const float *scales) {
    w4 x;
    memcpy(&x, scales, 16);
    return (v16)SHUFFLE(x, x, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
}

/* The greatest score of each of four queries, in every quarter; scores of keys that are not seen become -inf.
 * scales: of the keys, or NULL; the scores get them. */
static INLINE v16 greatest_of_four(float *quads, const part_of *p, int64_t from, int64_t end, const float *scales) {
    const i16 number = {0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3};
    v16 top = all(-INFINITY);
    for (int64_t key = from; key < end; key += FOUR) {
        const int is_edge = key < p->skip || key + FOUR > p->count;
        v16 score = load(F32, quads, key * FOUR, LANES);
        if (scales) score *= spread(scales + key);
        if (is_edge) {
            const i16 at = number + (int32_t)key;
            score = select16((at >= (int32_t)p->skip) & (at < (int32_t)p->count), score, all(-INFINITY));
        }
        if (scales || is_edge) store(F32, quads, key * FOUR, LANES, score);
        top = greater(score, top);
    }
    top = greater(swap_halves(top), top);
    return greater(swap_quarters(top), top);
}

/* Weights of four keys and four queries: pairs [2][FOUR], or floats as the kind rounds them [FOUR][FOUR]. */
static INLINE void put_quad(const kind t, char *to, v16 weight) {
    if (PAIRED(t)) {
        const h16 half = narrow(weight), pairs = SHUFFLE(half, half, 0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15);
        memcpy(to, &pairs, 32);
    } else {
        weight = rounded(t, weight);
        memcpy(to, &weight, 64);
    }
}

/* Softmax of four queries: their weights go to `weights`, which holds a key's in `key_bytes`. scales: of the part, or NULL. */
static INLINE void softmax_of_four(const kind t, const attend_work *w, float *quads, const part_of *p, int64_t from, int64_t end, char *weights, decode_state state, const float *scales) {
    const v16 factor = all(w->m->scaling * 1.44269504f), greatest_score = greatest_of_four(quads, p, from, end, scales);
    const v16 top = greatest_score * factor, less = select16(top == all(-INFINITY), all(0), -top);
    v16 total = {0};
    for (int64_t key = from; key < end; key += FOUR) {
        v16 weight = exp2_of(t, fused(load(F32, quads, key * FOUR, LANES), factor, less));
        total += weight;
        if (scales) weight = with_scale(weight, spread(scales + PART + key));
        put_quad(t, weights + key * (PAIRED(t) ? 8 : 16), weight);
    }
    total = total + swap_halves(total);
    total = total + swap_quarters(total);
    store(F32, state.top, 0, FOUR, top);
    store(F32, state.total, 0, FOUR, total);
}

#if defined(__AMX_BF16__)
/* Turn pairs [16][FOUR] of 32 keys into rows of four queries, 64 bytes each. */
static INLINE void turn_weights(const char *pairs, char *rows) {
    w16 x[4];
    memcpy(x, pairs, 256);
    const w16 a = SHUFFLE(x[0], x[1], 0, 4, 8, 12, 16, 20, 24, 28, 1, 5, 9, 13, 17, 21, 25, 29), b = SHUFFLE(x[2], x[3], 0, 4, 8, 12, 16, 20, 24, 28, 1, 5, 9, 13, 17, 21, 25, 29);
    const w16 c = SHUFFLE(x[0], x[1], 2, 6, 10, 14, 18, 22, 26, 30, 3, 7, 11, 15, 19, 23, 27, 31), e = SHUFFLE(x[2], x[3], 2, 6, 10, 14, 18, 22, 26, 30, 3, 7, 11, 15, 19, 23, 27, 31);
    const w16 out[4] = {
        SHUFFLE(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23), SHUFFLE(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31),
        SHUFFLE(c, e, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23), SHUFFLE(c, e, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31),
    };
    memcpy(rows, out, 256);
}

/* Values of a part, `halves` times 32 dims from byte `dims` of a row on, into `out`. */
static INLINE void value_tiles(const int halves, const attend_work *w, desk *d, const part_of *p, int64_t from, int64_t end, int64_t dims, float *out) {
    const scratch own = scratch_of(w, d);
    const int64_t depth = w->size.depth, offset = w->m->half_bytes, dim = dims / 2, last = dim + halves * 32;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t at = from; at < end; at += 2 * RUN) {
        const char *first = run_at(BF16, w, p, at, offset, dim, last, own.copies);
        const char *second = run_at(BF16, w, p, at + RUN, offset, dim, last, own.copies + RUN * depth);
        weave(halves, first + dims, second + dims, depth, own.woven);
        add_tiles(halves, own.woven, d->weights + at / 32 * TILE);
    }
    const int64_t stride = w->size.wide * 4;
    _tile_stored(0, out, stride);
    _tile_stored(1, out + 16, stride);
    if (halves == 1) return;
    _tile_stored(2, out + 32, stride);
    _tile_stored(3, out + 48, stride);
}
#endif

/* Values of a part by vectors, `vectors` of dims from `dim` on. */
static INLINE void value_vectors(const kind t, const int queries, const int vectors, const attend_work *w, desk *d, const part_of *p, int64_t from, int64_t end, int64_t dim, float *out) {
    const scratch own = scratch_of(w, d);
    v16 sums[4][4] = {{{0}}};
    for (int64_t at = from; at < end; at += RUN) {
        const char *values = run_at(t, w, p, at, w->m->half_bytes, dim, dim + vectors * LANES, own.copies) + dim * bytes_of(t);
        add_run(t, queries, vectors, values, w->size.depth, d->weights + at * (PAIRED(t) ? 8 : 16), sums);
    }
    for (int q = 0; q < queries; q++)
        for (int v = 0; v < vectors; v++) store(F32, out + q * w->size.wide, dim + v * LANES, LANES, sums[q][v]);
}

static INLINE void value_part(const kind t, const int queries, const attend_work *w, desk *d, const part_of *p, int64_t from, int64_t end, float *out) {
    const int64_t wide = w->size.wide;
    int64_t dim = 0;
    for (; MOST_PANELS == 2 && wide - dim >= 4 * LANES; dim += 4 * LANES) value_vectors(t, queries, 4, w, d, p, from, end, dim, out);
    for (; PAIRED(t) && dim < wide; dim += 2 * LANES) value_vectors(t, queries, 2, w, d, p, from, end, dim, out);
    for (; MOST_ROWS == 6 && queries <= 3 && wide - dim >= 2 * LANES; dim += 2 * LANES) value_vectors(t, queries, 2, w, d, p, from, end, dim, out);
    for (; dim < wide; dim += LANES) value_vectors(t, queries, 1, w, d, p, from, end, dim, out);
}

/* Values [count][wide] of a part. */
static INLINE void value_tile(const kind t, const attend_work *w, desk *d, const part_of *p, int64_t from, int64_t end, query_tile tile, float *out) {
#if defined(__AMX_BF16__)
    if (IN_TILES(t)) {
        for (int64_t dim = 0; dim < w->size.wide; dim += 64)
            if (w->size.wide - dim >= 64) value_tiles(2, w, d, p, from, end, dim * 2, out + dim);
            else value_tiles(1, w, d, p, from, end, dim * 2, out + dim);
        return;
    }
#endif
    if (tile.count == 4) value_part(t, 4, w, d, p, from, end, out);
    else if (tile.count == 3) value_part(t, 3, w, d, p, from, end, out);
    else if (tile.count == 2) value_part(t, 2, w, d, p, from, end, out);
    else value_part(t, 1, w, d, p, from, end, out);
}

/* What one tile gathers of one part. */
static INLINE void decode_tile(const kind t, const attend_work *w, desk *d, const part_of *p, query_tile tile, decode_state state) {
    const float *scales = scales_of(w, d->part);
    /* Steps of 32 keys as in multiply.h; keys that are not seen weigh nothing. */
    const int64_t from = p->skip / 32 * 32, end = round_up(p->count, 32), fours = (tile.count + FOUR - 1) / FOUR;
    pack_tile_queries(t, w, tile, d->queries);
#if defined(__AMX_BF16__)
    if (IN_TILES(t)) configure_decode(&d->tiles, (int)tile.count);
#endif
    score_part(t, w, d, p, from, end, fours);
    char *pairs = d->weights + PART / 32 * TILE;
    for (int64_t f = 0; f < fours; f++) {
        const decode_state of = {state.top + f * FOUR, state.total + f * FOUR, NULL};
        softmax_of_four(t, w, d->scores + f * PART * FOUR, p, from, end, IN_TILES(t) ? pairs : d->weights, of, scales);
#if defined(__AMX_BF16__)
        for (int64_t at = from; IN_TILES(t) && at < end; at += 32) turn_weights(pairs + at * 8, d->weights + at / 32 * TILE + f * 256);
#endif
    }
    value_tile(t, w, d, p, from, end, tile, state.values);
}

/* Write a tile's rows of the output. */
static INLINE void finish_decode(const kind t, const attend_work *w, query_tile tile, decode_state state) {
    const int64_t dim = w->m->dim, step = PAIRED(t) ? 2 * LANES : LANES;
    char *row = w->out + w->plan->firsts[tile.s] * w->size.out_stride;
    for (int64_t q = 0; q < tile.count; q++) {
        v16 total = all(state.total[q]);
        if (w->sinks) total = with_sink(total, all(state.top[q]), all(w->sinks[tile.head * w->size.group + tile.first + q]));
        for (int64_t at = 0; at < dim; at += step) {
            v16 x[2];
            memcpy(x, state.values + q * w->size.wide + at, step * 4);
            in_order(t, x);
            for (int64_t i = 0; i < step && at + i < dim; i += LANES)
                store(t, row, (tile.head * w->size.group + tile.first + q) * dim + at + i, dim - at - i, x[i / LANES] / total);
        }
    }
}

/* Add to `into` what `from` has gathered of later keys, as `merge` does for a chunk. */
static INLINE void merge_decode(const sizes_of *z, decode_state into, decode_state from, int64_t count) {
    const v16 old = load(F32, into.top, 0, LANES), late = load(F32, from.top, 0, LANES), top = greater(old, late);
    const v16 base = select16(top == all(-INFINITY), all(0), top), keep = exp2_of(F32, old - base), add = exp2_of(F32, late - base);
    store(F32, into.top, 0, LANES, top);
    store(F32, into.total, 0, LANES, fused(load(F32, into.total, 0, LANES), keep, load(F32, from.total, 0, LANES) * add));
    float keeps[LANES], adds[LANES];
    store(F32, keeps, 0, LANES, keep);
    store(F32, adds, 0, LANES, add);
    for (int64_t q = 0; q < count; q++)
        for (int64_t i = q * z->wide; i < (q + 1) * z->wide; i += LANES)
            store(F32, into.values, i, LANES, fused(load(F32, into.values, i, LANES), all(keeps[q]), load(F32, from.values, i, LANES) * all(adds[q])));
}

static INLINE void decode_part(const kind t, attend_work *w, desk *d, item i) {
    const part_of p = part_at(w, i);
    const int is_only = parts_of(w, i.s) == 1;
    if (w->m->scales) copy_scales(w, &p, scales_of(w, d->part));
    for (int64_t index = 0; index < query_tiles(w); index++) {
        const query_tile tile = query_tile_at(w, i, index);
        const decode_state state = decode_state_at(is_only ? (char *)d->now.top : record_of(w, i) + index * w->size.state_bytes);
        decode_tile(t, w, d, &p, tile, state);
        if (is_only) finish_decode(t, w, tile, state);
    }
}

static INLINE void merge_parts(const kind t, attend_work *w, item i) {
    const int64_t tiles = query_tiles(w);
    for (int64_t index = 0; index < tiles; index++) {
        const query_tile tile = query_tile_at(w, i, index);
        char *record = record_of(w, i) + index * w->size.state_bytes;
        for (int64_t part = 1; part < parts_of(w, i.s); part++)
            merge_decode(&w->size, decode_state_at(record), decode_state_at(record + part * tiles * w->size.state_bytes), tile.count);
        finish_decode(t, w, tile, decode_state_at(record));
    }
}

static INLINE void attend_decodes(const kind t, attend_work *w, desk *d, place me) {
    for (int64_t now; (now = atomic_fetch_add(&w->next[0], 1)) < w->num_items;) decode_part(t, w, d, w->items[now]);
    wait_for_all(me);
    int64_t first, last;
    share(me, w->num_items, &first, &last);
    for (int64_t at = first; at < last; at++) {
        const item i = w->items[at];
        if (i.part == first_part(w, i.s) && parts_of(w, i.s) > 1) merge_parts(t, w, i);
    }
}

#endif
