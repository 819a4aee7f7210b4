#include "module.h"

#include <string.h>

static const char *kind_name(char kind) {
    return kind == 'f' ? "float32" : kind == 'I' ? "uint32" : kind == 'B' ? "bytes" : "anything";
}

static int is_kind(const Py_buffer *view, char kind) {
    const char *format = view->format ? view->format : "B";
    if (*format == '<' || *format == '=' || *format == '@') format++;
    if (kind == '*') return 1;
    if (!*format || format[1]) return 0;
    if (kind == 'f') return *format == 'f' && view->itemsize == 4;
    if (kind == 'I') return strchr("IL", *format) && view->itemsize == 4;
    return strchr("Bb?c", *format) && view->itemsize == 1;
}

static Py_buffer *take(Views *views, PyObject *object, const char *what, char kind, int ndim,
                       int flags) {
    if (views->count == MOST_VIEWS) {
        PyErr_SetString(PyExc_SystemError, "too many views");
        return NULL;
    }
    Py_buffer *view = &views->views[views->count];
    if (PyObject_GetBuffer(object, view, flags | PyBUF_FORMAT)) {
        PyErr_Clear();
        PyErr_Format(PyExc_ValueError, "%s: no %s%sbuffer", what,
                     flags & PyBUF_WRITABLE ? "writable " : "",
                     (flags & PyBUF_C_CONTIGUOUS) == PyBUF_C_CONTIGUOUS ? "C-contiguous " : "");
        return NULL;
    }
    views->count++;
    if (!is_kind(view, kind)) {
        PyErr_Format(PyExc_ValueError, "%s: not of %s", what, kind_name(kind));
        return NULL;
    }
    if (ndim >= 0 && view->ndim != ndim) {
        PyErr_Format(PyExc_ValueError, "%s: %d dimensions, not %d", what, view->ndim, ndim);
        return NULL;
    }
    return view;
}

Py_buffer *view_array(Views *views, PyObject *object, const char *what, char kind, int ndim,
                      int writable) {
    int flags = PyBUF_C_CONTIGUOUS | (writable ? PyBUF_WRITABLE : 0);
    return take(views, object, what, kind, ndim, flags);
}

Py_buffer *view_strided(Views *views, PyObject *object, const char *what, char kind, int ndim,
                        int writable) {
    int flags = PyBUF_STRIDES | (writable ? PyBUF_WRITABLE : 0);
    return take(views, object, what, kind, ndim, flags);
}

void views_release(Views *views) {
    while (views->count) PyBuffer_Release(&views->views[--views->count]);
}

int take_precision(PyObject *object) {
    long precision = PyLong_Check(object) ? PyLong_AsLong(object) : -1;
    if (precision == 0 || precision == 1) return (int)precision;
    PyErr_Clear();
    PyErr_SetString(PyExc_ValueError, "precision: neither 0 (float32) nor 1 (int8)");
    return -1;
}
