#ifndef EXPERT_NETWORK_OPS_MATRIX_H
#define EXPERT_NETWORK_OPS_MATRIX_H

#include "matrix.h"
#include "module.h"

/* The weights of a Matrix, alive as long as it is. NULL and ValueError naming `what` otherwise. */
const struct matrix *matrix_of(PyObject *object, const char *what);

int add_matrix_type(PyObject *module);

#endif
