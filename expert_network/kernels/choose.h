#ifndef EXPERT_NETWORK_CHOOSE_H
#define EXPERT_NETWORK_CHOOSE_H

#include "table.h"

void choose_best(void);
int choose(const char *name);      /* 0: not built, or not of this processor */
const char *choice(int n);         /* the n-th set that runs here, best first; NULL at the end */

#endif
