#define _GNU_SOURCE
#include "_ring.h"

#if defined(__linux__) && defined(__has_include)
#if __has_include(<linux/io_uring.h>)
#include <linux/io_uring.h>
#endif
#endif

#ifdef IORING_FEAT_SINGLE_MMAP

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Kernels and containers that do not have it are not asked again. */
static atomic_int refused;

typedef struct {
    pid_t pid;
    int fd;
    char *queues;
    size_t queues_size, entries_size;
    struct io_uring_sqe *entries;
    struct io_uring_params is;
} ring_t;

/* Each thread keeps its own, which goes with it. */
static pthread_key_t own;
static pthread_once_t own_made = PTHREAD_ONCE_INIT;
static int own_error;

static int ring_open(ring_t *ring)
{
    ring->fd = (int)syscall(SYS_io_uring_setup, RING_MOST, &ring->is);
    if (ring->fd < 0)
        return -1;
    const struct io_uring_params *is = &ring->is;
    size_t submissions = is->sq_off.array + is->sq_entries * sizeof(uint32_t);
    size_t completions = is->cq_off.cqes + is->cq_entries * sizeof(struct io_uring_cqe);
    ring->queues_size = submissions > completions ? submissions : completions;
    ring->entries_size = is->sq_entries * sizeof(struct io_uring_sqe);
    if (is->features & IORING_FEAT_SINGLE_MMAP) {
        ring->queues = mmap(NULL, ring->queues_size, PROT_READ | PROT_WRITE,
                            MAP_SHARED | MAP_POPULATE, ring->fd, IORING_OFF_SQ_RING);
        if (ring->queues != MAP_FAILED) {
            ring->entries = mmap(NULL, ring->entries_size, PROT_READ | PROT_WRITE,
                                 MAP_SHARED | MAP_POPULATE, ring->fd, IORING_OFF_SQES);
            if (ring->entries != MAP_FAILED)
                return 0;
            munmap(ring->queues, ring->queues_size);
        }
    }
    close(ring->fd);
    return -1;
}

static void ring_close(void *given)
{
    ring_t *ring = given;
    munmap(ring->entries, ring->entries_size);
    munmap(ring->queues, ring->queues_size);
    close(ring->fd);
    free(ring);
}

static void make_own(void)
{
    own_error = pthread_key_create(&own, ring_close);
}

/* This thread's ring; NULL with errno where there is none to be had. */
static ring_t *ring_of_thread(void)
{
    errno = ENOMEM;
    if (pthread_once(&own_made, make_own) || own_error)
        return NULL;
    ring_t *ring = pthread_getspecific(own);
    /* A forked child has its parent's ring, which is not its own to use. */
    if (ring != NULL)
        return ring->pid == getpid() ? ring : NULL;
    ring = calloc(1, sizeof *ring);
    if (ring == NULL)
        return NULL;
    ring->pid = getpid();
    if (ring_open(ring) < 0) {
        free(ring);
        return NULL;
    }
    if (pthread_setspecific(own, ring)) {
        ring_close(ring);
        return NULL;
    }
    return ring;
}

static _Atomic uint32_t *word(const ring_t *ring, uint32_t offset)
{
    return (_Atomic uint32_t *)(ring->queues + offset);
}

/* Takes the answers that are there. */
static void ring_take(const ring_t *ring)
{
    const struct io_cqring_offsets *at = &ring->is.cq_off;
    const struct io_uring_cqe *answers = (void *)(ring->queues + at->cqes);
    uint32_t mask = *word(ring, at->ring_mask);
    uint32_t head = atomic_load_explicit(word(ring, at->head), memory_order_relaxed);
    uint32_t tail = atomic_load_explicit(word(ring, at->tail), memory_order_acquire);
    for (; head != tail; head++) {
        const struct io_uring_cqe *answer = &answers[head & mask];
        ring_write_t *write = (ring_write_t *)(uintptr_t)answer->user_data;
        write->is_whole = answer->res >= 0 && (size_t)answer->res == write->size;
        write->is_under_way = 0;
    }
    atomic_store_explicit(word(ring, at->head), head, memory_order_release);
}

void ring_begin(ring_write_t *writes, size_t count)
{
    for (size_t i = 0; i < count; i++)
        writes[i].is_whole = writes[i].is_under_way = 0;
    if (!count || atomic_load(&refused))
        return;
    ring_t *ring = ring_of_thread();
    if (ring == NULL) {
        if (errno == ENOSYS || errno == EPERM || errno == EACCES || errno == EINVAL)
            atomic_store(&refused, 1);
        return;
    }
    const struct io_sqring_offsets *at = &ring->is.sq_off;
    uint32_t *slots = (void *)(ring->queues + at->array);
    uint32_t mask = *word(ring, at->ring_mask);
    uint32_t begin = atomic_load_explicit(word(ring, at->tail), memory_order_relaxed);
    for (size_t i = 0; i < count; i++) {
        uint32_t slot = (begin + (uint32_t)i) & mask;
        struct io_uring_sqe *entry = &ring->entries[slot];
        memset(entry, 0, sizeof *entry);
        entry->opcode = IORING_OP_WRITE;
        entry->fd = writes[i].fd;
        entry->addr = (uint64_t)(uintptr_t)writes[i].data;
        entry->len = (uint32_t)writes[i].size;
        entry->user_data = (uint64_t)(uintptr_t)&writes[i];
        slots[slot] = slot;
    }
    atomic_store_explicit(word(ring, at->tail), begin + (uint32_t)count, memory_order_release);
    size_t taken = 0;
    while (taken < count) {
        long more = syscall(SYS_io_uring_enter, ring->fd, (unsigned int)(count - taken), 0, 0,
                            NULL, 0);
        if (more > 0)
            taken += (size_t)more;
        else if (more == 0 || errno != EINTR)
            break;
    }
    for (size_t i = 0; i < taken; i++)
        writes[i].is_under_way = 1;
    /* What the kernel has not taken is taken back. */
    atomic_store_explicit(word(ring, at->tail), begin + (uint32_t)taken, memory_order_release);
}

static unsigned int under_way(const ring_write_t *writes, size_t count)
{
    unsigned int left = 0;
    for (size_t i = 0; i < count; i++)
        left += writes[i].is_under_way != 0;
    return left;
}

void ring_end(ring_write_t *writes, size_t count)
{
    if (!under_way(writes, count))
        return;
    const ring_t *ring = pthread_getspecific(own);
    for (;;) {
        ring_take(ring);
        unsigned int left = under_way(writes, count);
        if (!left)
            return;
        /* An answer of others may come first. Whatever is wrong, the disk may still be reading. */
        if (syscall(SYS_io_uring_enter, ring->fd, 0, left, IORING_ENTER_GETEVENTS, NULL, 0) < 0 &&
            errno != EINTR)
            sched_yield();
    }
}

int ring_use(int wanted)
{
    atomic_store(&refused, !wanted);
    return wanted;
}

#else

void ring_begin(ring_write_t *writes, size_t count)
{
    for (size_t i = 0; i < count; i++)
        writes[i].is_whole = writes[i].is_under_way = 0;
}

void ring_end(ring_write_t *writes, size_t count)
{
    (void)writes;
    (void)count;
}

int ring_use(int wanted)
{
    (void)wanted;
    return 0;
}

#endif
