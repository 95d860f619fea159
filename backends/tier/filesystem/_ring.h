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
    int is_whole; /* set where all of it was written, from the file's front on */
} ring_write_t;

/* Returns when nothing is under way any more. Not of one write, nor of more than RING_MOST. */
void ring_write(ring_write_t *writes, size_t count);

/* Whether it is used; `wanted` 0: not from now on, 1: where it can be. */
int ring_use(int wanted);

#endif
