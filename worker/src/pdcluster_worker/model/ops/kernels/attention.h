/* Causal attention over the paged cache.
 *
 * Keys are taken in parts of PART at absolute positions.  Within a chunk's part the scores are S^T = K * Q^T, with a
 * query row (of one head) in each lane, and the values O^T = V^T * P^T; parts are merged in their order.  A decode sums
 * the same products in the same order, in other lanes.  So a row's bits depend neither on the other rows, nor on how a
 * prompt was cut into chunks, nor on threads.  A decode's parts are shared by the threads; a chunk's rows are, in tiles
 * of WIDE lanes.
 *
 * Rows of the cache that are stored otherwise than they are computed are expanded first, without their scales, which is
 * exact: a key's scale is a factor of its scores, a value's of its weights.
 */
#ifndef ATTENTION_H
#define ATTENTION_H

#include "multiply.h"
#include "stored.h"
#include "threads.h"

#define PART 256
#define WIDE 32                 /* lanes of a tile: two panels */
#define MOST_PACKED (64L << 20) /* bytes of packed keys and values before the next heads wait for their turn */
#define NO_WINDOW (1 << 30)     /* more keys than a context has */

/* Sizes of one model's pieces. */
typedef struct {
    int64_t group, steps, depth, padded, wide, stride, out_stride; /* depth: padded bytes of a key; padded: dim in whole lanes; wide: in whole steps */
    int64_t scales_at;                                       /* from a packed part to the scales of its keys and of its values, [2][PART] */
    int64_t part_bytes, state_bytes, thread_bytes;           /* of a packed part, of a tile's state, of a thread's own memory */
} sizes_of;

/* One part of one KV head of a decode.  record: where its tiles' states go. */
typedef struct {
    int32_t s, head, part, record;
} item;

/* What a tile has gathered so far: [WIDE] greatest score (in powers of 2), [WIDE] sum, [padded][WIDE] values. */
typedef struct {
    float *top, *total, *values;
} state_of;

/* The keys of one part: `count` of them, from position `first` of a sequence; the first `skip` are left of every window and are not read. */
typedef struct {
    const int32_t *table;
    int64_t head, first, count, skip;
} part_of;

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
    const float *sinks;         /* [heads]: a score of each head that has no value; or NULL */
    int64_t layer, num_decodes; /* sequences that are computed part by part */
    int64_t window;             /* a row sees this many keys, its own the last */
    sizes_of size;
    char *desks, *records, *packed;
    item *items; /* of decodes */
    int64_t num_items;
    uint8_t *is_bad;
    _Atomic int64_t next[4];
} attend_work;

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
    z.wide = z.depth / element;
    z.stride = (m->heads + 2 * m->kv_heads) * m->dim * element;
    z.out_stride = m->heads * m->dim * element;
    z.scales_at = PART * (z.depth + z.padded * element);
    z.part_bytes = z.scales_at + (m->scales ? 2 * PART * 4 : 0);
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

static INLINE int64_t tiles_of(const attend_work *w, int64_t s) { return (w->plan->lengths[s] * w->size.group + WIDE - 1) / WIDE; }

static INLINE tile_of tile_at(const attend_work *w, int64_t s, int64_t head, int64_t index) {
    return (tile_of){s, head, index * WIDE, least(WIDE, w->plan->lengths[s] * w->size.group - index * WIDE)};
}

static INLINE const int32_t *table_of(const attend_work *w, int64_t s) { return w->plan->tables + w->plan->seats[s] * w->plan->table_width; }

/* The first key that the row at `position` sees. */
static INLINE int64_t seen_from(const attend_work *w, int64_t position) { return position < w->window ? 0 : position + 1 - w->window; }

/* The parts [first, end) that some row of a sequence sees. */
static INLINE int64_t first_part(const attend_work *w, int64_t s) { return seen_from(w, w->plan->contexts[s] - w->plan->lengths[s]) / PART; }
static INLINE int64_t end_part(const attend_work *w, int64_t s) { return (w->plan->contexts[s] + PART - 1) / PART; }
static INLINE int64_t parts_of(const attend_work *w, int64_t s) { return end_part(w, s) - first_part(w, s); }

/* Part `number` of a sequence, as far as `end`; `from` is the first key that is seen. */
static INLINE part_of make_part(const int32_t *table, int64_t head, int64_t number, int64_t from, int64_t end) {
    const int64_t first = number * PART;
    return (part_of){table, head, first, least(PART, end - first), from > first ? from - first : 0};
}

static INLINE const char *key_at(const attend_work *w, const part_of *p, int64_t at) {
    const model_of *m = w->m;
    const int64_t position = p->first + at;
    return unit(m, p->table[position / m->block_size], p->head, w->layer) + position % m->block_size * m->dim * bytes_of((kind)m->stored);
}

/* Scales of a packed part, or NULL. */
static INLINE float *scales_of(const attend_work *w, char *packed) { return w->m->scales ? (float *)(packed + w->size.scales_at) : NULL; }

/* Copy the scales of a part's keys and values, 0 for those that are not read. */
static INLINE void copy_scales(const attend_work *w, const part_of *p, float *to) {
    const model_of *m = w->m;
    memset(to, 0, 2 * PART * 4);
    for (int64_t at = p->skip, n; at < p->count; at += n) {
        const int64_t position = p->first + at, offset = position % m->block_size;
        const char *scales = unit(m, p->table[position / m->block_size], p->head, w->layer) + m->scales + offset * 4;
        n = least(m->block_size - offset, p->count - at);
        memcpy(to + at, scales, n * 4);
        memcpy(to + PART + at, scales + m->half_bytes, n * 4);
    }
}

/* Walks over the keys of a part that are seen, without a division at each. */
typedef struct {
    const attend_work *w;
    const part_of *p;
    const char *key;
    int64_t block, left; /* left: keys of this block from here on */
} walk;

static INLINE walk walk_from(const attend_work *w, const part_of *p) {
    const int64_t size = w->m->block_size;
    const int64_t position = p->first + p->skip;
    return (walk){w, p, key_at(w, p, p->skip), position / size, size - position % size};
}

static INLINE void next_block(walk *k) {
    k->block++;
    k->left = k->w->m->block_size;
    k->key = unit(k->w->m, k->p->table[k->block], k->p->head, k->w->layer);
}

/* 16 lanes of V^T words: bfloat16 words are pairs of tokens.  Tokens without a row are 0. */
static INLINE w16 value_word(const kind t, const int is_full, const char *const *rows, int i, int64_t dim, int64_t left) {
    if (t == F32) return is_full || rows[i] ? (w16)load(F32, rows[i], dim, left) : (w16){0};
    const w16 even = is_full || rows[2 * i] ? (w16)load(BF16, rows[2 * i], dim, left) >> 16 : (w16){0};
    return is_full || rows[2 * i + 1] ? even | (w16)load(BF16, rows[2 * i + 1], dim, left) : even;
}

static INLINE w16 not_finite(const kind t, w16 word) {
    const w16 high = (w16)((word & 0x7F800000u) == 0x7F800000u);
    return t == F32 ? high : high | (w16)((word & 0x7F80u) == 0x7F80u);
}

/* Turn the values of one step's keys, rows[i] NULL beyond the last, into columns from `turned` on. */
static INLINE void turn_values(const kind t, const int is_full, const int is_whole, const char *const *rows, int64_t dims, char *turned, w16 *bad) {
    for (int64_t dim = 0; dim < dims; dim += LANES) {
        w16 words[LANES];
        for (int i = 0; i < LANES; i++) words[i] = value_word(t, is_full, rows, i, dim, is_whole ? LANES : dims - dim);
        if (bad)
            for (int i = 0; i < LANES; i++) *bad |= not_finite(t, words[i]);
        transpose(words);
        for (int64_t i = 0; i < LANES; i++) memcpy(turned + (dim + i) * PART * bytes_of(t), &words[i], 64);
    }
}

static INLINE void copy_key(const int is_whole, const char *key, int64_t bytes, char *to) {
    for (int64_t line = 0; line < bytes; line += 64) {
        w16 x = {0};
        if (is_whole || bytes - line >= 64) memcpy(&x, key + line, 64);
        else memcpy(&x, key + line, bytes - line);
        memcpy(to + line, &x, 64);
    }
}

/* expanded: memory of one step's rows. */
static INLINE void pack_keys(const kind t, const int is_whole, const attend_work *w, const part_of *p, char *packed, char *expanded, w16 *bad) {
    const sizes_of *z = &w->size;
    const model_of *m = w->m;
    const int is_expanded = m->stored != (int64_t)t;
    const int64_t bytes = m->dim * bytes_of((kind)m->stored), step = 64 / bytes_of(t);
    walk here = walk_from(w, p);
    for (int64_t at = 0; at < p->count; at += step) {
        const char *rows[32] = {NULL};
        const int64_t count = least(step, p->count - at);
        for (int64_t i = 0; i < count; i++) {
            char *to = packed + (at + i) * z->depth;
            if (at + i < p->skip) {
                memset(to, 0, z->depth);
                continue;
            }
            if (here.left == 0) next_block(&here);
            rows[i] = here.key + m->half_bytes;
            if (is_expanded) {
                expand_rows(t, m, here.key, 1, 0, z->wide, to, 0);
                expand_rows(t, m, rows[i], 1, 0, z->wide, expanded + i * z->depth, 0);
                rows[i] = expanded + i * z->depth;
            } else copy_key(is_whole, here.key, bytes, to);
            here.left--;
            here.key += bytes;
        }
        char *turned = packed + PART * z->depth + at * bytes_of(t);
        if (is_whole && count == step && at >= p->skip) turn_values(t, 1, 1, rows, m->dim, turned, bad);
        else turn_values(t, 0, 0, rows, m->dim, turned, bad);
    }
}

/* Copy a part's keys [PART][depth] and turn its values [padded][PART]; returns whether a value is not finite, if asked. */
static INLINE int pack_part(const kind t, const int is_asked, const attend_work *w, const part_of *p, char *packed, char *expanded) {
    w16 bad = {0};
    if (w->m->scales) copy_scales(w, p, scales_of(w, packed));
    if (w->m->dim * bytes_of(t) % 64 == 0) pack_keys(t, 1, w, p, packed, expanded, is_asked ? &bad : NULL);
    else pack_keys(t, 0, w, p, packed, expanded, is_asked ? &bad : NULL);
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
#if defined(__AVX512BF16__)
    static const uint16_t turns[32] = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    const __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)odd, (__m512)even);
    _mm512_storeu_si512(to, _mm512_permutexvar_epi16(_mm512_loadu_si512(turns), both));
#else
    const w16 word = (__builtin_convertvector(narrow(odd), w16) << 16) | __builtin_convertvector(narrow(even), w16);
    memcpy(to, &word, 64);
#endif
}

/* The keys of a part that each lane sees, [from, end), and those that all lanes see. */
typedef struct {
    i16 from, end;
    int64_t all_from, all_end;
} sight;

/* The greatest of the scores of keys [first, last), of which those that a lane does not see become -inf. */
static INLINE v16 greatest_seen(float *scores, int64_t first, int64_t last, const sight *see, v16 top) {
    for (int64_t key = first; key < last; key++) {
        const i16 number = (i16)all(0) + (int32_t)key;
        const v16 score = select16((number < see->end) & (number >= see->from), load(F32, scores, key * WIDE, LANES), all(-INFINITY));
        store(F32, scores, key * WIDE, LANES, score);
        top = greater(score, top);
    }
    return top;
}

/* The greatest of one panel's scores [count][WIDE]; those that a lane does not see become -inf. */
static INLINE v16 greatest(float *scores, int64_t count, const sight *see) {
    v16 top = all(-INFINITY), other = top;
    int64_t key = least(see->all_from, count);
    top = greatest_seen(scores, 0, key, see, top);
    for (; key + 2 <= see->all_end; key += 2) {
        top = greater(load(F32, scores, key * WIDE, LANES), top);
        other = greater(load(F32, scores, (key + 1) * WIDE, LANES), other);
    }
    return greater(other, greatest_seen(scores, key, count, see, top));
}

/* Give the scores [count][WIDE] of quantized keys their scales. */
static INLINE void scale_scores(float *scores, int64_t count, const float *scales) {
    for (int64_t key = 0; key < count; key++)
        for (int64_t i = key * WIDE; i < (key + 1) * WIDE; i += LANES) store(F32, scores, i, LANES, load(F32, scores, i, LANES) * all(scales[key]));
}

/* Softmax of one panel's scores [count][WIDE]: its greatest score in powers of 2, its sum and its packed weights.
 * scales: of values, or NULL. */
static INLINE void softmax(const kind t, const attend_work *w, desk *d, int64_t panel, int64_t count, const sight *see, const float *scales) {
    float *scores = d->scores + panel * LANES;
    char *weights = d->weights + panel * TILE;
    const v16 factor = all(w->m->scaling * 1.44269504f), greatest_score = greatest(scores, count, see);
    const v16 top = greatest_score * factor, less = select16(top == all(-INFINITY), all(0), -top);
    v16 totals[4] = {{0}}; /* of every fourth key, as a decode's quads have them */
    const int64_t step = 64 / bytes_of(t), word = 64 * bytes_of(t) / 4;
    for (int64_t first = 0; first < count; first += step, weights += 2 * TILE)
        for (int64_t i = 0; i < step; i += 4) {
            v16 x[4];
            for (int j = 0; j < 4; j++) {
                x[j] = exp2_of(t, fused(load(F32, scores + (first + i + j) * WIDE, 0, LANES), factor, less));
                totals[j] += x[j];
                if (scales) x[j] = with_scale(x[j], all(scales[first + i + j]));
            }
            put_weights(t, weights + i * word, x[0], x[1]);
            put_weights(t, weights + (i + 2) * word, x[2], x[3]);
        }
    store(F32, d->now.top, panel * LANES, LANES, top);
    store(F32, d->now.total, panel * LANES, LANES, (totals[0] + totals[2]) + (totals[1] + totals[3]));
}

/* Add to `into` what `from` has gathered of later keys. */
static INLINE void merge(const sizes_of *z, state_of into, state_of from, int64_t panels) {
    for (int64_t lane = 0; lane < panels * LANES; lane += LANES) {
        const v16 old = load(F32, into.top, lane, LANES), late = load(F32, from.top, lane, LANES), top = greater(old, late);
        const v16 base = select16(top == all(-INFINITY), all(0), top), keep = exp2_of(F32, old - base), add = exp2_of(F32, late - base);
        store(F32, into.top, lane, LANES, top);
        store(F32, into.total, lane, LANES, fused(load(F32, into.total, lane, LANES), keep, load(F32, from.total, lane, LANES) * add));
        for (int64_t i = lane; i < z->padded * WIDE; i += WIDE)
            store(F32, into.values, i, LANES, fused(load(F32, into.values, i, LANES), keep, load(F32, from.values, i, LANES) * add));
    }
}

/* The state `d->now` of a tile after one packed part.  base: position of the part's first key; count: keys that a lane may see. */
static INLINE void attend_part(const kind t, const attend_work *w, desk *d, tile_of tile, char *packed, part_of p) {
    const sizes_of *z = &w->size;
    const int64_t panels = tile.lanes > LANES ? 2 : 1, step = 64 / bytes_of(t), count = round_up(p.count, step);
    const int64_t start = w->plan->contexts[tile.s] - w->plan->lengths[tile.s];
    const panels_of queries = {d->queries, panels, 2 * TILE, z->steps}, weights = {d->weights, panels, 2 * TILE, count / step};
    const float *scales = scales_of(w, packed);
    multiply(t, &d->tiles, packed, z->depth, count, queries, d->scores, WIDE);
    if (scales) scale_scores(d->scores, count, scales);
    sight see = {.all_end = least(p.count, start + 1 + tile.lane / z->group - p.first)};
    /* The last row's window starts last. */
    see.all_from = seen_from(w, start + (tile.lane + tile.lanes - 1) / z->group) - p.first;
    see.all_from = see.all_from > 0 ? see.all_from : 0;
    for (int64_t panel = 0; panel < panels; panel++) {
        const i16 seen = seen_by(w, tile, panel) - (int32_t)p.first, most = (i16)all(0) + (int32_t)p.count;
        see.from = seen - (int32_t)w->window;
        see.end = (i16)select16(seen < most, (v16)seen, (v16)most);
        softmax(t, w, d, panel, count, &see, scales ? scales + PART : NULL);
    }
    multiply(t, &d->tiles, packed + PART * z->depth, PART * bytes_of(t), z->padded, weights, d->now.values, WIDE);
}

/* The sum of weights with that of a sink; top: the greatest score in powers of 2. */
static INLINE v16 with_sink(v16 total, v16 top, v16 sink) { return total + exp2_of(F32, sink * all(1.44269504f) - top); }

/* The sinks of a panel's lanes. */
static INLINE v16 sinks_of(const attend_work *w, tile_of tile, int64_t panel) {
    const int64_t group = w->size.group;
    float sinks[LANES];
    for (int64_t i = 0; i < LANES; i++) sinks[i] = w->sinks[tile.head * group + (tile.lane + panel * LANES + i) % group];
    return load(F32, sinks, 0, LANES);
}

/* Write a tile's rows of the output. */
static INLINE void finish_tile(const kind t, const attend_work *w, tile_of tile, state_of state) {
    const int64_t group = w->size.group, dim = w->m->dim, first = w->plan->firsts[tile.s];
    for (int64_t panel = 0; panel * LANES < tile.lanes; panel++) {
        v16 total = load(F32, state.total, panel * LANES, LANES);
        if (w->sinks) total = with_sink(total, load(F32, state.top, panel * LANES, LANES), sinks_of(w, tile, panel));
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

/* Lay out the memory of a step's attention by so many threads with this window (0 = all keys) and list its parts; returns 0, or 1 where
 * memory is out. */
static int64_t lay_out(attend_work *w, int64_t window, int64_t threads) {
    w->window = window > 0 && window < NO_WINDOW ? window : NO_WINDOW;
    int64_t records;
    w->num_items = list_items(w, NULL, &records);
    const int64_t packed = chunk_parts(w), desks = threads * w->size.thread_bytes, record_bytes = records * w->size.state_bytes;
    char *memory = kept(KEPT_ATTENTION, desks + record_bytes + packed * (w->size.part_bytes + 64) + w->num_items * sizeof(item));
    if (!memory) return 1;
    w->desks = memory;
    w->records = memory + desks;
    w->packed = w->records + record_bytes;
    w->items = (item *)(w->packed + packed * w->size.part_bytes);
    w->is_bad = (uint8_t *)(w->items + w->num_items);
    list_items(w, w->items, &records);
    return 0;
}

static attend_work attention_of(const model_of *model, const plan_of *plan, const void *qkv, void *out) {
    return (attend_work){.m = model, .plan = plan, .qkv = qkv, .out = out, .num_decodes = plan->num_decodes, .size = sizes(model)};
}

/* out [rows, heads * dim] of qkv [rows, (heads + 2 * kv_heads) * dim], whose keys and values are stored already.
 * window: keys that a row sees, its own the last; 0 = all of them. sinks: see attend_work. Returns 0, or 1 where memory is out. */
int64_t attend(const model_of *model, const plan_of *plan, const void *qkv, void *out, int64_t layer, int64_t window, const float *sinks) {
    attend_work w = attention_of(model, plan, qkv, out);
    w.layer = layer;
    w.sinks = sinks;
    const int64_t threads = most_threads();
    if (lay_out(&w, window, threads)) return 1;
    run_on(threads, attend_region, &w);
    return 0;
}

#endif
