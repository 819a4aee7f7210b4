#include "../table.h"

#define STRING_(x) #x
#define STRING(x) STRING_(x)

extern const struct attention_tasks ISA(attention_tasks);
extern const struct row_tasks ISA(row_tasks);

const struct kernels ISA(kernels) = {
    .name = STRING(ISA_NAME),
    .attention = &ISA(attention_tasks),
    .rows = &ISA(row_tasks),
};
