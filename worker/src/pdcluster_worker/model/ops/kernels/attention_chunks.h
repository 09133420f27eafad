/* Chunks: keys and values of a KV head are packed once, by all threads, then every tile of rows reads them. */
#ifndef ATTENTION_CHUNKS_H
#define ATTENTION_CHUNKS_H

/* A unit is one KV head of one chunk.  Units from `unit` on that fit into memory together: returns the end. */
static int64_t round_end(const attend_work *w, int64_t unit, int64_t *parts) {
    const int64_t heads = w->m->kv_heads, end = (w->plan->num_sequences - w->num_decodes) * heads;
    *parts = 0;
    for (int64_t u = unit; u < end; u++) {
        const int64_t more = parts_of(w, w->num_decodes + u / heads);
        if (u > unit && (*parts + more) * w->size.part_bytes > MOST_PACKED) return u;
        *parts += more;
    }
    return end;
}

/* Packed parts of the largest round. */
static int64_t chunk_parts(const attend_work *w) {
    const int64_t end = (w->plan->num_sequences - w->num_decodes) * w->m->kv_heads;
    int64_t most = 0, parts;
    for (int64_t unit = 0; unit < end;) {
        unit = round_end(w, unit, &parts);
        most = parts > most ? parts : most;
    }
    return most;
}

/* Values that are not finite go to 0 in the packed part: a weight of 0 times one of them would be NaN in rows that do not see it. */
static INLINE void clear_bad(const kind t, const attend_work *w, char *packed) {
    char *values = packed + PART * w->size.depth;
    for (int64_t i = 0; i < PART * w->size.padded; i += LANES) {
        const v16 x = load(t, values, i, LANES);
        store(t, values, i, LANES, select16(x - x == all(0), x, all(0)));
    }
}

/* Add the values that `clear_bad` took out to the lanes that see them. */
static INLINE void add_bad(const kind t, const attend_work *w, desk *d, tile_of tile, part_of p) {
    for (int64_t key = p.skip; key < p.count; key++) {
        const char *value = key_at(w, &p, key) + w->m->half_bytes;
        for (int64_t dim = 0; dim < w->m->dim; dim++) {
            float x;
            const v16 one = load_stored((kind)w->m->stored, value, dim, 1);
            memcpy(&x, &one, 4);
            if (x - x == 0) continue;
            for (int64_t lane = 0; lane < tile.lanes; lane++) {
                const int64_t row = w->plan->contexts[tile.s] - w->plan->lengths[tile.s] + (tile.lane + lane) / w->size.group;
                if (p.first + key <= row && p.first + key >= seen_from(w, row)) d->now.values[dim * WIDE + lane] += x;
            }
        }
    }
}

static INLINE void attend_tile(const kind t, attend_work *w, desk *d, tile_of tile, char *packed, const uint8_t *is_bad) {
    const int64_t start = w->plan->contexts[tile.s] - w->plan->lengths[tile.s];
    const int64_t from = seen_from(w, start + tile.lane / w->size.group), first = from / PART, packed_from = first_part(w, tile.s);
    const int64_t seen = start + 1 + (tile.lane + tile.lanes - 1) / w->size.group, panels = tile.lanes > LANES ? 2 : 1;
    pack_queries(w, tile, d->queries);
    for (int64_t part = first; part * PART < seen; part++) {
        const part_of p = make_part(table_of(w, tile.s), tile.head, part, from, seen);
        desk mine = *d;
        if (part == first) mine.now = d->sum;
        attend_part(t, w, &mine, tile, packed + (part - packed_from) * w->size.part_bytes, p);
        if (is_bad[part - packed_from]) add_bad(t, w, &mine, tile, p);
        if (part > first) merge(&w->size, d->sum, d->now, panels);
        d->tiles = mine.tiles;
    }
    finish_tile(t, w, tile, d->sum);
}

static INLINE void pack_unit(const kind t, attend_work *w, desk *d, int64_t s, int64_t head, int64_t part, int64_t at) {
    const int64_t context = w->plan->contexts[s], start = context - w->plan->lengths[s];
    const part_of p = make_part(table_of(w, s), head, first_part(w, s) + part, seen_from(w, start), context);
    char *packed = w->packed + at * w->size.part_bytes;
    /* Without a window every row sees what is before the chunk; quantized values are finite. */
    if (w->m->scales || (p.first + p.count <= start + 1 && seen_from(w, context - 1) <= p.first)) w->is_bad[at] = (uint8_t)pack_part(t, 0, w, &p, packed, d->part);
    else w->is_bad[at] = (uint8_t)pack_part(t, 1, w, &p, packed, d->part);
    if (w->is_bad[at]) clear_bad(t, w, packed);
}

/* One round: units [unit, end). */
static INLINE void attend_round(const kind t, attend_work *w, desk *d, place me, int64_t unit, int64_t end) {
    const int64_t heads = w->m->kv_heads;
    int64_t mine = atomic_fetch_add(&w->next[2], 1), seen = 0;
    for (int64_t u = unit; u < end; u++) {
        const int64_t s = w->num_decodes + u / heads, parts = parts_of(w, s);
        for (; mine < seen + parts; mine = atomic_fetch_add(&w->next[2], 1)) pack_unit(t, w, d, s, u % heads, mine - seen, mine);
        seen += parts;
    }
    wait_for_all(me);
    int64_t at = 0;
    mine = atomic_fetch_add(&w->next[3], 1), seen = 0;
    for (int64_t u = unit; u < end; u++) {
        const int64_t s = w->num_decodes + u / heads, tiles = tiles_of(w, s);
        /* The last rows see most keys: they go first. */
        for (; mine < seen + tiles; mine = atomic_fetch_add(&w->next[3], 1))
            attend_tile(t, w, d, tile_at(w, s, u % heads, tiles - 1 - (mine - seen)), w->packed + at * w->size.part_bytes, w->is_bad + at);
        seen += tiles;
        at += parts_of(w, s);
    }
}

static INLINE void attend_chunks(const kind t, attend_work *w, desk *d, place me) {
    const int64_t end = (w->plan->num_sequences - w->num_decodes) * w->m->kv_heads;
    int64_t parts, unit = 0;
    while (unit < end) {
        const int64_t last = round_end(w, unit, &parts);
        attend_round(t, w, d, me, unit, last);
        unit = last;
        if (unit == end) return;
        wait_for_all(me);
        if (me.number == 0) w->next[2] = w->next[3] = 0;
        wait_for_all(me);
    }
}

#endif
