/* rms_norm(), rope() and softmax(): check their arguments and divide. */
#include "norms.h"
#include "calls.h"
#include "table.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static int same_shape(const Py_buffer *x, const Py_buffer *out) {
    if (x->ndim == out->ndim && !memcmp(x->shape, out->shape, sizeof *x->shape * (size_t)x->ndim))
        return 0;
    PyErr_SetString(PyExc_ValueError, "out: not of x's shape");
    return -1;
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
    run_tasks(kernels->rms_norm, &norm, (norm.rows + norm.group - 1) / norm.group, elements);
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
    const char *format = element(offsets);
    long count = elements_of(offsets);
    if (offsets->itemsize != 4 || !*format || !strchr("iIlL", *format) || offsets->ndim > 1 ||
        (count != 1 && count != rope->batch)) {
        PyErr_SetString(PyExc_ValueError, "offset: neither an int nor one int32 a batch");
        return -1;
    }
    rope->offsets = offsets->buf, rope->one_offset = count == 1;
    return 0;
}

/* The last base is kept: one model, one base. */
void rope_inverse(float base, long half, float *inverse) {
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
        rope_inverse((float)number, rope->half, inverse);
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
    rope.half = dims / 2, rope.padded = ROPE_PADDED(rope.half);
    *memory = calloc((size_t)(rope.padded * (1 + 2 * pool_threads())), sizeof(float));
    if (!*memory) {
        PyErr_NoMemory();
        return -1;
    }
    if (take_angles(&rope, views, arguments[4], arguments[7], *memory)) return -1;
    rope.inverse = *memory, rope.scratch = *memory + rope.padded;
    rope.x = x->buf, rope.out = out->buf;
    if (elements_of(out))
        run_tasks(kernels->rope, &rope, rope.batch * rope.length, elements_of(out));
    return 0;
}

/* ---- */

static PyObject *rms_norm(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    (void)module;
    if (count != 4) return PyErr_Format(PyExc_TypeError, "rms_norm: %zd arguments, not 4", count);
    Views views;
    views.count = 0;
    int failed = norm(&views, arguments);
    views_release(&views);
    if (failed) return NULL;
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

static int share(Views *views, PyObject *const *arguments) {
    const Py_buffer *x = view_array(views, arguments[0], "x", 'f', -1, 0);
    const Py_buffer *out = x ? view_array(views, arguments[1], "out", 'f', -1, 1) : NULL;
    if (!out || same_shape(x, out)) return -1;
    long size = x->ndim ? x->shape[x->ndim - 1] : 0, count = size ? elements_of(x) / size : 0;
    for (long row = 0; row < count; row++)
        kernels->softmax((const float *)x->buf + row * size, size, (float *)out->buf + row * size);
    return 0;
}

static PyObject *softmax(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    (void)module;
    if (count != 2) return PyErr_Format(PyExc_TypeError, "softmax: %zd arguments, not 2", count);
    Views views;
    views.count = 0;
    int failed = share(&views, arguments);
    views_release(&views);
    if (failed) return NULL;
    Py_RETURN_NONE;
}

PyMethodDef norms_methods[] = {
    FAST(rms_norm),
    FAST(rope),
    FAST(softmax),
    {NULL, NULL, 0, NULL},
};
