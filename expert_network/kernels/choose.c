/* Which instruction set runs. */
#include "choose.h"

#include <string.h>

extern const struct kernels kernels_portable;
#ifdef HAVE_avx2
extern const struct kernels kernels_avx2;
static int has_avx2(void) {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
           __builtin_cpu_supports("f16c");
}
#endif

static int always(void) { return 1; }

/* The best first. */
static const struct {
    const struct kernels *kernels;
    int (*runs_here)(void);
} sets[] = {
#ifdef HAVE_avx2
    {&kernels_avx2, has_avx2},
#endif
    {&kernels_portable, always},
};
#define SETS (int)(sizeof sets / sizeof sets[0])

const struct kernels *kernels = &kernels_portable;

void choose_best(void) {
    for (int n = SETS - 1; n >= 0; n--)
        if (sets[n].runs_here()) kernels = sets[n].kernels;
}

int choose(const char *name) {
    for (int n = 0; n < SETS; n++)
        if (!strcmp(sets[n].kernels->name, name) && sets[n].runs_here()) {
            kernels = sets[n].kernels;
            return 1;
        }
    return 0;
}

const char *choice(int n) {
    for (int i = 0; i < SETS; i++)
        if (sets[i].runs_here() && n-- == 0) return sets[i].kernels->name;
    return NULL;
}
