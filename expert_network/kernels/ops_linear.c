/* linear: rows times a matrix. */
#include "module.h"
#include "ops_matrix.h"

#include "pool.h"
#include "scratch.h"
#include "table.h"

/* Rows of weights in a task: long streams for one row of activations, else short enough for the
 * threads to share evenly. */
#define MOST_SHARE 256
#define LEAST_SHARE 32
/* Rows of activations that one task multiplies. */
#define ROWS 96

struct linear {
    const struct matrix *matrix;
    const float *x;
    float *out;
    long rows, share, shares;
    struct layout layout;
    char *prepared;
};

static void prepare_row(void *context, long index, int thread) {
    (void)thread;
    struct linear *job = context;
    kernels->prepare(&job->layout, job->x + index * job->matrix->cols,
                     job->prepared + (size_t)index * job->layout.bytes);
}

static void multiply(void *context, long index, int thread) {
    (void)thread;
    struct linear *job = context;
    const struct matrix *m = job->matrix;
    long first = index % job->shares * job->share, from = index / job->shares * ROWS;
    long count = m->rows - first < job->share ? m->rows - first : job->share;
    long rows = job->rows - from < ROWS ? job->rows - from : ROWS;
    const char *x[ROWS];
    float *out[ROWS];
    for (long r = 0; r < rows; r++) {
        x[r] = job->prepared + (size_t)(from + r) * job->layout.bytes;
        out[r] = job->out + (from + r) * m->rows + first;
    }
    kernels->product(m, &job->layout, 0, first, count, x, out, rows);
}

static int run(struct linear *job) {
    job->prepared = scratch((size_t)job->rows * job->layout.bytes);
    if (!job->prepared) return -1;
    job->share = job->rows == 1 ? MOST_SHARE : LEAST_SHARE;
    while (job->share > LEAST_SHARE && job->matrix->rows / job->share < 8L * pool_threads())
        job->share /= 2;
    job->shares = (job->matrix->rows + job->share - 1) / job->share;
    pool_run(prepare_row, job, job->rows);
    pool_run(multiply, job, job->shares * ((job->rows + ROWS - 1) / ROWS));
    free(job->prepared);
    return 0;
}

static int check_shape(const Py_buffer *view, const char *what, long rows, long cols) {
    if (view->shape[0] == rows && view->shape[1] == cols) return 0;
    PyErr_Format(PyExc_ValueError, "%s: shape (%zd, %zd), not (%ld, %ld)", what, view->shape[0],
                 view->shape[1], rows, cols);
    return -1;
}

static int take_arguments(struct linear *job, Views *views, PyObject *const *args, Py_ssize_t n) {
    if (n != 4) {
        PyErr_SetString(PyExc_TypeError, "linear(matrix, x, out, precision)");
        return -1;
    }
    if (!(job->matrix = matrix_of(args[0], "matrix"))) return -1;
    if (job->matrix->count != 1) {
        PyErr_SetString(PyExc_ValueError, "matrix: a stack of matrices, not one");
        return -1;
    }
    Py_buffer *x = view_array(views, args[1], "x", 'f', 2, 0);
    Py_buffer *out = x ? view_array(views, args[2], "out", 'f', 2, 1) : NULL;
    int precision = out ? take_precision(args[3]) : -1;
    if (precision < 0) return -1;
    job->rows = (long)x->shape[0];
    if (check_shape(x, "x", job->rows, job->matrix->cols)) return -1;
    if (check_shape(out, "out", job->rows, job->matrix->rows)) return -1;
    layout_of(job->matrix, precision, &job->layout);
    job->x = x->buf, job->out = out->buf;
    return 0;
}

static PyObject *linear(PyObject *module, PyObject *const *args, Py_ssize_t n) {
    (void)module;
    Views views = {0};
    struct linear job = {0};
    int failed = take_arguments(&job, &views, args, n);
    if (!failed && job.rows) {
        Py_BEGIN_ALLOW_THREADS
        failed = run(&job);
        Py_END_ALLOW_THREADS
        if (failed) PyErr_NoMemory();
    }
    views_release(&views);
    if (failed) return NULL;
    Py_RETURN_NONE;
}

PyMethodDef linear_methods[] = {
    {"linear", (PyCFunction)(void (*)(void))linear, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};
