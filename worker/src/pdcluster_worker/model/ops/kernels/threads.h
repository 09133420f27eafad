/* torch's own threads: the addresses of libgomp's functions, as the loader found them in the process.
 *
 * Without them everything runs on the calling thread.
 */
#ifndef THREADS_H
#define THREADS_H

#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>

#define LARGE 32768 /* elements below which sharing costs more than it saves */

static struct {
    void (*parallel)(void (*)(void *), void *, unsigned, unsigned); /* GOMP_parallel */
    void (*barrier)(void);                                          /* GOMP_barrier */
    int (*number)(void);                                            /* omp_get_thread_num */
    int (*count)(void);                                             /* omp_get_num_threads */
    int (*most)(void);                                              /* omp_get_max_threads */
} pool;

/* One thread's place in a parallel region. */
typedef struct {
    int64_t number, count;
} place;

static inline place my_place(void) {
    if (!pool.parallel) return (place){0, 1};
    return (place){pool.number(), pool.count()};
}

static inline int64_t most_threads(void) { return pool.parallel ? pool.most() : 1; }

static inline void wait_for_all(place me) {
    if (me.count > 1) pool.barrier();
}

/* Run `work` on all threads of torch, or on this one where it is too small to share. */
static inline void run(void (*work)(void *), void *data, int is_large) {
    if (is_large && most_threads() > 1) pool.parallel(work, data, 0, 0);
    else work(data);
}

/* This thread's share [first, last) of `total` things. */
static inline void share(place me, int64_t total, int64_t *first, int64_t *last) {
    *first = total * me.number / me.count;
    *last = total * (me.number + 1) / me.count;
}

/* Users of `kept`: one's memory holds while another takes its own. */
enum { KEPT_ROWS, KEPT_ATTENTION, KEPT_USERS };

/* Memory of the calling thread that grows to the user's largest step and is kept. */
static char *kept(int user, int64_t bytes) {
    static _Thread_local char *memory[KEPT_USERS];
    static _Thread_local int64_t size[KEPT_USERS];
    if (bytes > size[user]) {
        free(memory[user]);
        size[user] = (bytes + bytes / 4 + (2 << 20) - 1) >> 21 << 21;
        memory[user] = aligned_alloc(2 << 20, size[user]);
        if (!memory[user]) size[user] = 0;
    }
    return memory[user];
}

#endif
