/* Ways to copy KV fragments, side by side; docs/adr/0003-copy-kernel.md draws on its figures.
 *
 *   mkdir -p build && cc -O3 -pthread -o build/copy_variants benchmarks/copy_variants.c
 *   build/copy_variants [threads] [rounds] [chunks] [fragment KiB]      (x86-64 with AVX2)
 *
 * 64 layers-first tensors in private memory, rows in a shared memory file, random places. Each run
 * of a variant stands beside a run of a contiguous memcpy of as many bytes; the ratio is the median
 * over the rounds of the memcpy's time over the variant's.
 */

#define _GNU_SOURCE
#include <immintrin.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum { LAYERS = 64, SPARE = 50, HEADER = 4096, MAX_THREADS = 64, MAX_ROUNDS = 64 };
enum order { CONTIGUOUS, LAYER_MAJOR, CHUNK_MAJOR };

static size_t fragment_bytes, row_bytes;
static int chunks, threads;
static char *kv, *region;
static int *blocks, *rows;

typedef void (*move_fn)(char *destination, const char *source, size_t bytes);

static void move_memcpy(char *d, const char *s, size_t n) { memcpy(d, s, n); }

static void move_rep_movsb(char *d, const char *s, size_t n)
{
    __asm__ volatile("rep movsb" : "+D"(d), "+S"(s), "+c"(n)::"memory");
}

#define AVX2 __attribute__((target("avx2"))) static
#define LOAD(P) _mm256_loadu_si256((const __m256i *)(P))
#define STREAM(P, V) _mm256_stream_si256((__m256i *)(P), V)

/* AHEAD: distance of a software prefetch in bytes, 0 for none. */
#define DEFINE_STREAM(NAME, AHEAD)                                                                 \
    AVX2 void NAME(char *d, const char *s, size_t n)                                               \
    {                                                                                              \
        for (size_t i = 0; i < n; i += 128) {                                                      \
            if (AHEAD) {                                                                           \
                _mm_prefetch(s + i + AHEAD, _MM_HINT_T0);                                          \
                _mm_prefetch(s + i + AHEAD + 64, _MM_HINT_T0);                                     \
            }                                                                                      \
            __m256i a = LOAD(s + i), b = LOAD(s + i + 32), c = LOAD(s + i + 64),                   \
                    e = LOAD(s + i + 96);                                                          \
            STREAM(d + i, a);                                                                      \
            STREAM(d + i + 32, b);                                                                 \
            STREAM(d + i + 64, c);                                                                 \
            STREAM(d + i + 96, e);                                                                 \
        }                                                                                          \
    }
DEFINE_STREAM(move_stream, 0)
DEFINE_STREAM(move_stream_ahead_512, 512)
DEFINE_STREAM(move_stream_ahead_2048, 2048)

/* One line of each of PAGES pages in turn, as glibc does for large copies. */
#define DEFINE_PAGES(NAME, PAGES)                                                                  \
    AVX2 void NAME(char *d, const char *s, size_t n)                                               \
    {                                                                                              \
        for (size_t base = 0; base < n; base += 4096 * PAGES)                                      \
            for (size_t i = base; i < base + 4096; i += 64)                                        \
                for (size_t p = i; p < i + 4096 * PAGES; p += 4096) {                              \
                    __m256i a = LOAD(s + p), b = LOAD(s + p + 32);                                 \
                    STREAM(d + p, a);                                                              \
                    STREAM(d + p + 32, b);                                                         \
                }                                                                                  \
    }
DEFINE_PAGES(move_2_pages, 2)
DEFINE_PAGES(move_4_pages, 4)

struct variant {
    const char *name;
    enum order order;
    move_fn move;
    int next_lines; /* lines of the next fragment to prefetch */
};

static const struct variant variants[] = {
    {"contiguous memcpy", CONTIGUOUS, move_memcpy, 0},
    {"contiguous stream", CONTIGUOUS, move_stream, 0},
    {"layer-major memcpy", LAYER_MAJOR, move_memcpy, 0},
    {"chunk-major memcpy", CHUNK_MAJOR, move_memcpy, 0},
    {"layer-major rep movsb", LAYER_MAJOR, move_rep_movsb, 0},
    {"layer-major stream", LAYER_MAJOR, move_stream, 0},
    {"chunk-major stream", CHUNK_MAJOR, move_stream, 0},
    {"layer-major stream, next 4 lines", LAYER_MAJOR, move_stream, 4},
    {"chunk-major stream, next 4 lines", CHUNK_MAJOR, move_stream, 4},
    {"layer-major stream, next 16 lines", LAYER_MAJOR, move_stream, 16},
    {"layer-major stream, 512 B ahead", LAYER_MAJOR, move_stream_ahead_512, 0},
    {"layer-major stream, 2 KiB ahead", LAYER_MAJOR, move_stream_ahead_2048, 0},
    {"layer-major stream, 2 pages", LAYER_MAJOR, move_2_pages, 0},
    {"layer-major stream, 4 pages", LAYER_MAJOR, move_4_pages, 0},
};
enum { VARIANTS = sizeof variants / sizeof *variants };

struct shard {
    const struct variant *variant;
    int store, thread;
    pthread_t id;
};

static char *in_kv(int chunk, int layer)
{
    return kv + ((size_t)layer * (chunks + SPARE) + blocks[chunk]) * fragment_bytes;
}

static char *in_row(int chunk, int layer)
{
    return region + rows[chunk] * row_bytes + HEADER + layer * fragment_bytes;
}

static void move_one(const struct variant *v, int store, int chunk, int layer, int next_chunk,
                     int next_layer)
{
    const char *next = store ? in_kv(next_chunk, next_layer) : in_row(next_chunk, next_layer);
    for (int line = 0; line < v->next_lines; line++)
        _mm_prefetch(next + line * 64, _MM_HINT_T0);
    if (store)
        v->move(in_row(chunk, layer), in_kv(chunk, layer), fragment_bytes);
    else
        v->move(in_kv(chunk, layer), in_row(chunk, layer), fragment_bytes);
}

static void *run_shard(void *argument)
{
    const struct shard *s = argument;
    const struct variant *v = s->variant;
    int first = chunks * s->thread / threads, end = chunks * (s->thread + 1) / threads;
    if (v->order == CONTIGUOUS) {
        size_t chunk_bytes = LAYERS * fragment_bytes, offset = first * chunk_bytes;
        char *a = region + offset, *b = kv + offset;
        v->move(s->store ? a : b, s->store ? b : a, (end - first) * chunk_bytes);
    } else if (v->order == LAYER_MAJOR) {
        for (int l = 0; l < LAYERS; l++)
            for (int c = first; c < end; c++)
                move_one(v, s->store, c, l, c + 1 < end ? c + 1 : c, l);
    } else {
        for (int c = first; c < end; c++)
            for (int l = 0; l < LAYERS; l++)
                move_one(v, s->store, c, l, l + 1 < LAYERS || c + 1 == end ? c : c + 1,
                         (l + 1) % LAYERS);
    }
    _mm_sfence();
    return NULL;
}

static int fits(const struct variant *v)
{
    size_t unit = v->move == move_4_pages ? 16384 : v->move == move_2_pages ? 8192 : 128;
    return fragment_bytes % unit == 0;
}

static double seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

static double timed(const struct variant *variant, int store)
{
    struct shard shards[MAX_THREADS];
    double start = seconds();
    for (int t = 0; t < threads; t++)
        shards[t] = (struct shard){variant, store, t, 0};
    for (int t = 1; t < threads; t++)
        if (pthread_create(&shards[t].id, NULL, run_shard, &shards[t]))
            abort();
    run_shard(&shards[0]);
    for (int t = 1; t < threads; t++)
        pthread_join(shards[t].id, NULL);
    return seconds() - start;
}

static int ascending(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *values, int count)
{
    qsort(values, count, sizeof *values, ascending);
    return values[count / 2];
}

static int *permutation(int count)
{
    int *order = malloc(count * sizeof *order);
    for (int i = 0; i < count; i++)
        order[i] = i;
    for (int i = count - 1; i > 0; i--) {
        int other = rand() % (i + 1), kept = order[i];
        order[i] = order[other];
        order[other] = kept;
    }
    return order;
}

int main(int count, char **arguments)
{
    static double ratios[VARIANTS][MAX_ROUNDS];
    threads = count > 1 ? atoi(arguments[1]) : 1;
    int rounds = count > 2 ? atoi(arguments[2]) : 9;
    chunks = count > 3 ? atoi(arguments[3]) : 250;
    fragment_bytes = (count > 4 ? atoi(arguments[4]) : 32) * 1024ul;
    if (threads < 1 || threads > MAX_THREADS || rounds < 1 || rounds > MAX_ROUNDS)
        return 2;
    row_bytes = HEADER + LAYERS * fragment_bytes;
    int places = chunks + SPARE;
    size_t kv_bytes = places * LAYERS * fragment_bytes, region_bytes = places * row_bytes;
    int file = memfd_create("kvquay-variants", 0);
    if (file < 0 || ftruncate(file, region_bytes))
        return 1;
    region = mmap(NULL, region_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, file, 0);
    kv = mmap(NULL, kv_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (region == MAP_FAILED || kv == MAP_FAILED)
        return 1;
    memset(kv, 1, kv_bytes);
    blocks = permutation(places);
    rows = permutation(places);

    double bytes = (double)chunks * LAYERS * fragment_bytes;
    for (int store = 1; store >= 0; store--) {
        printf("%s, %d thread(s), %d chunks x %d layers x %zu KiB\n", store ? "gather" : "scatter",
               threads, chunks, LAYERS, fragment_bytes / 1024);
        double best[VARIANTS];
        for (int v = 0; v < VARIANTS; v++)
            best[v] = 1e9;
        for (int r = 0; r < rounds; r++)
            for (int v = 0; v < VARIANTS; v++) {
                if (!fits(&variants[v]))
                    continue;
                double base = timed(&variants[0], store), taken = timed(&variants[v], store);
                ratios[v][r] = base / taken;
                best[v] = taken < best[v] ? taken : best[v];
            }
        for (int v = 0; v < VARIANTS; v++)
            if (fits(&variants[v]))
                printf("  %-36s ratio %.2f  best %5.2f GB/s\n", variants[v].name,
                       median(ratios[v], rounds), bytes / best[v] / 1e9);
    }
    return 0;
}
