/* XXH3 of 64 bits with seed 0 and the default secret, for more than 240 bytes: what the xxhash
 * library gives. One thing it cannot do: copy the bytes while they are summed up, so that memory is
 * read once for both.
 *
 * The function and its constants are specified in doc/xxhash_spec.md of
 * https://github.com/Cyan4973/xxHash.
 */

#ifndef KVQUAY_XXH3_H
#define KVQUAY_XXH3_H

#if !defined(__BYTE_ORDER__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "words are read as they lie in memory; on other machines the library sums up"
#endif

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#ifdef __x86_64__
#include <immintrin.h>
#define XXH3_AVX2 __attribute__((target("avx2")))
#endif

/* What is not longer is summed up in other ways, which nothing here needs. */
#define XXH3_SHORT_BYTES 240

#define XXH3_LANES 8
#define XXH3_STRIPE_BYTES 64
#define XXH3_SECRET_BYTES 192
#define XXH3_STRIPES ((XXH3_SECRET_BYTES - XXH3_STRIPE_BYTES) / 8)
#define XXH3_BLOCK_BYTES (XXH3_STRIPES * XXH3_STRIPE_BYTES)
/* The processor does not look beyond the end of a small page by itself. With this, sum and copy of
 * what lies in memory take no longer than the copy alone. */
#define XXH3_AHEAD_BYTES 8192
#define XXH3_LINE_BYTES 64

#define XXH3_PRIME32_1 0x9E3779B1U
#define XXH3_PRIME32_2 0x85EBCA77U
#define XXH3_PRIME32_3 0xC2B2AE3DU
#define XXH3_PRIME64_1 0x9E3779B185EBCA87ULL
#define XXH3_PRIME64_2 0xC2B2AE3D27D4EB4FULL
#define XXH3_PRIME64_3 0x165667B19E3779F9ULL
#define XXH3_PRIME64_4 0x85EBCA77C2B2AE63ULL
#define XXH3_PRIME64_5 0x27D4EB2F165667C5ULL
#define XXH3_PRIME_MX1 0x165667919E3779F9ULL

static const unsigned char xxh3_secret[XXH3_SECRET_BYTES] __attribute__((aligned(64))) = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

static uint64_t xxh3_word(const unsigned char *at)
{
    uint64_t word;
    memcpy(&word, at, sizeof word);
    return word;
}

/* Adds stripes to the lanes; the secret moves by 8 bytes with each. */
typedef void xxh3_stripes_t(uint64_t *lanes, const unsigned char *from, size_t stripes,
                            const unsigned char *secret);

static void xxh3_stripes(uint64_t *lanes, const unsigned char *from, size_t stripes,
                         const unsigned char *secret)
{
    for (size_t n = 0; n < stripes; n++, from += XXH3_STRIPE_BYTES, secret += 8) {
        for (int i = 0; i < XXH3_LANES; i++) {
            uint64_t word = xxh3_word(from + 8 * i);
            uint64_t keyed = word ^ xxh3_word(secret + 8 * i);
            lanes[i ^ 1] += word;
            lanes[i] += (keyed & 0xFFFFFFFFU) * (keyed >> 32);
        }
    }
}

#ifdef XXH3_AVX2
XXH3_AVX2 static void xxh3_stripes_avx2(uint64_t *lanes, const unsigned char *from, size_t stripes,
                                        const unsigned char *secret)
{
    __m256i sums[2];
    for (int half = 0; half < 2; half++)
        sums[half] = _mm256_loadu_si256((const __m256i *)lanes + half);
    for (size_t n = 0; n < stripes; n++, from += XXH3_STRIPE_BYTES, secret += 8) {
        for (int half = 0; half < 2; half++) {
            __m256i words = _mm256_loadu_si256((const __m256i *)from + half);
            __m256i keys = _mm256_loadu_si256((const __m256i *)secret + half);
            __m256i keyed = _mm256_xor_si256(words, keys);
            __m256i product = _mm256_mul_epu32(keyed, _mm256_srli_epi64(keyed, 32));
            __m256i swapped = _mm256_shuffle_epi32(words, _MM_SHUFFLE(1, 0, 3, 2));
            sums[half] = _mm256_add_epi64(sums[half], _mm256_add_epi64(product, swapped));
        }
    }
    for (int half = 0; half < 2; half++)
        _mm256_storeu_si256((__m256i *)lanes + half, sums[half]);
}
#endif

static xxh3_stripes_t *xxh3_fastest(void)
{
#ifdef XXH3_AVX2
    if (__builtin_cpu_supports("avx2"))
        return xxh3_stripes_avx2;
#endif
    return xxh3_stripes;
}

static void xxh3_scramble(uint64_t *lanes)
{
    const unsigned char *secret = xxh3_secret + XXH3_SECRET_BYTES - XXH3_STRIPE_BYTES;
    for (int i = 0; i < XXH3_LANES; i++) {
        lanes[i] ^= lanes[i] >> 47;
        lanes[i] ^= xxh3_word(secret + 8 * i);
        lanes[i] *= XXH3_PRIME32_1;
    }
}

static uint64_t xxh3_end(const uint64_t *lanes, size_t length)
{
    uint64_t sum = length * XXH3_PRIME64_1;
    for (int i = 0; i < XXH3_LANES; i += 2) {
        const unsigned char *secret = xxh3_secret + 11 + 8 * i;
        unsigned __int128 product = (unsigned __int128)(lanes[i] ^ xxh3_word(secret)) *
                                    (lanes[i + 1] ^ xxh3_word(secret + 8));
        sum += (uint64_t)product ^ (uint64_t)(product >> 64);
    }
    sum ^= sum >> 37;
    sum *= XXH3_PRIME_MX1;
    return sum ^ sum >> 32;
}

/* Fetches a block's bytes from memory; past others in the caches if they are needed only `once`. */
static void xxh3_fetch(const unsigned char *from, int once)
{
    for (size_t at = 0; at < XXH3_BLOCK_BYTES; at += XXH3_LINE_BYTES) {
        if (once)
            __builtin_prefetch(from + at, 0, 0);
        else
            __builtin_prefetch(from + at);
    }
}

/* The sum of more than XXH3_SHORT_BYTES; they are copied if `to`, and not needed again soon if
 * `once`. `stripes` is `xxh3_fastest()`. */
static uint64_t xxh3_sum(xxh3_stripes_t *stripes, const void *bytes, size_t length, void *to,
                         int once)
{
    uint64_t lanes[XXH3_LANES] = {XXH3_PRIME32_3, XXH3_PRIME64_1, XXH3_PRIME64_2, XXH3_PRIME64_3,
                                  XXH3_PRIME64_4, XXH3_PRIME32_2, XXH3_PRIME64_5, XXH3_PRIME32_1};
    const unsigned char *from = bytes;
    unsigned char *copy = to;
    size_t at = 0;
    /* At least one byte is left to the last stripe, which overlaps what comes before it. */
    for (; length - at > XXH3_BLOCK_BYTES; at += XXH3_BLOCK_BYTES) {
        xxh3_fetch(from + at + XXH3_AHEAD_BYTES, once);
        if (copy != NULL)
            memcpy(copy + at, from + at, XXH3_BLOCK_BYTES);
        stripes(lanes, from + at, XXH3_STRIPES, xxh3_secret);
        xxh3_scramble(lanes);
    }
    stripes(lanes, from + at, (length - 1 - at) / XXH3_STRIPE_BYTES, xxh3_secret);
    stripes(lanes, from + length - XXH3_STRIPE_BYTES, 1,
            xxh3_secret + XXH3_SECRET_BYTES - XXH3_STRIPE_BYTES - 7);
    if (copy != NULL)
        memcpy(copy + at, from + at, length - at);
    return xxh3_end(lanes, length);
}

#endif
