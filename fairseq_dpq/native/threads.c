/* Threads, started per call: a pool would have to survive fork(), and starting one costs far less
 * than the work that is shared out here. */
#include <pthread.h>

#include "internal.h"

typedef struct {
    dpq_work work;
    const void *job;
    int64_t start, end, result;
} share;

static void *run(void *argument) {
    share *own = argument;
    own->result = own->work(own->job, own->start, own->end);
    return NULL;
}

int64_t dpq_parallel(dpq_work work, const void *job, int64_t count, int64_t grain,
                     int32_t threads) {
    int64_t parts = threads < DPQ_MAX_THREADS ? threads : DPQ_MAX_THREADS;
    if (grain < 1) grain = 1;
    if (parts > count / grain) parts = count / grain;
    if (parts <= 1) return work(job, 0, count);

    share shares[DPQ_MAX_THREADS];
    pthread_t ids[DPQ_MAX_THREADS];
    int started[DPQ_MAX_THREADS] = {0};
    for (int64_t i = 0; i < parts; i++) {
        int64_t size = count / parts, rest = count % parts;
        int64_t start = size * i + (i < rest ? i : rest);
        shares[i] = (share){work, job, start, start + size + (i < rest), 0};
        if (i) started[i] = pthread_create(&ids[i], NULL, run, &shares[i]) == 0;
    }
    for (int64_t i = 0; i < parts; i++) {
        if (!started[i]) run(&shares[i]);
    }
    int64_t result = 0;
    for (int64_t i = 0; i < parts; i++) {
        if (started[i]) pthread_join(ids[i], NULL);
        if (!result) result = shares[i].result;
    }
    return result;
}
