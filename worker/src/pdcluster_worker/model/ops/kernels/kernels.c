/* All kernels of one level of instructions.  Built once for each level of worker/setup.py; ops/kernel_object.py chooses at load. */
#include "layers.h"

/* Digest of the sources that this was compiled from: Python's side refuses an object of others (ops/kernel_object.py). */
uint64_t sources(void) {
    return KERNEL_SOURCES;
}

/* Take libgomp's functions (NULL: one thread) and make the CPU ready; returns 0, or an error of the kernel.
 * spins: turns of a wait before a thread sleeps. */
int64_t start(void *parallel, void *number, void *count, void *most, int64_t spins) {
    pool.parallel = (void (*)(void (*)(void *), void *, unsigned, unsigned))parallel;
    pool.number = (int (*)(void))number;
    pool.count = (int (*)(void))count;
    pool.most = (int (*)(void))most;
    pool.spins = spins;
    if (!pool.frees_kept) pool.frees_kept = !pthread_key_create(&pool.kept, free_kept);
#if defined(__AMX_BF16__)
    const long ask_for_feature = 0x1023, tile_data = 18; /* ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA */
    return syscall(SYS_arch_prctl, ask_for_feature, tile_data);
#else
    return 0;
#endif
}

/* Use no more threads than stand at this address from now on, an int32 that others may change; NULL: as many as torch. */
void bound(const void *threads) {
    pool.bound = threads;
}

/* A function over rows [first, last) of its arguments, and the rows that threads share. */
typedef struct {
    void (*work)(const void *, int64_t, int64_t);
    const void *arguments;
    int64_t first, last;
} shared_rows;

static void my_rows(void *data) {
    const shared_rows *shared = data;
    int64_t first, last;
    share(my_place(), shared->last - shared->first, &first, &last);
    if (first < last) shared->work(shared->arguments, shared->first + first, shared->first + last);
}

/* Run a function of sample.c on all threads. */
void share_rows(void (*work)(const void *, int64_t, int64_t), const void *arguments, int64_t first, int64_t last) {
    shared_rows shared = {work, arguments, first, last};
    run(my_rows, &shared, last - first > 1);
}
