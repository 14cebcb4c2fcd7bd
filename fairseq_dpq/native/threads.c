/* One pool of threads for all calls. Its workers spin briefly after a call, because the next one often
 * follows at once, and then sleep. Work is handed out in pieces: a worker that the system wakes late
 * takes fewer of them or none, and nobody waits for it.
 *
 * A call that finds the pool busy runs in its own thread. After fork() the child has no workers; it
 * starts its own when it needs them. */
#define _POSIX_C_SOURCE 200809L /* clock_gettime, sigset_t */
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <time.h>

#include "internal.h"

#define SPIN_NANOSECONDS 50000
#define PIECES 4 /* of each thread's share, so that a slow thread leaves some to the others */

typedef struct {
    dpq_work work;
    const void *job;
    int64_t count, piece;
    atomic_llong next;   /* the first item that nobody has taken */
    atomic_llong failed; /* the first item of a piece that failed; INT64_MAX for none */
    int64_t result;      /* of that piece; guarded by `lock` */
} call;

static call now; /* the call that the pool works on: written while it is closed and nobody inside */
static atomic_int busy, open, inside, seats, sleepers;
static atomic_ullong epoch; /* counts calls: what workers wait for */
static int workers;         /* started so far; changed by the owner of `busy` */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t wake = PTHREAD_COND_INITIALIZER;

static void relax(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static int64_t nanoseconds(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

/* Take pieces until none is left. */
static void run_pieces(call *own) {
    for (;;) {
        int64_t start = atomic_fetch_add(&own->next, own->piece);
        if (start >= own->count || start > atomic_load(&own->failed)) return;
        int64_t end = own->count - start < own->piece ? own->count : start + own->piece;
        int64_t result = own->work(own->job, start, end);
        if (!result) continue;
        pthread_mutex_lock(&lock);
        if (start < atomic_load(&own->failed)) {
            atomic_store(&own->failed, start);
            own->result = result;
        }
        pthread_mutex_unlock(&lock);
    }
}

/* Work on the present call, if there is one with a free seat. The owner closes a call before it waits
 * until nobody is inside, so a worker either sees that it is closed or is waited for. */
static void join_in(void) {
    atomic_fetch_add(&inside, 1);
    if (atomic_load(&open) && atomic_fetch_sub(&seats, 1) > 0) run_pieces(&now);
    atomic_fetch_sub(&inside, 1);
}

static void *worker(void *argument) {
    unsigned long long seen = (unsigned long long)(uintptr_t)argument;
    for (;;) {
        for (int64_t until = nanoseconds() + SPIN_NANOSECONDS; atomic_load(&epoch) == seen;) {
            for (int i = 0; i < 32 && atomic_load_explicit(&epoch, memory_order_relaxed) == seen; i++) {
                relax();
            }
            if (atomic_load(&epoch) != seen || nanoseconds() < until) continue;
            pthread_mutex_lock(&lock);
            atomic_fetch_add(&sleepers, 1);
            while (atomic_load(&epoch) == seen) pthread_cond_wait(&wake, &lock);
            atomic_fetch_sub(&sleepers, 1);
            pthread_mutex_unlock(&lock);
        }
        seen = atomic_load(&epoch);
        join_in();
    }
    return NULL;
}

static void before_fork(void) { pthread_mutex_lock(&lock); }

static void in_parent(void) { pthread_mutex_unlock(&lock); }

/* The child has one thread, and no call is under way in it. */
static void in_child(void) {
    pthread_mutex_init(&lock, NULL);
    pthread_cond_init(&wake, NULL);
    workers = 0;
    atomic_store(&open, 0);
    atomic_store(&inside, 0);
    atomic_store(&sleepers, 0);
    atomic_store(&busy, 0);
}

static void watch_fork(void) { pthread_atfork(before_fork, in_parent, in_child); }

/* Start workers until there are `wanted`, or as many as the system gives. Signals are for the
 * program's own threads. */
static void start_workers(int wanted) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    if (workers >= wanted) return;
    pthread_once(&once, watch_fork);
    pthread_attr_t detached;
    if (pthread_attr_init(&detached)) return;
    pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED);
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    for (; workers < wanted; workers++) {
        pthread_t id;
        void *seen = (void *)(uintptr_t)atomic_load(&epoch);
        if (pthread_create(&id, &detached, worker, seen)) break;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&detached);
}

int64_t dpq_parallel(dpq_work work, const void *job, int64_t count, int64_t grain,
                     int32_t threads) {
    int64_t parts = threads < DPQ_MAX_THREADS ? threads : DPQ_MAX_THREADS;
#ifdef DPQ_SHARE_ALL /* for tests: share out the smallest work */
    grain = 1;
#endif
    if (grain < 1) grain = 1;
    if (parts > count / grain) parts = count / grain;
    if (parts <= 1 || atomic_exchange(&busy, 1)) return work(job, 0, count);

    start_workers((int)parts - 1);
    int64_t piece = (count + PIECES * parts - 1) / (PIECES * parts);
    if (piece > 256) piece = (piece + 63) / 64 * 64; /* kernels take up to 64 rows at once */
    now.work = work;
    now.job = job;
    now.count = count;
    now.piece = piece;
    now.result = 0;
    atomic_store(&now.next, 0);
    atomic_store(&now.failed, INT64_MAX);
    atomic_store(&seats, (int)parts - 1);
    atomic_store(&open, 1);
    atomic_fetch_add(&epoch, 1);
    if (atomic_load(&sleepers)) {
        pthread_mutex_lock(&lock);
        pthread_cond_broadcast(&wake);
        pthread_mutex_unlock(&lock);
    }
    run_pieces(&now);
    atomic_store(&open, 0);
    for (int spins = 0; atomic_load(&inside); spins++) {
        if (spins < 10000) relax();
        else sched_yield();
    }
    int64_t result = now.result;
    atomic_store(&busy, 0);
    return result;
}
