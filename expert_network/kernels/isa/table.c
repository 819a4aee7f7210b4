#include "../table.h"

#define STRING_(x) #x
#define STRING(x) STRING_(x)

void ISA(prepare)(const struct layout *, const float *, char *);
void ISA(product)(const struct matrix *, const struct layout *, long, long, long,
                  const char *const *, float *const *, long);
void ISA(activate)(enum activation, const float *, const float *, const float *, float *, long);
uint64_t ISA(read)(const uint8_t *, long, size_t);
void ISA(attend_few)(void *, long, int);
void ISA(attend_many)(void *, long, int);
void ISA(attend_end)(void *, long, int);
void ISA(rms_norm)(void *, long, int);
void ISA(rope)(void *, long, int);
void ISA(softmax)(const float *, long, float *);
extern const struct row_form ISA(row_forms)[];

const struct kernels ISA(kernels) = {
    .name = STRING(ISA_NAME),
    .prepare = ISA(prepare),
    .product = ISA(product),
    .activate = ISA(activate),
    .read = ISA(read),
    .attend_few = ISA(attend_few),
    .attend_many = ISA(attend_many),
    .attend_end = ISA(attend_end),
    .rms_norm = ISA(rms_norm),
    .rope = ISA(rope),
    .softmax = ISA(softmax),
    .forms = ISA(row_forms),
};
