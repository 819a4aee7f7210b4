/* rms_norm(), rope(), encode(), decode() and accumulate(): check their arguments and divide. */
#include "rows.h"
#include "module.h"
#include "table.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Elements that one thread is done with before another would have woken. */
#define ALONE 32768
#define STRIPE 512   /* columns of one task of accumulate; whole blocks of int8 rows */

static void run(pool_task task, void *context, long count, long elements) {
    if (elements <= ALONE) {
        for (long index = 0; index < count; index++) task(context, index, 0);
        return;
    }
    Py_BEGIN_ALLOW_THREADS
    pool_run(task, context, count);
    Py_END_ALLOW_THREADS
}

static int contiguous_last(const Py_buffer *view, const char *what) {
    int last = view->ndim - 1;
    if (view->shape[last] <= 1 || view->strides[last] == view->itemsize) return 0;
    PyErr_Format(PyExc_ValueError, "%s: its last axis is not contiguous", what);
    return -1;
}

static int same_shape(const Py_buffer *x, const Py_buffer *out) {
    if (x->ndim == out->ndim && !memcmp(x->shape, out->shape, sizeof *x->shape * (size_t)x->ndim))
        return 0;
    PyErr_SetString(PyExc_ValueError, "out: not of x's shape");
    return -1;
}

static long elements_of(const Py_buffer *view) {
    return view->itemsize ? view->len / view->itemsize : 0;
}

/* ---- rms_norm ---- */

static int norm(Views *views, PyObject *const *arguments) {
    struct rms_norm norm = {0};
    const Py_buffer *x = view_strided(views, arguments[0], "x", 'f', -1, 0);
    const Py_buffer *out = x ? view_array(views, arguments[3], "out", 'f', -1, 1) : NULL;
    if (!out) return -1;
    if (x->ndim < 1 || x->ndim > MOST_AXES) {
        PyErr_Format(PyExc_ValueError, "x: %d axes, not 1 to %d", x->ndim, MOST_AXES);
        return -1;
    }
    if (same_shape(x, out) || contiguous_last(x, "x")) return -1;
    norm.axes = x->ndim - 1, norm.size = x->shape[norm.axes];
    if (arguments[1] != Py_None) {
        const Py_buffer *weight = view_array(views, arguments[1], "weight", 'f', 1, 0);
        if (!weight) return -1;
        if (weight->shape[0] != norm.size) {
            PyErr_Format(PyExc_ValueError, "weight: %zd elements, not x's %ld", weight->shape[0],
                         norm.size);
            return -1;
        }
        norm.weight = weight->buf;
    }
    norm.eps = (float)PyFloat_AsDouble(arguments[2]);
    if (PyErr_Occurred()) return -1;
    norm.x = x->buf, norm.out = out->buf;
    for (int axis = 0; axis < norm.axes; axis++) {
        norm.shape[axis] = x->shape[axis];
        norm.stride[axis] = x->strides[axis];
    }
    long elements = elements_of(out);
    if (!elements) return 0;
    norm.rows = elements / norm.size;
    norm.group = ALONE / 4 / norm.size + 1;
    run(kernels->rows->rms_norm, &norm, (norm.rows + norm.group - 1) / norm.group, elements);
    return 0;
}

/* ---- rope ---- */

static int take_shape(struct rope *rope, const Py_buffer *x) {
    int axes = x->ndim, inner = axes == 5;
    if (axes < 3 || axes > 5) {
        PyErr_Format(PyExc_ValueError, "x: %d axes, not 3 to 5", axes);
        return -1;
    }
    rope->batch = x->shape[0], rope->length = x->shape[axes - 2], rope->size = x->shape[axes - 1];
    rope->outer = axes > 3 ? x->shape[1] : 1, rope->inner = inner ? x->shape[2] : 1;
    rope->stride[0] = x->strides[0], rope->stride[3] = x->strides[axes - 2];
    rope->stride[1] = axes > 3 ? x->strides[1] : 0, rope->stride[2] = inner ? x->strides[2] : 0;
    return 0;
}

static int take_offset(struct rope *rope, Views *views, PyObject *object, int32_t *one) {
    rope->offsets = one, rope->one_offset = 1;
    if (PyLong_Check(object)) {
        long value = PyLong_AsLong(object);
        if (PyErr_Occurred() || value < INT32_MIN || value > INT32_MAX) {
            PyErr_Clear();
            PyErr_SetString(PyExc_ValueError, "offset: over 32 bits");
            return -1;
        }
        *one = (int32_t)value;
        return 0;
    }
    const Py_buffer *offsets = view_array(views, object, "offset", '*', -1, 0);
    if (!offsets) return -1;
    const char *format = offsets->format ? offsets->format : "B";
    format += *format == '<' || *format == '=' || *format == '@';
    long count = elements_of(offsets);
    if (offsets->itemsize != 4 || !*format || !strchr("iIlL", *format) || offsets->ndim > 1 ||
        (count != 1 && count != rope->batch)) {
        PyErr_SetString(PyExc_ValueError, "offset: neither an int nor one int32 a batch");
        return -1;
    }
    rope->offsets = offsets->buf, rope->one_offset = count == 1;
    return 0;
}

/* Radians per position, rounded where MLX rounds them. The last base is kept: one model, one base. */
static void inverse_of(float base, long half, float *inverse) {
    static float kept[256], kept_base;
    static long kept_half;
    if (base == kept_base && half == kept_half) {
        memcpy(inverse, kept, (size_t)half * sizeof *inverse);
        return;
    }
    float step = logf(base) / (float)half;
    for (long i = 0; i < half; i++) inverse[i] = (float)exp((double)((float)-i * step));
    if (half > 256) return;
    memcpy(kept, inverse, (size_t)half * sizeof *inverse);
    kept_base = base, kept_half = half;
}

static int take_angles(struct rope *rope, Views *views, PyObject *base, PyObject *freqs,
                       float *inverse) {
    if ((base == Py_None) == (freqs == Py_None)) {
        PyErr_SetString(PyExc_ValueError, "base, freqs: one of them, and not both");
        return -1;
    }
    if (freqs == Py_None) {
        double number = PyFloat_AsDouble(base);
        if (PyErr_Occurred()) return -1;
        inverse_of((float)number, rope->half, inverse);
        return 0;
    }
    const Py_buffer *given = view_array(views, freqs, "freqs", 'f', 1, 0);
    if (!given) return -1;
    if (given->shape[0] != rope->half) {
        PyErr_Format(PyExc_ValueError, "freqs: %zd elements, not %ld", given->shape[0], rope->half);
        return -1;
    }
    for (long i = 0; i < rope->half; i++) inverse[i] = 1.0f / ((const float *)given->buf)[i];
    return 0;
}

static int turn(Views *views, PyObject *const *arguments, float **memory) {
    struct rope rope = {0};
    int32_t offset;
    const Py_buffer *x = view_strided(views, arguments[0], "x", 'f', -1, 0);
    const Py_buffer *out = x ? view_array(views, arguments[1], "out", 'f', -1, 1) : NULL;
    if (!out || take_shape(&rope, x) || same_shape(x, out) || contiguous_last(x, "x")) return -1;
    long dims = PyLong_AsLong(arguments[2]);
    rope.traditional = PyObject_IsTrue(arguments[3]);
    rope.scale = (float)PyFloat_AsDouble(arguments[5]);
    if (PyErr_Occurred()) return -1;
    if (dims < 2 || dims % 2 || dims > rope.size) {
        PyErr_Format(PyExc_ValueError, "dims: %ld is not even and from 2 to %ld", dims, rope.size);
        return -1;
    }
    if (take_offset(&rope, views, arguments[6], &offset)) return -1;
    rope.half = dims / 2, rope.padded = (rope.half + 15) & -16;
    *memory = calloc((size_t)(rope.padded * (1 + 2 * pool_threads())), sizeof(float));
    if (!*memory) {
        PyErr_NoMemory();
        return -1;
    }
    if (take_angles(&rope, views, arguments[4], arguments[7], *memory)) return -1;
    rope.inverse = *memory, rope.scratch = *memory + rope.padded;
    rope.x = x->buf, rope.out = out->buf;
    if (elements_of(out))
        run(kernels->rows->rope, &rope, rope.batch * rope.length, elements_of(out));
    return 0;
}

/* ---- the forms in which rows travel ---- */

struct coding {
    const struct row_form *form;
    uint8_t *raw;
    float *floats;                    /* values, out or total */
    long rows, size, row_bytes, itemsize, group;
    const uint8_t *index;             /* of the row of total that each row is added to */
    long index_size;
    int decodes, fine;
};

static int take_form(struct coding *coding, PyObject *label, long size) {
    static const char *const labels[ROW_FORMS] = {"f32", "bf16", "f16", "int8"};
    static const long itemsizes[ROW_FORMS] = {4, 2, 2, 1};
    const char *text = PyUnicode_Check(label) ? PyUnicode_AsUTF8AndSize(label, NULL) : NULL;
    for (int n = 0; text && n < ROW_FORMS; n++)
        if (!strcmp(text, labels[n])) {
            coding->form = &kernels->rows->form[n], coding->itemsize = itemsizes[n];
            coding->size = size, coding->row_bytes = size * itemsizes[n];
            if (n == ROW_INT8) coding->row_bytes += (size + ROW_BLOCK - 1) / ROW_BLOCK * 2;
            coding->fine = 1;
            return 0;
        }
    PyErr_Clear();
    PyErr_Format(PyExc_ValueError, "label: %R is not f32, bf16, f16 or int8", label);
    return -1;
}

static int take_raw(struct coding *coding, const Py_buffer *raw, const char *what) {
    coding->raw = raw->buf;
    if (raw->len == coding->rows * coding->row_bytes) return 0;
    PyErr_Format(PyExc_ValueError, "%s: %zd bytes, not %ld rows of %ld", what, raw->len,
                 coding->rows, coding->row_bytes);
    return -1;
}

static int take_floats(struct coding *coding, const Py_buffer *view, PyObject *label,
                       const char *what) {
    if (view->ndim < 1) {
        PyErr_Format(PyExc_ValueError, "%s: no axis", what);
        return -1;
    }
    long size = view->shape[view->ndim - 1];
    if (take_form(coding, label, size)) return -1;
    coding->floats = view->buf, coding->rows = size ? elements_of(view) / size : 0;
    coding->group = size ? ALONE / 4 / size + 1 : 1;
    return 0;
}

static void code_task(void *context, long index, int thread) {
    (void)thread;
    struct coding *coding = context;
    long last = (index + 1) * coding->group, size = coding->size;
    int fine = 1;
    for (long row = index * coding->group; row < last && row < coding->rows; row++) {
        uint8_t *raw = coding->raw + row * coding->row_bytes, *scales = raw + size * coding->itemsize;
        float *floats = coding->floats + row * size;
        fine &= coding->index_size ? coding->form->finite(raw, scales, size)
              : coding->decodes    ? coding->form->decode(raw, scales, size, floats)
                                   : coding->form->encode(floats, size, raw, scales);
    }
    if (!fine) __atomic_store_n(&coding->fine, 0, __ATOMIC_RELAXED);
}

static void code(struct coding *coding) {
    run(code_task, coding, (coding->rows + coding->group - 1) / coding->group,
        coding->rows * coding->size);
}

static long row_of(const struct coding *coding, long row) {
    uint64_t at = 0;
    if (!coding->index) return row;
    memcpy(&at, coding->index + row * coding->index_size, (size_t)coding->index_size);
    return (long)at;
}

/* By columns: two rows may be added to one. */
static void add_task(void *context, long index, int thread) {
    (void)thread;
    struct coding *coding = context;
    long from = index * STRIPE, size = coding->size - from < STRIPE ? coding->size - from : STRIPE;
    for (long row = 0; row < coding->rows; row++) {
        const uint8_t *raw = coding->raw + row * coding->row_bytes;
        coding->form->add(raw + from * coding->itemsize,
                          raw + coding->size * coding->itemsize + from / ROW_BLOCK * 2, size,
                          coding->floats + row_of(coding, row) * coding->size + from);
    }
}

static int encode_rows(Views *views, PyObject *const *arguments) {
    struct coding coding = {0};
    const Py_buffer *values = view_array(views, arguments[0], "values", 'f', -1, 0);
    const Py_buffer *out = values ? view_array(views, arguments[2], "out", '*', -1, 1) : NULL;
    if (!out || take_floats(&coding, values, arguments[1], "values") ||
        take_raw(&coding, out, "out"))
        return -1;
    code(&coding);
    return coding.fine;
}

static int decode_rows(Views *views, PyObject *const *arguments) {
    struct coding coding = {.decodes = 1};
    const Py_buffer *raw = view_array(views, arguments[0], "raw", '*', -1, 0);
    const Py_buffer *out = raw ? view_array(views, arguments[2], "out", 'f', -1, 1) : NULL;
    if (!out || take_floats(&coding, out, arguments[1], "out") || take_raw(&coding, raw, "raw"))
        return -1;
    code(&coding);
    return coding.fine;
}

static int take_index(struct coding *coding, const Py_buffer *index) {
    const char *format = index->format ? index->format : "B";
    format += *format == '<' || *format == '=' || *format == '@';
    long size = index->itemsize, total = coding->rows;
    if (!*format || !strchr("BHIiLlQq", *format) || size > 8) {
        PyErr_SetString(PyExc_ValueError, "rows: not of integers");
        return -1;
    }
    coding->index = index->buf, coding->rows = index->shape[0], coding->index_size = size;
    for (long row = 0; row < coding->rows; row++) {
        /* A negative number is, unsigned, over every count of rows of its size. */
        uint64_t at = (uint64_t)row_of(coding, row);
        if (at >= (uint64_t)total || (size == 4 && at > INT32_MAX)) {
            PyErr_Format(PyExc_ValueError, "rows: one is not below the %ld of total", total);
            return -1;
        }
    }
    return 0;
}

static int add_rows(Views *views, PyObject *const *arguments) {
    struct coding coding = {0};
    const Py_buffer *total = view_array(views, arguments[0], "total", 'f', 2, 1);
    const Py_buffer *raw = total ? view_array(views, arguments[2], "raw", '*', -1, 0) : NULL;
    if (!raw || take_floats(&coding, total, arguments[3], "total")) return -1;
    coding.index_size = 8;
    if (arguments[1] != Py_None) {
        const Py_buffer *index = view_array(views, arguments[1], "rows", '*', 1, 0);
        if (!index || take_index(&coding, index)) return -1;
    }
    if (take_raw(&coding, raw, "raw")) return -1;
    code(&coding);
    if (!coding.fine) return 0;
    run(add_task, &coding, (coding.size + STRIPE - 1) / STRIPE, coding.rows * coding.size);
    return 1;
}

/* ---- */

static PyObject *call(int (*function)(Views *, PyObject *const *), const char *name,
                      PyObject *const *arguments, Py_ssize_t count, Py_ssize_t wanted) {
    if (count != wanted)
        return PyErr_Format(PyExc_TypeError, "%s: %zd arguments, not %zd", name, count, wanted);
    Views views;
    views.count = 0;
    int fine = function(&views, arguments);
    views_release(&views);
    return fine < 0 ? NULL : PyBool_FromLong(fine);
}

static PyObject *rms_norm(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    (void)module;
    PyObject *done = call(norm, "rms_norm", arguments, count, 4);
    Py_XDECREF(done);
    if (!done) return NULL;
    Py_RETURN_NONE;
}

static PyObject *rope(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    (void)module;
    if (count != 8) return PyErr_Format(PyExc_TypeError, "rope: %zd arguments, not 8", count);
    Views views;
    float *memory = NULL;
    views.count = 0;
    int failed = turn(&views, arguments, &memory);
    free(memory);
    views_release(&views);
    if (failed) return NULL;
    Py_RETURN_NONE;
}

static PyObject *encode(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    (void)module;
    return call(encode_rows, "encode", arguments, count, 3);
}

static PyObject *decode(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    (void)module;
    return call(decode_rows, "decode", arguments, count, 3);
}

static PyObject *accumulate(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    (void)module;
    return call(add_rows, "accumulate", arguments, count, 4);
}

#define FAST(function) {#function, (PyCFunction)(void (*)(void))function, METH_FASTCALL, NULL}

PyMethodDef rows_methods[] = {
    FAST(rms_norm), FAST(rope), FAST(encode), FAST(decode), FAST(accumulate),
    {NULL, NULL, 0, NULL},
};
