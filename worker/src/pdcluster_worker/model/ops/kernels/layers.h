/* All layers of a step in one parallel region: threads meet at a barrier after each operation, and leave after a layer
 * where fewer are allowed by then. */
#ifndef LAYERS_H
#define LAYERS_H

#include "adapters.h"
#include "attention.h"
#include "experts.h"
#include "product.h"
#include "rows.h"

/* See Layer in operations.py. */
typedef struct {
    norm_of attention_norm, mlp_norm;
    const weights_of *qkv, *out, *gate_up, *down;
    const experts_of *experts; /* in place of the last two; or NULL */
    const norm_of *head_norms; /* or NULL */
    const float *sinks;        /* or NULL */
    const adapted_of *adapted; /* of the four products in their order; or NULL */
    int64_t rotates, window;
} layer_of;

enum { QKV, OUT, GATE_UP, DOWN };

/* Layers of one width. wide, half: elements of the widest row that products make, and that they take. */
typedef struct {
    const layer_of *layers;
    int64_t count, width, wide, half, activation;
} stack_of;

/* hidden, row: [rows, width]; wide: queries, keys and values, or gates and ups; half: what attention or the gates give. */
typedef struct {
    const stack_of *stack;
    const model_of *model;
    const plan_of *plan;
    const rotation_of *rotation;
    char *hidden, *row, *wide, *half;
    char *between; /* of adapters; NULL in a step without */
    attend_work attention;
    experts_work experts;
    int64_t laid_out, is_out_of_memory, staying; /* staying: threads of the next layer */
} layers_work;

/* By one thread, while the others are on their way to the barrier before attention.
 * threads: of this region, before any of them leaves it. */
static void begin_attention(layers_work *w, int64_t layer, int64_t threads) {
    const int64_t window = w->stack->layers[layer].window;
    if (!layer || window != w->laid_out) w->is_out_of_memory |= lay_out(&w->attention, window, threads);
    w->laid_out = window;
    w->attention.layer = layer;
    w->attention.sinks = w->stack->layers[layer].sinks;
    for (int i = 0; i < 4; i++) w->attention.next[i] = 0;
}

/* adapted: of this product; or NULL. */
static void multiply_rows(layers_work *w, const weights_of *weights, const adapted_of *adapted, const char *x, char *out, place me) {
    const adapt_work adapting = {(kind)w->model->t, w->plan, adapted, x, out, w->between};
    if (adapted) shrink_region(&adapting, me);
    product_region(&(product_work){weights, x, out, w->plan->rows});
    wait_for_all(me);
    if (!adapted) return;
    grow_region(&adapting, me);
    wait_for_all(me);
}

static INLINE const adapted_of *adapted(const layers_work *w, const layer_of *l, int product) {
    return w->between && l->adapted ? l->adapted + product : NULL;
}

/* Add what was computed last to `hidden`; `row` becomes its norm. */
static void norm_hidden(layers_work *w, const norm_of *norm, int is_first, place me) {
    norm_region(&(norm_work){(kind)w->model->t, is_first ? NULL : w->row, w->hidden, norm ? w->row : NULL, w->plan->rows, w->stack->width, norm ? *norm : (norm_of){0}});
    wait_for_all(me);
}

static void attend_layer(layers_work *w, int64_t layer, place me) {
    static const rotation_of none = {0};
    const layer_of *l = &w->stack->layers[layer];
    rope_region(&(rope_work){w->model, w->plan, w->wide, layer, l->rotates ? w->rotation : &none, l->head_norms});
    if (me.number == 0) begin_attention(w, layer, me.count);
    wait_for_all(me);
    if (w->is_out_of_memory) return;
    attend_region(&w->attention);
    wait_for_all(me);
}

static void mix_experts(layers_work *w, const layer_of *l, place me) {
    if (me.number == 0) {
        w->experts = (experts_work){.of = l->experts, .t = (kind)w->model->t, .x = w->row, .out = w->row};
        w->experts.rows = w->plan->rows, w->experts.width = w->stack->width, w->experts.activation = w->stack->activation;
        w->is_out_of_memory |= lay_out_experts(&w->experts);
    }
    wait_for_all(me);
    if (w->is_out_of_memory) return;
    experts_region(&w->experts);
    wait_for_all(me);
}

/* A layer's products after its attention, and whether this thread has a place in the next layer. */
static int ends_layer(layers_work *w, const layer_of *l, place *me) {
    if (me->number == 0) w->staying = least(me->count, bound_threads());
    if (l->experts) mix_experts(w, l, *me);
    else {
        multiply_rows(w, l->gate_up, adapted(w, l, GATE_UP), w->row, w->wide, *me);
        gate_region(&(gate_work){(kind)w->model->t, w->wide, w->half, w->plan->rows, l->down->depth, w->stack->activation});
        wait_for_all(*me);
        multiply_rows(w, l->down, adapted(w, l, DOWN), w->half, w->row, *me);
    }
    if (me->number >= w->staying) return 0;
    here.count = me->count = w->staying;
    return 1;
}

static void layers_region(void *data) {
    layers_work *w = data;
    place me = my_place();
    for (int64_t layer = 0; layer < w->stack->count && !w->is_out_of_memory; layer++) {
        const layer_of *l = &w->stack->layers[layer];
        norm_hidden(w, &l->attention_norm, !layer, me);
        multiply_rows(w, l->qkv, adapted(w, l, QKV), w->row, w->wide, me);
        attend_layer(w, layer, me);
        multiply_rows(w, l->out, adapted(w, l, OUT), w->half, w->row, me);
        norm_hidden(w, &l->mlp_norm, 0, me);
        if (!ends_layer(w, l, &me)) return;
    }
    norm_hidden(w, NULL, 0, me);
}

/* Add what the layers compute to hidden [rows, width]; depths are whole steps of 64 bytes.
 * memory: rows * (width + wide + half) elements; between: see adapt_work. Returns 0, or 1 where memory is out. */
int64_t layers(const model_of *model, const plan_of *plan, const stack_of *stack, void *hidden, char *memory, char *between,
               const rotation_of *rotation) {
    const int64_t rows = plan->rows * bytes_of((kind)model->t);
    char *wide = memory + rows * stack->width, *half = wide + rows * stack->wide;
    layers_work w = {stack, model, plan, rotation, hidden, memory, wide, half, between, attention_of(model, plan, wide, half), {0}, 0, 0, 0};
    run(layers_region, &w, 1);
    return w.is_out_of_memory;
}

#endif
