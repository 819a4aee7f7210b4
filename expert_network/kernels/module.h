/* What the sources that speak to Python share. */
#ifndef EXPERT_NETWORK_MODULE_H
#define EXPERT_NETWORK_MODULE_H

#ifndef Py_LIMITED_API
#define Py_LIMITED_API 0x030B0000
#endif
#define PY_SSIZE_T_CLEAN
#include <Python.h>

/* Each source that adds functions to the module has a table, named in module.c's list. */
extern PyMethodDef choose_methods[], linear_methods[], ffn_methods[], bandwidth_methods[];
extern PyMethodDef attention_methods[], norms_methods[], forms_methods[], checksum_methods[];
extern PyMethodDef fanout_methods[], single_methods[], layer_methods[];

/* Views of up to MOST_VIEWS arguments, released together whatever went wrong on the way. */
#define MOST_VIEWS 12
typedef struct {
    Py_buffer views[MOST_VIEWS];
    int count;
} Views;

/* Element kinds, for messages and checks: 'f' float32, 'I' uint32, 'B' any bytes of size 1, '*' any. */
/* A C-contiguous buffer of `kind` with `ndim` dimensions (-1: any). NULL and ValueError naming
 * `what` if it is not one. `writable`: it will be written to. */
Py_buffer *view_array(Views *views, PyObject *object, const char *what, char kind, int ndim,
                      int writable);
/* The same with any strides (in bytes, maybe negative) on all axes. */
Py_buffer *view_strided(Views *views, PyObject *object, const char *what, char kind, int ndim,
                        int writable);
void views_release(Views *views);

/* 0 float32, 1 int8; -1 and ValueError for anything else. */
int take_precision(PyObject *object);

#endif
