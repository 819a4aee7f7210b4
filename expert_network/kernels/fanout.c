/* A decode step's dispatch, one row and one weighted sum: to all nodes and back in two calls.
 *
 * Sockets block, and wait for a few milliseconds at most. Whatever is not as it should be is left
 * to the caller, with what was sent and what came. */
#include "checksum.h"
#include "frames.h"
#include "table.h"

#include <errno.h>
#include <sched.h>
#include <sys/uio.h>

#define MOST_NODES 256
/* Nanoseconds to look for what comes before sleeping, and for how many dispatches of a layer not to
 * look once that was in vain. */
#define LOOK 100000
#define IN_VAIN 32

/* One node: a row of the plan, which is int64 (nodes, 16). Times in nanoseconds. What stands after
 * `replied_at` grows with each dispatch that was answered as it should be. */
struct lane {
    int64_t descriptor, sequence, pairs, state, sent, got, queue_us, compute_us, sent_at, replied_at;
    int64_t all_dispatches, all_pairs, all_queue_us, all_compute_us, all_sent, all_got;
};
#define FIELDS (sizeof(struct lane) / sizeof(int64_t))
enum { UNASKED, ASKED, REPLIED, ODD };

/* What is the same in all dispatches of a layer, with the memory that it lies in. */
struct layer {
    struct lane *lanes;
    long nodes;
    uint8_t *rooms;           /* for what comes, `room` bytes for each node */
    size_t room;
    uint8_t head[HEAD], due[HEAD];
    const int32_t *owners;    /* of each expert: a node's number */
    long experts;
    long form, hidden;
    uint8_t *raw;             /* for a row that is encoded here */
    long unlooked;            /* dispatches that are still not to be looked for */
    Views views;
};

static const char *const NAME = "expert_network.kernels.fanout";

static int take_layer(PyObject *const *arguments, struct layer *layer) {
    Views *views = &layer->views;
    const Py_buffer *plan, *rooms, *owners;
    const uint8_t *head, *due;
    if (!(plan = view_array(views, arguments[0], "plan", '*', 2, 1)) ||
        !(rooms = view_array(views, arguments[1], "rooms", 'B', 2, 1)) ||
        !(head = head_of(views, arguments[2], "head")) ||
        !(due = head_of(views, arguments[3], "due")) ||
        !(owners = view_array(views, arguments[4], "owners", '*', 1, 0)))
        return -1;
    layer->form = PyLong_AsLong(arguments[5]), layer->hidden = PyLong_AsLong(arguments[6]);
    if (PyErr_Occurred()) return -1;
    layer->lanes = plan->buf, layer->nodes = plan->shape[0];
    layer->rooms = rooms->buf, layer->room = (size_t)rooms->shape[1];
    layer->owners = owners->buf, layer->experts = owners->shape[0];
    memcpy(layer->head, head, HEAD), memcpy(layer->due, due, HEAD);
    if (plan->itemsize != 8 || plan->shape[1] != (Py_ssize_t)FIELDS || layer->nodes > MOST_NODES ||
        owners->itemsize != 4) {
        PyErr_SetString(PyExc_ValueError, "plan, owners: not int64 (nodes, 16), int32 (experts,)");
        return -1;
    }
    if (layer->form < 0 || layer->form >= ROW_FORMS || layer->hidden < 1 ||
        layer->hidden > INT32_MAX) {
        PyErr_SetString(PyExc_ValueError, "form, hidden: there is no such row");
        return -1;
    }
    size_t size = (size_t)row_bytes(layer->form, layer->hidden);
    if (number_at(due + LENGTH_AT) != TIMES + size || layer->room <= HEADER + TIMES + size ||
        rooms->shape[0] != layer->nodes) {
        PyErr_SetString(PyExc_ValueError, "rooms: not of the nodes' number and a reply's size");
        return -1;
    }
    if ((layer->raw = PyMem_Malloc(size))) return 0;
    PyErr_NoMemory();
    return -1;
}

static void forget(struct layer *layer) {
    views_release(&layer->views);
    PyMem_Free(layer->raw);
    PyMem_Free(layer);
}

static void forget_capsule(PyObject *capsule) { forget(PyCapsule_GetPointer(capsule, NAME)); }

static PyObject *fan_layer(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    (void)module;
    if (count != 7) return PyErr_Format(PyExc_TypeError, "fan_layer: %zd arguments, not 7", count);
    struct layer *layer = PyMem_Calloc(1, sizeof *layer);
    if (!layer) return PyErr_NoMemory();
    PyObject *capsule = take_layer(arguments, layer) ? NULL
                                                     : PyCapsule_New(layer, NAME, forget_capsule);
    if (!capsule) forget(layer);
    return capsule;
}

/* ---- out ---- */

struct row {
    uint8_t *raw;
    size_t size;
    const uint32_t *ids;
    const float *weights;
    long pairs;
};

static void send_to(const struct layer *layer, long node, const struct row *row) {
    struct lane *lane = &layer->lanes[node];
    const int32_t *owners = layer->owners;
    uint8_t header[HEADER], tail[OFFSETS + PAIR * MOST_PAIRS];
    uint32_t pairs = 0;
    for (long pair = 0; pair < row->pairs; pair++) pairs += owners[row->ids[pair]] == node;
    lane->pairs = lane->state = lane->sent = lane->got = 0;
    if (!pairs) return;
    uint8_t *ids = tail + OFFSETS, *weights = ids + 2 * pairs;
    put_number(tail, 0), put_number(tail + 4, pairs);
    for (long pair = 0; pair < row->pairs; pair++)
        if (owners[row->ids[pair]] == node) {
            uint16_t id = (uint16_t)row->ids[pair];
            memcpy(ids, &id, 2), memcpy(weights, &row->weights[pair], 4);
            ids += 2, weights += 4;
        }
    lane->sequence = following(lane->sequence);
    lane->pairs = pairs, lane->state = ASKED;
    size_t length = row->size, rest = OFFSETS + PAIR * (size_t)pairs;
    memcpy(header, layer->head, HEAD);
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
static int take_row(Views *views, PyObject *const *arguments, const struct layer *layer,
                    struct row *row) {
    const Py_buffer *values, *ids, *weights;
    if (!(values = view_strided(views, arguments[1], "values", '*', -1, 0)) ||
        !(ids = view_strided(views, arguments[2], "ids", '*', -1, 0)) ||
        !(weights = view_strided(views, arguments[3], "weights", '*', -1, 0)))
        return -1;
    row->pairs = ids->len / 4, row->ids = ids->buf, row->weights = weights->buf;
    row->raw = layer->raw, row->size = (size_t)row_bytes(layer->form, layer->hidden);
    if (!in_a_row(values) || !in_a_row(ids) || !in_a_row(weights) || !is_element(ids, "IL") ||
        !is_element(weights, "f") || row->pairs > MOST_PAIRS)
        return 0;
    int encoded = !is_element(values, "f");
    if (weights->len != ids->len ||
        values->len != (encoded ? (Py_ssize_t)row->size : 4 * layer->hidden)) {
        PyErr_SetString(PyExc_ValueError, "values, ids, weights: of another size than the layer's");
        return -1;
    }
    for (long pair = 0; pair < row->pairs; pair++)
        if (row->ids[pair] >= (uint64_t)layer->experts || row->ids[pair] > UINT16_MAX) {
            PyErr_Format(PyExc_ValueError, "ids: there is no expert %u", row->ids[pair]);
            return -1;
        }
    if (encoded)
        row->raw = values->buf;
    else
        kernels->forms[layer->form].encode(values->buf, layer->hidden, row->raw,
                                           row->raw + layer->hidden * value_bytes(layer->form));
    return 1;
}

/* arguments: layer, values, ids, weights. 1 if all has gone, 0 if some has not, 2 if nothing was
 * done since the arrays are not such as can be taken here. */
static int out(Views *views, PyObject *const *arguments) {
    const struct layer *layer = PyCapsule_GetPointer(arguments[0], NAME);
    struct row row;
    int whole = layer ? take_row(views, arguments, layer, &row) : -1;
    if (whole <= 0) return whole < 0 ? -1 : 2;
    Py_BEGIN_ALLOW_THREADS
    for (long node = 0; node < layer->nodes; node++) {
        send_to(layer, node, &row);
        whole &= layer->lanes[node].state != ODD;
    }
    Py_END_ALLOW_THREADS
    return whole;
}

/* ---- and back ---- */

/* Take what comes of a node's reply, or what is there (`flags`: MSG_DONTWAIT); ODD if it is
 * anything but that. 0 if nothing came, -1 for a signal. */
static int take(const struct layer *layer, long node, int flags) {
    struct lane *lane = &layer->lanes[node];
    uint8_t *room = layer->rooms + layer->room * (size_t)node, due[HEAD];
    int64_t size = HEADER + number_at(layer->due + LENGTH_AT);
    ssize_t count = recv((int)lane->descriptor, room + lane->got, layer->room - (size_t)lane->got,
                         flags);
    if (count < 0 && errno == EINTR) return -1;
    if (count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return 0;
    if (count <= 0) {
        lane->state = ODD;
        return 1;
    }
    lane->got += count;
    memcpy(due, layer->due, HEAD);
    put_number(due + SEQUENCE_AT, (uint32_t)lane->sequence);
    if (memcmp(room, due, lane->got < HEAD ? (size_t)lane->got : HEAD) || lane->got > size) {
        lane->state = ODD;
    } else if (lane->got == size) {
        uint32_t crc = checksum(checksum(0, room, HEAD), room + HEADER, (size_t)size - HEADER);
        lane->state = crc == number_at(room + HEAD) ? REPLIED : ODD;
        lane->replied_at = clock_now();
        lane->queue_us = number_at(room + HEADER), lane->compute_us = number_at(room + HEADER + 4);
    }
    return 1;
}

/* As `gather` for LOOK at most, -1 then: who sleeps wakes late. Whoever else wants this core gets
 * it, and where replies take longer it is hardly ever tried. */
static int look(struct layer *layer) {
    if (layer->unlooked > 0) {
        layer->unlooked--;
        return -1;
    }
    int64_t until = clock_now() + LOOK;
    for (long node = 0; node < layer->nodes; node++)
        while (layer->lanes[node].state != UNASKED && layer->lanes[node].state != REPLIED) {
            if (layer->lanes[node].state == ODD) return 0;
            if (take(layer, node, MSG_DONTWAIT) > 0) continue;
            if (clock_now() >= until) {
                layer->unlooked = IN_VAIN;
                return -1;
            }
            sched_yield();
        }
    return 1;
}

/* Until all have replied (1), one is odd or the time is over (0), or a signal came (-1). Waits for
 * one node after the other, since to be woken for each reply takes the nodes' time where cores are
 * few; but when nothing came for as long as a socket waits, it looks at the others. */
static int gather(const struct layer *layer, int64_t until) {
    for (long node = 0; node < layer->nodes; node++)
        while (layer->lanes[node].state != UNASKED && layer->lanes[node].state != REPLIED) {
            if (layer->lanes[node].state == ODD) return 0;
            int came = take(layer, node, 0);
            if (came > 0) continue;
            for (long other = 0; other < layer->nodes; other++) {
                if (layer->lanes[other].state == ASKED) take(layer, other, MSG_DONTWAIT);
                if (layer->lanes[other].state == ODD) return 0;
            }
            if (came < 0) return -1;
            if (clock_now() >= until) return 0;
        }
    return 1;
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

static int add_all(const struct layer *layer, float *total) {
    const struct row_form *rows = &kernels->forms[layer->form];
    long hidden = layer->hidden;
    memset(total, 0, (size_t)hidden * 4);
    for (long node = 0; node < layer->nodes; node++)
        if (layer->lanes[node].state == REPLIED) {
            const uint8_t *values = layer->rooms + layer->room * (size_t)node + HEADER + TIMES;
            const uint8_t *scales = values + hidden * value_bytes(layer->form);
            if (!rows->finite(values, scales, hidden)) {
                layer->lanes[node].state = ODD;
                return 0;
            }
            rows->add(values, scales, hidden, total);
        }
    return 1;
}

/* arguments: layer, total, seconds. The bytes that went and came; 0 if the caller has to go on. */
static long back(Views *views, PyObject *const *arguments) {
    struct layer *layer = PyCapsule_GetPointer(arguments[0], NAME);
    const Py_buffer *total = layer ? view_array(views, arguments[1], "total", 'f', -1, 1) : NULL;
    double seconds = total ? PyFloat_AsDouble(arguments[2]) : 0;
    if (!total || PyErr_Occurred()) return -1;
    if (total->len != 4 * layer->hidden) {
        PyErr_SetString(PyExc_ValueError, "total: of another size than the layer's rows");
        return -1;
    }
    int64_t until = clock_now() + (int64_t)(seconds * 1e9);
    for (int looked = 0;; looked = 1) {
        int fine;
        Py_BEGIN_ALLOW_THREADS
        fine = looked ? gather(layer, until) : look(layer);
        if (fine > 0) fine = add_all(layer, total->buf);
        Py_END_ALLOW_THREADS
        if (fine > 0) return count_all(layer->lanes, layer->nodes);
        if (PyErr_CheckSignals()) return -1;
        if (!fine) return 0;
    }
}

static PyObject *fan_out(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    (void)module;
    if (count != 4) return PyErr_Format(PyExc_TypeError, "fan_out: %zd arguments, not 4", count);
    Views views;
    views.count = 0;
    int whole = out(&views, arguments);
    views_release(&views);
    return whole < 0 ? NULL : PyLong_FromLong(whole);
}

static PyObject *fan_in(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    (void)module;
    if (count != 3) return PyErr_Format(PyExc_TypeError, "fan_in: %zd arguments, not 3", count);
    Views views;
    views.count = 0;
    long moved = back(&views, arguments);
    views_release(&views);
    return moved < 0 ? NULL : PyLong_FromLong(moved);
}

PyMethodDef fanout_methods[] = {
    {"fan_layer", (PyCFunction)(void (*)(void))fan_layer, METH_FASTCALL, NULL},
    {"fan_out", (PyCFunction)(void (*)(void))fan_out, METH_FASTCALL, NULL},
    {"fan_in", (PyCFunction)(void (*)(void))fan_in, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};
