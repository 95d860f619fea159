/* Several writes of one thread at once, through io_uring (io_uring_setup(2), io_uring_enter(2)).
 *
 * A thread that writes one file after another is woken for each, and the disk has one request of it
 * at a time. Here it hands over several and is woken once. It is a faster way and never the only
 * one: kernels and containers may refuse it, and what was not written whole is for the caller.
 */

#ifndef KVQUAY_RING_H
#define KVQUAY_RING_H

#include <stddef.h>

#define RING_MOST 16

typedef struct {
    int fd;
    const char *data;
    size_t size;
    int is_under_way;
    int is_whole; /* set where all of it was written, from the file's front on */
} ring_write_t;

/* Hands them over, if that is possible. Of all that a thread has handed over and not ended there
 * are RING_MOST at most; they and their data stay where they are. */
void ring_begin(ring_write_t *writes, size_t count);

/* Returns when none of these is under way any more. */
void ring_end(ring_write_t *writes, size_t count);

/* Whether it is used; `wanted` 0: not from now on, 1: where it can be. */
int ring_use(int wanted);

#endif
