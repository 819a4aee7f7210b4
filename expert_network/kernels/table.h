/* What is compiled once per instruction set (every source in isa/), and the one that is chosen.
 *
 * Sources in isa/ name their functions with ISA(name) and may use what ISA_<set> promises. To add
 * a function: a member here, and its place in isa/table.c. To add an instruction set: its flags in
 * hatch_build.py, a line in choose.c, and what differs in a simd_<set>.h. */
#ifndef EXPERT_NETWORK_TABLE_H
#define EXPERT_NETWORK_TABLE_H

#include <stddef.h>
#include <stdint.h>

#include "activation.h"
#include "forms.h"
#include "pool.h"

#define PASTE_(a, b) a##_##b
#define PASTE(a, b) PASTE_(a, b)
#define ISA(name) PASTE(name, ISA_NAME)

struct matrix;
struct layout;

struct kernels {
    const char *name;

    /* A row of layout->cols floats, made ready in `row` (layout->bytes, aligned to 64). */
    void (*prepare)(const struct layout *layout, const float *x, char *row);
    /* out[r][c] = prepared row x[r] times row `first` + c of matrix `expert`, with its bias. */
    void (*product)(const struct matrix *m, const struct layout *layout, long expert, long first,
                    long count, const char *const *x, float *const *out, long rows);
    /* out[0..count) from two arrays; without a gate, from `up` twice. */
    void (*activate)(enum activation kind, const float *parameters, const float *gate,
                     const float *up, float *out, long count);
    /* Reads `streams` runs of `bytes` (a multiple of 128) that follow one another, in turns. */
    uint64_t (*read)(const uint8_t *memory, long streams, size_t bytes);
    /* Tasks of struct attention: few or many rows, index (head, block, chunk), a head being a
     * batch's key head; end, index (head, row). */
    pool_task attend_few, attend_many, attend_end;
    pool_task rms_norm, rope;       /* of the structs in norms.h */
    /* Shares that add up to 1; out may be x. */
    void (*softmax)(const float *x, long size, float *out);
    const struct row_form *forms;   /* as forms.h numbers them */
};

extern const struct kernels *kernels;   /* never NULL; changed by use_isa only */

#endif
