#include "ffn.h"

#include <stdatomic.h>
#include <string.h>

#include "pool.h"
#include "scratch.h"
#include "table.h"

/* Columns in a task, at most: long streams of weights where few pairs use them. At least LEAST, so
 * that the threads share evenly; where many pairs use weights these stay in the cache anyway. */
#define MOST_SHARE 256
#define LEAST_SHARE 32
/* Pairs that one product multiplies, times columns. */
#define PRODUCT (96 * LEAST_SHARE)
/* Pairs computed at once: bounds memory, and is enough to read weights seldom. */
#define MOST_PAIRS 8192

/* Columns in tasks: `whole` of `share` and, so that the threads end together, the rest of `end`. */
struct cut {
    long columns, share, whole, end;
};

/* A slab of a dispatch. Pairs are numbered from its first; `order` has them by expert, and
 * expert number n of `experts` has those from starts[n] to starts[n + 1]. */
struct slab {
    const struct ffn *ffn;
    long first_row, rows, pairs, experts;
    struct cut up, down;
    uint32_t *order, *starts, *expert, *row_of;
    struct layout gate_layout, up_layout, down_layout;
    char *gate_rows, *up_rows, *hidden_rows;    /* prepared; gate_rows may be up_rows */
    float *hidden;                              /* (pairs, down's cols) */
    atomic_int failed;
};

static long tasks_of(const struct cut *cut) {
    return cut->whole + (cut->columns - cut->whole * cut->share + cut->end - 1) / cut->end;
}

/* The columns of task `index`: how many, and the first. */
static long columns_of(const struct cut *cut, long index, long *first) {
    long over = index - cut->whole, share = over < 0 ? cut->share : cut->end;
    *first = over < 0 ? index * share : cut->whole * cut->share + over * share;
    long left = cut->columns - *first;
    return left < share ? left : share;
}

/* For `experts` (1 if a task is for all of them) times so many columns. */
static struct cut cut_of(const struct slab *s, long experts, long columns) {
    long share = s->pairs > 4 * s->experts ? LEAST_SHARE : MOST_SHARE;
    while (share > LEAST_SHARE && experts * (columns / share) < 4L * pool_threads()) share /= 2;
    long end = experts > 1 || share / 4 < LEAST_SHARE ? share : share / 4;
    long whole = columns / share - (end < share ? 2 : 0);
    return (struct cut){columns, share, whole < 0 ? 0 : whole, end};
}

static uint32_t first_pair(const struct slab *s) { return s->ffn->offsets[s->first_row]; }

/* Sort the pairs by expert, in order within each. */
static int group_pairs(struct slab *s) {
    const struct ffn *f = s->ffn;
    const uint32_t *slots = f->slots + first_pair(s);
    uint32_t *at = calloc((size_t)f->up->count + 1, sizeof *at);
    if (!at) return -1;
    for (long p = 0; p < s->pairs; p++) at[slots[p] + 1]++;
    for (long e = 0; e < f->up->count; e++) {
        if (at[e + 1]) s->expert[s->experts] = (uint32_t)e, s->starts[s->experts++] = at[e];
        at[e + 1] += at[e];
    }
    s->starts[s->experts] = (uint32_t)s->pairs;
    for (long p = 0; p < s->pairs; p++) s->order[at[slots[p]]++] = (uint32_t)p;
    for (long r = 0, p = 0; r < s->rows; r++)
        for (; p < (long)(f->offsets[s->first_row + r + 1] - first_pair(s)); p++)
            s->row_of[p] = (uint32_t)r;
    free(at);
    return 0;
}

static void prepare_row(void *context, long index, int thread) {
    (void)thread;
    struct slab *s = context;
    const struct ffn *f = s->ffn;
    const float *x = f->x + (s->first_row + index) * f->up->cols;
    kernels->prepare(&s->up_layout, x, s->up_rows + (size_t)index * s->up_layout.bytes);
    if (s->gate_rows != s->up_rows && f->gate)
        kernels->prepare(&s->gate_layout, x, s->gate_rows + (size_t)index * s->gate_layout.bytes);
}

/* Some pairs of one expert, at most PRODUCT / count, through columns of gate and up. */
static void hide(struct slab *s, long expert, const uint32_t *pairs, long n, long first,
                 long count) {
    const struct ffn *f = s->ffn;
    float gate[PRODUCT], up[PRODUCT], *out[PRODUCT / LEAST_SHARE] = {NULL};
    const char *x[PRODUCT / LEAST_SHARE] = {NULL};
    for (long i = 0; i < n; i++) {
        x[i] = s->up_rows + (size_t)s->row_of[pairs[i]] * s->up_layout.bytes;
        out[i] = up + i * count;
    }
    if (f->gate && n == 1) ask_for(f->gate, expert, first, count);
    kernels->product(f->up, &s->up_layout, expert, first, count, x, out, n);
    for (long i = 0; f->gate && i < n; i++) {
        x[i] = s->gate_rows + (size_t)s->row_of[pairs[i]] * s->gate_layout.bytes;
        out[i] = gate + i * count;
    }
    if (f->gate) kernels->product(f->gate, &s->gate_layout, expert, first, count, x, out, n);
    for (long i = 0; i < n; i++)
        kernels->activate(f->activation, f->parameters, (f->gate ? gate : up) + i * count,
                          up + i * count, s->hidden + pairs[i] * f->down->cols + first, count);
}

static void hide_share(void *context, long index, int thread) {
    (void)thread;
    struct slab *s = context;
    long tasks = tasks_of(&s->up), n = index / tasks, first;
    long count = columns_of(&s->up, index % tasks, &first), most = PRODUCT / s->up.share;
    for (long p = s->starts[n]; p < s->starts[n + 1]; p += most) {
        long pairs = s->starts[n + 1] - p < most ? s->starts[n + 1] - p : most;
        hide(s, s->expert[n], s->order + p, pairs, first, count);
    }
}

static void prepare_hidden(void *context, long index, int thread) {
    (void)thread;
    struct slab *s = context;
    kernels->prepare(&s->down_layout, s->hidden + index * s->ffn->down->cols,
                     s->hidden_rows + (size_t)index * s->down_layout.bytes);
}

/* Columns first..first + count of every pair's output, at out + pair * stride. */
static void lower(struct slab *s, long first, long count, float *out, long stride) {
    const struct ffn *f = s->ffn;
    const char *x[PRODUCT / LEAST_SHARE] = {NULL};
    float *to[PRODUCT / LEAST_SHARE];
    long most = PRODUCT / LEAST_SHARE;
    for (long n = 0; n < s->experts; n++)
        for (long p = s->starts[n]; p < s->starts[n + 1]; p += most) {
            long pairs = s->starts[n + 1] - p < most ? s->starts[n + 1] - p : most;
            for (long i = 0; i < pairs; i++) {
                x[i] = s->hidden_rows + (size_t)s->order[p + i] * s->down_layout.bytes;
                to[i] = out + s->order[p + i] * stride;
            }
            if (n + 1 < s->experts && pairs == 1) ask_for(f->down, s->expert[n + 1], first, count);
            kernels->product(f->down, &s->down_layout, s->expert[n], first, count, x, to, pairs);
        }
}

/* One after the other, in the order of a row's pairs. */
static void add_up(const struct slab *s, const float *outputs, long first, long count) {
    const struct ffn *f = s->ffn;
    const float *weights = f->weights + first_pair(s);
    for (long r = 0, p = 0; r < s->rows; r++) {
        float *out = f->out + (s->first_row + r) * f->down->rows + first;
        long end = f->offsets[s->first_row + r + 1] - first_pair(s);
        if (p == end) memset(out, 0, (size_t)count * 4);
        for (long k = p; k < end; k++)
            for (long c = 0; c < count; c++) {
                float value = outputs[k * s->down.share + c] * weights[k];
                out[c] = k == p ? value : out[c] + value;
            }
        p = end;
    }
}

static void lower_share(void *context, long index, int thread) {
    (void)thread;
    struct slab *s = context;
    const struct ffn *f = s->ffn;
    long first, count = columns_of(&s->down, index, &first);
    if (!f->weights) {
        lower(s, first, count, f->out + first_pair(s) * f->down->rows + first, f->down->rows);
        return;
    }
    float *outputs = scratch((size_t)(s->pairs * s->down.share) * 4);
    if (!outputs) {
        atomic_store(&s->failed, 1);
        return;
    }
    lower(s, first, count, outputs, s->down.share);
    add_up(s, outputs, first, count);
    free(outputs);
}

static int allocate(struct slab *s) {
    const struct ffn *f = s->ffn;
    size_t pairs = (size_t)s->pairs, rows = (size_t)s->rows;
    layout_of(f->up, f->precision, &s->up_layout);
    layout_of(f->gate ? f->gate : f->up, f->precision, &s->gate_layout);
    layout_of(f->down, f->precision, &s->down_layout);
    s->order = scratch(4 * (4 * pairs + 1));
    s->starts = s->order + pairs, s->expert = s->starts + pairs + 1;
    s->row_of = s->expert + pairs;
    s->up_rows = scratch(rows * s->up_layout.bytes);
    s->gate_rows = layout_same(&s->up_layout, &s->gate_layout)
                       ? s->up_rows
                       : scratch(rows * s->gate_layout.bytes);
    s->hidden = scratch(pairs * (size_t)f->down->cols * 4);
    s->hidden_rows = scratch(pairs * s->down_layout.bytes);
    return s->order && s->up_rows && s->gate_rows && s->hidden && s->hidden_rows ? 0 : -1;
}

static void release(struct slab *s) {
    free(s->order);
    if (s->gate_rows != s->up_rows) free(s->gate_rows);
    free(s->up_rows);
    free(s->hidden);
    free(s->hidden_rows);
}

static int run(struct slab *s) {
    if (allocate(s) || group_pairs(s)) return -1;
    long inner = s->ffn->up->rows, outer = s->ffn->down->rows;
    s->up = cut_of(s, s->experts, inner), s->down = cut_of(s, 1, outer);
    pool_run(prepare_row, s, s->rows);
    pool_run(hide_share, s, s->experts * tasks_of(&s->up));
    pool_run(prepare_hidden, s, s->pairs);
    pool_run(lower_share, s, tasks_of(&s->down));
    return atomic_load(&s->failed) ? -1 : 0;
}

int ffn_run(const struct ffn *ffn) {
    const uint32_t *offsets = ffn->offsets;
    for (long row = 0; row < ffn->rows;) {
        long end = row + 1;
        while (end < ffn->rows && offsets[end + 1] - offsets[row] <= MOST_PAIRS) end++;
        struct slab slab = {.ffn = ffn, .first_row = row, .rows = end - row,
                            .pairs = offsets[end] - offsets[row]};
        int failed = run(&slab);
        release(&slab);
        if (failed) return -1;
        row = end;
    }
    return 0;
}
