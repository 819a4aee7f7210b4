#include "../table.h"

#define STRING_(x) #x
#define STRING(x) STRING_(x)

void ISA(prepare)(const struct layout *, const float *, char *);
void ISA(product)(const struct matrix *, const struct layout *, long, long, long,
                  const char *const *, float *const *, long);
void ISA(activate)(enum activation, const float *, const float *, const float *, float *, long);
uint64_t ISA(read)(const uint8_t *, long, size_t);
extern const struct attention_tasks ISA(attention_tasks);
extern const struct row_tasks ISA(row_tasks);

const struct kernels ISA(kernels) = {
    .name = STRING(ISA_NAME),
    .prepare = ISA(prepare),
    .product = ISA(product),
    .activate = ISA(activate),
    .read = ISA(read),
    .attention = &ISA(attention_tasks),
    .rows = &ISA(row_tasks),
};
