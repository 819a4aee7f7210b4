/* The kernels without Python, for processors that are emulated; test_kernels_arm.py feeds it.
 *
 *     kernels_harness                        prints the instruction sets that run here
 *     kernels_harness SET CASES RESULTS      runs the cases of a file with one of them
 *
 * A case is numbers and arrays, as its function below takes them. A number is a double; an array is
 * the number of its bytes, then these. A result is such an array. Each array ends where memory that
 * can be touched ends, so that whoever reads or writes past it is found out. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "attention.h"
#include "choose.h"
#include "ffn.h"
#include "norms.h"
#include "pool.h"
#include "scratch.h"

static const char *at;      /* what is next of the cases */
static FILE *results;

static void *at_the_edge(size_t bytes) {
    size_t page = (size_t)sysconf(_SC_PAGESIZE), whole = (bytes + page - 1) / page * page;
    char *memory = mmap(NULL, whole + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS,
                        -1, 0);
    if (memory == MAP_FAILED || mprotect(memory + whole, page, PROT_NONE)) abort();
    return memory + whole - bytes;
}

static double number(void) {
    double value;
    memcpy(&value, at, sizeof value);
    at += sizeof value;
    return value;
}

static long whole(void) { return (long)number(); }

/* NULL if it is empty. */
static void *array(void) {
    size_t bytes = (size_t)number();
    if (!bytes) return NULL;
    void *values = memcpy(at_the_edge(bytes), at, bytes);
    at += bytes;
    return values;
}

/* What is not written is NaN. */
static void *output(size_t bytes) { return memset(at_the_edge(bytes), 0xff, bytes); }

static void put(const void *values, size_t bytes) {
    double size = (double)bytes;
    if (fwrite(&size, sizeof size, 1, results) != 1 || fwrite(values, 1, bytes, results) != bytes)
        abort();
}

static struct matrix matrix(void) {
    struct matrix m = {0};
    m.format = (enum format)whole(), m.element = (enum element)whole();
    m.count = whole(), m.rows = whole(), m.cols = whole(), m.group = whole();
    m.row_bytes = (size_t)whole(), m.scale_bytes = (size_t)whole();
    while (1 << m.group_shift < m.group) m.group_shift++;
    m.weight = array(), m.scales = array(), m.biases = array(), m.bias = array();
    return m;
}

static void linear(void) {
    struct matrix m = matrix();
    struct layout layout;
    layout_of(&m, (int)whole(), &layout);
    long rows = whole();
    const float *x = array();
    float *out = output((size_t)(rows * m.rows) * 4), **to = malloc((size_t)rows * sizeof *to);
    const char **prepared = malloc((size_t)rows * sizeof *prepared);
    for (long r = 0; r < rows; r++) {
        char *row = scratch(layout.bytes);
        kernels->prepare(&layout, x + r * m.cols, row);
        prepared[r] = row, to[r] = out + r * m.rows;
    }
    kernels->product(&m, &layout, 0, 0, m.rows, prepared, to, rows);
    put(out, (size_t)(rows * m.rows) * 4);
}

static void ffn(void) {
    struct ffn f = {0};
    f.activation = (enum activation)whole();
    for (int n = 0; n < 4; n++) f.parameters[n] = (float)number();
    f.precision = (int)whole(), f.rows = whole();
    struct matrix gate = {0}, up, down;
    if (whole()) gate = matrix(), f.gate = &gate;
    up = matrix(), down = matrix();
    f.up = &up, f.down = &down;
    f.x = array(), f.offsets = array(), f.slots = array(), f.weights = array();
    long rows = f.weights ? f.rows : (long)f.offsets[f.rows];
    size_t bytes = (size_t)(rows * down.rows) * 4;
    f.out = output(bytes);
    if (ffn_run(&f)) abort();
    put(f.out, bytes);
}

static void strides(ptrdiff_t *out, int count) {
    for (int n = 0; n < count; n++) out[n] = whole();
}

static void attention(void) {
    struct attention a = {0};
    a.batch = whole(), a.heads = whole(), a.key_heads = whole(), a.length = whole(), a.keys = whole();
    a.depth = whole(), a.width = whole();
    a.scale = (float)number(), a.causal = (int)whole();
    a.k_stored = (int)whole(), a.v_stored = (int)whole(), a.mask_kind = (int)whole();
    strides(a.q_stride, 3), strides(a.k_stride, 3), strides(a.v_stride, 3);
    strides(a.mask_stride, 4);
    a.q = array(), a.k = array(), a.v = array(), a.mask = array(), a.sinks = array();
    size_t bytes = (size_t)(a.batch * a.heads * a.length * a.width) * 4;
    a.out = output(bytes);
    if (attention_run(&a)) abort();
    put(a.out, bytes);
}

static void rms_norm(void) {
    struct rms_norm norm = {.axes = 1, .group = 3};
    norm.rows = whole(), norm.size = whole(), norm.eps = (float)number();
    norm.shape[0] = norm.rows, norm.stride[0] = norm.size * 4;
    norm.x = array(), norm.weight = array();
    size_t bytes = (size_t)(norm.rows * norm.size) * 4;
    norm.out = output(bytes);
    pool_run(kernels->rms_norm, &norm, (norm.rows + 2) / 3);
    put(norm.out, bytes);
}

static void softmax(void) {
    long rows = whole(), size = whole();
    const float *x = array();
    float *out = output((size_t)(rows * size) * 4);
    for (long row = 0; row < rows; row++) kernels->softmax(x + row * size, size, out + row * size);
    put(out, (size_t)(rows * size) * 4);
}

/* The inverse frequencies are a multiple of 16. */
static void rope(void) {
    struct rope rope = {.inner = 1};
    rope.batch = whole(), rope.outer = whole(), rope.length = whole(), rope.size = whole();
    rope.half = whole(), rope.traditional = (int)whole();
    rope.scale = (float)number(), rope.padded = (rope.half + 15) & -16;
    rope.stride[3] = rope.size * 4, rope.stride[1] = rope.length * rope.stride[3];
    rope.stride[0] = rope.outer * rope.stride[1];
    rope.x = array(), rope.offsets = array(), rope.inverse = array();
    rope.scratch = scratch((size_t)(2 * rope.padded * pool_threads()) * 4);
    size_t bytes = (size_t)(rope.batch * rope.stride[0]);
    rope.out = output(bytes);
    pool_run(kernels->rope, &rope, rope.batch * rope.length);
    put(rope.out, bytes);
}

/* A row as it travels, the same read again, that added to the row, and whether each is finite. */
static void form(void) {
    int kind = (int)whole(), itemsize = (int)whole();
    const struct row_form *form = &kernels->forms[kind];
    long size = whole();
    const float *x = array();
    size_t bytes = (size_t)(size * itemsize), floats = (size_t)size * 4;
    size_t scales = kind == ROW_INT8 ? (size_t)(size + ROW_BLOCK - 1) / ROW_BLOCK * 2 : 0;
    uint8_t *raw = output(bytes + scales), fine[3];
    float *out = output(floats), *total = memcpy(output(floats), x, floats);
    fine[0] = (uint8_t)form->encode(x, size, raw, raw + bytes);
    fine[1] = (uint8_t)form->decode(raw, raw + bytes, size, out);
    fine[2] = (uint8_t)form->finite(raw, raw + bytes, size);
    form->add(raw, raw + bytes, size, total);
    put(raw, bytes + scales), put(out, floats), put(total, floats), put(fine, sizeof fine);
}

static void (*const functions[])(void) = {linear, ffn, attention, rms_norm, softmax, rope, form};

static const char *contents(const char *path) {
    FILE *file = fopen(path, "rb");
    if (!file || fseek(file, 0, SEEK_END)) abort();
    size_t size = (size_t)ftell(file);
    char *text = malloc(size + 1);
    rewind(file);
    if (!text || fread(text, 1, size, file) != size) abort();
    fclose(file);
    return text;
}

int main(int count, char **arguments) {
    const char *name;
    for (int n = 0; count == 1 && (name = choice(n)); n++) puts(name);
    if (count != 4) return count != 1;
    if (!choose(arguments[1]) || !(results = fopen(arguments[3], "wb"))) return 1;
    pool_set_threads(2);
    at = contents(arguments[2]);
    for (long cases = whole(); cases; cases--) functions[whole()]();
    return fclose(results) != 0;
}
