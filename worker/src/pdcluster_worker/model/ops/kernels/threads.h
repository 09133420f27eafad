/* torch's own threads: the addresses of libgomp's functions, as the loader found them in the process.
 *
 * Without them everything runs on the calling thread.
 */
#ifndef THREADS_H
#define THREADS_H

#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "vectors.h"

#define LARGE 32768 /* elements below which sharing costs more than it saves */

static struct {
    void (*parallel)(void (*)(void *), void *, unsigned, unsigned); /* GOMP_parallel */
    int (*number)(void);                                            /* omp_get_thread_num */
    int (*count)(void);                                             /* omp_get_num_threads */
    int (*most)(void);                                              /* omp_get_max_threads */
    int64_t spins;                                                  /* turns of a wait before a thread sleeps */
    const _Atomic int32_t *bound;                                   /* NULL, or the most threads for the moment */
    pthread_key_t kept;
    int frees_kept; /* there is such a key */
} pool;

/* Where the threads of one region wait for each other. */
typedef struct {
    _Atomic int32_t arrived, round, asleep;
} meeting;

/* One thread's place in a parallel region. */
typedef struct {
    int64_t number, count;
    meeting *meeting;
} place;

static _Thread_local place here = {0, 1, NULL};

static INLINE place my_place(void) { return here; }

/* The most threads for the moment: another process may lower it in the middle of a step, when it wants its cores back. */
static INLINE int64_t bound_threads(void) {
    const int64_t bound = pool.bound ? atomic_load_explicit(pool.bound, memory_order_relaxed) : INT_MAX;
    return bound > 1 ? bound : 1;
}

static INLINE int64_t most_threads(void) { return pool.parallel ? least(pool.most(), bound_threads()) : 1; }

static INLINE void pause_thread(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static void sleep_until(meeting *m, int32_t round) {
    atomic_fetch_add(&m->asleep, 1);
    while (atomic_load(&m->round) == round) syscall(SYS_futex, &m->round, FUTEX_WAIT_PRIVATE, round, NULL, NULL, 0);
    atomic_fetch_sub(&m->asleep, 1);
}

/* Wait for all threads of the region that have not left it. */
static void wait_for_all(place me) {
    if (me.count == 1) return;
    meeting *m = me.meeting;
    const int32_t round = atomic_load(&m->round);
    if (atomic_fetch_add(&m->arrived, 1) + 1 == me.count) {
        atomic_store(&m->arrived, 0);
        atomic_store(&m->round, round + 1);
        if (atomic_load(&m->asleep)) syscall(SYS_futex, &m->round, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
        return;
    }
    for (int64_t turn = 0; turn < pool.spins; turn++) {
        if (atomic_load_explicit(&m->round, memory_order_acquire) != round) return;
        pause_thread();
    }
    sleep_until(m, round);
}

typedef struct {
    void (*work)(void *);
    void *data;
    meeting meeting;
} region;

static void enter(void *of) {
    region *r = of;
    here = (place){pool.number(), pool.count(), &r->meeting};
    r->work(r->data);
    here = (place){0, 1, NULL};
}

/* Run `work` on so many threads. */
static INLINE void run_on(int64_t threads, void (*work)(void *), void *data) {
    region r = {work, data, {0}};
    if (threads > 1) pool.parallel(enter, &r, (unsigned)threads, 0);
    else work(data);
}

/* Run `work` on all threads, or on this one where it is too small to share. */
static INLINE void run(void (*work)(void *), void *data, int is_large) { run_on(is_large ? most_threads() : 1, work, data); }

/* This thread's share [first, last) of `total` things. */
static INLINE void share(place me, int64_t total, int64_t *first, int64_t *last) {
    *first = total * me.number / me.count;
    *last = total * (me.number + 1) / me.count;
}

/* Users of `kept`: one's memory holds while another takes its own. */
enum { KEPT_ROWS, KEPT_ATTENTION, KEPT_EXPERTS, KEPT_USERS };

typedef struct {
    char *memory[KEPT_USERS];
    int64_t size[KEPT_USERS];
} kept_memory;

/* When its thread ends: libgomp ends those that a smaller team has no place for. */
static void free_kept(void *of) {
    kept_memory *memory = of;
    for (int user = 0; user < KEPT_USERS; user++) free(memory->memory[user]);
    *memory = (kept_memory){0};
}

/* Memory of the calling thread that grows to the user's largest step and is kept. */
static char *kept(int user, int64_t bytes) {
    static _Thread_local kept_memory mine;
    if (bytes > mine.size[user]) {
        free(mine.memory[user]);
        mine.size[user] = (bytes + bytes / 4 + (2 << 20) - 1) >> 21 << 21;
        mine.memory[user] = aligned_alloc(2 << 20, mine.size[user]);
        if (!mine.memory[user]) mine.size[user] = 0;
        if (pool.frees_kept) pthread_setspecific(pool.kept, &mine);
    }
    return mine.memory[user];
}

#endif
