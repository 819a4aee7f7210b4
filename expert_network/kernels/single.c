/* The node's end of a dispatch of one row in sum mode: from the socket to floats, and from floats
 * to the socket.
 *
 * Whatever is not a frame that has come whole, of a form that is known, is left to the caller. */
#include "checksum.h"
#include "frames.h"
#include "table.h"

#include <errno.h>
#include <math.h>
#include <poll.h>
#include <sys/uio.h>

/* For the rest of a frame that has begun; later its link's own deadlines count. */
#define REST 100000000

/* A link's numbers, int64: the last dispatch's sequence; bytes that came, or of the reply that
 * went; its pairs; which of `heads` it has. */
struct lane {
    int64_t sequence, moved, pairs, which;
};

/* A form of dispatch, int32. `layer` is a row of `held`. */
struct form {
    int32_t layer, form, hidden, most_pairs;
};

struct known {
    const uint8_t *heads;
    const struct form *forms;
    long count;
    const uint8_t *held;
    long experts;
    float *row;
};

static struct lane *lane_of(Views *views, PyObject *object) {
    const Py_buffer *view = view_array(views, object, "lane", '*', 1, 1);
    if (view && view->len == sizeof(struct lane)) return view->buf;
    if (view) PyErr_SetString(PyExc_ValueError, "lane: not int64 (4,)");
    return NULL;
}

static int take_known(Views *views, PyObject *const *arguments, struct known *known) {
    const Py_buffer *heads = view_array(views, arguments[0], "heads", 'B', 2, 0);
    const Py_buffer *forms = heads ? view_array(views, arguments[1], "forms", '*', 2, 0) : NULL;
    const Py_buffer *held = forms ? view_array(views, arguments[2], "held", '*', 2, 0) : NULL;
    const Py_buffer *row = held ? view_array(views, arguments[3], "row", 'f', -1, 1) : NULL;
    if (!row) return -1;
    *known = (struct known){heads->buf, forms->buf, heads->shape[0], held->buf, held->shape[1],
                            row->buf};
    int fine = heads->shape[1] == HEAD && forms->shape[0] == known->count && held->itemsize == 1 &&
               forms->len == known->count * (Py_ssize_t)sizeof(struct form);
    for (long n = 0; fine && n < known->count; n++) {
        const struct form *form = &known->forms[n];
        fine = form->layer >= 0 && form->layer < held->shape[0] && form->form >= 0 &&
               form->form < ROW_FORMS && form->hidden > 0 && form->hidden * 4 <= row->len;
    }
    if (fine) return 0;
    PyErr_SetString(PyExc_ValueError, "heads, forms, held, row: they do not go together");
    return -1;
}

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

static int read_row(const uint8_t *frame, const struct known *known, struct lane *lane) {
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

/* What comes first, and the rest of its frame if it follows at once. */
static int64_t receive(int descriptor, uint8_t *memory, int64_t size) {
    int64_t got = 0, until = 0, left;
    for (;;) {
        ssize_t count = recv(descriptor, memory + got, (size_t)(size - got), 0);
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

/* arguments: descriptor, lane, memory, heads, forms, held, row */
static int await(Views *views, PyObject *const *arguments) {
    struct known known;
    int descriptor = (int)PyLong_AsLong(arguments[0]);
    struct lane *lane = PyErr_Occurred() ? NULL : lane_of(views, arguments[1]);
    const Py_buffer *memory = lane ? view_array(views, arguments[2], "memory", 'B', 1, 1) : NULL;
    if (!memory || take_known(views, arguments + 3, &known)) return -1;
    int fine;
    Py_BEGIN_ALLOW_THREADS
    lane->moved = receive(descriptor, memory->buf, memory->len);
    fine = read_row(memory->buf, &known, lane);
    Py_END_ALLOW_THREADS
    return fine;
}

/* arguments: descriptor, lane, due, values, form, queue_us, compute_us */
static int answer(Views *views, PyObject *const *arguments) {
    uint8_t header[HEADER], times[TIMES];
    int descriptor = (int)PyLong_AsLong(arguments[0]);
    struct lane *lane = PyErr_Occurred() ? NULL : lane_of(views, arguments[1]);
    const uint8_t *due = lane ? head_of(views, arguments[2], "due") : NULL;
    const Py_buffer *values = due ? view_array(views, arguments[3], "values", 'f', -1, 0) : NULL;
    if (!values) return -1;
    long form = PyLong_AsLong(arguments[4]), hidden = (long)(values->len / 4);
    unsigned long queue = PyLong_AsUnsignedLongMask(arguments[5]);
    unsigned long compute = PyLong_AsUnsignedLongMask(arguments[6]);
    if (PyErr_Occurred()) return -1;
    size_t size = form < 0 || form >= ROW_FORMS ? 0 : (size_t)row_bytes(form, hidden);
    if (!size || number_at(due + LENGTH_AT) != TIMES + size) {
        PyErr_SetString(PyExc_ValueError, "values: not of the size that is due");
        return -1;
    }
    uint8_t *raw = PyMem_Malloc(size);
    if (!raw) {
        PyErr_NoMemory();
        return -1;
    }
    int fine;
    Py_BEGIN_ALLOW_THREADS
    fine = kernels->forms[form].encode(values->buf, hidden, raw, raw + hidden * value_bytes(form));
    lane->moved = 0;
    if (fine) {
        memcpy(header, due, HEAD);
        put_number(header + SEQUENCE_AT, (uint32_t)lane->sequence);
        put_number(times, (uint32_t)queue), put_number(times + 4, (uint32_t)compute);
        uint32_t crc = checksum(checksum(0, header, HEAD), times, TIMES);
        put_number(header + HEAD, checksum(crc, raw, size));
        struct iovec parts[] = {{header, HEADER}, {times, TIMES}, {raw, size}};
        struct msghdr message = {.msg_iov = parts, .msg_iovlen = 3};
        ssize_t sent = sendmsg(descriptor, &message, MSG_NOSIGNAL);
        lane->moved = sent < 0 ? 0 : sent;
    }
    Py_END_ALLOW_THREADS
    PyMem_Free(raw);
    return fine;
}

static PyObject *await_row(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    (void)module;
    return call_with_views(await, "await_row", arguments, count, 7);
}

static PyObject *answer_row(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    (void)module;
    return call_with_views(answer, "answer_row", arguments, count, 7);
}

PyMethodDef single_methods[] = {
    {"await_row", (PyCFunction)(void (*)(void))await_row, METH_FASTCALL, NULL},
    {"answer_row", (PyCFunction)(void (*)(void))answer_row, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};
