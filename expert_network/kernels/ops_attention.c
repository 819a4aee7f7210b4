/* attention(): its arguments, checked. */
#include "attention.h"
#include "calls.h"

#include <string.h>

#define MOST_DEPTH 65536

static int stored_kind(const Py_buffer *view, const char *what) {
    const char *format = element(view);
    if (!strcmp(format, "f") && view->itemsize == 4) return 0;
    if (!strcmp(format, "e") && view->itemsize == 2) return 1;
    if ((!strcmp(format, "H") || !strcmp(format, "bfloat16")) && view->itemsize == 2) return 2;
    PyErr_Format(PyExc_ValueError, "%s: not of float32, float16 or bfloat16 (uint16)", what);
    return -1;
}

/* The strides of the axes before the last, which has to be contiguous. */
static int strides_of(const Py_buffer *view, const char *what, ptrdiff_t *strides) {
    for (int axis = 0; axis < 3; axis++) strides[axis] = view->strides[axis];
    return contiguous_last(view, what);
}

static int same(const char *what, int axis, long is, long wanted) {
    if (is == wanted) return 0;
    PyErr_Format(PyExc_ValueError, "%s: axis %d has %ld elements, not %ld", what, axis, is, wanted);
    return -1;
}

static int take_shapes(struct attention *a, const Py_buffer *q, const Py_buffer *k,
                       const Py_buffer *v, const Py_buffer *out) {
    a->batch = q->shape[0], a->heads = q->shape[1], a->length = q->shape[2];
    a->depth = q->shape[3], a->key_heads = k->shape[1], a->keys = k->shape[2];
    a->width = v->shape[3];
    if (a->key_heads < 1 || a->heads % a->key_heads) {
        PyErr_Format(PyExc_ValueError, "k: %ld heads do not divide the %ld of q", a->key_heads,
                     a->heads);
        return -1;
    }
    if (same("k", 0, k->shape[0], a->batch) || same("k", 3, k->shape[3], a->depth) ||
        same("v", 0, v->shape[0], a->batch) || same("v", 1, v->shape[1], a->key_heads) ||
        same("v", 2, v->shape[2], a->keys) || same("out", 0, out->shape[0], a->batch) ||
        same("out", 1, out->shape[1], a->heads) || same("out", 2, out->shape[2], a->length) ||
        same("out", 3, out->shape[3], a->width))
        return -1;
    if (a->keys < 1 || a->depth < 1 || a->depth > MOST_DEPTH || a->width > MOST_DEPTH) {
        PyErr_Format(PyExc_ValueError, "k: %ld keys of %ld elements, values of %ld: none, or over %d",
                     a->keys, a->depth, a->width, MOST_DEPTH);
        return -1;
    }
    a->q = q->buf, a->k = k->buf, a->v = v->buf, a->out = out->buf;
    a->k_stored = stored_kind(k, "k"), a->v_stored = stored_kind(v, "v");
    if (a->k_stored < 0 || a->v_stored < 0) return -1;
    return strides_of(q, "q", a->q_stride) || strides_of(k, "k", a->k_stride) ||
           strides_of(v, "v", a->v_stride);
}

static int take_mask(struct attention *a, Views *views, PyObject *object) {
    if (object == Py_None) return 0;
    const Py_buffer *mask = view_strided(views, object, "mask", '*', -1, 0);
    if (!mask) return -1;
    const char *format = element(mask);
    if (!strcmp(format, "?") && mask->itemsize == 1) a->mask_kind = MASK_BOOL;
    if (!strcmp(format, "f") && mask->itemsize == 4) a->mask_kind = MASK_ADDED;
    if (a->mask_kind == MASK_NONE || mask->ndim > 4) {
        PyErr_SetString(PyExc_ValueError, "mask: not bool or float32 of up to 4 dimensions");
        return -1;
    }
    const long wanted[4] = {a->batch, a->heads, a->length, a->keys};
    for (int axis = 3, own = mask->ndim - 1; own >= 0; axis--, own--) {
        if (mask->shape[own] == 1) continue;   /* broadcast: a stride of 0 */
        if (same("mask", own, mask->shape[own], wanted[axis])) return -1;
        a->mask_stride[axis] = mask->strides[own];
    }
    a->mask = mask->buf;
    return 0;
}

static int take_sinks(struct attention *a, Views *views, PyObject *object) {
    if (object == Py_None) return 0;
    const Py_buffer *sinks = view_array(views, object, "sinks", 'f', 1, 0);
    if (!sinks || same("sinks", 0, sinks->shape[0], a->heads)) return -1;
    a->sinks = sinks->buf;
    return 0;
}

static int attend(Views *views, PyObject *const *arguments) {
    struct attention a = {0};
    const Py_buffer *q = view_strided(views, arguments[0], "q", 'f', 4, 0);
    const Py_buffer *k = q ? view_strided(views, arguments[1], "k", '*', 4, 0) : NULL;
    const Py_buffer *v = k ? view_strided(views, arguments[2], "v", '*', 4, 0) : NULL;
    const Py_buffer *out = v ? view_array(views, arguments[3], "out", 'f', 4, 1) : NULL;
    if (!out || take_shapes(&a, q, k, v, out)) return -1;
    double scale = PyFloat_AsDouble(arguments[4]);
    a.scale = (float)scale, a.causal = PyObject_IsTrue(arguments[5]);
    if (PyErr_Occurred()) return -1;
    if (take_mask(&a, views, arguments[6]) || take_sinks(&a, views, arguments[7])) return -1;
    int failed;
    Py_BEGIN_ALLOW_THREADS
    failed = attention_run(&a);
    Py_END_ALLOW_THREADS
    if (failed) PyErr_NoMemory();
    return failed;
}

static PyObject *attention(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    (void)module;
    if (count != 8) return PyErr_Format(PyExc_TypeError, "attention: %zd arguments, not 8", count);
    Views views = {.count = 0};
    int failed = attend(&views, arguments);
    views_release(&views);
    if (failed) return NULL;
    Py_RETURN_NONE;
}

PyMethodDef attention_methods[] = {
    FAST(attention),
    {NULL, NULL, 0, NULL},
};
