/* What fanout.c and single.c know of frames: a header ends with the crc32 of what stands before it
 * and of the payload; where in it the sequence number and the payload's length stand; and that a
 * dispatch of one row goes on with offsets, ids and weights, a reply with its times. All else is in
 * heads, which are headers but for the crc32, made by the protocol. */
#ifndef EXPERT_NETWORK_FRAMES_H
#define EXPERT_NETWORK_FRAMES_H

#include "experts.h"
#include "forms.h"
#include "module.h"

#include <stdint.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "frames are little-endian, and so must be what is sent as it lies in memory"
#endif

#define HEAD 28
#define HEADER 32
#define SEQUENCE_AT 8
#define LENGTH_AT 24
#define TIMES 8             /* bytes of a reply before its values */
#define OFFSETS 8           /* bytes of a dispatch's offsets, if it has one row */
#define PAIR 6              /* bytes of an id and a weight */

#ifndef MSG_NOSIGNAL        /* Python ignores SIGPIPE */
#define MSG_NOSIGNAL 0
#endif

static inline void put_number(uint8_t *at, uint32_t number) { memcpy(at, &number, 4); }

static inline uint32_t number_at(const uint8_t *at) {
    uint32_t number;
    memcpy(&number, at, 4);
    return number;
}

/* Nanoseconds, by the clock of time.perf_counter. */
static inline int64_t clock_now(void) {
#ifdef __APPLE__
    return (int64_t)clock_gettime_nsec_np(CLOCK_UPTIME_RAW);
#else
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * INT64_C(1000000000) + time.tv_nsec;
#endif
}

static inline int64_t following(int64_t sequence) {
    return sequence == UINT32_MAX ? 1 : sequence + 1;
}

static inline long value_bytes(long form) { return form == ROW_F32 ? 4 : form == ROW_INT8 ? 1 : 2; }

static inline long row_bytes(long form, long hidden) {
    long scales = form == ROW_INT8 ? (hidden + ROW_BLOCK - 1) / ROW_BLOCK * 2 : 0;
    return hidden * value_bytes(form) + scales;
}

/* The bytes of a head given by Python. NULL and ValueError if it is none. */
static inline const uint8_t *head_of(Views *views, PyObject *head, const char *what) {
    const Py_buffer *view = view_array(views, head, what, 'B', 1, 0);
    if (!view) return NULL;
    if (view->len == HEAD) return view->buf;
    PyErr_Format(PyExc_ValueError, "%s: %zd bytes, not %d", what, view->len, HEAD);
    return NULL;
}

/* A function for Python whose work gives 0 or 1, or -1 with an error set. */
static inline PyObject *call_with_views(int (*work)(Views *, PyObject *const *), const char *name,
                                        PyObject *const *arguments, Py_ssize_t count,
                                        Py_ssize_t wanted) {
    if (count != wanted)
        return PyErr_Format(PyExc_TypeError, "%s: %zd arguments, not %zd", name, count, wanted);
    Views views;
    views.count = 0;
    int fine = work(&views, arguments);
    views_release(&views);
    return fine < 0 ? NULL : PyBool_FromLong(fine);
}

#endif
