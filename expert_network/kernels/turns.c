/* The Python type Turns. Neither threading.Lock nor a mutex promises an order: a driver that sends
 * its next dispatch at once could keep all others waiting. */
#include "turns.h"

#include <pthread.h>

/* In the queue, on the stack of who waits. */
struct waiting {
    pthread_cond_t turn;
    int given;
    struct waiting *next;
};

struct turns {
    pthread_mutex_t mutex;
    int taken;
    struct waiting *first, *last;
};

typedef struct {
    PyObject_HEAD
    struct turns turns;
} TurnsObject;

static PyTypeObject *turns_type;

struct turns *turns_of(PyObject *object, const char *what) {
    if (turns_type && PyObject_TypeCheck(object, turns_type))
        return &((TurnsObject *)object)->turns;
    PyErr_Format(PyExc_ValueError, "%s: not a Turns", what);
    return NULL;
}

static int try_to_take(struct turns *turns) {
    pthread_mutex_lock(&turns->mutex);
    int taken = !turns->taken;
    turns->taken = 1;
    pthread_mutex_unlock(&turns->mutex);
    return taken;
}

void turns_take(struct turns *turns) {
    pthread_mutex_lock(&turns->mutex);
    if (turns->taken) {
        struct waiting here = {PTHREAD_COND_INITIALIZER, 0, NULL};
        if (turns->first)
            turns->last->next = &here;
        else
            turns->first = &here;
        turns->last = &here;
        while (!here.given) pthread_cond_wait(&here.turn, &turns->mutex);
        pthread_cond_destroy(&here.turn);
    }
    turns->taken = 1;
    pthread_mutex_unlock(&turns->mutex);
}

void turns_give(struct turns *turns) {
    pthread_mutex_lock(&turns->mutex);
    struct waiting *next = turns->first;
    if (next) {
        turns->first = next->next;
        next->given = 1;
        pthread_cond_signal(&next->turn);
    } else {
        turns->taken = 0;
    }
    pthread_mutex_unlock(&turns->mutex);
}

static PyObject *turns_new(PyTypeObject *type, PyObject *args, PyObject *named) {
    if (PyTuple_Size(args) || (named && PyDict_Size(named)))
        return PyErr_Format(PyExc_TypeError, "Turns takes no arguments");
    allocfunc alloc = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    TurnsObject *self = (TurnsObject *)alloc(type, 0);
    if (self) pthread_mutex_init(&self->turns.mutex, NULL);
    return (PyObject *)self;
}

static void turns_dealloc(PyObject *object) {
    PyTypeObject *type = Py_TYPE(object);
    pthread_mutex_destroy(&((TurnsObject *)object)->turns.mutex);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(object);
    Py_DECREF(type);
}

static PyObject *acquire(PyObject *object, PyObject *args) {
    struct turns *turns = &((TurnsObject *)object)->turns;
    int blocking = 1;
    if (!PyArg_ParseTuple(args, "|p", &blocking)) return NULL;
    int taken = try_to_take(turns);
    if (!taken && blocking) {
        Py_BEGIN_ALLOW_THREADS
        turns_take(turns);
        Py_END_ALLOW_THREADS
        taken = 1;
    }
    return PyBool_FromLong(taken);
}

static PyObject *release(PyObject *object, PyObject *unused) {
    (void)unused;
    struct turns *turns = &((TurnsObject *)object)->turns;
    if (!turns->taken) return PyErr_Format(PyExc_RuntimeError, "release of what was not acquired");
    turns_give(turns);
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"acquire", acquire, METH_VARARGS, NULL},
    {"release", release, METH_NOARGS, NULL},
    {"__enter__", acquire, METH_VARARGS, NULL},
    {"__exit__", release, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot type_slots[] = {
    {Py_tp_new, turns_new},
    {Py_tp_dealloc, turns_dealloc},
    {Py_tp_methods, methods},
    {0, NULL},
};

static PyType_Spec spec = {
    .name = "expert_network.kernels._native.Turns",
    .basicsize = sizeof(TurnsObject),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = type_slots,
};

int add_turns_type(PyObject *module) {
    if (!turns_type && !(turns_type = (PyTypeObject *)PyType_FromSpec(&spec))) return -1;
    return PyModule_AddObjectRef(module, "Turns", (PyObject *)turns_type);
}
