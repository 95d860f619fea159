/* Gather and scatter of KV fragments between paged tensors and one worker's slot.
 *
 * One call moves a whole batch with the GIL released. Addresses, bounds and duplicates have been
 * checked by the caller (backends/copy/native.py and checks.py); nothing here looks at them again.
 *
 * Bulk bytes are written with non-temporal stores where the processor has them: neither a stored
 * chunk nor a loaded block is read again soon by this core, and not reading the destination first
 * saves a third of the memory traffic. docs/adr/0003-copy-kernel.md has the measurements.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <pthread.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define HAVE_X86_STREAMING 1
#else
#define HAVE_X86_STREAMING 0
#endif

#define LINE_BYTES 64
/* Below this a streaming loop costs more in set-up and partly written lines than it saves. */
#define STREAM_MIN_BYTES 256
/* Lines of the next fragment that a gather asks for early: enough to hide its first misses (the
 * hardware prefetcher starts afresh at each random place), few enough not to get in its way. */
#define PREFETCH_LINES 4

typedef void (*move_fn)(char *destination, const char *source, size_t bytes);

typedef struct {
    const char *name;
    move_fn move;
} kernel_t;

/* Same order as the columns that native.py packs. */
typedef struct {
    int64_t address;
    int64_t block_stride_bytes;
    int64_t bytes;
    int64_t slot_offset_bytes;
} fragment_t;

typedef struct {
    move_fn move;
    int to_slot;
    const fragment_t *fragments;
    const int64_t *block_ids; /* [chunks][blocks_per_chunk], -1 where a block is skipped */
    const int64_t *rows;      /* [chunks] */
    int64_t blocks_per_chunk;
    char *slot;
    int64_t row_stride_bytes;
    int64_t slot_bytes;
    int64_t block_bytes;
} batch_t;

typedef struct {
    const batch_t *batch;
    Py_ssize_t first_fragment, end_fragment;
    Py_ssize_t first_block, end_block; /* indices into block_ids, flattened */
    int zeroes_tails;
    pthread_t thread;
    int started;
} shard_t;

static void move_portable(char *destination, const char *source, size_t bytes)
{
    memcpy(destination, source, bytes);
}

#if HAVE_X86_STREAMING
/* Whole lines are streamed; the ragged ends go through memcpy. */
#define DEFINE_STREAMING_MOVE(NAME, TARGET, VECTOR, LOAD, STREAM)                                  \
    __attribute__((target(TARGET))) static void NAME(char *destination, const char *source,        \
                                                     size_t bytes)                                 \
    {                                                                                              \
        const size_t step = 4 * sizeof(VECTOR);                                                    \
        if (bytes < STREAM_MIN_BYTES) {                                                            \
            memcpy(destination, source, bytes);                                                    \
            return;                                                                                \
        }                                                                                          \
        size_t head = (size_t)(-(uintptr_t)destination & (LINE_BYTES - 1));                        \
        if (head) {                                                                                \
            memcpy(destination, source, head);                                                     \
            destination += head;                                                                   \
            source += head;                                                                        \
            bytes -= head;                                                                         \
        }                                                                                          \
        for (; bytes >= step; bytes -= step) {                                                     \
            VECTOR a = LOAD((const void *)source);                                                 \
            VECTOR b = LOAD((const void *)(source + sizeof(VECTOR)));                              \
            VECTOR c = LOAD((const void *)(source + 2 * sizeof(VECTOR)));                          \
            VECTOR d = LOAD((const void *)(source + 3 * sizeof(VECTOR)));                          \
            STREAM((void *)destination, a);                                                        \
            STREAM((void *)(destination + sizeof(VECTOR)), b);                                     \
            STREAM((void *)(destination + 2 * sizeof(VECTOR)), c);                                 \
            STREAM((void *)(destination + 3 * sizeof(VECTOR)), d);                                 \
            destination += step;                                                                   \
            source += step;                                                                        \
        }                                                                                          \
        if (bytes)                                                                                 \
            memcpy(destination, source, bytes);                                                    \
    }

DEFINE_STREAMING_MOVE(move_avx2, "avx2", __m256i, _mm256_loadu_si256, _mm256_stream_si256)
DEFINE_STREAMING_MOVE(move_avx512, "avx512f", __m512i, _mm512_loadu_si512, _mm512_stream_si512)
#endif

/* Fills `found` with the kernels that this processor can run, best first; returns how many. */
static int usable_kernels(kernel_t found[3])
{
    int count = 0;
#if HAVE_X86_STREAMING
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f"))
        found[count++] = (kernel_t){"c-avx512", move_avx512};
    if (__builtin_cpu_supports("avx2"))
        found[count++] = (kernel_t){"c-avx2", move_avx2};
#endif
    found[count++] = (kernel_t){"c-portable", move_portable};
    return count;
}

static void prefetch(const char *address)
{
#if defined(__GNUC__)
    for (int line = 0; line < PREFETCH_LINES; line++)
        __builtin_prefetch(address + line * LINE_BYTES);
#else
    (void)address;
#endif
}

static char *in_slot(const batch_t *batch, Py_ssize_t chunk, int64_t block)
{
    return batch->slot + batch->rows[chunk] * batch->row_stride_bytes + block * batch->block_bytes;
}

static char *in_tensor(const fragment_t *fragment, int64_t block_id)
{
    return (char *)(uintptr_t)fragment->address + block_id * fragment->block_stride_bytes;
}

/* How many blocks from place `first` of a chunk on follow each other without a gap, both in the
 * tensor and in the slot: they are one run of bytes. `block` is that place's number in its chunk. */
static int64_t run_length(const batch_t *batch, const fragment_t *fragment, Py_ssize_t first,
                          Py_ssize_t end, int64_t block)
{
    const int64_t *ids = batch->block_ids;
    int64_t run = 1;
    if (fragment->bytes == batch->block_bytes && fragment->block_stride_bytes == fragment->bytes)
        while (block + run < batch->blocks_per_chunk && first + run < end &&
               ids[first + run] == ids[first] + run)
            run++;
    return run;
}

/* Both walks keep to the side that is read: the writes are streamed and do not mind where they go.
 *
 * A store stays in one tensor as long as it can. */
static void gather(const batch_t *batch, const fragment_t *fragment, Py_ssize_t first,
                   Py_ssize_t end)
{
    const int64_t *ids = batch->block_ids;
    Py_ssize_t chunk = first / batch->blocks_per_chunk;
    int64_t block = first % batch->blocks_per_chunk;

    while (first < end) {
        char *destination = in_slot(batch, chunk, block) + fragment->slot_offset_bytes;
        int64_t id = ids[first];
        int64_t run = id < 0 ? 1 : run_length(batch, fragment, first, end, block);

        first += run;
        block += run;
        if (block == batch->blocks_per_chunk) {
            block = 0;
            chunk++;
        }
        if (first < end && ids[first] >= 0)
            prefetch(in_tensor(fragment, ids[first]));
        if (id < 0)
            memset(destination, 0, (size_t)fragment->bytes);
        else
            batch->move(destination, in_tensor(fragment, id), (size_t)(run * fragment->bytes));
    }
}

/* A load reads row after row, where the fragments of a block lie side by side. */
static void scatter(const batch_t *batch, const fragment_t *fragments, Py_ssize_t fragment_count,
                    Py_ssize_t first, Py_ssize_t end)
{
    for (int64_t run; first < end; first += run) {
        Py_ssize_t chunk = first / batch->blocks_per_chunk;
        int64_t block = first % batch->blocks_per_chunk;
        int64_t id = batch->block_ids[first];
        const char *source = in_slot(batch, chunk, block);

        run = 1;
        if (id < 0 || fragment_count == 0)
            continue;
        run = run_length(batch, fragments, first, end, block);
        for (const fragment_t *f = fragments; f < fragments + fragment_count; f++)
            batch->move(in_tensor(f, id), source + f->slot_offset_bytes, (size_t)(run * f->bytes));
    }
}

/* Zeroes what no block of the chunk covers, so that no earlier row's bytes leave with this one. */
static void zero_slot_tails(const batch_t *batch, Py_ssize_t first, Py_ssize_t end)
{
    int64_t used = batch->blocks_per_chunk * batch->block_bytes;
    Py_ssize_t chunk = (first + batch->blocks_per_chunk - 1) / batch->blocks_per_chunk;
    if (used == batch->slot_bytes)
        return;
    for (; chunk * batch->blocks_per_chunk < end; chunk++)
        memset(batch->slot + batch->rows[chunk] * batch->row_stride_bytes + used, 0,
               (size_t)(batch->slot_bytes - used));
}

static void *run_shard(void *argument)
{
    const shard_t *shard = argument;
    const batch_t *batch = shard->batch;
    const fragment_t *fragments = batch->fragments + shard->first_fragment;
    Py_ssize_t fragment_count = shard->end_fragment - shard->first_fragment;
    if (batch->to_slot)
        for (Py_ssize_t f = 0; f < fragment_count; f++)
            gather(batch, &fragments[f], shard->first_block, shard->end_block);
    else
        scatter(batch, fragments, fragment_count, shard->first_block, shard->end_block);
    if (shard->zeroes_tails)
        zero_slot_tails(batch, shard->first_block, shard->end_block);
#if HAVE_X86_STREAMING
    /* Streaming stores are weakly ordered; whoever is told that the batch is done must see them. */
    _mm_sfence();
#endif
    return NULL;
}

static void run_batch(const batch_t *batch, Py_ssize_t fragments, Py_ssize_t blocks, shard_t *shards,
                      Py_ssize_t threads)
{
    int by_block = blocks >= threads;
    for (Py_ssize_t t = 0; t < threads; t++) {
        shard_t *shard = &shards[t];
        shard->batch = batch;
        shard->first_fragment = by_block ? 0 : fragments * t / threads;
        shard->end_fragment = by_block ? fragments : fragments * (t + 1) / threads;
        shard->first_block = by_block ? blocks * t / threads : 0;
        shard->end_block = by_block ? blocks * (t + 1) / threads : blocks;
        shard->zeroes_tails = batch->to_slot && (by_block || t == 0);
        shard->started = t && !pthread_create(&shard->thread, NULL, run_shard, shard);
    }
    /* The calling thread takes the first shard, and any that could get no thread of its own. */
    for (Py_ssize_t t = 0; t < threads; t++)
        if (!shards[t].started)
            run_shard(&shards[t]);
    for (Py_ssize_t t = 1; t < threads; t++)
        if (shards[t].started)
            pthread_join(shards[t].thread, NULL);
}

static PyObject *kernels(PyObject *module, PyObject *unused)
{
    kernel_t found[3];
    int count = usable_kernels(found);
    PyObject *names = PyTuple_New(count);
    (void)module;
    (void)unused;
    if (!names)
        return NULL;
    for (int i = 0; i < count; i++) {
        PyObject *name = PyUnicode_FromString(found[i].name);
        if (!name) {
            Py_DECREF(names);
            return NULL;
        }
        PyTuple_SET_ITEM(names, i, name);
    }
    return names;
}

static move_fn find_move(const char *name)
{
    kernel_t found[3];
    int count = usable_kernels(found);
    for (int i = 0; i < count; i++)
        if (!strcmp(found[i].name, name))
            return found[i].move;
    return NULL;
}

static PyObject *copy(PyObject *module, PyObject *args)
{
    const char *kernel;
    Py_ssize_t threads;
    Py_buffer fragments, block_ids, rows;
    long long blocks_per_chunk, row_stride_bytes, slot_bytes, block_bytes;
    unsigned long long slot_address;
    batch_t batch = {0};
    (void)module;

    if (!PyArg_ParseTuple(args, "snpy*y*y*LKLLL", &kernel, &threads, &batch.to_slot, &fragments,
                          &block_ids, &rows, &blocks_per_chunk, &slot_address, &row_stride_bytes,
                          &slot_bytes, &block_bytes))
        return NULL;

    Py_ssize_t fragment_count = fragments.len / (Py_ssize_t)sizeof(fragment_t);
    Py_ssize_t chunks = rows.len / (Py_ssize_t)sizeof(int64_t);
    shard_t *shards = NULL;
    batch.move = find_move(kernel);
    batch.fragments = fragments.buf;
    batch.block_ids = block_ids.buf;
    batch.rows = rows.buf;
    batch.blocks_per_chunk = blocks_per_chunk;
    batch.slot = (char *)(uintptr_t)slot_address;
    batch.row_stride_bytes = row_stride_bytes;
    batch.slot_bytes = slot_bytes;
    batch.block_bytes = block_bytes;

    if (!batch.move)
        PyErr_Format(PyExc_ValueError, "kernel %s cannot run on this processor", kernel);
    else if (threads < 1 || blocks_per_chunk < 1)
        PyErr_SetString(PyExc_ValueError, "threads and blocks_per_chunk must be at least 1");
    else if (fragments.len % (Py_ssize_t)sizeof(fragment_t) ||
             rows.len % (Py_ssize_t)sizeof(int64_t) ||
             block_ids.len != chunks * blocks_per_chunk * (Py_ssize_t)sizeof(int64_t))
        PyErr_SetString(PyExc_ValueError, "buffers of fragments, blocks and rows do not fit");
    else if (!(shards = PyMem_Calloc((size_t)threads, sizeof(shard_t))))
        PyErr_NoMemory();
    else {
        Py_BEGIN_ALLOW_THREADS
        run_batch(&batch, fragment_count, chunks * blocks_per_chunk, shards, threads);
        Py_END_ALLOW_THREADS
    }

    PyMem_Free(shards);
    PyBuffer_Release(&fragments);
    PyBuffer_Release(&block_ids);
    PyBuffer_Release(&rows);
    if (PyErr_Occurred())
        return NULL;
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"kernels", kernels, METH_NOARGS, "Names of the kernels this processor can run, best first."},
    {"copy", copy, METH_VARARGS, "Moves one batch; see _kernel.pyi for the arguments."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_kernel", "KV fragment gather and scatter.", 0, methods, NULL, NULL,
    NULL, NULL,
};

PyMODINIT_FUNC PyInit__kernel(void)
{
    return PyModuleDef_Init(&definition);
}
