/* Decodes: a thread takes one part of one KV head of one sequence at a time; the parts are merged at the end. */
#ifndef ATTENTION_DECODES_H
#define ATTENTION_DECODES_H

static INLINE int64_t tiles_of(const attend_work *w, int64_t s) { return (w->plan->lengths[s] * w->size.group + WIDE - 1) / WIDE; }

static INLINE tile_of tile_at(const attend_work *w, int64_t s, int64_t head, int64_t index) {
    return (tile_of){s, head, index * WIDE, least(WIDE, w->plan->lengths[s] * w->size.group - index * WIDE)};
}

static INLINE const int32_t *table_of(const attend_work *w, int64_t s) { return w->plan->tables + w->plan->seats[s] * w->plan->table_width; }

/* Records [sequence][head][part][tile] of sequences that are computed part by part. */
static int64_t decode_records(const attend_work *w) {
    int64_t records = 0;
    for (int64_t s = 0; s < w->num_decodes; s++) records += w->m->kv_heads * parts_of(w->plan->contexts[s]) * tiles_of(w, s);
    return records;
}

static INLINE void decode_part(const kind t, attend_work *w, desk *d, int64_t s, int64_t head, int64_t part, char *record) {
    const int64_t first = part * PART, tiles = tiles_of(w, s);
    const part_of p = {table_of(w, s), head, first, least(PART, w->plan->contexts[s] - first)};
    const int is_only = w->plan->contexts[s] <= PART;
    pack_part(t, w, &p, d->part);
    for (int64_t i = 0; i < tiles; i++) {
        const tile_of tile = tile_at(w, s, head, i);
        desk mine = *d;
        if (!is_only) mine.now = state_at(record + i * w->size.state_bytes);
        pack_queries(w, tile, mine.queries);
        attend_part(t, w, &mine, tile, d->part, p);
        if (is_only) finish_tile(t, w, tile, mine.now);
        d->tiles = mine.tiles;
    }
}

static INLINE void merge_parts(const kind t, attend_work *w, int64_t s, int64_t head, char *records) {
    const int64_t parts = parts_of(w->plan->contexts[s]), tiles = tiles_of(w, s);
    for (int64_t i = 0; i < tiles; i++) {
        const tile_of tile = tile_at(w, s, head, i);
        const state_of sum = state_at(records + i * w->size.state_bytes);
        for (int64_t part = 1; part < parts; part++)
            merge(&w->size, sum, state_at(records + (part * tiles + i) * w->size.state_bytes), tile.lanes > LANES ? 2 : 1);
        finish_tile(t, w, tile, sum);
    }
}

static INLINE void attend_decodes(const kind t, attend_work *w, desk *d, place me) {
    const int64_t heads = w->m->kv_heads;
    int64_t mine = atomic_fetch_add(&w->next[0], 1), seen = 0, is_long = 0, record = 0;
    for (int64_t s = 0; s < w->num_decodes; s++) {
        const int64_t parts = parts_of(w->plan->contexts[s]), tiles = tiles_of(w, s);
        for (; mine < seen + heads * parts; mine = atomic_fetch_add(&w->next[0], 1)) {
            const int64_t index = mine - seen;
            decode_part(t, w, d, s, index / parts, index % parts, w->records + (record + index * tiles) * w->size.state_bytes);
        }
        seen += heads * parts;
        record += heads * parts * tiles;
        is_long |= parts > 1;
    }
    if (!is_long) return;
    wait_for_all(me);
    mine = atomic_fetch_add(&w->next[1], 1), seen = 0, record = 0;
    for (int64_t s = 0; s < w->num_decodes; s++) {
        const int64_t each = parts_of(w->plan->contexts[s]) * tiles_of(w, s);
        for (; mine < seen + heads; mine = atomic_fetch_add(&w->next[1], 1))
            if (w->plan->contexts[s] > PART) merge_parts(t, w, s, mine - seen, w->records + (record + (mine - seen) * each) * w->size.state_bytes);
        seen += heads;
        record += heads * each;
    }
}

#endif
