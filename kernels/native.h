/* What the C kernels share: vectors of 16 floats, fp16 and bf16, and AMX tiles. */

#pragma once

#include <immintrin.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef int64_t i64;

#define LANES 16

static inline i64 least(i64 a, i64 b) { return a < b ? a : b; }
static inline i64 most(i64 a, i64 b) { return a > b ? a : b; }
static inline i64 parts(i64 n, i64 size) { return (n + size - 1) / size; }

/* The lanes of a vector that starts `left` elements before the end. */
static inline __mmask16 lanes(i64 left) { return left >= LANES ? 0xffff : (__mmask16)((1u << left) - 1); }

/* e^x to 2e-7 of it, for x <= 88; below -87 it is about 0. */
static inline __m512 exp_ps(__m512 x) {
    x = _mm512_max_ps(x, _mm512_set1_ps(-104.f));
    __m512 t = _mm512_mul_ps(x, _mm512_set1_ps(1.44269504f));
    __m512 n = _mm512_roundscale_ps(t, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693145752f), x);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(1.42860677e-6f), r);
    __m512 p = _mm512_set1_ps(1.f / 720);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.f / 120));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.f / 24));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.f / 6));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.5f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.f));
    return _mm512_scalef_ps(p, n);
}

/* One stage of a Hadamard transform inside a vector: neighbours at a distance of 1, 2, 4 or 8 lanes. */
static inline __m512 butterfly(__m512 x, int distance) {
    __m512i lane = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    __m512i other = _mm512_xor_si512(lane, _mm512_set1_epi32(distance));
    __mmask16 second = _mm512_test_epi32_mask(lane, _mm512_set1_epi32(distance));
    return _mm512_add_ps(_mm512_permutexvar_ps(other, x), _mm512_mask_sub_ps(x, second, _mm512_setzero_ps(), x));
}

/* x [size] times the orthonormal Hadamard matrix, in place; size is a power of two from 16 to 256. */
static inline void hadamard(float *x, int size) {
    __m512 v[16];
    int count = size / LANES;
    for (int i = 0; i < count; i++) {
        __m512 y = _mm512_loadu_ps(x + i * LANES);
        for (int distance = 1; distance < LANES; distance *= 2) y = butterfly(y, distance);
        v[i] = y;
    }
    for (int half = 1; half < count; half *= 2)
        for (int i = 0; i < count; i += 2 * half)
            for (int j = i; j < i + half; j++) {
                __m512 a = v[j], b = v[j + half];
                v[j] = _mm512_add_ps(a, b);
                v[j + half] = _mm512_sub_ps(a, b);
            }
    __m512 norm = _mm512_set1_ps(1.f / sqrtf((float)size));
    for (int i = 0; i < count; i++) _mm512_storeu_ps(x + i * LANES, _mm512_mul_ps(v[i], norm));
}

/* The same, with the usual sizes known to the compiler. */
static inline void turn(float *x, int size) {
    if (size == 64)
        hadamard(x, 64);
    else if (size == 128)
        hadamard(x, 128);
    else
        hadamard(x, size);
}

/* 16 numbers of fp16. */
static inline __m512 from_half(const uint16_t *x) { return _mm512_cvtph_ps(_mm256_loadu_si256((const void *)x)); }

/* 16 codes, less 8, as floats: the low or the high nibbles of 16 bytes. */
static inline __m512 low_codes(__m512i bytes) {
    const __m512 table = _mm512_set_ps(7, 6, 5, 4, 3, 2, 1, 0, -1, -2, -3, -4, -5, -6, -7, -8);
    return _mm512_permutexvar_ps(bytes, table);
}
static inline __m512 high_codes(__m512i bytes) { return low_codes(_mm512_srli_epi32(bytes, 4)); }

/* x / (1 + e^-x). */
static inline __m512 silu_ps(__m512 x) {
    return _mm512_div_ps(x, _mm512_add_ps(exp_ps(_mm512_sub_ps(_mm512_setzero_ps(), x)), _mm512_set1_ps(1.f)));
}

#ifdef __AMX_TILE__

/* All eight tiles with 16 rows of 64 bytes; each thread sets its own and releases them. Elsewhere there are none. */
static inline void set_tiles(void) {
    struct {
        uint8_t palette, start, reserved[14];
        uint16_t columns[16];
        uint8_t rows[16];
    } config = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        config.columns[i] = 64;
        config.rows[i] = 16;
    }
    _tile_loadconfig(&config);
}
static inline void release_tiles(void) { _tile_release(); }

#else
static inline void set_tiles(void) {}
static inline void release_tiles(void) {}
#endif
