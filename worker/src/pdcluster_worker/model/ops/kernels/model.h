/* The arguments of the kernels, a model's and a step's; ops/kernel_arguments.py has the same fields in the same order. */
#ifndef MODEL_H
#define MODEL_H

#include "vectors.h"

/* cache: [blocks, kv_heads, layers, 2, block_size, dim], keys before values. */
typedef struct {
    char *cache;
    int64_t t, heads, kv_heads, dim, layers, block_size;
    float scaling;
} model_of;

/* See StepPlan. */
typedef struct {
    const int64_t *slots;
    const int32_t *firsts, *lengths, *contexts, *seats, *tables;
    int64_t rows, num_tokens, num_sequences, num_decodes, table_width;
} plan_of;

/* cosine, sine: [rows, half], or NULL for no rotation. */
typedef struct {
    const float *cosine, *sine;
    int64_t half;
} rotation_of;

typedef struct {
    const float *weight;
    float epsilon;
    int64_t rounds_first;
} norm_of;

/* Keys of one block, head and layer: block_size rows; its values follow. */
static INLINE char *unit(const model_of *m, int64_t block, int64_t head, int64_t layer) {
    return m->cache + ((block * m->kv_heads + head) * m->layers + layer) * 2 * m->block_size * m->dim * bytes_of((kind)m->t);
}

#endif
