/* ffn and experts: their arguments, checked. */
#include "experts.h"
#include "ffn.h"
#include "module.h"
#include "ops_matrix.h"
#include "scratch.h"

#include <string.h>

static const struct {
    const char *name;
    int parameters, gated;
} activations[] = {
#define ENTRY(kind, name, parameters, gated) {name, parameters, gated},
    EACH_ACTIVATION(ENTRY)
};
#define ACTIVATIONS (int)(sizeof activations / sizeof activations[0])

/* What was checked must not change while it is used: offsets and slots are copies. */
struct arguments {
    struct ffn ffn;
    Views views;
    uint32_t *copies;
};

static int refuse(const char *sentence) {
    PyErr_SetString(PyExc_ValueError, sentence);
    return -1;
}

static int take_activation(struct ffn *f, PyObject *name, PyObject *parameters) {
    PyObject *bytes = PyUnicode_Check(name) ? PyUnicode_AsUTF8String(name) : NULL;
    const char *text = bytes ? PyBytes_AsString(bytes) : "";
    int kind = 0;
    while (kind < ACTIVATIONS && strcmp(activations[kind].name, text)) kind++;
    Py_XDECREF(bytes);
    PyErr_Clear();
    if (kind == ACTIVATIONS) {
        PyErr_Format(PyExc_ValueError, "activation: %R is unknown", name);
        return -1;
    }
    f->activation = (enum activation)kind;
    if (activations[kind].gated != (f->gate != NULL))
        return refuse("gate: the activation has another number of inputs");
    if (!PyTuple_Check(parameters) || PyTuple_Size(parameters) != activations[kind].parameters)
        return refuse("parameters: not a tuple of as many numbers as the activation has");
    for (int n = 0; n < activations[kind].parameters; n++)
        f->parameters[n] = (float)PyFloat_AsDouble(PyTuple_GetItem(parameters, n));
    if (!PyErr_Occurred()) return 0;
    PyErr_Clear();
    return refuse("parameters: not numbers");
}

static int take_matrices(struct ffn *f, PyObject *const *args) {
    if (args[0] != Py_None && !(f->gate = matrix_of(args[0], "gate"))) return -1;
    if (!(f->up = matrix_of(args[1], "up")) || !(f->down = matrix_of(args[2], "down"))) return -1;
    const struct matrix *up = f->up, *gate = f->gate ? f->gate : up;
    if (gate->rows != up->rows || gate->cols != up->cols)
        return refuse("gate: of another shape than up");
    if (f->down->cols != up->rows) return refuse("down: as many cols as up has rows are needed");
    if (gate->count != up->count || f->down->count != up->count)
        return refuse("gate, up, down: stacks of different counts");
    return 0;
}

/* Offsets 0 = o[0] <= o[1] <= ... <= o[R] = P, slots below the stacks' count. */
static int take_pairs(struct arguments *a, const Py_buffer *offsets, const Py_buffer *slots) {
    struct ffn *f = &a->ffn;
    size_t n = (size_t)offsets->shape[0], pairs = (size_t)slots->shape[0];
    if ((long)n != f->rows + 1) return refuse("offsets: not one more than rows");
    if (pairs > INT32_MAX) return refuse("slots: more than 2^31");
    if (!(a->copies = scratch(4 * (n + pairs)))) {
        PyErr_NoMemory();
        return -1;
    }
    memcpy(a->copies, offsets->buf, 4 * n);
    if (pairs) memcpy(a->copies + n, slots->buf, 4 * pairs);
    f->offsets = a->copies, f->slots = a->copies + n;
    if (f->offsets[0] || f->offsets[n - 1] != pairs)
        return refuse("offsets: they go from 0 to the number of slots");
    for (size_t r = 1; r < n; r++)
        if (f->offsets[r] < f->offsets[r - 1]) return refuse("offsets: they may not decrease");
    for (size_t p = 0; p < pairs; p++)
        if (f->slots[p] >= (unsigned long)f->up->count)
            return refuse("slots: one is not below the stacks' count");
    return 0;
}

static int take_arrays(struct arguments *a, PyObject *const *args) {
    struct ffn *f = &a->ffn;
    Py_buffer *x = view_array(&a->views, args[5], "rows", 'f', 2, 0);
    Py_buffer *offsets = x ? view_array(&a->views, args[6], "offsets", 'I', 1, 0) : NULL;
    Py_buffer *slots = offsets ? view_array(&a->views, args[7], "slots", 'I', 1, 0) : NULL;
    if (!slots) return -1;
    f->rows = (long)x->shape[0], f->x = x->buf;
    if (x->shape[1] != f->up->cols) return refuse("rows: not as wide as up has cols");
    if (take_pairs(a, offsets, slots)) return -1;
    if (args[8] != Py_None) {
        Py_buffer *weights = view_array(&a->views, args[8], "weights", 'f', 1, 0);
        if (!weights) return -1;
        if (weights->shape[0] != slots->shape[0]) return refuse("weights: not as many as slots");
        f->weights = weights->buf;
    }
    Py_buffer *out = view_array(&a->views, args[9], "out", 'f', 2, 1);
    if (!out) return -1;
    if (out->shape[0] != (f->weights ? f->rows : slots->shape[0]) ||
        out->shape[1] != f->down->rows)
        return refuse("out: not of shape (rows with weights, else slots; down's rows)");
    f->out = out->buf;
    return 0;
}

static int take_arguments(struct arguments *a, PyObject *const *args, Py_ssize_t n) {
    if (n != 11) {
        PyErr_SetString(PyExc_TypeError, "ffn(gate, up, down, activation, parameters, rows, "
                                         "offsets, slots, weights, out, precision)");
        return -1;
    }
    if (take_matrices(&a->ffn, args) || take_activation(&a->ffn, args[3], args[4])) return -1;
    if ((a->ffn.precision = take_precision(args[10])) < 0) return -1;
    return take_arrays(a, args);
}

static PyObject *ffn(PyObject *module, PyObject *const *args, Py_ssize_t n) {
    (void)module;
    struct arguments a = {0};
    int failed = take_arguments(&a, args, n);
    if (!failed) {
        Py_BEGIN_ALLOW_THREADS
        failed = ffn_run(&a.ffn);
        Py_END_ALLOW_THREADS
        if (failed) PyErr_NoMemory();
    }
    views_release(&a.views);
    free(a.copies);
    if (failed) return NULL;
    Py_RETURN_NONE;
}

/* ---- rows that come one by one, for who is no Python ---- */

struct experts {
    struct ffn ffn;
    PyObject *matrices[3];    /* kept alive */
    uint32_t *slots;          /* of each expert in the stacks; NULL: all give zeros */
    long count, hidden;
};

static const char *const NAME = "expert_network.kernels.experts";

static void forget(struct experts *experts) {
    for (int n = 0; n < 3; n++) Py_XDECREF(experts->matrices[n]);
    PyMem_Free(experts->slots);
    PyMem_Free(experts);
}

static void forget_capsule(PyObject *capsule) { forget(PyCapsule_GetPointer(capsule, NAME)); }

static int take_experts(struct experts *experts, PyObject *const *args) {
    Views views;
    views.count = 0;
    if (take_matrices(&experts->ffn, args) || take_activation(&experts->ffn, args[3], args[4]))
        return -1;
    for (int n = 0; n < 3; n++) Py_INCREF(experts->matrices[n] = args[n]);
    const Py_buffer *slots = view_array(&views, args[5], "slots", 'I', 1, 0);
    if (slots && (experts->slots = PyMem_Malloc((size_t)slots->len + 4))) {
        memcpy(experts->slots, slots->buf, (size_t)slots->len);
        experts->count = slots->shape[0], experts->hidden = experts->ffn.up->cols;
    } else if (slots) {
        PyErr_NoMemory();
    }
    views_release(&views);
    return experts->slots ? 0 : -1;
}

static PyObject *experts(PyObject *module, PyObject *const *args, Py_ssize_t n) {
    (void)module;
    if (n != 6) return PyErr_Format(PyExc_TypeError, "experts: %zd arguments, not 6", n);
    struct experts *made = PyMem_Calloc(1, sizeof *made);
    if (!made) return PyErr_NoMemory();
    PyObject *capsule = take_experts(made, args) ? NULL : PyCapsule_New(made, NAME, forget_capsule);
    if (!capsule) forget(made);
    return capsule;
}

static PyObject *no_experts(PyObject *module, PyObject *hidden) {
    (void)module;
    struct experts *made = PyMem_Calloc(1, sizeof *made);
    if (!made) return PyErr_NoMemory();
    made->hidden = PyLong_AsLong(hidden);
    PyObject *capsule = PyErr_Occurred() ? NULL : PyCapsule_New(made, NAME, forget_capsule);
    if (!capsule) forget(made);
    return capsule;
}

static PyObject *swap_experts(PyObject *module, PyObject *const *args, Py_ssize_t n) {
    (void)module;
    if (n != 2) return PyErr_Format(PyExc_TypeError, "swap_experts: %zd arguments, not 2", n);
    struct experts *one = PyCapsule_GetPointer(args[0], NAME);
    struct experts *other = one ? PyCapsule_GetPointer(args[1], NAME) : NULL;
    if (!other) return NULL;
    if (one->hidden != other->hidden) {
        PyErr_SetString(PyExc_ValueError, "swap_experts: of rows of another length");
        return NULL;
    }
    struct experts was = *one;
    *one = *other, *other = was;
    Py_RETURN_NONE;
}

const struct experts *experts_of(PyObject *capsule, long hidden) {
    const struct experts *experts = PyCapsule_GetPointer(capsule, NAME);
    if (!experts) return NULL;
    if (experts->hidden == hidden && (!experts->slots || experts->ffn.down->rows == hidden))
        return experts;
    PyErr_Format(PyExc_ValueError, "experts: not of rows of %ld values", hidden);
    return NULL;
}

int experts_sum(const struct experts *experts, const float *row, long pairs, const uint8_t *ids,
                const uint8_t *weights, int precise, float *out) {
    uint32_t offsets[2] = {0, (uint32_t)pairs}, slots[MOST_PAIRS];
    float scores[MOST_PAIRS];
    if (!experts->slots) {
        memset(out, 0, 4 * (size_t)experts->hidden);
        return 0;
    }
    for (long pair = 0; pair < pairs; pair++) {
        uint16_t id;
        memcpy(&id, ids + 2 * pair, 2);
        slots[pair] = id < experts->count ? experts->slots[id] : UINT32_MAX;
        if (slots[pair] >= (unsigned long)experts->ffn.up->count) return -1;
    }
    memcpy(scores, weights, 4 * (size_t)pairs);
    struct ffn ffn = experts->ffn;
    ffn.precision = !precise, ffn.rows = 1, ffn.x = row;
    ffn.offsets = offsets, ffn.slots = slots, ffn.weights = scores, ffn.out = out;
    return ffn_run(&ffn);
}

PyMethodDef ffn_methods[] = {
    {"ffn", (PyCFunction)(void (*)(void))ffn, METH_FASTCALL, NULL},
    {"experts", (PyCFunction)(void (*)(void))experts, METH_FASTCALL, NULL},
    {"no_experts", no_experts, METH_O, NULL},
    {"swap_experts", (PyCFunction)(void (*)(void))swap_experts, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};
