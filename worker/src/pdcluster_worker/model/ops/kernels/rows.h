/* Kernels that work row by row: norm, gate, rotation and store.  They round where the plain torch operations do. */
#ifndef ROWS_H
#define ROWS_H

#include "stored.h"
#include "threads.h"
#include "vectors.h"

/* out = norm of x, `width` elements; see Norm in operations.py. */
static INLINE void norm_row(const kind t, const void *x, void *out, int64_t width, norm_of norm) {
    v16 squares = {0};
    for (int64_t i = 0; i < width; i += LANES) {
        const v16 part = load(t, x, i, width - i);
        squares = fused(part, part, squares);
    }
    const v16 scale = all(1.0f / sqrtf(sum_of(squares) / (float)width + norm.epsilon));
    for (int64_t i = 0; i < width; i += LANES) {
        const v16 weight = load(F32, norm.weight, i, width - i);
        v16 normed = load(t, x, i, width - i) * scale;
        normed = norm.rounds_first ? rounded(t, normed) * rounded(t, weight) : normed * weight;
        store(t, out, i, width - i, normed);
    }
}

typedef struct {
    kind t;
    const void *x;
    void *hidden, *out;
    int64_t rows, width;
    norm_of norm;
} norm_work;

static INLINE void norm_rows(const kind t, norm_work *w) {
    int64_t first, last;
    share(my_place(), w->rows, &first, &last);
    for (int64_t row = first; row < last; row++) {
        const int64_t start = row * w->width * bytes_of(t);
        char *hidden = (char *)w->hidden + start;
        if (w->x)
            for (int64_t i = 0; i < w->width; i += LANES) {
                const int64_t n = w->width - i;
                store(t, hidden, i, n, load(t, hidden, i, n) + load(t, (const char *)w->x + start, i, n));
            }
        if (w->out) norm_row(t, hidden, (char *)w->out + start, w->width, w->norm);
    }
}

static void norm_region(void *data) {
    norm_work *w = data;
    if (w->t == F32) norm_rows(F32, w);
    else norm_rows(BF16, w);
}

/* hidden += x where x is given; out = norm of hidden. */
void add_rms_norm(int64_t t, const void *x, void *hidden, void *out, int64_t rows, int64_t width, const float *weight, float epsilon,
                  int64_t rounds_first) {
    norm_work w = {(kind)t, x, hidden, out, rows, width, {weight, epsilon, rounds_first}};
    run(norm_region, &w, rows * width > LARGE);
}

typedef struct {
    kind t;
    const void *gate_up;
    void *out;
    int64_t rows, width, activation;
} gate_work;

/* Numbers of ops/kernel_arguments.py. */
typedef enum { GELU_TANH = 0, SILU = 1, CLAMPED_SILU = 2 } activation;

static INLINE v16 activated(const kind t, const activation how, v16 x) {
    /* gelu by tanh is x * sigmoid(2 * u), which has no difference of near numbers. */
    const v16 u = how == SILU ? x : how == CLAMPED_SILU ? all(1.702f) * x : all(1.5957691216f) * fused(x * x * x, all(0.044715f), x);
    return ratio(t, x, all(1.0f) + exp_of(t, -u));
}

/* What the activated gate is multiplied with, and the gate before it is activated: gpt-oss bounds both. */
static INLINE v16 factor_of(const kind t, const activation how, v16 up) {
    return how == CLAMPED_SILU ? rounded(t, clamped(up, -7.0f, 7.0f) + all(1.0f)) : up;
}

static INLINE v16 gate_of(const activation how, v16 gate) { return how == CLAMPED_SILU ? select16(gate > all(7.0f), all(7.0f), gate) : gate; }

static INLINE void gate_rows(const kind t, const activation how, gate_work *w) {
    int64_t first, last;
    share(my_place(), w->rows, &first, &last);
    for (int64_t row = first; row < last; row++) {
        const char *gate = (const char *)w->gate_up + 2 * row * w->width * bytes_of(t), *up = gate + w->width * bytes_of(t);
        char *out = (char *)w->out + row * w->width * bytes_of(t);
        for (int64_t i = 0; i < w->width; i += LANES) {
            const int64_t n = w->width - i;
            const v16 gated = rounded(t, activated(t, how, gate_of(how, load(t, gate, i, n))));
            store(t, out, i, n, gated * factor_of(t, how, load(t, up, i, n)));
        }
    }
}

static INLINE void gate_rows_of(const kind t, gate_work *w) {
    if (w->activation == SILU) gate_rows(t, SILU, w);
    else if (w->activation == CLAMPED_SILU) gate_rows(t, CLAMPED_SILU, w);
    else gate_rows(t, GELU_TANH, w);
}

static void gate_region(void *data) {
    gate_work *w = data;
    if (w->t == F32) gate_rows_of(F32, w);
    else gate_rows_of(BF16, w);
}

/* out [rows, width] = activation(gate) * up of gate_up [rows, 2 * width]. */
void gate_mul(int64_t t, const void *gate_up, void *out, int64_t rows, int64_t width, int64_t activation) {
    gate_work w = {(kind)t, gate_up, out, rows, width, activation};
    run(gate_region, &w, rows * width > LARGE / 2);
}

/* Rotate one head in place: each product is rounded, then their sum. */
static INLINE void rotate(const kind t, char *head, const float *cosine, const float *sine, int64_t half) {
    for (int64_t i = 0; i < half; i += LANES) {
        const int64_t n = half - i;
        const v16 left = load(t, head, i, n), right = load(t, head, half + i, n);
        const v16 c = load(F32, cosine, i, n), s = load(F32, sine, i, n);
        store(t, head, i, n, rounded(t, left * c) + rounded(t, -right * s));
        store(t, head, half + i, n, rounded(t, right * c) + rounded(t, left * s));
    }
}

typedef struct {
    const model_of *model;
    const plan_of *plan;
    char *qkv;
    int64_t layer;
    const rotation_of *rotation;
    const norm_of *norms; /* of queries, then of keys; or NULL */
} rope_work;

static INLINE void rope_rows(const kind t, rope_work *w) {
    const model_of *m = w->model;
    const int64_t head_bytes = m->dim * bytes_of(t), num_turned = m->heads + m->kv_heads;
    int64_t first, last;
    share(my_place(), w->plan->rows, &first, &last);
    for (int64_t row = first; row < last; row++) {
        char *heads = w->qkv + row * (num_turned + m->kv_heads) * head_bytes;
        for (int64_t h = 0; h < num_turned; h++) {
            char *head = heads + h * head_bytes;
            if (w->norms) norm_row(t, head, head, m->dim, w->norms[h >= m->heads]);
            if (w->rotation->cosine)
                rotate(t, head, w->rotation->cosine + row * w->rotation->half, w->rotation->sine + row * w->rotation->half, w->rotation->half);
        }
        const int64_t slot = w->plan->slots[row];
        if (slot < 0) continue;
        const char *key = heads + m->heads * head_bytes, *value = key + m->kv_heads * head_bytes;
        for (int64_t h = 0; h < m->kv_heads; h++) {
            char *keys = unit(m, slot / m->block_size, h, w->layer);
            store_row(t, m, key + h * head_bytes, keys, slot % m->block_size);
            store_row(t, m, value + h * head_bytes, keys + m->half_bytes, slot % m->block_size);
        }
    }
}

static void rope_region(void *data) {
    rope_work *w = data;
    if (w->model->t == F32) rope_rows(F32, w);
    else rope_rows(BF16, w);
}

/* Norm and rotate queries and keys of qkv in place; store keys and values at the plan's slots. */
void rope_store(const model_of *model, const plan_of *plan, void *qkv, int64_t layer, const rotation_of *rotation, const norm_of *norms) {
    rope_work w = {model, plan, qkv, layer, rotation, norms};
    run(rope_region, &w, plan->rows * (model->heads + model->kv_heads) * model->dim > LARGE / 2);
}

#endif
