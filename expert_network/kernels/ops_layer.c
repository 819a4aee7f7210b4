/* trunk_layer() and step(): a trunk layer checked once, and one token's way through it. */
#include "layer.h"
#include "calls.h"
#include "norms.h"
#include "ops_matrix.h"
#include "scratch.h"

#include <string.h>

static const char *const NAME = "expert_network.kernels.trunk_layer";

#define MOST_WIDTH 65536

struct known {
    struct layer layer;
    PyObject *arguments;        /* keeps the matrices alive */
    Views views;                /* of the norms' weights */
};

static int refuse(const char *message) {
    PyErr_SetString(PyExc_ValueError, message);
    return -1;
}

/* (matrix, precision) */
static int take_product(PyObject *pair, const char *what, struct product *product) {
    PyObject *matrix;
    int precision;
    if (!PyTuple_Check(pair) || !PyArg_ParseTuple(pair, "Oi", &matrix, &precision)) {
        PyErr_Clear();
        PyErr_Format(PyExc_ValueError, "%s: not a matrix and its precision", what);
        return -1;
    }
    if (!(product->matrix = matrix_of(matrix, what))) return -1;
    product->precision = precision;
    if (product->matrix->count == 1 && (precision == 0 || precision == 1)) return 0;
    PyErr_Format(PyExc_ValueError, "%s: a stack of matrices, or precision neither 0 nor 1", what);
    return -1;
}

/* (weight or None, eps) */
static int take_norm(struct known *known, PyObject *pair, const char *what, long size,
                     struct norm *norm) {
    PyObject *weight;
    if (!PyTuple_Check(pair) || !PyArg_ParseTuple(pair, "Of", &weight, &norm->eps)) {
        PyErr_Clear();
        PyErr_Format(PyExc_ValueError, "%s: not a weight and eps", what);
        return -1;
    }
    if (weight == Py_None) return 0;
    const Py_buffer *view = view_array(&known->views, weight, what, 'f', 1, 0);
    if (!view) return -1;
    norm->weight = view->buf;
    if (view->shape[0] == size) return 0;
    PyErr_Format(PyExc_ValueError, "%s: %zd elements, not %ld", what, view->shape[0], size);
    return -1;
}

/* Shapes that go together. */
static int check(const struct layer *l) {
    long hidden = l->query.matrix->cols;
    if (l->heads < 1 || l->key_heads < 1 || l->heads % l->key_heads ||
        l->query.matrix->rows % l->heads || l->value.matrix->rows % l->key_heads)
        return refuse("heads: they do not divide the rows of query, key and value");
    if (l->key.matrix->cols != hidden || l->value.matrix->cols != hidden ||
        l->key.matrix->rows != l->key_heads * l->depth ||
        l->output.matrix->cols != l->heads * l->width || l->output.matrix->rows != hidden)
        return refuse("query, key, value, output: their shapes do not go together");
    if (l->depth > MOST_WIDTH || l->width > MOST_WIDTH)
        return refuse("query, value: heads of more than 65536 elements");
    if (l->half < 1 || 2 * l->half > l->depth) return refuse("dims: not from 2 to a head's size");
    return 0;
}

/* (query's norm, key's norm): of whole rows, or of each head. */
static int take_head_norms(struct known *known, PyObject *norms) {
    struct layer *l = &known->layer;
    PyObject *query, *key;
    if (norms == Py_None) return 0;
    if (!PyTuple_Check(norms) || !PyArg_ParseTuple(norms, "OO", &query, &key)) {
        PyErr_Clear();
        return refuse("norms: neither None nor those of query and key");
    }
    l->normed = 1;
    long heads = l->whole ? l->heads : 1, key_heads = l->whole ? l->key_heads : 1;
    return take_norm(known, query, "norms: query", heads * l->depth, &l->query_norm) ||
                   take_norm(known, key, "norms: key", key_heads * l->depth, &l->key_norm)
               ? -1 : 0;
}

static int take_choice(struct choice *choice, PyObject *gate, long hidden) {
    if (gate == Py_None) return 0;
    if (take_product(gate, "gate", &choice->gate)) return -1;
    if (choice->gate.matrix->cols != hidden) return refuse("gate: not as wide as query");
    if (choice->each >= 1 && choice->each <= choice->gate.matrix->rows) return 0;
    return refuse("each: not from 1 to the number of experts");
}

static int take_layer(struct known *known, PyObject *arguments) {
    struct layer *l = &known->layer;
    PyObject *before, *after, *query, *key, *value, *output, *norms, *gate;
    long dims;
    float base;
    if (!PyArg_ParseTuple(arguments, "OOOOOOOpllflpffOlp:trunk_layer", &before, &after, &query,
                          &key, &value, &output, &norms, &l->whole, &l->heads, &l->key_heads,
                          &l->scale, &dims, &l->traditional, &base, &l->rope_scale, &gate,
                          &l->choice.each, &l->choice.ascending))
        return -1;
    if (take_product(query, "query", &l->query) || take_product(key, "key", &l->key) ||
        take_product(value, "value", &l->value) || take_product(output, "output", &l->output))
        return -1;
    if (l->heads > 0) l->depth = l->query.matrix->rows / l->heads;
    if (l->key_heads > 0) l->width = l->value.matrix->rows / l->key_heads;
    l->half = dims % 2 ? 0 : dims / 2;
    long hidden = l->query.matrix->cols;
    if (check(l) || take_head_norms(known, norms) || take_choice(&l->choice, gate, hidden) ||
        take_norm(known, before, "before", hidden, &l->before) ||
        take_norm(known, after, "after", hidden, &l->after))
        return -1;
    if (!(l->inverse = scratch(sizeof(float) * (size_t)ROPE_PADDED(l->half)))) {
        PyErr_NoMemory();
        return -1;
    }
    for (long i = l->half; i < ROPE_PADDED(l->half); i++) l->inverse[i] = 0;
    rope_inverse(base, l->half, l->inverse);
    return 0;
}

static void forget(struct known *known) {
    views_release(&known->views);
    free(known->layer.inverse);
    Py_XDECREF(known->arguments);
    PyMem_Free(known);
}

static void forget_capsule(PyObject *capsule) { forget(PyCapsule_GetPointer(capsule, NAME)); }

static PyObject *trunk_layer(PyObject *module, PyObject *arguments) {
    (void)module;
    struct known *known = PyMem_Calloc(1, sizeof *known);
    if (!known) return PyErr_NoMemory();
    known->arguments = Py_NewRef(arguments);
    PyObject *capsule = take_layer(known, arguments) ? NULL : PyCapsule_New(known, NAME, forget_capsule);
    if (!capsule) forget(known);
    return capsule;
}

/* ---- a step ---- */

static const void *take_row(Views *views, PyObject *object, const char *what, char kind, long size,
                            int writable) {
    const Py_buffer *view = view_array(views, object, what, kind, -1, writable);
    if (!view) return NULL;
    if (view->len == size * view->itemsize) return view->buf;
    PyErr_Format(PyExc_ValueError, "%s: %zd bytes, not %ld elements", what, view->len, size);
    return NULL;
}

/* (1, heads, room, size), float32 or float16. */
static void *take_cache(Views *views, PyObject *object, const char *what, long heads, long size,
                        struct step *step) {
    const Py_buffer *view = view_array(views, object, what, '*', 4, 1);
    if (!view) return NULL;
    const char *format = element(view);
    int half = !strcmp(format, "e") && view->itemsize == 2;
    int single = !strcmp(format, "f") && view->itemsize == 4;
    if ((half || single) && view->shape[0] == 1 && view->shape[1] == heads &&
        view->shape[2] > step->offset && view->shape[3] == size &&
        (!step->keys || (half == step->half && view->shape[2] == step->room))) {
        step->half = half, step->room = view->shape[2];
        return view->buf;
    }
    PyErr_Format(PyExc_ValueError, "%s: not a float32 or float16 cache (1, %ld, more than %ld, %ld)",
                 what, heads, step->offset, size);
    return NULL;
}

static int take_step(Views *views, PyObject *const *arguments, const struct layer *l,
                     struct step *step) {
    long hidden = l->query.matrix->cols;
    step->offset = PyLong_AsLong(arguments[4]);
    if (PyErr_Occurred() || step->offset < 0 || step->offset >= INT32_MAX) {
        PyErr_Clear();
        return refuse("offset: not from 0 to 2^31");
    }
    if (!(step->row = take_row(views, arguments[1], "row", 'f', hidden, 0)) ||
        !(step->keys = take_cache(views, arguments[2], "keys", l->key_heads, l->depth, step)) ||
        !(step->values = take_cache(views, arguments[3], "values", l->key_heads, l->width, step)) ||
        !(step->residual = (float *)take_row(views, arguments[5], "residual", 'f', hidden, 1)) ||
        !(step->normed = (float *)take_row(views, arguments[6], "normed", 'f', hidden, 1)))
        return -1;
    if (!l->choice.gate.matrix) return 0;
    if (!(step->experts = (uint32_t *)take_row(views, arguments[7], "experts", 'I', l->choice.each, 1)) ||
        !(step->shares = (float *)take_row(views, arguments[8], "shares", 'f', l->choice.each, 1)))
        return -1;
    return 0;
}

static PyObject *step(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    (void)module;
    if (count != 9) return PyErr_Format(PyExc_TypeError, "step: %zd arguments, not 9", count);
    const struct known *known = PyCapsule_GetPointer(arguments[0], NAME);
    if (!known) return NULL;
    Views views;
    views.count = 0;
    struct step step = {0};
    int failed = take_step(&views, arguments, &known->layer, &step);
    if (!failed) {
        Py_BEGIN_ALLOW_THREADS
        failed = layer_run(&known->layer, &step);
        Py_END_ALLOW_THREADS
        if (failed < 0) PyErr_NoMemory();
    }
    views_release(&views);
    return failed < 0 ? NULL : PyBool_FromLong(!failed);
}

PyMethodDef layer_methods[] = {
    {"trunk_layer", trunk_layer, METH_VARARGS, NULL},
    FAST(step),
    {NULL, NULL, 0, NULL},
};
