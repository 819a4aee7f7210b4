/* read_bandwidth: how fast the threads read memory. */
#include "module.h"

#include <stdatomic.h>
#include <time.h>

#include "pool.h"
#include "table.h"

#define PART (1L << 20)

struct reading {
    const uint8_t *memory;
    long parts, streams;
    atomic_ullong sum;          /* so that no compiler leaves the reading out */
};

static void read_part(void *context, long index, int thread) {
    (void)thread;
    struct reading *job = context;
    size_t bytes = (size_t)(PART / job->streams) & ~(size_t)127;
    uint64_t sum = kernels->read(job->memory + index * PART, job->streams, bytes);
    atomic_fetch_xor(&job->sum, sum);
}

static double seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static PyObject *read_bandwidth(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *memory;
    Views views = {0};
    struct reading job = {0};
    if (!PyArg_ParseTuple(args, "Ol", &memory, &job.streams)) return NULL;
    if (job.streams < 1 || job.streams > 16 || PART % (128 * job.streams))
        return PyErr_Format(PyExc_ValueError, "streams: %ld is not 1, 2, 4, 8 or 16", job.streams);
    Py_buffer *view = view_array(&views, memory, "memory", '*', -1, 0);
    if (!view) return NULL;
    double took = 0;
    job.memory = view->buf, job.parts = (long)(view->len / PART);
    if (job.parts) {
        Py_BEGIN_ALLOW_THREADS
        took = seconds();
        pool_run(read_part, &job, job.parts);
        took = seconds() - took;
        Py_END_ALLOW_THREADS
    } else {
        PyErr_SetString(PyExc_ValueError, "memory: less than 1 MiB");
    }
    views_release(&views);
    return job.parts ? PyFloat_FromDouble(took) : NULL;
}

PyMethodDef bandwidth_methods[] = {
    {"read_bandwidth", read_bandwidth, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};
