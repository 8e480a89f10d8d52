/* int8 x int8 products with scales, bias and sum in the epilogue: one row on VNNI; many on AMX where there is such a
   unit, else on VNNI too, whose left side is unsigned.

   A weight [outer, inner] lies in panels of 32 outputs; a panel is inner / 64 steps of two tiles, a tile 16 rows of
   64 bytes, and byte 4 c + j of row r is weight[16 tile + c][64 step + 4 r + j]: what TDPBSSD takes as its right side
   and VPDPBUSD row by row. Outputs and inner channels are padded with zeros. */

#include "native.h"

enum { WIDTH = 32, STEP = 64, TILE = 1024, ROWS = 256 };

void prepack(const int8_t *weight, int8_t *tiles, int32_t *sums, i64 outer, i64 inner) {
    i64 panels = parts(outer, WIDTH), steps = parts(inner, STEP);
    memset(tiles, 0, panels * steps * 2 * TILE);
    for (i64 n = 0; n < outer; n++) {
        int32_t sum = 0;
        for (i64 k = 0; k < inner; k++) {
            i64 tile = (n / WIDTH * steps + k / STEP) * 2 + n % WIDTH / 16;
            tiles[tile * TILE + k % STEP / 4 * 64 + n % 16 * 4 + k % 4] = weight[n * inner + k];
            sum += weight[n * inner + k];
        }
        sums[n] = sum;
    }
}

typedef struct {
    const float *scale;     /* [outer] */
    const float *row_scale; /* [rows] or NULL */
    const float *bias;      /* [outer] or NULL */
    float *out;             /* [rows, outer] */
    i64 outer;
    int add; /* the result is added to out */
} Epilogue;

/* 16 sums of a row, from column n on. */
static inline void finish(const Epilogue *e, __m512i sums, i64 row, i64 n) {
    __mmask16 mask = lanes(e->outer - n);
    __m512 x = _mm512_mul_ps(_mm512_cvtepi32_ps(sums), _mm512_maskz_loadu_ps(mask, e->scale + n));
    if (e->row_scale) x = _mm512_mul_ps(x, _mm512_set1_ps(e->row_scale[row]));
    if (e->bias) x = _mm512_add_ps(x, _mm512_maskz_loadu_ps(mask, e->bias + n));
    float *to = e->out + row * e->outer + n;
    if (e->add) x = _mm512_add_ps(x, _mm512_maskz_loadu_ps(mask, to));
    _mm512_mask_storeu_ps(to, mask, x);
}

/* Where 16 sums over raised codes begin: 128 times the weights' sum is taken off before anything is added. */
static inline __m512i start(const int32_t *column_sums, i64 n, i64 outer) {
    __mmask16 mask = lanes(most(0, outer - n));
    __m512i sum = _mm512_maskz_loadu_epi32(mask, column_sums + (mask ? n : 0));
    return _mm512_sub_epi32(_mm512_setzero_si512(), _mm512_slli_epi32(sum, 7));
}

/* One row against panels first .. last - 1. VPDPBUSD wants its left side unsigned: 128 is added to every code. */
static void one_row(const uint8_t *raised, const int8_t *tiles, const int32_t *sums, i64 steps, i64 first, i64 last,
                    const Epilogue *e) {
    for (i64 panel = first; panel < last; panel++) {
        const int8_t *at = tiles + panel * steps * 2 * TILE;
        __m512i even[2] = {start(sums, panel * WIDTH, e->outer), start(sums, panel * WIDTH + 16, e->outer)};
        __m512i odd[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
        for (i64 step = 0; step < steps; step++, at += 2 * TILE)
            for (int r = 0; r < 16; r += 2) {
                int32_t four[2];
                memcpy(four, raised + step * STEP + 4 * r, 8);
                __m512i a = _mm512_set1_epi32(four[0]), b = _mm512_set1_epi32(four[1]);
                for (int t = 0; t < 2; t++) {
                    even[t] = _mm512_dpbusd_epi32(even[t], a, _mm512_load_si512(at + t * TILE + r * 64));
                    odd[t] = _mm512_dpbusd_epi32(odd[t], b, _mm512_load_si512(at + t * TILE + r * 64 + 64));
                }
            }
        for (int t = 0; t < 2; t++) {
            i64 n = panel * WIDTH + 16 * t;
            if (n < e->outer) finish(e, _mm512_add_epi32(even[t], odd[t]), 0, n);
        }
    }
}

#ifdef __AMX_INT8__

enum { RAISED = 0 };

/* Up to 32 rows of codes [.., stride] against two tiles a step: sums [32, 32]. */
static inline void block(const int8_t *codes, i64 stride, i64 rows, const int8_t *left, const int8_t *right, i64 steps,
                         __m512i left_start, __m512i right_start, int32_t *sums) {
    (void)left_start, (void)right_start;
    int both = rows > 16;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (i64 step = 0; step < steps; step++, left += 2 * TILE, right += 2 * TILE, codes += STEP) {
        _tile_loadd(6, left, 64);
        _tile_loadd(7, right, 64);
        _tile_loadd(4, codes, stride);
        _tile_dpbssd(0, 4, 6);
        _tile_dpbssd(1, 4, 7);
        if (both) {
            _tile_loadd(5, codes + 16 * stride, stride);
            _tile_dpbssd(2, 5, 6);
            _tile_dpbssd(3, 5, 7);
        }
    }
    _tile_stored(0, sums, 4 * WIDTH);
    _tile_stored(1, sums + 16, 4 * WIDTH);
    if (both) {
        _tile_stored(2, sums + 16 * WIDTH, 4 * WIDTH);
        _tile_stored(3, sums + 16 * WIDTH + 16, 4 * WIDTH);
    }
}

#else

enum { RAISED = 1, AT_ONCE = 8 };

/* The same; the codes are raised. */
static inline void block(const int8_t *codes, i64 stride, i64 rows, const int8_t *left, const int8_t *right, i64 steps,
                         __m512i left_start, __m512i right_start, int32_t *sums) {
    for (i64 row = 0; row < rows; row += AT_ONCE, codes += AT_ONCE * stride, sums += AT_ONCE * WIDTH) {
        __m512i one[AT_ONCE], two[AT_ONCE];
        for (int i = 0; i < AT_ONCE; i++) one[i] = left_start, two[i] = right_start;
        for (i64 step = 0; step < steps; step++)
            for (int r = 0; r < 16; r++) {
                __m512i x = _mm512_load_si512(left + step * 2 * TILE + 64 * r);
                __m512i y = _mm512_load_si512(right + step * 2 * TILE + 64 * r);
                for (int i = 0; i < AT_ONCE; i++) {
                    int32_t four;
                    memcpy(&four, codes + i * stride + step * STEP + 4 * r, 4);
                    __m512i both = _mm512_set1_epi32(four);
                    one[i] = _mm512_dpbusd_epi32(one[i], both, x);
                    two[i] = _mm512_dpbusd_epi32(two[i], both, y);
                }
            }
        for (int i = 0; i < AT_ONCE; i++) {
            _mm512_store_si512(sums + i * WIDTH, one[i]);
            _mm512_store_si512(sums + i * WIDTH + 16, two[i]);
        }
    }
}

#endif

/* Codes as `block` reads them, whole rows and whole steps. A copy holds what does not fill them, padded with zeros, or
   everything, raised by 128, where the unit wants that. */
typedef struct {
    const int8_t *codes;
    int8_t *copy;
    i64 whole, inner, padded, rows;
} Left;

static Left pad(const int8_t *codes, i64 rows, i64 inner, int threads) {
    Left left = {codes, NULL, 0, inner, parts(inner, STEP) * STEP, rows};
    left.whole = left.padded == inner && !RAISED ? rows / 32 * 32 : 0;
    i64 rest = rows - left.whole, room = parts(rest, 32) * 32;
    if (room) left.copy = aligned_alloc(64, room * left.padded);
#pragma omp parallel for num_threads(threads) schedule(static) if (RAISED)
    for (i64 i = 0; i < room; i++) {
        i64 filled = i < rest ? inner : 0;
        int8_t *to = left.copy + i * left.padded;
        const int8_t *from = codes + (left.whole + i) * inner;
        if (RAISED)
            for (i64 k = 0; k < filled; k++) to[k] = from[k] ^ (int8_t)0x80;
        else if (filled)
            memcpy(to, from, filled);
        memset(to + filled, RAISED ? 0x80 : 0, left.padded - filled);
    }
    return left;
}

static inline const int8_t *at_row(const Left *left, i64 row) {
    return row < left->whole ? left->codes + row * left->inner : left->copy + (row - left->whole) * left->padded;
}

/* The rows of a thread's part, whole tiles: the same ones that other kernels give it, for its caches' sake. */
static inline i64 part_of(i64 rows, int part, int threads) { return least(rows, parts(rows * part / threads, 32) * 32); }

/* Where 16 outputs' tiles begin. */
static inline const int8_t *tile_at(const int8_t *tiles, i64 steps, i64 index) {
    return tiles + (index / 2 * steps * 2 + index % 2) * TILE;
}

/* 16 gates and beside them their 16 ups, of `count` rows from `row` on; n is the first one's place in `out`. */
static inline void finish_gated(const Epilogue *e, const int32_t *sums, i64 row, i64 count, i64 n) {
    i64 half = e->outer / 2;
    __m512 gate_scale = _mm512_loadu_ps(e->scale + n), up_scale = _mm512_loadu_ps(e->scale + half + n);
    for (i64 i = 0; i < count; i++, sums += WIDTH) {
        __m512 own = _mm512_set1_ps(e->row_scale[row + i]);
        __m512 g = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_load_si512(sums)), gate_scale);
        __m512 u = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_load_si512(sums + 16)), up_scale);
        g = silu_ps(_mm512_mul_ps(g, own));
        _mm512_storeu_ps(e->out + (row + i) * half + n, _mm512_mul_ps(g, _mm512_mul_ps(u, own)));
    }
}

/* A thread's rows against all pairs of tiles: neighbours, or 16 gates and their 16 ups. */
static inline __attribute__((always_inline)) void some_rows(const Left *left, const int8_t *tiles,
                                                            const int32_t *column_sums, int part, int threads,
                                                            const Epilogue *e, int gated) {
    int32_t sums[WIDTH * WIDTH] __attribute__((aligned(64)));
    i64 steps = left->padded / STEP, last = part_of(left->rows, part + 1, threads), up = e->outer / 32;
    set_tiles();
    for (i64 slab = part_of(left->rows, part, threads); slab < last; slab += ROWS)
        for (i64 n = 0; n < e->outer; n += WIDTH) {
            i64 pair = n / WIDTH;
            const int8_t *one = tile_at(tiles, steps, gated ? pair : 2 * pair);
            const int8_t *two = gated ? tile_at(tiles, steps, pair + up) : one + TILE;
            __m512i one_start = start(column_sums, gated ? n / 2 : n, e->outer);
            __m512i two_start = start(column_sums, gated ? e->outer / 2 + n / 2 : n + 16, e->outer);
            for (i64 row = slab; row < least(last, slab + ROWS); row += 32) {
                i64 count = least(32, last - row);
                block(at_row(left, row), left->padded, count, one, two, steps, one_start, two_start, sums);
                if (gated)
                    finish_gated(e, sums, row, count, n / 2);
                else
                    for (i64 i = 0; i < count; i++)
                        for (int t = 0; t < 2 && n + 16 * t < e->outer; t++)
                            finish(e, _mm512_load_si512(sums + i * WIDTH + 16 * t), row + i, n + 16 * t);
            }
        }
    release_tiles();
}

static void multiply(const int8_t *codes, const int8_t *tiles, const int32_t *column_sums, i64 rows, i64 inner,
                     int threads, const Epilogue *e) {
    i64 panels = parts(e->outer, WIDTH), steps = parts(inner, STEP), padded = steps * STEP;
    if (rows == 1) {
        uint8_t *raised = aligned_alloc(64, padded);
        for (i64 k = 0; k < inner; k++) raised[k] = (uint8_t)codes[k] ^ 0x80;
        memset(raised + inner, 0x80, padded - inner); /* a zero, against weights that are zero */
#pragma omp parallel for num_threads(threads) schedule(static)
        for (int part = 0; part < threads; part++)
            one_row(raised, tiles, column_sums, steps, panels * part / threads, panels * (part + 1) / threads, e);
        free(raised);
        return;
    }
    Left left = pad(codes, rows, inner, threads);
#pragma omp parallel for num_threads(threads) schedule(static, 1)
    for (int part = 0; part < threads; part++) some_rows(&left, tiles, column_sums, part, threads, e, 0);
    free(left.copy);
}

/* out (+)= (codes [rows, inner] weight^T) scale row_scale + bias; tiles and column_sums come from prepack. */
void matmul(const int8_t *codes, const int8_t *tiles, const int32_t *column_sums, const float *scale,
            const float *row_scale, const float *bias, float *out, i64 rows, i64 inner, i64 outer, int add,
            int threads) {
    Epilogue e = {scale, row_scale, bias, out, outer, add};
    multiply(codes, tiles, column_sums, rows, inner, threads, &e);
}

/* out [rows, half] = silu(gate) up, where gate is the first half of the product's columns (a multiple of 16). */
void gated_matmul(const int8_t *codes, const int8_t *tiles, const int32_t *column_sums, const float *scale,
                  const float *row_scale, float *out, i64 rows, i64 inner, i64 half, int threads) {
    Epilogue e = {scale, row_scale, NULL, out, 2 * half, 0};
    if (rows == 1) {
        e.out = aligned_alloc(64, parts(8 * half, 64) * 64);
        multiply(codes, tiles, column_sums, rows, inner, threads, &e);
        for (i64 i = 0; i < half; i += LANES) {
            __m512 gate = _mm512_loadu_ps(e.out + i), up = _mm512_loadu_ps(e.out + half + i);
            _mm512_storeu_ps(out + i, _mm512_mul_ps(silu_ps(gate), up));
        }
        free(e.out);
        return;
    }
    Left left = pad(codes, rows, inner, threads);
#pragma omp parallel for num_threads(threads) schedule(static, 1)
    for (int part = 0; part < threads; part++) some_rows(&left, tiles, column_sums, part, threads, &e, 1);
    free(left.copy);
}
