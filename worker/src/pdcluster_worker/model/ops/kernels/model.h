/* The arguments of the kernels, a model's and a step's; ops/kernel_arguments.py has the same fields in the same order. */
#ifndef MODEL_H
#define MODEL_H

#include "vectors.h"

/* cache: [blocks, kv_heads, layers, 2, block_size, dim] of the kind `stored`, keys before values, in one piece from the layers on.
 * block_bytes, head_bytes: from one block or head to the next, which are further apart where a rank has only some of them.
 * half_bytes: from keys to values. scales: from keys or values to their scales [block_size], float32; 0 = rows are not quantized. */
typedef struct {
    char *cache;
    int64_t t, stored, heads, kv_heads, dim, block_size, block_bytes, head_bytes, half_bytes, scales;
    float scaling;
} model_of;

/* See StepPlan. adapter_runs: [num_runs] pairs of an adapter and its number of rows. */
typedef struct {
    const int64_t *slots;
    const int32_t *firsts, *lengths, *contexts, *seats, *tables;
    const int64_t *adapter_rows;
    const int32_t *adapter_runs;
    int64_t rows, num_tokens, num_sequences, num_decodes, table_width, num_runs;
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

/* Keys of one block, head and layer: block_size rows; its values are half_bytes on. */
static INLINE char *unit(const model_of *m, int64_t block, int64_t head, int64_t layer) {
    return m->cache + block * m->block_bytes + head * m->head_bytes + layer * 2 * m->half_bytes;
}

#endif
