/* Locks that are given in the order in which they were asked for, as kernels.Turns has them. */
#ifndef EXPERT_NETWORK_TURNS_H
#define EXPERT_NETWORK_TURNS_H

#include "module.h"

struct turns;

/* The lock of a Turns, alive as long as it is. NULL and ValueError naming `what` otherwise. */
struct turns *turns_of(PyObject *object, const char *what);

/* Without the GIL. */
void turns_take(struct turns *turns);
void turns_give(struct turns *turns);

int add_turns_type(PyObject *module);

#endif
