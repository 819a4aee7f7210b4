/* Which instruction set runs. */
#include "choose.h"

#include <string.h>

extern const struct kernels kernels_portable;
#ifdef HAVE_avx512
extern const struct kernels kernels_avx512;
static int has_avx512(void) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("fma");
}
#endif
#ifdef HAVE_avx2
extern const struct kernels kernels_avx2;
static int has_avx2(void) {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
           __builtin_cpu_supports("f16c");
}
#endif

#ifdef HAVE_dotprod
extern const struct kernels kernels_dotprod;
#ifdef __APPLE__
#include <sys/sysctl.h>
static int has_dotprod(void) {
    int found = 0;
    size_t size = sizeof found;
    return !sysctlbyname("hw.optional.arm.FEAT_DotProd", &found, &size, NULL, 0) && found;
}
#else
#include <sys/auxv.h>
/* HWCAP_ASIMDDP, which old headers do not have. */
static int has_dotprod(void) { return (getauxval(AT_HWCAP) >> 20) & 1; }
#endif
#endif
#ifdef HAVE_neon
extern const struct kernels kernels_neon;
#endif

static int always(void) { return 1; }

/* The best first. */
static const struct {
    const struct kernels *kernels;
    int (*runs_here)(void);
} sets[] = {
#ifdef HAVE_avx512
    {&kernels_avx512, has_avx512},
#endif
#ifdef HAVE_avx2
    {&kernels_avx2, has_avx2},
#endif
#ifdef HAVE_dotprod
    {&kernels_dotprod, has_dotprod},
#endif
#ifdef HAVE_neon
    {&kernels_neon, always},
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
