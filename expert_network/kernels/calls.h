/* What the functions for Python that work on rows share. */
#ifndef EXPERT_NETWORK_CALLS_H
#define EXPERT_NETWORK_CALLS_H

#include "module.h"
#include "pool.h"

#define FAST(function) {#function, (PyCFunction)(void (*)(void))function, METH_FASTCALL, NULL}

/* The tasks on the pool without the GIL, or here and now if they are small. */
static inline void run_tasks(pool_task task, void *context, long count, long elements) {
    if (elements <= ALONE) {
        for (long index = 0; index < count; index++) task(context, index, 0);
        return;
    }
    Py_BEGIN_ALLOW_THREADS
    pool_run(task, context, count);
    Py_END_ALLOW_THREADS
}

/* A buffer's element, without the byte order. */
static inline const char *element(const Py_buffer *view) {
    const char *format = view->format ? view->format : "B";
    return format + (*format == '<' || *format == '=' || *format == '@');
}

static inline long elements_of(const Py_buffer *view) {
    return view->itemsize ? view->len / view->itemsize : 0;
}

static inline int contiguous_last(const Py_buffer *view, const char *what) {
    int last = view->ndim - 1;
    if (view->shape[last] <= 1 || view->strides[last] == view->itemsize) return 0;
    PyErr_Format(PyExc_ValueError, "%s: its last axis is not contiguous", what);
    return -1;
}

#endif
