/* The module expert_network.kernels._native: its parts, put together. */
#include "module.h"

#include "choose.h"
#include "ops_matrix.h"
#include "pool.h"
#include "turns.h"

static PyObject *isa(PyObject *module, PyObject *unused) {
    (void)module, (void)unused;
    return PyUnicode_FromString(kernels->name);
}

static PyObject *isas(PyObject *module, PyObject *unused) {
    (void)module, (void)unused;
    PyObject *names = PyList_New(0);
    const char *name;
    for (int n = 0; names && (name = choice(n)); n++) {
        PyObject *text = PyUnicode_FromString(name);
        if (!text || PyList_Append(names, text)) Py_CLEAR(names);
        Py_XDECREF(text);
    }
    return names;
}

static PyObject *use_isa(PyObject *module, PyObject *name) {
    (void)module;
    PyObject *ascii = PyUnicode_Check(name) ? PyUnicode_AsASCIIString(name) : NULL;
    const char *text = ascii ? PyBytes_AsString(ascii) : NULL;
    int known = text && choose(text);
    Py_XDECREF(ascii);
    PyErr_Clear();
    if (known) Py_RETURN_NONE;
    return PyErr_Format(PyExc_ValueError, "isa: %R does not run here", name);
}

static PyObject *threads(PyObject *module, PyObject *unused) {
    (void)module, (void)unused;
    return PyLong_FromLong(pool_threads());
}

static PyObject *set_threads(PyObject *module, PyObject *number) {
    (void)module;
    long n = PyLong_AsLong(number);
    if (PyErr_Occurred()) return NULL;
    if (n < 1 || n > POOL_MOST)
        return PyErr_Format(PyExc_ValueError, "threads: %ld is not from 1 to %d", n, POOL_MOST);
    Py_BEGIN_ALLOW_THREADS
    pool_set_threads((int)n);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

PyMethodDef choose_methods[] = {
    {"isa", isa, METH_NOARGS, NULL},
    {"isas", isas, METH_NOARGS, NULL},
    {"use_isa", use_isa, METH_O, NULL},
    {"threads", threads, METH_NOARGS, NULL},
    {"set_threads", set_threads, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

/* One table per source that has functions for Python. */
static PyMethodDef *const tables[] = {
    choose_methods,
    linear_methods,
    ffn_methods,
    bandwidth_methods,
    attention_methods,
    norms_methods,
    layer_methods,
    forms_methods,
    checksum_methods,
    fanout_methods,
    single_methods,
};

static int fill(PyObject *module) {
    choose_best();
    for (size_t n = 0; n < sizeof tables / sizeof tables[0]; n++)
        if (PyModule_AddFunctions(module, tables[n])) return -1;
    if (add_matrix_type(module) || add_turns_type(module)) return -1;
    return PyModule_AddIntConstant(module, "VERSION", KERNELS_VERSION);
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, fill}, {0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, .m_name = "_native", .m_size = 0, .m_slots = slots,
};

PyMODINIT_FUNC PyInit__native(void) { return PyModuleDef_Init(&definition); }
