/* The node's end of dispatches of one row in sum mode: from the socket to the experts, and from
 * there back to the socket, one after the other.
 *
 * Whatever is not a frame that has come whole, of a form that is known, is left to the caller. */
#include "checksum.h"
#include "frames.h"
#include "table.h"
#include "turns.h"

#include <errno.h>
#include <math.h>
#include <poll.h>
#include <sched.h>
#include <sys/uio.h>

/* For the rest of a frame that has begun; later its link's own deadlines count. */
#define REST 100000000
/* In nanoseconds as well. */
#define LOOK 100000

#define BOUNDS 18           /* between what histograms count, in microseconds */

/* A link's numbers, int64. sequence: the last dispatch's. moved: bytes that came, or of the reply
 * that went, or -errno. which: its form. since: when the dispatch at hand came, 0 between two; began: when it
 * was its turn; both in nanoseconds. ending: whether no more is to be served. What follows grows with
 * each dispatch that was answered. */
struct lane {
    int64_t sequence, moved, pairs, which, since, began, ending;
    int64_t dispatches, all_pairs, queue_us, compute_us, received, sent;
    int64_t queued[BOUNDS + 1], computed[BOUNDS + 1];
};

/* A form of dispatch, int32. `layer` is a row of `held`. */
struct form {
    int32_t layer, form, hidden, most_pairs, precise;
};

/* What a link knows, with the memory that it lies in. */
struct known {
    struct lane *lane;
    uint8_t *memory;
    int64_t size;
    const uint8_t *heads, *dues;
    const struct form *forms;
    long count;
    const uint8_t *held;
    long experts;
    float *row;
    const double *bounds;
    const struct experts **computing; /* of each form; NULL for what Python computes */
    struct turns *turns, *sending;    /* to compute, and around what goes out */
    float *sum;
    uint8_t *raw;                     /* for a reply's values */
    PyObject *kept[3];
    Views views;
};

static const char *const NAME = "expert_network.kernels.single";

/* The tuple of the forms' experts, and the two locks. */
static int take_experts(PyObject *const *arguments, struct known *known) {
    for (int n = 0; n < 3; n++) Py_INCREF(known->kept[n] = arguments[8 + n]);
    if (!(known->turns = turns_of(arguments[9], "turns")) ||
        !(known->sending = turns_of(arguments[10], "sending")))
        return -1;
    if (!PyTuple_Check(arguments[8]) || PyTuple_Size(arguments[8]) != known->count) {
        PyErr_SetString(PyExc_ValueError, "experts: not a tuple of as many as there are forms");
        return -1;
    }
    if (!(known->computing = PyMem_Calloc((size_t)known->count + 1, sizeof *known->computing))) {
        PyErr_NoMemory();
        return -1;
    }
    for (long n = 0; n < known->count; n++) {
        PyObject *capsule = PyTuple_GetItem(arguments[8], n);
        if (capsule != Py_None &&
            !(known->computing[n] = experts_of(capsule, known->forms[n].hidden)))
            return -1;
    }
    return 0;
}

static int take_known(PyObject *const *arguments, struct known *known) {
    const Py_buffer *lane, *memory, *heads, *dues, *forms, *held, *row, *bounds;
    Views *views = &known->views;
    if (!(lane = view_array(views, arguments[0], "lane", '*', 1, 1)) ||
        !(memory = view_array(views, arguments[1], "memory", 'B', 1, 1)) ||
        !(heads = view_array(views, arguments[2], "heads", 'B', 2, 0)) ||
        !(dues = view_array(views, arguments[3], "dues", 'B', 2, 0)) ||
        !(forms = view_array(views, arguments[4], "forms", '*', 2, 0)) ||
        !(held = view_array(views, arguments[5], "held", '*', 2, 0)) ||
        !(row = view_array(views, arguments[6], "row", 'f', 1, 1)) ||
        !(bounds = view_array(views, arguments[7], "bounds", '*', 1, 0)))
        return -1;
    known->lane = lane->buf, known->memory = memory->buf, known->size = memory->len;
    known->heads = heads->buf, known->dues = dues->buf, known->count = heads->shape[0];
    known->forms = forms->buf, known->row = row->buf, known->bounds = bounds->buf;
    known->held = held->buf, known->experts = held->shape[1];
    int fine = lane->len == sizeof(struct lane) && heads->shape[1] == HEAD && held->itemsize == 1 &&
               dues->len == heads->len && bounds->len == BOUNDS * sizeof(double) &&
               forms->len == known->count * (Py_ssize_t)sizeof(struct form);
    long most = 1;
    for (long n = 0; fine && n < known->count; n++) {
        const struct form *form = &known->forms[n];
        fine = form->layer >= 0 && form->layer < held->shape[0] && form->form >= 0 &&
               form->form < ROW_FORMS && form->hidden > 0 && form->hidden * 4 <= row->len;
        long size = fine ? row_bytes(form->form, form->hidden) : 0;
        fine = fine && number_at(known->dues + n * HEAD + LENGTH_AT) == TIMES + size &&
               form->most_pairs <= MOST_PAIRS;
        most = fine && form->hidden > most ? form->hidden : most;
    }
    if (!fine) {
        PyErr_SetString(PyExc_ValueError, "lane, heads, forms, held, row: they do not go together");
        return -1;
    }
    known->sum = PyMem_Malloc(2 * 4 * (size_t)most);
    known->raw = (uint8_t *)(known->sum + most);   /* no form is longer than f32 */
    if (known->sum) return take_experts(arguments, known);
    PyErr_NoMemory();
    return -1;
}

static void forget(struct known *known) {
    views_release(&known->views);
    for (int n = 0; n < 3; n++) Py_XDECREF(known->kept[n]);
    PyMem_Free(known->computing);
    PyMem_Free(known->sum);
    PyMem_Free(known);
}

static void forget_capsule(PyObject *capsule) { forget(PyCapsule_GetPointer(capsule, NAME)); }

/* But for the sequence number and the length. */
static int same_head(const uint8_t *a, const uint8_t *b) {
    return !memcmp(a, b, SEQUENCE_AT) &&
           !memcmp(a + SEQUENCE_AT + 4, b + SEQUENCE_AT + 4, LENGTH_AT - SEQUENCE_AT - 4);
}

/* Layers are asked one after the other: most often it is the one after the last. */
static long find(const uint8_t *frame, const struct known *known, long last) {
    for (long n = 1; n <= known->count; n++) {
        long which = (last + n) % known->count;
        if (same_head(frame, known->heads + which * HEAD)) return which;
    }
    return -1;
}

static int read_row(const struct known *known) {
    const uint8_t *frame = known->memory;
    struct lane *lane = known->lane;
    long which = known->count && lane->moved >= HEADER ? find(frame, known, lane->which) : -1;
    if (which < 0 || number_at(frame + SEQUENCE_AT) != following(lane->sequence)) return 0;
    const struct form *form = &known->forms[which];
    long size = row_bytes(form->form, form->hidden), length = number_at(frame + LENGTH_AT);
    long pairs = (length - size - OFFSETS) / PAIR;
    if (pairs < 1 || pairs > form->most_pairs || length != size + OFFSETS + PAIR * pairs ||
        lane->moved != HEADER + length)
        return 0;
    const uint8_t *raw = frame + HEADER, *tail = raw + size, *ids = tail + OFFSETS;
    if (checksum(checksum(0, frame, HEAD), raw, (size_t)length) != number_at(frame + HEAD) ||
        number_at(tail) != 0 || number_at(tail + 4) != pairs)
        return 0;
    for (long pair = 0; pair < pairs; pair++) {
        uint16_t id;
        float weight;
        memcpy(&id, ids + 2 * pair, 2), memcpy(&weight, ids + 2 * pairs + 4 * pair, 4);
        if (id >= known->experts || !known->held[form->layer * known->experts + id] ||
            !isfinite(weight))
            return 0;
    }
    const uint8_t *scales = raw + form->hidden * value_bytes(form->form);
    if (!kernels->forms[form->form].decode(raw, scales, form->hidden, known->row)) return 0;
    lane->sequence = following(lane->sequence), lane->pairs = pairs, lane->which = which;
    return 1;
}

/* Until the next frame begins to come, or for LOOK: a core that sleeps wakes late. Whoever else
 * wants this one gets it. */
static void look(int descriptor) {
    int64_t until = clock_now() + LOOK;
    uint8_t first;
    while (recv(descriptor, &first, 1, MSG_PEEK | MSG_DONTWAIT) < 0 && clock_now() < until)
        sched_yield();
}

/* What comes first, and the rest of its frame if it follows at once. */
static int64_t receive(int descriptor, uint8_t *memory, int64_t size) {
    int64_t got = 0, until = 0, left;
    for (;;) {
        ssize_t count;
        do count = recv(descriptor, memory + got, (size_t)(size - got), 0);
        while (count < 0 && errno == EINTR);
        if (count <= 0) return got;
        got += count;
        if (got == size || (got >= HEADER && got >= HEADER + (int64_t)number_at(memory + LENGTH_AT)))
            return got;
        if (!until) until = clock_now() + REST;
        struct pollfd rest = {descriptor, POLLIN, 0};
        if ((left = until - clock_now()) <= 0 || poll(&rest, 1, (int)(left / 1000000) + 1) <= 0)
            return got;
    }
}

static void count(int64_t *histogram, const double *bounds, int64_t microseconds) {
    int n = 0;
    while (n < BOUNDS && (double)microseconds > bounds[n]) n++;
    histogram[n]++;
}

enum { LEFT, ANSWERED, FAILED, NOT_FINITE, CUT, ASKED };

/* Send `values`, which took so long, as the reply that is due. */
static int send_reply(struct known *known, int descriptor, const float *values, int64_t ended) {
    struct lane *lane = known->lane;
    const struct form *form = &known->forms[lane->which];
    size_t size = (size_t)row_bytes(form->form, form->hidden);
    uint8_t header[HEADER], times[TIMES], *scales = known->raw + form->hidden * value_bytes(form->form);
    int64_t queue = (lane->began - lane->since) / 1000, compute = (ended - lane->began) / 1000;
    lane->since = lane->moved = 0;
    if (!kernels->forms[form->form].encode(values, form->hidden, known->raw, scales))
        return NOT_FINITE;
    memcpy(header, known->dues + lane->which * HEAD, HEAD);
    put_number(header + SEQUENCE_AT, (uint32_t)lane->sequence);
    put_number(times, queue > UINT32_MAX ? UINT32_MAX : (uint32_t)queue);
    put_number(times + 4, compute > UINT32_MAX ? UINT32_MAX : (uint32_t)compute);
    uint32_t crc = checksum(checksum(0, header, HEAD), times, TIMES);
    put_number(header + HEAD, checksum(crc, known->raw, size));
    struct iovec parts[] = {{header, HEADER}, {times, TIMES}, {known->raw, size}};
    struct msghdr message = {.msg_iov = parts, .msg_iovlen = 3};
    ssize_t sent;
    do sent = sendmsg(descriptor, &message, MSG_NOSIGNAL);
    while (sent < 0 && errno == EINTR);
    lane->moved = sent < 0 ? -errno : sent;
    if (lane->moved != (int64_t)(HEADER + TIMES + size)) return CUT;
    lane->dispatches++, lane->all_pairs += lane->pairs, lane->sent += sent;
    lane->queue_us += queue, lane->compute_us += compute;
    count(lane->queued, known->bounds, queue), count(lane->computed, known->bounds, compute);
    return ANSWERED;
}

static int reply(struct known *known, int descriptor, const float *values, int64_t ended) {
    turns_take(known->sending);
    int result = send_reply(known, descriptor, values, ended);
    turns_give(known->sending);
    return result;
}

static int compute_and_reply(struct known *known, int descriptor) {
    struct lane *lane = known->lane;
    const struct form *form = &known->forms[lane->which];
    const uint8_t *ids = known->memory + HEADER + row_bytes(form->form, form->hidden) + OFFSETS;
    turns_take(known->turns);
    lane->began = clock_now();
    int failed = experts_sum(known->computing[lane->which], known->row, (long)lane->pairs, ids,
                             ids + 2 * lane->pairs, form->precise, known->sum);
    turns_give(known->turns);
    return failed ? FAILED : reply(known, descriptor, known->sum, clock_now());
}

/* Until something comes that is no such dispatch (LEFT), one is ASKED that Python computes, or
 * could not be answered; or one was ANSWERED and no more is to be served. */
static int serve(struct known *known, int descriptor, int once) {
    struct lane *lane = known->lane;
    for (;;) {
        lane->moved = receive(descriptor, known->memory, known->size);
        if (!read_row(known)) return LEFT;
        lane->received += lane->moved;
        lane->since = lane->began = clock_now();
        if (!known->computing[lane->which]) return ASKED;
        int result = compute_and_reply(known, descriptor);
        if (result != ANSWERED || once || lane->ending) return result;
        look(descriptor);
    }
}

/* Have Python compute, and reply. FAILED without values. */
static int ask(struct known *known, int descriptor, PyObject *compute) {
    struct lane *lane = known->lane;
    PyObject *made = PyObject_CallFunction(compute, "LL", lane->which, lane->pairs);
    if (!made) return -1;
    int64_t ended = clock_now();
    Views views;
    views.count = 0;
    const Py_buffer *values = made == Py_None ? NULL : view_array(&views, made, "values", 'f', -1, 0);
    int result = made == Py_None ? FAILED : values ? ANSWERED : -1;
    if (values && values->len != known->forms[lane->which].hidden * 4) {
        PyErr_SetString(PyExc_ValueError, "values: of another size than the row");
        result = -1;
    }
    if (result == ANSWERED) {
        Py_BEGIN_ALLOW_THREADS
        result = reply(known, descriptor, values->buf, ended);
        Py_END_ALLOW_THREADS
    }
    views_release(&views);
    Py_DECREF(made);
    return result;
}

static PyObject *single(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    (void)module;
    if (count != 11) return PyErr_Format(PyExc_TypeError, "single: %zd arguments, not 11", count);
    struct known *known = PyMem_Calloc(1, sizeof *known);
    if (!known) return PyErr_NoMemory();
    PyObject *capsule = take_known(arguments, known) ? NULL : PyCapsule_New(known, NAME, forget_capsule);
    if (!capsule) forget(known);
    return capsule;
}

static PyObject *serve_rows(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    (void)module;
    if (count != 4) return PyErr_Format(PyExc_TypeError, "serve_rows: %zd arguments, not 4", count);
    struct known *known = PyCapsule_GetPointer(arguments[0], NAME);
    int descriptor = known ? (int)PyLong_AsLong(arguments[1]) : -1;
    int once = known ? PyObject_IsTrue(arguments[3]) : 0, result;
    if (PyErr_Occurred()) return NULL;
    Py_BEGIN_ALLOW_THREADS
    result = serve(known, descriptor, once);
    Py_END_ALLOW_THREADS
    if (result == ASKED) result = ask(known, descriptor, arguments[2]);
    return result < 0 ? NULL : PyLong_FromLong(result);
}

PyMethodDef single_methods[] = {
    {"single", (PyCFunction)(void (*)(void))single, METH_FASTCALL, NULL},
    {"serve_rows", (PyCFunction)(void (*)(void))serve_rows, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};
