#include "../table.h"

#define STRING_(x) #x
#define STRING(x) STRING_(x)

const struct kernels ISA(kernels) = {
    .name = STRING(ISA_NAME),
};
