/* The Python type Matrix: weights checked once, so that products need no checks. */
#include "module.h"

#include "ops_matrix.h"

#include <string.h>

#define MOST_COLS (1L << 24)

typedef struct {
    PyObject_HEAD
    struct matrix matrix;
    Views views;
} MatrixObject;

static PyTypeObject *matrix_type;

const struct matrix *matrix_of(PyObject *object, const char *what) {
    if (matrix_type && PyObject_TypeCheck(object, matrix_type))
        return &((MatrixObject *)object)->matrix;
    PyErr_Format(PyExc_ValueError, "%s: not a Matrix", what);
    return NULL;
}

static int refuse(const char *what, long long is, long long should) {
    PyErr_Format(PyExc_ValueError, "%s: %lld, not %lld", what, is, should);
    return -1;
}

static int set_element(struct matrix *m, const char *dtype) {
    static const char *const names[] = {"float32", "bfloat16", "float16"};
    for (int n = 0; n < 3; n++)
        if (!strcmp(dtype, names[n])) {
            m->element = (enum element)n;
            return 0;
        }
    PyErr_Format(PyExc_ValueError, "dtype: %s is not float32, bfloat16 or float16", dtype);
    return -1;
}

static int set_affine(struct matrix *m, int bits, long group) {
    static const int formats[] = {-1, -1, BITS2, BITS3, BITS4, BITS5, BITS6, -1, BITS8};
    int format = bits >= 0 && bits <= 8 ? formats[bits] : -1;
    if (format < 0) {
        PyErr_Format(PyExc_ValueError, "bits: %d is not 2, 3, 4, 5, 6 or 8", bits);
        return -1;
    }
    if (group != 32 && group != 64 && group != 128) {
        PyErr_Format(PyExc_ValueError, "group_size: %ld is not 32, 64 or 128", group);
        return -1;
    }
    m->format = (enum format)format;
    return 0;
}

/* The format and what follows from it: bytes of a row. */
static int set_format(struct matrix *m, const char *mode, const char *dtype, int bits, long group) {
    if (m->cols < 1 || m->cols > MOST_COLS) {
        PyErr_Format(PyExc_ValueError, "cols: %ld is not from 1 to %ld", m->cols, MOST_COLS);
        return -1;
    }
    if (set_element(m, dtype)) return -1;
    if (!strcmp(mode, "plain")) {
        m->format = PLAIN;
        m->row_bytes = (size_t)m->cols * (m->element == F32 ? 4 : 2);
        return 0;
    }
    if (!strcmp(mode, "affine")) {
        if (set_affine(m, bits, group)) return -1;
    } else if (!strcmp(mode, "mxfp4")) {
        if (bits && bits != 4) return refuse("bits of mxfp4", bits, 4);
        if (group && group != 32) return refuse("group_size of mxfp4", group, 32);
        bits = 4, group = 32;
        m->format = FP4, m->element = E8M0;
    } else {
        PyErr_Format(PyExc_ValueError, "mode: %s is not plain, affine or mxfp4", mode);
        return -1;
    }
    if (m->cols % group) {
        PyErr_Format(PyExc_ValueError, "cols: %ld is no multiple of group_size %ld", m->cols, group);
        return -1;
    }
    m->group = group, m->group_shift = __builtin_ctzl((unsigned long)group);
    m->row_bytes = (size_t)(m->cols * bits / 8);
    m->scale_bytes = (size_t)(m->cols / group) * (m->element == F32 ? 4 : m->element == E8M0 ? 1 : 2);
    return 0;
}

/* Bytes of a row, and the same stack of rows as the weight, once that is known. */
static int check_stack(struct matrix *m, const Py_buffer *view, const char *what, size_t bytes) {
    int first = view->ndim == 2;
    long count = first ? 1 : (long)view->shape[0], rows = (long)view->shape[view->ndim - 2];
    long long row = (long long)view->shape[view->ndim - 1] * view->itemsize;
    if (row != (long long)bytes) {
        PyErr_Format(PyExc_ValueError, "%s: rows of %lld bytes, not %lld", what, row,
                     (long long)bytes);
        return -1;
    }
    if (!m->count) m->count = count, m->rows = rows;
    if (count == m->count && rows == m->rows && count > 0 && rows > 0) return 0;
    PyErr_Format(PyExc_ValueError, "%s: shape (%ld, %ld, ...), not (%ld, %ld, ...)", what, count,
                 rows, m->count, m->rows);
    return -1;
}

static const void *take_stack(MatrixObject *self, PyObject *object, const char *what,
                              size_t bytes) {
    Py_buffer *view = view_array(&self->views, object, what, '*', -1, 0);
    if (!view) return NULL;
    if (view->ndim != 2 && view->ndim != 3) {
        PyErr_Format(PyExc_ValueError, "%s: %d dimensions, not 2 or 3", what, view->ndim);
        return NULL;
    }
    return check_stack(&self->matrix, view, what, bytes) ? NULL : view->buf;
}

static int take_bias(MatrixObject *self, PyObject *object) {
    struct matrix *m = &self->matrix;
    Py_buffer *view = view_array(&self->views, object, "bias", 'f', -1, 0);
    if (!view) return -1;
    if (view->ndim < 1 || view->ndim > 2) return refuse("bias: dimensions", view->ndim, 2);
    if (view->shape[view->ndim - 1] != m->rows || view->len != (Py_ssize_t)4 * m->count * m->rows)
        return refuse("bias: bytes", view->len, 4LL * m->count * m->rows);
    m->bias = view->buf;
    return 0;
}

static int take_weights(MatrixObject *self, PyObject *weight, PyObject *scales, PyObject *biases,
                        PyObject *bias) {
    struct matrix *m = &self->matrix;
    if (!(m->weight = take_stack(self, weight, "weight", m->row_bytes))) return -1;
    int wants_scales = m->format != PLAIN, wants_biases = wants_scales && m->format != FP4;
    if ((scales != Py_None) != wants_scales) {
        PyErr_SetString(PyExc_ValueError, "scales: quantized weights have them, plain ones do not");
        return -1;
    }
    if ((biases != Py_None) != wants_biases) {
        PyErr_SetString(PyExc_ValueError, "biases: affine weights have them, others do not");
        return -1;
    }
    if (wants_scales && !(m->scales = take_stack(self, scales, "scales", m->scale_bytes)))
        return -1;
    if (wants_biases && !(m->biases = take_stack(self, biases, "biases", m->scale_bytes)))
        return -1;
    return bias == Py_None ? 0 : take_bias(self, bias);
}

static PyObject *matrix_new(PyTypeObject *type, PyObject *args, PyObject *named) {
    static char *names[] = {"weight", "scales", "biases", "mode", "dtype", "bits",
                            "group_size", "cols", "bias", NULL};
    PyObject *weight, *scales = Py_None, *biases = Py_None, *bias = Py_None;
    const char *mode, *dtype;
    int bits = 0;
    long group = 0, cols;
    allocfunc alloc = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    MatrixObject *self = (MatrixObject *)alloc(type, 0);
    if (!self) return NULL;
    mode = "", dtype = "float32";
    cols = 0;
    if (!PyArg_ParseTupleAndKeywords(args, named, "O|OO$ssillO", names, &weight, &scales, &biases,
                                     &mode, &dtype, &bits, &group, &cols, &bias)) {
        Py_DECREF(self);
        return NULL;
    }
    self->matrix.cols = cols;
    if (set_format(&self->matrix, mode, dtype, bits, group) ||
        take_weights(self, weight, scales, biases, bias)) {
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

static void matrix_dealloc(PyObject *object) {
    PyTypeObject *type = Py_TYPE(object);
    views_release(&((MatrixObject *)object)->views);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(object);
    Py_DECREF(type);
}

#define NUMBER(member)                                                        \
    static PyObject *get_##member(PyObject *object, void *unused) {           \
        (void)unused;                                                         \
        return PyLong_FromLong(((MatrixObject *)object)->matrix.member);      \
    }
NUMBER(count)
NUMBER(rows)
NUMBER(cols)

static PyGetSetDef numbers[] = {
    {"count", get_count, NULL, NULL, NULL},
    {"rows", get_rows, NULL, NULL, NULL},
    {"cols", get_cols, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot type_slots[] = {
    {Py_tp_new, matrix_new},
    {Py_tp_dealloc, matrix_dealloc},
    {Py_tp_getset, numbers},
    {0, NULL},
};

static PyType_Spec spec = {
    .name = "expert_network.kernels._native.Matrix",
    .basicsize = sizeof(MatrixObject),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = type_slots,
};

int add_matrix_type(PyObject *module) {
    if (!matrix_type && !(matrix_type = (PyTypeObject *)PyType_FromSpec(&spec))) return -1;
    return PyModule_AddObjectRef(module, "Matrix", (PyObject *)matrix_type);
}
