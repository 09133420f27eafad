/* Decodes: a thread takes one part of one KV head of one sequence at a time; the parts are merged at the end. */
#ifndef ATTENTION_DECODES_H
#define ATTENTION_DECODES_H

static INLINE int64_t tiles_of(const attend_work *w, int64_t s) { return (w->plan->lengths[s] * w->size.group + WIDE - 1) / WIDE; }

static INLINE tile_of tile_at(const attend_work *w, int64_t s, int64_t head, int64_t index) {
    return (tile_of){s, head, index * WIDE, least(WIDE, w->plan->lengths[s] * w->size.group - index * WIDE)};
}

static INLINE const int32_t *table_of(const attend_work *w, int64_t s) { return w->plan->tables + w->plan->seats[s] * w->plan->table_width; }

/* Parts of the decodes, which come first among the sequences; returns their number, and that of their tiles. */
static int64_t list_items(const attend_work *w, item *items, int64_t *records) {
    int64_t count = 0;
    *records = 0;
    for (int64_t s = 0; s < w->num_decodes; s++)
        for (int64_t head = 0; head < w->m->kv_heads; head++)
            for (int64_t part = first_part(w, s); part < end_part(w, s); part++, count++) {
                if (items) items[count] = (item){(int32_t)s, (int32_t)head, (int32_t)part, (int32_t)*records};
                *records += tiles_of(w, s);
            }
    return count;
}

static INLINE part_of part_at(const attend_work *w, item i) {
    const int64_t context = w->plan->contexts[i.s];
    return make_part(table_of(w, i.s), i.head, i.part, seen_from(w, context - 1), context);
}

static INLINE char *record_of(const attend_work *w, item i) { return w->records + i.record * w->size.state_bytes; }

static INLINE void decode_part(const kind t, attend_work *w, desk *d, item i) {
    const part_of p = part_at(w, i);
    const int is_only = parts_of(w, i.s) == 1;
    pack_part(t, 0, w, &d->ahead, &p, d->part);
    for (int64_t index = 0; index < tiles_of(w, i.s); index++) {
        const tile_of tile = tile_at(w, i.s, i.head, index);
        const state_of own = d->now;
        if (!is_only) d->now = state_at(record_of(w, i) + index * w->size.state_bytes);
        pack_queries(w, tile, d->queries);
        attend_part(t, 1, w, d, tile, d->part, p);
        if (is_only) finish_tile(t, w, tile, d->now);
        d->now = own;
    }
}

static INLINE void merge_parts(const kind t, attend_work *w, int64_t s, int64_t head, char *records) {
    const int64_t parts = parts_of(w, s), tiles = tiles_of(w, s);
    for (int64_t i = 0; i < tiles; i++) {
        const tile_of tile = tile_at(w, s, head, i);
        const state_of sum = state_at(records + i * w->size.state_bytes);
        for (int64_t part = 1; part < parts; part++)
            merge(&w->size, sum, state_at(records + (part * tiles + i) * w->size.state_bytes), tile.lanes > LANES ? 2 : 1);
        finish_tile(t, w, tile, sum);
    }
}

static INLINE void attend_decodes(const kind t, attend_work *w, desk *d, place me) {
    int64_t now = atomic_fetch_add(&w->next[0], 1);
    if (now < w->num_items) {
        aim(w, &d->ahead, part_at(w, w->items[now]));
        fetch(w, &d->ahead, 128);
    }
    while (now < w->num_items) {
        const int64_t next = atomic_fetch_add(&w->next[0], 1);
        if (next < w->num_items) d->ahead.next = part_at(w, w->items[next]);
        decode_part(t, w, d, w->items[now]);
        now = next;
    }
    wait_for_all(me);
    int64_t first, last;
    share(me, w->num_items, &first, &last);
    for (int64_t at = first; at < last; at++) {
        const item i = w->items[at];
        if (i.part == first_part(w, i.s) && parts_of(w, i.s) > 1) merge_parts(t, w, i.s, i.head, record_of(w, i));
    }
}

#endif
