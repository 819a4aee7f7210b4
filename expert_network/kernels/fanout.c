/* A decode step's dispatch, one row and one weighted sum: to all nodes and back in two calls.
 *
 * Whatever is not as it should be is left to the caller, with what was sent and what came. */
#include "checksum.h"
#include "frames.h"
#include "table.h"

#include <errno.h>
#include <poll.h>
#include <sys/uio.h>

#define MOST_NODES 256
#define LOOK_MS 5         /* to wait for one node before the others are looked at */

/* One node: a row of the plan, which is int64 (nodes, 16). Times in nanoseconds. What stands after
 * `replied_at` grows with each dispatch that was answered as it should be. */
struct lane {
    int64_t descriptor, sequence, pairs, state, sent, got, queue_us, compute_us, sent_at, replied_at;
    int64_t all_dispatches, all_pairs, all_queue_us, all_compute_us, all_sent, all_got;
};
#define FIELDS (sizeof(struct lane) / sizeof(int64_t))
enum { UNASKED, ASKED, REPLIED, ODD };

static struct lane *lanes_of(Views *views, PyObject *plan, long *nodes) {
    const Py_buffer *view = view_array(views, plan, "plan", '*', 2, 1);
    if (!view) return NULL;
    if (view->itemsize != 8 || view->shape[1] != (Py_ssize_t)FIELDS || view->shape[0] > MOST_NODES) {
        PyErr_SetString(PyExc_ValueError, "plan: not int64 (nodes, 16)");
        return NULL;
    }
    *nodes = view->shape[0];
    return view->buf;
}

/* ---- out ---- */

struct row {
    const uint8_t *head;
    uint8_t *raw;
    size_t size;
    const uint32_t *ids;
    const float *weights;
    const int32_t *owners;
    long pairs;
    uint8_t *made;            /* raw, if it was encoded here */
};

static void send_to(struct lane *lane, long node, const struct row *row) {
    uint8_t header[HEADER], tail[OFFSETS + PAIR * MOST_PAIRS];
    uint32_t pairs = 0;
    for (long pair = 0; pair < row->pairs; pair++) pairs += row->owners[row->ids[pair]] == node;
    lane->pairs = lane->state = lane->sent = lane->got = 0;
    if (!pairs) return;
    uint8_t *ids = tail + OFFSETS, *weights = ids + 2 * pairs;
    put_number(tail, 0), put_number(tail + 4, pairs);
    for (long pair = 0; pair < row->pairs; pair++)
        if (row->owners[row->ids[pair]] == node) {
            uint16_t id = (uint16_t)row->ids[pair];
            memcpy(ids, &id, 2), memcpy(weights, &row->weights[pair], 4);
            ids += 2, weights += 4;
        }
    lane->sequence = following(lane->sequence);
    lane->pairs = pairs, lane->state = ASKED;
    size_t length = row->size, rest = OFFSETS + PAIR * (size_t)pairs;
    memcpy(header, row->head, HEAD);
    put_number(header + SEQUENCE_AT, (uint32_t)lane->sequence);
    put_number(header + LENGTH_AT, (uint32_t)(length + rest));
    uint32_t crc = checksum(checksum(0, header, HEAD), row->raw, length);
    put_number(header + HEAD, checksum(crc, tail, rest));
    struct iovec parts[] = {{header, HEADER}, {row->raw, length}, {tail, rest}};
    struct msghdr message = {.msg_iov = parts, .msg_iovlen = 3};
    ssize_t sent = sendmsg((int)lane->descriptor, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    lane->sent = sent < 0 ? 0 : sent, lane->sent_at = clock_now();
    if (lane->sent != (int64_t)(HEADER + length + rest)) lane->state = ODD;
}

/* Whether a row's values lie one after the other, whatever its exporter was asked for. */
static int in_a_row(const Py_buffer *view) {
    Py_ssize_t step = view->itemsize;
    for (int axis = view->ndim - 1; axis >= 0; step *= view->shape[axis--])
        if (view->strides && view->shape[axis] > 1 && view->strides[axis] != step) return 0;
    return 1;
}

static int is_element(const Py_buffer *view, const char *formats) {
    const char *format = view->format ? view->format : "B";
    format += *format == '<' || *format == '=' || *format == '@';
    return *format && !format[1] && strchr(formats, *format) && view->itemsize == 4;
}

/* 1, or 0 if the arrays are of other types, too long, or their values do not lie in a row. */
static int take_row(Views *views, PyObject *const *arguments, struct row *row, long form) {
    const Py_buffer *values, *ids, *weights, *owners;
    if (!(row->head = head_of(views, arguments[1], "head")) ||
        !(values = view_array(views, arguments[2], "values", '*', -1, 0)) ||
        !(ids = view_array(views, arguments[4], "ids", '*', -1, 0)) ||
        !(weights = view_array(views, arguments[5], "weights", '*', -1, 0)) ||
        !(owners = view_array(views, arguments[6], "owners", '*', 1, 0)))
        return -1;
    row->pairs = ids->len / 4;
    row->ids = ids->buf, row->weights = weights->buf, row->owners = owners->buf;
    if (!in_a_row(values) || !in_a_row(ids) || !in_a_row(weights) || !is_element(ids, "IL") ||
        !is_element(weights, "f") || row->pairs > MOST_PAIRS)
        return 0;
    if (owners->itemsize != 4 || weights->len != ids->len) {
        PyErr_SetString(PyExc_ValueError, "owners: not int32, or ids and weights that differ");
        return -1;
    }
    for (long pair = 0; pair < row->pairs; pair++)
        if (row->ids[pair] >= (uint64_t)owners->shape[0] || row->ids[pair] > UINT16_MAX) {
            PyErr_Format(PyExc_ValueError, "ids: there is no expert %u", row->ids[pair]);
            return -1;
        }
    if (!is_element(values, "f")) {   /* raw already */
        row->raw = values->buf, row->size = (size_t)values->len;
        return 1;
    }
    long hidden = (long)(values->len / 4);
    row->size = (size_t)row_bytes(form, hidden);
    if (!(row->raw = row->made = PyMem_Malloc(row->size + 1))) {
        PyErr_NoMemory();
        return -1;
    }
    kernels->forms[form].encode(values->buf, hidden, row->raw, row->raw + hidden * value_bytes(form));
    return 1;
}

/* arguments: plan, head, values, form, ids, weights, owners. 1 if all has gone, 0 if some has not,
 * 2 if nothing was done since the arrays are not such as can be taken here. */
static int out(Views *views, PyObject *const *arguments) {
    long nodes, form = PyLong_AsLong(arguments[3]);
    struct row row = {0};
    struct lane *lanes = PyErr_Occurred() ? NULL : lanes_of(views, arguments[0], &nodes);
    if (!lanes) return -1;
    if (form < 0 || form >= ROW_FORMS) {
        PyErr_Format(PyExc_ValueError, "form: there is none of number %ld", form);
        return -1;
    }
    int whole = take_row(views, arguments, &row, form);
    if (whole > 0) {
        Py_BEGIN_ALLOW_THREADS
        for (long node = 0; node < nodes; node++) {
            send_to(&lanes[node], node, &row);
            whole &= lanes[node].state != ODD;
        }
        Py_END_ALLOW_THREADS
    } else if (!whole) {
        whole = 2;
    }
    PyMem_Free(row.made);
    return whole;
}

/* ---- and back ---- */

struct due {
    uint8_t head[HEAD];
    size_t size;              /* of a reply's frame */
    uint8_t *rooms;
    size_t room;
};

/* Take what is there; ODD if it is anything but the reply that is due, or the end. */
static void take(struct lane *lane, uint8_t *room, struct due *due) {
    ssize_t count = recv((int)lane->descriptor, room + lane->got, due->room - (size_t)lane->got,
                         MSG_DONTWAIT);
    if (count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) return;
    if (count <= 0) {
        lane->state = ODD;
        return;
    }
    lane->got += count;
    put_number(due->head + SEQUENCE_AT, (uint32_t)lane->sequence);
    if (lane->got < (int64_t)due->size) {
        size_t known = lane->got < HEAD ? (size_t)lane->got : HEAD;
        if (memcmp(room, due->head, known)) lane->state = ODD;
        return;
    }
    uint32_t crc = checksum(checksum(0, room, HEAD), room + HEADER, due->size - HEADER);
    if (lane->got != (int64_t)due->size || memcmp(room, due->head, HEAD) ||
        crc != number_at(room + HEAD)) {
        lane->state = ODD;
        return;
    }
    lane->state = REPLIED, lane->replied_at = clock_now();
    lane->queue_us = number_at(room + HEADER), lane->compute_us = number_at(room + HEADER + 4);
}

/* Take from every node that has something to say. -1 for a signal. */
static int take_all(struct lane *lanes, long nodes, struct due *due) {
    struct pollfd owing[MOST_NODES];
    for (long node = 0; node < nodes; node++) {
        int descriptor = lanes[node].state == ASKED ? (int)lanes[node].descriptor : -1;
        owing[node] = (struct pollfd){descriptor, POLLIN, 0};
    }
    if (poll(owing, (nfds_t)nodes, 0) < 0) return errno == EINTR ? -1 : 0;
    for (long node = 0; node < nodes; node++)
        if (owing[node].revents) take(&lanes[node], due->rooms + due->room * (size_t)node, due);
    return 0;
}

/* Until all have replied (1), one is odd or the time is over (0), or a signal came (-1). Waits for
 * one node after the other, since to be woken for each reply takes the nodes' time where cores are
 * few; but never for long without looking at the others. */
static int gather(struct lane *lanes, long nodes, struct due *due, int64_t until, int64_t spin_until) {
    long node = 0;
    for (int64_t time = clock_now();;) {
        while (node < nodes && (lanes[node].state == UNASKED || lanes[node].state == REPLIED)) node++;
        if (node == nodes) return 1;
        if (lanes[node].state == ODD) return 0;
        int64_t got = lanes[node].got;
        take(&lanes[node], due->rooms + due->room * (size_t)node, due);
        if (lanes[node].state != ASKED || lanes[node].got != got) continue;
        struct pollfd owing = {(int)lanes[node].descriptor, POLLIN, 0};
        int ready = poll(&owing, 1, time < spin_until ? 0 : LOOK_MS);
        if (ready < 0) return errno == EINTR ? -1 : 0;
        time = clock_now();
        if (ready || time < spin_until) continue;
        if (take_all(lanes, nodes, due)) return -1;
        for (long other = 0; other < nodes; other++)
            if (lanes[other].state == ODD) return 0;
        if (time >= until) return 0;
    }
}

static long count_all(struct lane *lanes, long nodes) {
    long moved = 0;
    for (struct lane *lane = lanes; lane < lanes + nodes; lane++)
        if (lane->state == REPLIED) {
            lane->all_dispatches++, lane->all_pairs += lane->pairs;
            lane->all_queue_us += lane->queue_us, lane->all_compute_us += lane->compute_us;
            lane->all_sent += lane->sent, lane->all_got += lane->got;
            moved += (long)(lane->sent + lane->got);
        }
    return moved;
}

static int add_all(struct lane *lanes, long nodes, const struct due *due, float *total, long hidden,
                   long form) {
    const struct row_form *rows = &kernels->forms[form];
    for (long node = 0; node < nodes; node++)
        if (lanes[node].state == REPLIED) {
            const uint8_t *values = due->rooms + due->room * (size_t)node + HEADER + TIMES;
            const uint8_t *scales = values + hidden * value_bytes(form);
            if (rows->finite(values, scales, hidden)) {
                rows->add(values, scales, hidden, total);
            } else {
                lanes[node].state = ODD;
                return 0;
            }
        }
    return 1;
}

/* arguments: plan, rooms, due, total, form, seconds, spin. The bytes that went and came; 0 if the
 * caller has to go on. */
static long back(Views *views, PyObject *const *arguments) {
    long nodes;
    struct due due;
    struct lane *lanes = lanes_of(views, arguments[0], &nodes);
    const Py_buffer *rooms = lanes ? view_array(views, arguments[1], "rooms", 'B', 2, 1) : NULL;
    const uint8_t *head = rooms ? head_of(views, arguments[2], "due") : NULL;
    const Py_buffer *total = head ? view_array(views, arguments[3], "total", 'f', -1, 1) : NULL;
    if (!total) return -1;
    long form = PyLong_AsLong(arguments[4]), hidden = (long)(total->len / 4);
    double seconds = PyFloat_AsDouble(arguments[5]), spin = PyFloat_AsDouble(arguments[6]);
    if (PyErr_Occurred()) return -1;
    memcpy(due.head, head, HEAD);
    due.size = HEADER + number_at(head + LENGTH_AT);
    due.rooms = rooms->buf, due.room = (size_t)rooms->shape[1];
    if (form < 0 || form >= ROW_FORMS || rooms->shape[0] != nodes || due.room <= due.size ||
        due.size != (size_t)(HEADER + TIMES + row_bytes(form, hidden))) {
        PyErr_SetString(PyExc_ValueError, "rooms: of another number or size, or total is");
        return -1;
    }
    int64_t time = clock_now(), until = time + (int64_t)(seconds * 1e9);
    for (;;) {
        int fine;
        Py_BEGIN_ALLOW_THREADS
        fine = gather(lanes, nodes, &due, until, time + (int64_t)(spin * 1e9));
        Py_END_ALLOW_THREADS
        if (fine >= 0) {
            fine = fine && add_all(lanes, nodes, &due, total->buf, hidden, form);
            return fine ? count_all(lanes, nodes) : 0;
        }
        if (PyErr_CheckSignals()) return -1;
    }
}

static PyObject *fan_out(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    (void)module;
    if (count != 7) return PyErr_Format(PyExc_TypeError, "fan_out: %zd arguments, not 7", count);
    Views views;
    views.count = 0;
    int whole = out(&views, arguments);
    views_release(&views);
    return whole < 0 ? NULL : PyLong_FromLong(whole);
}

static PyObject *fan_in(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    (void)module;
    if (count != 7) return PyErr_Format(PyExc_TypeError, "fan_in: %zd arguments, not 7", count);
    Views views;
    views.count = 0;
    long moved = back(&views, arguments);
    views_release(&views);
    return moved < 0 ? NULL : PyLong_FromLong(moved);
}

PyMethodDef fanout_methods[] = {
    {"fan_out", (PyCFunction)(void (*)(void))fan_out, METH_FASTCALL, NULL},
    {"fan_in", (PyCFunction)(void (*)(void))fan_in, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};
