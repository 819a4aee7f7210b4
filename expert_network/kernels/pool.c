#include "pool.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <time.h>
#include <unistd.h>
#ifdef __APPLE__
#include <sys/sysctl.h>
#endif

/* How long to look before sleeping: a wake-up costs 40 us, and between two runs of one token the
 * interpreter takes 100 to 300. */
#define SPIN_NS 200000

/* Odd while a run is open to workers; each run and each end of one has a number of its own. */
static atomic_ulong state;
static atomic_int inside, sleepers;
static atomic_long next_index;
static pool_task run_task;
static void *run_context;
static long run_count;
static int run_threads;

static pthread_mutex_t turn = PTHREAD_MUTEX_INITIALIZER;   /* one run at a time */
static pthread_mutex_t sleep_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t wake = PTHREAD_COND_INITIALIZER;     /* workers: a run was opened */
static pthread_cond_t done = PTHREAD_COND_INITIALIZER;     /* the caller: the last worker left */
static atomic_int caller_sleeps;
static int started;                                        /* workers, under `turn` */
static int threads;                                        /* under `turn`; 0: not yet known */
static atomic_int threads_shown;
static _Thread_local int here = -1;                        /* this thread's place inside a run */

static void relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("isb");
#endif
}

static long now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000L + t.tv_nsec;
}

/* The n-th look at what another thread is to change. Whether to look on: `end` is when to stop,
 * and 0 at first. Now and then whoever else wants this core gets it. */
static int look_again(int n, long *end) {
    relax();
    if (n % 64) return 1;
    sched_yield();
    long now = now_ns();
    if (!*end) *end = now + SPIN_NS;
    return now <= *end;
}

static int usable_cores(void) {
#if defined(__linux__)
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0) return CPU_COUNT(&set);
#elif defined(__APPLE__)
    int fast = 0;
    size_t size = sizeof fast;
    if (sysctlbyname("hw.perflevel0.logicalcpu", &fast, &size, NULL, 0) == 0 && fast > 0)
        return fast;
#endif
    long n = sysconf(_SC_NPROCESSORS_ONLN);
    return n > 0 ? (int)n : 1;
}

static int clamp(int n) { return n < 1 ? 1 : n > POOL_MOST ? POOL_MOST : n; }

static void work(int thread) {
    here = thread;
    for (;;) {
        long index = atomic_fetch_add(&next_index, 1);
        if (index >= run_count) break;
        run_task(run_context, index, thread);
    }
    here = -1;
}

/* The next run after `last`, waited for. */
static unsigned long await_run(unsigned long last) {
    unsigned long seen;
    long end = 0;
    int n = 0;
    do {
        seen = atomic_load(&state);
        if ((seen & 1) && seen != last) return seen;
    } while (look_again(n++, &end));
    pthread_mutex_lock(&sleep_lock);
    atomic_fetch_add(&sleepers, 1);
    while (seen = atomic_load(&state), !(seen & 1) || seen == last)
        pthread_cond_wait(&wake, &sleep_lock);
    atomic_fetch_sub(&sleepers, 1);
    pthread_mutex_unlock(&sleep_lock);
    return seen;
}

static void leave(void) {
    if (atomic_fetch_sub(&inside, 1) != 1 || !atomic_load(&caller_sleeps)) return;
    pthread_mutex_lock(&sleep_lock);
    pthread_cond_signal(&done);
    pthread_mutex_unlock(&sleep_lock);
}

static void *worker(void *place) {
    int thread = (int)(long)place;
    unsigned long last = 0;
    for (;;) {
        last = await_run(last);
        atomic_fetch_add(&inside, 1);
        /* From here on the caller waits for us, if it had not already closed the run. */
        if (atomic_load(&state) == last && thread < run_threads) work(thread);
        leave();
    }
    return NULL;
}

static void start_workers(int wanted) {
    sigset_t all, before;
    if (started >= wanted) return;
    /* Signals are the main thread's. */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    for (; started < wanted; started++) {
        pthread_t id;
        if (pthread_create(&id, NULL, worker, (void *)(long)(started + 1))) break;
        pthread_detach(id);
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

static void wait_for_workers(void) {
    long end = 0;
    int n = 0;
    do
        if (!atomic_load(&inside)) return;
    while (look_again(n++, &end));
    pthread_mutex_lock(&sleep_lock);
    atomic_store(&caller_sleeps, 1);
    while (atomic_load(&inside)) pthread_cond_wait(&done, &sleep_lock);
    atomic_store(&caller_sleeps, 0);
    pthread_mutex_unlock(&sleep_lock);
}

static void open_run(void) {
    atomic_fetch_add(&state, 1);
    if (!atomic_load(&sleepers)) return;
    pthread_mutex_lock(&sleep_lock);
    pthread_cond_broadcast(&wake);
    pthread_mutex_unlock(&sleep_lock);
}

/* A forked child has none of the workers, and locks in whatever state they were. */
static void forget(void) {
    pthread_mutex_t unlocked = PTHREAD_MUTEX_INITIALIZER;
    pthread_cond_t empty = PTHREAD_COND_INITIALIZER;
    turn = sleep_lock = unlocked;
    wake = done = empty;
    atomic_store(&state, 0);
    atomic_store(&inside, 0);
    atomic_store(&sleepers, 0);
    atomic_store(&caller_sleeps, 0);
    started = 0;
    here = -1;
}

static void set_up(void) { pthread_atfork(NULL, NULL, forget); }

static void take_turn(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, set_up);
    pthread_mutex_lock(&turn);
    if (!threads) threads = clamp(usable_cores());
    atomic_store(&threads_shown, threads);
}

void pool_run(pool_task task, void *context, long count) {
    if (here >= 0) {
        int thread = here;
        for (long index = 0; index < count; index++) task(context, index, thread);
        return;
    }
    take_turn();
    run_task = task, run_context = context, run_count = count, run_threads = threads;
    atomic_store(&next_index, 0);
    if (threads == 1 || count <= 1) {
        work(0);
    } else {
        start_workers(threads - 1);
        open_run();
        work(0);
        atomic_fetch_add(&state, 1);
        wait_for_workers();
    }
    pthread_mutex_unlock(&turn);
}

int pool_threads(void) {
    int known = atomic_load(&threads_shown);
    return known ? known : clamp(usable_cores());
}

void pool_set_threads(int n) {
    take_turn();
    threads = clamp(n);
    atomic_store(&threads_shown, threads);
    pthread_mutex_unlock(&turn);
}
