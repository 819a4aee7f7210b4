/* encode(), decode() and accumulate(): check their arguments and divide. */
#include "forms.h"
#include "calls.h"
#include "table.h"

#include <string.h>

#define STRIPE 512   /* columns of one task of accumulate; whole blocks of int8 rows */

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
            coding->form = &kernels->forms[n], coding->itemsize = itemsizes[n];
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
    run_tasks(code_task, coding, (coding->rows + coding->group - 1) / coding->group,
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
    const char *format = element(index);
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
    run_tasks(add_task, &coding, (coding.size + STRIPE - 1) / STRIPE, coding.rows * coding.size);
    return 1;
}

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

PyMethodDef forms_methods[] = {
    FAST(encode),
    FAST(decode),
    FAST(accumulate),
    {NULL, NULL, 0, NULL},
};
