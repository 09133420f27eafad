/* Causal attention over the paged cache.
 *
 * Keys are taken in parts of PART at absolute positions.  Within a part the scores are S^T = K * Q^T, with a query row
 * (of one head) in each lane, and the values O^T = V^T * P^T; parts are merged in their order.  So a row's bits depend
 * neither on the other rows, nor on how a prompt was cut into chunks, nor on threads.  A decode's parts are shared by
 * the threads; a chunk's rows are, in tiles of WIDE lanes.
 */
#ifndef ATTENTION_H
#define ATTENTION_H

#include <stdlib.h>

#include "model.h"
#include "multiply.h"
#include "threads.h"

#define PART 256
#define WIDE 32                 /* lanes of a tile: two panels */
#define MOST_PACKED (64L << 20) /* bytes of packed keys and values before the next heads wait for their turn */

/* Sizes of one model's pieces. */
typedef struct {
    int64_t group, steps, depth, padded, stride, out_stride; /* depth: padded bytes of a key; padded: dim in whole lanes */
    int64_t part_bytes, state_bytes, thread_bytes;           /* of a packed part, of a tile's state, of a thread's own memory */
} sizes_of;

/* What a tile has gathered so far: [WIDE] greatest score (in powers of 2), [WIDE] sum, [padded][WIDE] values. */
typedef struct {
    float *top, *total, *values;
} state_of;

/* A thread's own memory. */
typedef struct {
    char *part, *queries, *weights; /* packed keys and values; packed queries; packed weights of a part */
    float *scores;
    state_of now, sum;
    tile_rows tiles;
} desk;

typedef struct {
    const model_of *m;
    const plan_of *plan;
    const char *qkv;
    char *out;
    int64_t layer, num_decodes; /* sequences that are computed part by part */
    sizes_of size;
    char *desks, *records, *packed;
    uint8_t *is_bad;
    _Atomic int64_t next[4];
} attend_work;

/* The keys of one part: `count` of them, from position `first` of a sequence. */
typedef struct {
    const int32_t *table;
    int64_t head, first, count;
} part_of;

/* A tile: lanes `lane` to `lane + lanes` of the rows of sequence s, KV head `head`. */
typedef struct {
    int64_t s, head, lane, lanes;
} tile_of;

static sizes_of sizes(const model_of *m) {
    const int64_t element = bytes_of((kind)m->t);
    sizes_of z = {.group = m->heads / m->kv_heads};
    z.steps = (m->dim * element + 63) / 64;
    z.depth = z.steps * 64;
    z.padded = round_up(m->dim, LANES);
    z.stride = (m->heads + 2 * m->kv_heads) * m->dim * element;
    z.out_stride = m->heads * m->dim * element;
    z.part_bytes = PART * (z.depth + z.padded * element);
    z.state_bytes = (2 + z.padded) * WIDE * 4;
    z.thread_bytes = round_up(z.part_bytes + z.steps * 2 * TILE + PART * WIDE * 8 + 2 * z.state_bytes, 4096);
    return z;
}

static state_of state_at(char *memory) {
    float *f = (float *)memory;
    return (state_of){f, f + WIDE, f + 2 * WIDE};
}

static desk desk_of(attend_work *w, int64_t thread) {
    const sizes_of *z = &w->size;
    desk d = {.part = w->desks + thread * z->thread_bytes};
    d.queries = d.part + z->part_bytes;
    d.weights = d.queries + z->steps * 2 * TILE;
    d.scores = (float *)(d.weights + PART * WIDE * 4);
    d.now = state_at((char *)d.scores + PART * WIDE * 4);
    d.sum = state_at((char *)d.scores + PART * WIDE * 4 + z->state_bytes);
    return d;
}

static INLINE int64_t parts_of(int64_t context) { return (context + PART - 1) / PART; }

static INLINE const char *key_at(const attend_work *w, const part_of *p, int64_t at) {
    const model_of *m = w->m;
    const int64_t position = p->first + at;
    return unit(m, p->table[position / m->block_size], p->head, w->layer) + position % m->block_size * m->dim * bytes_of((kind)m->t);
}

static INLINE void prefetch_part(const attend_work *w, const part_of *p, int64_t at, int64_t count) {
    const int64_t size = w->m->block_size, bytes = w->m->dim * bytes_of((kind)w->m->t), values = size * bytes;
    for (int64_t end = least(at + count, p->count); at < end;) {
        const int64_t run = least(size - (p->first + at) % size, end - at);
        const char *key = key_at(w, p, at);
        for (int64_t line = 0; line < run * bytes; line += 64) {
            __builtin_prefetch(key + line);
            __builtin_prefetch(key + values + line);
        }
        at += run;
    }
}

/* 16 lanes of V^T words: bfloat16 words are pairs of tokens.  Tokens without a row are 0. */
static INLINE w16 value_word(const kind t, const char *const *rows, int i, int64_t dim, int64_t left) {
    if (t == F32) return rows[i] ? (w16)load(F32, rows[i], dim, left) : (w16){0};
    const w16 even = rows[2 * i] ? (w16)load(BF16, rows[2 * i], dim, left) >> 16 : (w16){0};
    return rows[2 * i + 1] ? even | (w16)load(BF16, rows[2 * i + 1], dim, left) : even;
}

static INLINE w16 not_finite(const kind t, w16 word) {
    const w16 high = (w16)((word & 0x7F800000u) == 0x7F800000u);
    return t == F32 ? high : high | (w16)((word & 0x7F80u) == 0x7F80u);
}

/* Copy a part's keys [PART][depth] and turn its values [padded][PART]; returns whether a value is not finite. */
static INLINE int pack_part(const kind t, const attend_work *w, const part_of *p, char *packed) {
    const model_of *m = w->m;
    const sizes_of *z = &w->size;
    const int64_t bytes = m->dim * bytes_of(t), values = m->block_size * bytes, step = 64 / bytes_of(t);
    char *turned = packed + PART * z->depth;
    w16 bad = {0};
    prefetch_part(w, p, 0, 64);
    for (int64_t at = 0; at < p->count; at += step) {
        const char *rows[32] = {NULL};
        prefetch_part(w, p, at + 64, step);
        for (int64_t i = 0; i < least(step, p->count - at); i++) {
            const char *key = key_at(w, p, at + i);
            char *to = packed + (at + i) * z->depth;
            for (int64_t line = 0; line < bytes; line += 64) {
                w16 x = {0};
                if (bytes - line >= 64) memcpy(&x, key + line, 64);
                else memcpy(&x, key + line, bytes - line);
                memcpy(to + line, &x, 64);
            }
            rows[i] = key + values;
        }
        for (int64_t dim = 0; dim < m->dim; dim += LANES) {
            w16 words[LANES];
            for (int i = 0; i < LANES; i++) {
                words[i] = value_word(t, rows, i, dim, m->dim - dim);
                bad |= not_finite(t, words[i]);
            }
            transpose(words);
            for (int64_t i = 0; i < LANES; i++) memcpy(turned + ((dim + i) * PART + at) * bytes_of(t), &words[i], 64);
        }
    }
    uint32_t lanes[LANES], any = 0;
    memcpy(lanes, &bad, 64);
    for (int i = 0; i < LANES; i++) any |= lanes[i];
    return any != 0;
}

static INLINE void pack_queries(const attend_work *w, tile_of tile, char *queries) {
    const model_of *m = w->m;
    const int64_t bytes = m->dim * bytes_of((kind)m->t), first = w->plan->firsts[tile.s], group = w->size.group;
    for (int64_t panel = 0; panel * LANES < tile.lanes; panel++) {
        const char *rows[LANES] = {NULL};
        for (int64_t i = 0; i < least(LANES, tile.lanes - panel * LANES); i++) {
            const int64_t lane = tile.lane + panel * LANES + i;
            rows[i] = w->qkv + (first + lane / group) * w->size.stride + (tile.head * group + lane % group) * bytes;
        }
        pack_panel(rows, bytes, queries + panel * TILE, 2 * TILE);
    }
}

/* How many keys of a sequence each lane of a panel sees; lanes beyond the tile see what its last one sees. */
static INLINE i16 seen_by(const attend_work *w, tile_of tile, int64_t panel) {
    const int64_t start = w->plan->contexts[tile.s] - w->plan->lengths[tile.s];
    int32_t seen[LANES];
    for (int64_t i = 0; i < LANES; i++) seen[i] = (int32_t)(start + 1 + (tile.lane + least(panel * LANES + i, tile.lanes - 1)) / w->size.group);
    i16 lanes;
    memcpy(&lanes, seen, 64);
    return lanes;
}

/* Weights of two keys as the product wants them: words of 16 lanes. */
static INLINE void put_weights(const kind t, char *to, v16 even, v16 odd) {
    if (t == F32) {
        memcpy(to, &even, 64);
        memcpy(to + 64, &odd, 64);
        return;
    }
    const w16 word = (__builtin_convertvector(narrow(odd), w16) << 16) | __builtin_convertvector(narrow(even), w16);
    memcpy(to, &word, 64);
}

/* Softmax of one panel's scores [count][WIDE], which lie `masked` from that key on: its greatest score, sum and packed weights. */
static INLINE void softmax(const kind t, const attend_work *w, desk *d, int64_t panel, int64_t count, i16 seen, int64_t seen_by_all) {
    const v16 factor = all(w->m->scaling * 1.44269504f), nothing = all(-INFINITY);
    float *scores = d->scores + panel * LANES;
    v16 top = nothing, total = {0};
    for (int64_t key = 0; key < count; key++) {
        v16 score = load(F32, scores, key * WIDE, LANES) * factor;
        if (key >= seen_by_all) score = select16((i16)all(0) + (int32_t)key < seen, score, nothing);
        store(F32, scores, key * WIDE, LANES, score);
        top = greater(score, top);
    }
    const v16 base = select16(top == nothing, all(0), top);
    for (int64_t key = 0; key < count; key += 2) {
        const v16 even = exp2_of(load(F32, scores, key * WIDE, LANES) - base), odd = exp2_of(load(F32, scores, (key + 1) * WIDE, LANES) - base);
        total += even;
        total += odd;
        put_weights(t, d->weights + panel * TILE + (t == F32 ? key / 16 * 2 * TILE + key % 16 * 64 : key / 32 * 2 * TILE + key % 32 * 32), even,
                    odd);
    }
    store(F32, d->now.top, panel * LANES, LANES, top);
    store(F32, d->now.total, panel * LANES, LANES, total);
}

/* Add to `into` what `from` has gathered of later keys. */
static INLINE void merge(const sizes_of *z, state_of into, state_of from, int64_t panels) {
    for (int64_t lane = 0; lane < panels * LANES; lane += LANES) {
        const v16 old = load(F32, into.top, lane, LANES), late = load(F32, from.top, lane, LANES), top = greater(old, late);
        const v16 base = select16(top == all(-INFINITY), all(0), top), keep = exp2_of(old - base), add = exp2_of(late - base);
        store(F32, into.top, lane, LANES, top);
        store(F32, into.total, lane, LANES, fused(load(F32, into.total, lane, LANES), keep, load(F32, from.total, lane, LANES) * add));
        for (int64_t i = lane; i < z->padded * WIDE; i += WIDE)
            store(F32, into.values, i, LANES, fused(load(F32, into.values, i, LANES), keep, load(F32, from.values, i, LANES) * add));
    }
}

/* The state `d->now` of a tile after one packed part.  base: position of the part's first key; count: keys that a lane may see. */
static INLINE void attend_part(const kind t, const attend_work *w, desk *d, tile_of tile, const char *packed, part_of p) {
    const sizes_of *z = &w->size;
    const int64_t panels = tile.lanes > LANES ? 2 : 1, step = 64 / bytes_of(t), count = round_up(p.count, step);
    const int64_t start = w->plan->contexts[tile.s] - w->plan->lengths[tile.s];
    const panels_of queries = {d->queries, panels, 2 * TILE, z->steps}, weights = {d->weights, panels, 2 * TILE, count / step};
    multiply(t, &d->tiles, packed, z->depth, count, queries, d->scores, WIDE, 0);
    const int64_t all_see = least(p.count, start + 1 + tile.lane / z->group - p.first);
    for (int64_t panel = 0; panel < panels; panel++) {
        i16 seen = seen_by(w, tile, panel) - (int32_t)p.first;
        const i16 most = (i16)all(0) + (int32_t)p.count;
        seen = (i16)select16(seen < most, (v16)seen, (v16)most);
        softmax(t, w, d, panel, count, seen, all_see);
    }
    multiply(t, &d->tiles, packed + PART * z->depth, PART * bytes_of(t), z->padded, weights, d->now.values, WIDE, 0);
}

/* Write a tile's rows of the output. */
static INLINE void finish_tile(const kind t, const attend_work *w, tile_of tile, state_of state) {
    const int64_t group = w->size.group, dim = w->m->dim, first = w->plan->firsts[tile.s];
    for (int64_t panel = 0; panel * LANES < tile.lanes; panel++) {
        const v16 total = load(F32, state.total, panel * LANES, LANES);
        for (int64_t at = 0; at < dim; at += LANES) {
            w16 words[LANES];
            for (int64_t i = 0; i < LANES; i++) words[i] = (w16)(load(F32, state.values, (at + i) * WIDE + panel * LANES, LANES) / total);
            transpose(words);
            for (int64_t i = 0; i < least(LANES, tile.lanes - panel * LANES); i++) {
                const int64_t lane = tile.lane + panel * LANES + i;
                char *row = w->out + (first + lane / group) * w->size.out_stride;
                store(t, row, (tile.head * group + lane % group) * dim + at, dim - at, (v16)words[i]);
            }
        }
    }
}

#include "attention_chunks.h"
#include "attention_decodes.h"

static INLINE void attend_all(const kind t, attend_work *w) {
    const place me = my_place();
    desk d = desk_of(w, me.number);
    if (w->num_decodes) attend_decodes(t, w, &d, me);
    attend_chunks(t, w, &d, me);
    end_tiles(&d.tiles);
    int64_t first, last;
    share(me, w->plan->rows - w->plan->num_tokens, &first, &last);
    memset(w->out + (w->plan->num_tokens + first) * w->size.out_stride, 0, (last - first) * w->size.out_stride);
}

static void attend_region(void *data) {
    attend_work *w = data;
    if (w->m->t == F32) attend_all(F32, w);
    else attend_all(BF16, w);
}

/* Memory of the calling thread that grows to the largest step and is kept. */
static char *kept(int64_t bytes) {
    static _Thread_local char *memory;
    static _Thread_local int64_t size;
    if (bytes > size) {
        free(memory);
        size = round_up(bytes + bytes / 4, 2 << 20);
        memory = aligned_alloc(2 << 20, size);
        if (!memory) size = 0;
    }
    return memory;
}

/* out [rows, heads * dim] of qkv [rows, (heads + 2 * kv_heads) * dim], whose keys and values are stored already.
 * Returns 0, or 1 where memory is out. */
int64_t attend(const model_of *model, const plan_of *plan, const void *qkv, void *out, int64_t layer) {
    attend_work w = {.m = model, .plan = plan, .qkv = qkv, .out = out, .layer = layer, .num_decodes = plan->num_decodes, .size = sizes(model)};
    const int64_t threads = most_threads(), records = decode_records(&w), packed = chunk_parts(&w);
    const int64_t desks = threads * w.size.thread_bytes, record_bytes = round_up(records * w.size.state_bytes, 64);
    char *memory = kept(desks + record_bytes + packed * (w.size.part_bytes + 64));
    if (!memory) return 1;
    w.desks = memory;
    w.records = memory + desks;
    w.packed = w.records + record_bytes;
    w.is_bad = (uint8_t *)(w.packed + packed * w.size.part_bytes);
    run(attend_region, &w, 1);
    return 0;
}

#endif
