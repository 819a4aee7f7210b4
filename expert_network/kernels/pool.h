/* The process's worker threads. */
#ifndef EXPERT_NETWORK_POOL_H
#define EXPERT_NETWORK_POOL_H

/* `thread` is 0 for the caller, and below pool_threads(): the place of a thread's own scratch. */
typedef void (*pool_task)(void *context, long index, int thread);

/* Calls task for 0..count-1, spread dynamically over the pool, and returns when all are done. The
 * caller takes part. Concurrent callers take turns; a call from inside a task runs in place, as
 * that thread's. Call it without the GIL. */
void pool_run(pool_task task, void *context, long count);

int pool_threads(void);          /* at most so many take part, the caller included */
void pool_set_threads(int n);    /* clamped to 1..POOL_MOST; waits for a run in progress */

#define POOL_MOST 256

/* Elements that one thread is done with before another would have woken. */
#define ALONE 32768

#endif
