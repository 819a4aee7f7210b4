#include "layer.h"

#include <math.h>
#include <string.h>

#include "attention.h"
#include "forms.h"
#include "norms.h"
#include "pool.h"
#include "scratch.h"
#include "table.h"

/* Rows of weights in a task. */
#define MOST_SHARE 256
#define LEAST_SHARE 32
#define MOST_PRODUCTS 3

/* One row through several matrices at once. */
struct multiplying {
    int count;
    long share, shares[MOST_PRODUCTS];
    struct layout layouts[MOST_PRODUCTS];
    const struct matrix *matrices[MOST_PRODUCTS];
    const char *rows[MOST_PRODUCTS];
    float *out[MOST_PRODUCTS];
};

static void multiply_share(void *context, long index, int thread) {
    (void)thread;
    const struct multiplying *job = context;
    int n = 0;
    while (index >= job->shares[n]) index -= job->shares[n++];
    const struct matrix *m = job->matrices[n];
    long first = index * job->share, left = m->rows - first;
    float *out = job->out[n] + first;
    kernels->product(m, &job->layouts[n], 0, first, left < job->share ? left : job->share,
                     &job->rows[n], &out, 1);
}

/* out[n] = products[n] of the row. */
static int multiply(const struct product *const *products, int count, const float *row,
                    float *const *out) {
    struct multiplying job = {.count = count, .share = MOST_SHARE};
    long columns = 0, tasks = 0;
    size_t bytes = 0;
    for (int n = 0; n < count; n++) {
        job.matrices[n] = products[n]->matrix, job.out[n] = out[n];
        layout_of(job.matrices[n], products[n]->precision, &job.layouts[n]);
        bytes += job.layouts[n].bytes, columns += job.matrices[n]->rows;
    }
    char *rows = scratch(bytes), *next = rows;
    if (!rows) return -1;
    for (int n = 0; n < count; n++) {
        if (n && layout_same(&job.layouts[n - 1], &job.layouts[n])) {
            job.rows[n] = job.rows[n - 1];
            continue;
        }
        kernels->prepare(&job.layouts[n], row, next);
        job.rows[n] = next, next += job.layouts[n].bytes;
    }
    while (job.share > LEAST_SHARE && columns / job.share < 8L * pool_threads()) job.share /= 2;
    for (int n = 0; n < count; n++)
        tasks += job.shares[n] = (job.matrices[n]->rows + job.share - 1) / job.share;
    pool_run(multiply_share, &job, tasks);
    free(rows);
    return 0;
}

static void norm_rows(const struct norm *norm, const float *x, long rows, long size, float *out) {
    struct rms_norm job = {.x = (const char *)x, .weight = norm->weight, .out = out,
                           .eps = norm->eps, .rows = rows, .size = size, .group = rows, .axes = 1,
                           .shape = {rows}, .stride = {size * (ptrdiff_t)sizeof *x}};
    kernels->rms_norm(&job, 0, 0);
}

/* All heads of one position, in place. */
static void turn(const struct layer *layer, float *x, long heads, int32_t offset, float *memory) {
    struct rope job = {.x = (const char *)x, .out = x, .batch = 1, .outer = heads, .inner = 1,
                       .length = 1, .size = layer->depth, .half = layer->half,
                       .padded = ROPE_PADDED(layer->half), .traditional = layer->traditional,
                       .scale = layer->rope_scale, .offsets = &offset, .one_offset = 1,
                       .inverse = layer->inverse, .scratch = memory};
    job.stride[1] = layer->depth * (ptrdiff_t)sizeof *x;
    kernels->rope(&job, 0, 0);
}

/* A position's row of each head into the cache. Whether all of it could be stored. */
static int keep(const struct step *step, const float *x, long heads, long size, void *cache) {
    int fine = 1;
    for (long head = 0; head < heads; head++) {
        long at = (head * step->room + step->offset) * size;
        const float *row = x + head * size;
        if (step->half)
            fine &= kernels->forms[ROW_F16].encode(row, size, (uint8_t *)cache + at * 2, NULL);
        else
            memcpy((float *)cache + at, row, (size_t)size * sizeof *row);
    }
    return fine;
}

static int attend(const struct layer *layer, const struct step *step, const float *query,
                  float *out) {
    ptrdiff_t size = step->half ? 2 : 4, key = layer->depth * size, value = layer->width * size;
    struct attention a = {.q = (const char *)query, .k = step->keys, .v = step->values, .out = out,
                          .batch = 1, .heads = layer->heads, .key_heads = layer->key_heads,
                          .length = 1, .keys = step->offset + 1, .depth = layer->depth,
                          .width = layer->width, .scale = layer->scale,
                          .k_stored = step->half, .v_stored = step->half};
    a.q_stride[1] = a.q_stride[2] = layer->depth * 4;
    a.q_stride[0] = layer->heads * a.q_stride[1];
    a.k_stride[2] = key, a.k_stride[1] = step->room * key;
    a.v_stride[2] = value, a.v_stride[1] = step->room * value;
    a.k_stride[0] = layer->key_heads * a.k_stride[1];
    a.v_stride[0] = layer->key_heads * a.v_stride[1];
    return attention_run(&a);
}

/* The largest shares in their order, among equals as a stable sort of all would have them. */
static void choose(const struct choice *choice, const float *all, long count, uint32_t *experts,
                   float *shares) {
    long found = 0, each = choice->each;
    for (long e = 0; e < count; e++) {
        long at = found;
        while (at && (choice->ascending ? all[e] >= shares[at - 1] : all[e] > shares[at - 1])) at--;
        if (at == each) continue;
        if (found < each) found++;
        memmove(shares + at + 1, shares + at, (size_t)(found - at - 1) * sizeof *shares);
        memmove(experts + at + 1, experts + at, (size_t)(found - at - 1) * sizeof *experts);
        shares[at] = all[e], experts[at] = (uint32_t)e;
    }
    for (long a = 0, b = found - 1; choice->ascending && a < b; a++, b--) {
        float share = shares[a];
        uint32_t expert = experts[a];
        shares[a] = shares[b], experts[a] = experts[b];
        shares[b] = share, experts[b] = expert;
    }
}

/* Shares of all experts, and those that are largest. */
static int route(const struct choice *choice, const struct step *step, float *all) {
    const struct product *gate = &choice->gate;
    long count = gate->matrix->rows;
    if (multiply(&gate, 1, step->normed, &all)) return -1;
    kernels->softmax(all, count, all);
    for (long e = 0; e < count; e++)
        if (!isfinite(all[e])) return 1;
    choose(choice, all, count, step->experts, step->shares);
    return 0;
}

int layer_run(const struct layer *layer, const struct step *step) {
    long hidden = layer->query.matrix->cols, queries = layer->heads * layer->depth;
    long keys = layer->key_heads * layer->depth, values = layer->key_heads * layer->width;
    long mixed = layer->heads * layer->width, padded = ROPE_PADDED(layer->half);
    const struct matrix *gate = layer->choice.gate.matrix;
    const struct product *in[] = {&layer->query, &layer->key, &layer->value};
    const struct product *out[] = {&layer->output};
    float *memory = scratch(sizeof(float) * (size_t)(hidden + queries + keys + values + mixed +
                                                     2 * padded + (gate ? gate->rows : 0)));
    if (!memory) return -1;
    float *x = memory, *q = x + hidden, *k = q + queries, *v = k + keys, *mix = v + values;
    float *angles = mix + mixed, *all = angles + 2 * padded, *const qkv[] = {q, k, v};
    int32_t offset = (int32_t)step->offset;
    norm_rows(&layer->before, step->row, 1, hidden, x);
    int failed = multiply(in, 3, x, qkv);
    if (!failed && layer->normed) {
        long query_rows = layer->whole ? 1 : layer->heads, key_rows = layer->whole ? 1 : layer->key_heads;
        norm_rows(&layer->query_norm, q, query_rows, queries / query_rows, q);
        norm_rows(&layer->key_norm, k, key_rows, keys / key_rows, k);
    }
    if (!failed) {
        turn(layer, q, layer->heads, offset, angles), turn(layer, k, layer->key_heads, offset, angles);
        failed = !keep(step, k, layer->key_heads, layer->depth, step->keys) |
                 !keep(step, v, layer->key_heads, layer->width, step->values);
    }
    if (!failed) failed = attend(layer, step, q, mix);
    if (!failed) failed = multiply(out, 1, mix, &x);
    if (!failed) {
        for (long i = 0; i < hidden; i++) step->residual[i] = step->row[i] + x[i];
        norm_rows(&layer->after, step->residual, 1, hidden, step->normed);
        if (gate) failed = route(&layer->choice, step, all);
    }
    free(memory);
    return failed;
}
