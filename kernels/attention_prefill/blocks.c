/* Attention of a chunk in bf16 with fp32 sums: on AMX where there is such a unit, else on the vectors' bf16 products.

   A task is one KV head and 128 tokens' queries, 32 rows of one query head at a time, with the keys in steps of 128.
   Packed blocks are brought into the order of the matrix units as they are needed: unpacking 128 tokens costs 2,000
   cycles, and a group of three query heads works on it for 40,000. */

#include "native.h"

enum { BLOCK = 128, ROWS = 32, WORDS = 256 }; /* a tile holds 256 words of two bf16 */

/* Neighbours in the reduced dimension: a in the low, b in the high half of each word. */
static inline __m512i two(__m512 a, __m512 b) {
    const __m512i order =
        _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20, 4, 19,
                         3, 18, 2, 17, 1, 16, 0);
    return _mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh(b, a));
}

/* `count` exact keys and values [.., d] in fp16, zeros behind them up to `size` (a multiple of 32), as right sides: key
   tile [key / 16, channel / 32] has channels as rows, value tile [key / 32, channel / 16] has keys as rows. */
static void lay_exact(const uint16_t *k, const uint16_t *v, i64 count, i64 size, int d, uint32_t *keys,
                      uint32_t *values) {
    uint32_t words[BLOCK * 128];
    const __m512 zero = _mm512_setzero_ps();
    for (i64 t = 0; t < size; t++)
        for (int c = 0; c < d; c += 32) {
            __m512i both = _mm512_setzero_si512();
            if (t < count)
                both = (__m512i)_mm512_cvtne2ps_pbh(from_half(k + t * d + c + 16), from_half(k + t * d + c));
            _mm512_storeu_si512(words + (t * d + c) / 2, both);
        }
    __m512i apart = _mm512_mullo_epi32(_mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0),
                                       _mm512_set1_epi32(d / 2));
    for (int t = 0; t < size; t += 16)
        for (int c = 0; c < d / 2; c++)
            _mm512_storeu_si512(keys + (t / 16 * (d / 32) + c / 16) * WORDS + c % 16 * 16,
                                _mm512_i32gather_epi32(apart, words + t * d / 2 + c, 4));
    for (i64 t = 0; t < size; t += 2)
        for (int c = 0; c < d; c += 16) {
            __m512 a = t < count ? from_half(v + t * d + c) : zero;
            __m512 b = t + 1 < count ? from_half(v + (t + 1) * d + c) : zero;
            _mm512_storeu_si512(values + (t / 32 * (d / 16) + c / 16) * WORDS + t % 32 / 2 * 16, two(a, b));
        }
}

/* A packed block (layout int4pack with panels of 64) as `lay_exact`; scales: fp16 [size, 4]. */
static void lay_packed(const uint8_t *k, const uint8_t *v, i64 v_panel, const uint16_t *scales, int size, int d,
                       uint32_t *keys, uint32_t *values) {
    float step[BLOCK], middle[BLOCK];
    for (int t = 0; t < size; t++) {
        step[t] = _cvtsh_ss(scales[4 * t]);
        middle[t] = _cvtsh_ss(scales[4 * t + 1]);
    }
    for (int panel = 0; panel < size / 64; panel++, k += d * 32)
        for (int half = 0; half < 2; half++) {
            int low = panel * 64 + half * 16, high = low + 32; /* tokens in the low and in the high nibbles */
            __m512 low_step = _mm512_loadu_ps(step + low), low_middle = _mm512_loadu_ps(middle + low);
            __m512 high_step = _mm512_loadu_ps(step + high), high_middle = _mm512_loadu_ps(middle + high);
            for (int c = 0; c < d; c += 2) {
                __m512i a = _mm512_cvtepu8_epi32(_mm_loadu_si128((const void *)(k + c * 32 + half * 16)));
                __m512i b = _mm512_cvtepu8_epi32(_mm_loadu_si128((const void *)(k + c * 32 + 32 + half * 16)));
                uint32_t *to = keys + c / 32 * WORDS + c % 32 / 2 * 16;
                _mm512_storeu_si512(to + low / 16 * (d / 32) * WORDS,
                                    two(_mm512_fmadd_ps(low_codes(a), low_step, low_middle),
                                        _mm512_fmadd_ps(low_codes(b), low_step, low_middle)));
                _mm512_storeu_si512(to + high / 16 * (d / 32) * WORDS,
                                    two(_mm512_fmadd_ps(high_codes(a), high_step, high_middle),
                                        _mm512_fmadd_ps(high_codes(b), high_step, high_middle)));
            }
        }
    for (int t = 0; t < size; t += 2) {
        __m512 a_step = _mm512_set1_ps(_cvtsh_ss(scales[4 * t + 2]));
        __m512 a_middle = _mm512_set1_ps(_cvtsh_ss(scales[4 * t + 3]));
        __m512 b_step = _mm512_set1_ps(_cvtsh_ss(scales[4 * t + 6]));
        __m512 b_middle = _mm512_set1_ps(_cvtsh_ss(scales[4 * t + 7]));
        for (int panel = 0; panel < d / 64; panel++)
            for (int half = 0; half < 2; half++) {
                const uint8_t *at = v + panel * v_panel + t * 32 + half * 16;
                __m512i a = _mm512_cvtepu8_epi32(_mm_loadu_si128((const void *)at));
                __m512i b = _mm512_cvtepu8_epi32(_mm_loadu_si128((const void *)(at + 32)));
                uint32_t *to = values + (t / 32 * (d / 16) + panel * 4 + half) * WORDS + t % 32 / 2 * 16;
                _mm512_storeu_si512(to, two(_mm512_fmadd_ps(low_codes(a), a_step, a_middle),
                                            _mm512_fmadd_ps(low_codes(b), b_step, b_middle)));
                _mm512_storeu_si512(to + 2 * WORDS, two(_mm512_fmadd_ps(high_codes(a), a_step, a_middle),
                                                        _mm512_fmadd_ps(high_codes(b), b_step, b_middle)));
            }
    }
}

/* 2^x to 7.5e-5 of it, well below what bf16 holds. */
static inline __m512 exp2_ps(__m512 x) {
    __m512 r = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC); /* x - floor(x) */
    __m512 p = _mm512_set1_ps(0.07802452f);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.22606717f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.69583350f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.99992520f));
    return _mm512_scalef_ps(p, x);
}

/* What 32 rows of queries have seen so far: a reference for their scores (base 2), the sums of weights, lane by lane, and
   of values. */
typedef struct {
    float reference[ROWS];
    __m512 sums[ROWS];
    float *out; /* [ROWS, d] */
} State;

enum { SLACK = 8 }; /* how far, in powers of two, scores may rise above their reference before sums are rescaled */

static __attribute__((noinline)) void raise(State *state, int i, int d, float most) {
    float less = exp2f(state->reference[i] - most);
    state->reference[i] = most;
    state->sums[i] = _mm512_mul_ps(state->sums[i], _mm512_set1_ps(less));
    for (int c = 0; c < d; c += LANES) {
        float *at = state->out + i * d + c;
        _mm512_store_ps(at, _mm512_mul_ps(_mm512_load_ps(at), _mm512_set1_ps(less)));
    }
}

/* Scores [width] of row i become weights in bf16. `width` is known to the compiler. */
static inline __attribute__((always_inline)) void weigh(const float *scores, uint16_t *weights, const int width,
                                                        State *state, int i, int d) {
    __m512 x[BLOCK / LANES], high = _mm512_load_ps(scores);
    x[0] = high;
    for (int t = 1; t < width / LANES; t++) {
        x[t] = _mm512_load_ps(scores + t * LANES);
        high = _mm512_max_ps(high, x[t]);
    }
    __m512 limit = _mm512_set1_ps(state->reference[i] + SLACK);
    if (_mm512_cmp_ps_mask(high, limit, _CMP_GT_OQ)) raise(state, i, d, _mm512_reduce_max_ps(high));
    float reference = state->reference[i];
    __m512 zero = _mm512_set1_ps(reference == -INFINITY ? 0.f : reference), sum = state->sums[i];
    for (int t = 0; t < width / LANES; t += 2) {
        __m512 a = exp2_ps(_mm512_sub_ps(x[t], zero)), b = exp2_ps(_mm512_sub_ps(x[t + 1], zero));
        sum = _mm512_add_ps(sum, _mm512_add_ps(a, b));
        _mm512_store_si512(weights + t * LANES, (__m512i)_mm512_cvtne2ps_pbh(b, a));
    }
    state->sums[i] = sum;
}

/* out [32, 32], rows `row` floats apart, is or (`add`) grows by the product of x, 32 rows of bf16 `width` apart, and of
   `count` right sides, `step` words apart: tiles of 16 columns and, `right` words behind them, of 16 more. */
#ifdef __AMX_BF16__
static inline void multiply(const uint16_t *x, int width, const uint32_t *tiles, int count, int step, int right,
                            float *out, int row, int add) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    if (add) {
        _tile_loadd(0, out, row * 4);
        _tile_loadd(1, out + 16, row * 4);
        _tile_loadd(2, out + 16 * row, row * 4);
        _tile_loadd(3, out + 16 * row + 16, row * 4);
    }
    for (int c = 0; c < count; c++, tiles += step, x += 32) {
        _tile_loadd(4, x, width * 2);
        _tile_loadd(6, tiles, 64);
        _tile_loadd(7, tiles + right, 64);
        _tile_loadd(5, x + 16 * width, width * 2);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, out, row * 4);
    _tile_stored(1, out + 16, row * 4);
    _tile_stored(2, out + 16 * row, row * 4);
    _tile_stored(3, out + 16 * row + 16, row * 4);
}
#else
enum { AT_ONCE = 8 }; /* rows whose sums stay in registers, two vectors each */

static inline void multiply(const uint16_t *x, int width, const uint32_t *tiles, int count, int step, int right,
                            float *out, int row, int add) {
    for (int first = 0; first < ROWS; first += AT_ONCE, x += AT_ONCE * width, out += AT_ONCE * row) {
        __m512 sums[AT_ONCE][2];
#pragma GCC unroll 8
        for (int i = 0; i < AT_ONCE; i++) {
            sums[i][0] = add ? _mm512_loadu_ps(out + i * row) : _mm512_setzero_ps();
            sums[i][1] = add ? _mm512_loadu_ps(out + i * row + LANES) : _mm512_setzero_ps();
        }
        for (int c = 0; c < count; c++)
            for (int pair = 0; pair < 16; pair++) {
                const uint32_t *at = tiles + c * step + pair * LANES;
                __m512bh a = (__m512bh)_mm512_load_si512(at), b = (__m512bh)_mm512_load_si512(at + right);
#pragma GCC unroll 8
                for (int i = 0; i < AT_ONCE; i++) {
                    int both; /* two neighbours of x */
                    memcpy(&both, x + i * width + c * 32 + pair * 2, sizeof both);
                    __m512bh same = (__m512bh)_mm512_set1_epi32(both);
                    sums[i][0] = _mm512_dpbf16_ps(sums[i][0], same, a);
                    sums[i][1] = _mm512_dpbf16_ps(sums[i][1], same, b);
                }
            }
#pragma GCC unroll 8
        for (int i = 0; i < AT_ONCE; i++) {
            _mm512_storeu_ps(out + i * row, sums[i][0]);
            _mm512_storeu_ps(out + i * row + LANES, sums[i][1]);
        }
    }
}
#endif

/* 32 queries see `width` (a multiple of 32, at most 128) keys: row i those from first + i to last + i - 1 that lie below
   `limit`. */
static void see(const uint16_t *q, const uint32_t *keys, const uint32_t *values, int d, int width, int first, int last,
                int limit, State *state) {
    float scores[ROWS * BLOCK] __attribute__((aligned(64)));
    uint16_t weights[ROWS * BLOCK] __attribute__((aligned(64)));
    for (int t = 0; t < width; t += 32)
        multiply(q, d, keys + t / 16 * (d / 32) * WORDS, d / 32, WORDS, d / 32 * WORDS, scores + t, BLOCK, 0);
    int whole = first + ROWS - 1 <= 0 && last >= width && limit >= width;
    for (int i = 0; i < ROWS && !whole; i++) {
        float *row = scores + i * BLOCK;
        __m512 none = _mm512_set1_ps(-INFINITY);
        for (int t = 0; t < width; t += LANES) {
            i64 from = most(first + i - t, 0), end = most(least(last + i, limit) - t, 0);
            __mmask16 seen = lanes(end) & (from >= LANES ? 0 : (__mmask16)(0xffffu << from));
            _mm512_store_ps(row + t, _mm512_mask_load_ps(none, seen, row + t));
        }
    }
    for (int i = 0; i < ROWS; i++) {
        const float *row = scores + i * BLOCK;
        uint16_t *to = weights + i * BLOCK;
        switch (width) {
            case 32: weigh(row, to, 32, state, i, d); break;
            case 64: weigh(row, to, 64, state, i, d); break;
            case 96: weigh(row, to, 96, state, i, d); break;
            default: weigh(row, to, 128, state, i, d);
        }
    }
    for (int c = 0; c < d; c += 32)
        multiply(weights, BLOCK, values + c / 16 * WORDS, width / 32, d / 16 * WORDS, WORDS, state->out + c, d, 1);
}

/* 32 rows of q [.., stride] from `row` on, scaled and in bf16; zeros for rows outside first .. last - 1. */
static void take_queries(const float *q, i64 stride, i64 row, i64 first, i64 last, int d, float scale, uint16_t *to) {
    __m512 factor = _mm512_set1_ps(scale);
    for (i64 i = row; i < row + ROWS; i++)
        for (int c = 0; c < d; c += 32, to += 32) {
            __m512 a = _mm512_setzero_ps(), b = a;
            if (i >= first && i < last) {
                a = _mm512_mul_ps(_mm512_loadu_ps(q + i * stride + c), factor);
                b = _mm512_mul_ps(_mm512_loadu_ps(q + i * stride + c + 16), factor);
            }
            _mm512_store_si512(to, (__m512i)_mm512_cvtne2ps_pbh(b, a));
        }
}

static void give(const State *state, float *out, i64 stride, i64 row, i64 first, i64 last, int d) {
    for (i64 i = most(row, first); i < least(row + ROWS, last); i++) {
        __m512 whole = _mm512_set1_ps(1.f / _mm512_reduce_add_ps(state->sums[i - row]));
        for (int c = 0; c < d; c += LANES)
            _mm512_storeu_ps(out + i * stride + c, _mm512_mul_ps(_mm512_load_ps(state->out + (i - row) * d + c), whole));
    }
}

/* Room of one thread: 128 keys and values, and the queries and states of a group's 128 tokens. */
typedef struct {
    uint32_t *keys, *values;
    uint16_t *q;
    State *states;
    void *all;
} Room;

static Room room(int group, int d) {
    i64 tiles = BLOCK * d * 2, rows = (i64)group * BLOCK;
    i64 states = parts(sizeof(State) * rows / ROWS, 64) * 64;
    char *all = aligned_alloc(64, 2 * tiles + rows * d * 2 + states + rows * d * 4);
    Room r = {(void *)all, (void *)(all + tiles), (void *)(all + 2 * tiles), (void *)(all + 2 * tiles + rows * d * 2), all};
    float *out = (void *)((char *)r.states + states);
    for (i64 i = 0; i < rows / ROWS; i++) r.states[i].out = out + i * ROWS * d;
    return r;
}

static void clear(State *state, int d) {
    for (int i = 0; i < ROWS; i++) state->reference[i] = -INFINITY, state->sums[i] = _mm512_setzero_ps();
    memset(state->out, 0, ROWS * d * 4);
}

/* The packed blocks of one head: strides in bytes (scales: in halves), `size` tokens a block. */
typedef struct {
    const uint8_t *k, *v;
    const uint16_t *scales;
    i64 k_block, v_block, v_panel, s_block;
    const int32_t *table;
    int size;
} Packed;

/* Lays out `count` blocks from block b on, one behind the other. */
static void lay_blocks(const Packed *p, i64 b, int count, int d, const Room *r) {
    for (int i = 0; i < count; i++) {
        i64 id = p->table[b + i], t = i * p->size;
        lay_packed(p->k + id * p->k_block, p->v + id * p->v_block, p->v_panel, p->scales + id * p->s_block, p->size, d,
                   r->keys + t / 16 * (d / 32) * WORDS, r->values + t / 32 * (d / 16) * WORDS);
    }
}

/* A task's rows from `row` on that are queries see the first `limit` of `width` keys that are laid out. */
static void see_rows(const Room *r, int group, int d, int row, int width, int limit, i64 start, i64 n) {
    for (int i = 0; i < group * (BLOCK / ROWS); i++) {
        int own = i % (BLOCK / ROWS) * ROWS;
        if (own < row || start + own + ROWS <= 0 || start + own >= n) continue;
        see(r->q + i * ROWS * d, r->keys, r->values, d, width, -ROWS, BLOCK, limit, r->states + i);
    }
}

/* The rows of the block of `size` tokens at `row` see that block, as it is laid out, up to themselves. */
static void see_own(const Room *r, int group, int d, int row, int size, i64 start, i64 n) {
    for (int i = 0; i < group * (BLOCK / ROWS); i++) {
        int own = i % (BLOCK / ROWS) * ROWS, within = own - row;
        if (within < 0 || within >= size || start + own + ROWS <= 0 || start + own >= n) continue;
        see(r->q + i * ROWS * d, r->keys, r->values, d, within + ROWS, -ROWS, within + 1, within + ROWS, r->states + i);
    }
}

/* Retrieval heads. A query sees the first tokens and its own block as they are, every block between them packed.

   q [n, heads group, d] and out with rows `q_stride`, `out_stride` floats apart, behind `length` tokens, the first ones
   not counted; own keys and values fp16 [heads, own_stride], from the start of the block that the first query lies in;
   those of the `firsts` first tokens (at most 128) [heads, first_stride]. Packed blocks have `size` tokens, 64 or 128;
   strides in bytes (scales: in halves); table[i] is where block i lies. */
void attend_blocks(const float *q, i64 q_stride, float *out, i64 out_stride, const uint16_t *own_k,
                   const uint16_t *own_v, i64 own_stride, const uint16_t *first_k, const uint16_t *first_v,
                   i64 first_stride, i64 firsts, const uint8_t *k, i64 k_head, i64 k_block, const uint8_t *v, i64 v_head,
                   i64 v_panel, i64 v_block, const uint16_t *scales, i64 s_head, i64 s_block, const int32_t *table,
                   int size, i64 length, i64 n, i64 heads, int group, int d, float scale, int threads) {
    i64 first = length / BLOCK, tasks = parts(length + n, BLOCK) - first, origin = length / size * size;
#pragma omp parallel num_threads(threads)
    {
        Room r = room(group, d);
        set_tiles();
#pragma omp for schedule(dynamic, 1)
        for (i64 task = 0; task < tasks * heads; task++) {
            i64 at = (first + tasks - 1 - task / heads) * BLOCK, head = task % heads; /* the longest first */
            i64 start = at - length;                                                  /* its first row of q */
            const float *from = q + head * group * d;
            Packed packed = {k + head * k_head, v + head * v_head, scales + head * s_head, k_block,
                             v_block,           v_panel,           s_block,                table,   size};
            int count = group * (BLOCK / ROWS);
            for (int i = 0; i < count; i++) {
                take_queries(from + i / 4 * d, q_stride, start + i % 4 * ROWS, 0, n, d, scale * 1.44269504f,
                             r.q + i * ROWS * d);
                clear(r.states + i, d);
            }
            /* Everything in front of the task's 128 tokens, then these, block by block. */
            if (firsts) {
                i64 width = parts(firsts, 32) * 32, skip = head * first_stride;
                lay_exact(first_k + skip, first_v + skip, firsts, width, d, r.keys, r.values);
                see_rows(&r, group, d, 0, (int)width, (int)firsts, start, n);
            }
            for (i64 t = 0; t < at; t += BLOCK) {
                lay_blocks(&packed, t / size, BLOCK / size, d, &r);
                see_rows(&r, group, d, 0, BLOCK, BLOCK, start, n);
            }
            for (int row = 0; row < BLOCK && start + row < n; row += size) {
                if (start + row + size > 0) {
                    i64 skip = head * own_stride + (at + row - origin) * d;
                    lay_exact(own_k + skip, own_v + skip, least(size, n - start - row), size, d, r.keys, r.values);
                    see_own(&r, group, d, row, size, start, n);
                }
                if (row + size < BLOCK && start + row + size < n) {
                    lay_blocks(&packed, (at + row) / size, 1, d, &r);
                    see_rows(&r, group, d, row + size, size, size, start, n);
                }
            }
            for (int i = 0; i < count; i++)
                give(r.states + i, out + (head * group + i / 4) * d, out_stride, start + i % 4 * ROWS, 0, n, d);
        }
        release_tiles();
        free(r.all);
    }
}

/* A task's queries see those of `count` keys (laid out) that are theirs; first and last as in
   `see`, for the first of the group's 128 rows. */
static void see_range(const Room *r, int group, int d, i64 count, i64 first, i64 last, i64 start, i64 n) {
    for (int i = 0; i < group * (BLOCK / ROWS); i++) {
        int row = i % (BLOCK / ROWS) * ROWS;
        if (start + row >= n) continue;
        i64 from = most(first + row, 0) / 32 * 32, end = least(last + row + ROWS - 1, count);
        if (from >= end) continue;
        i64 width = parts(end - from, 32) * 32;
        see(r->q + i * ROWS * d, r->keys + from / 16 * (d / 32) * WORDS, r->values + from / 32 * (d / 16) * WORDS, d,
            (int)width, (int)most(first + row - from, -BLOCK), (int)least(last + row - from, 2 * BLOCK),
            (int)(count - from), r->states + i);
    }
}

/* Streaming heads. A query sees the first `sinks` tokens and the `recent` newest ones, its own among them.

   run_k, run_v: fp16 [heads, run_stride], tokens from position length - held on; sink_k, sink_v: [heads, sink_stride].
   Positions below `sink` are seen as sinks only. */
void attend_window(const float *q, i64 q_stride, float *out, i64 out_stride, const uint16_t *run_k,
                   const uint16_t *run_v, i64 run_stride, const uint16_t *sink_k, const uint16_t *sink_v,
                   i64 sink_stride, i64 sink, i64 recent, i64 held, i64 length, i64 n, i64 heads, int group, int d,
                   float scale, int threads) {
    i64 blocks = parts(n, BLOCK), sinks = least(sink, length + n), origin = length - held;
#pragma omp parallel num_threads(threads)
    {
        Room r = room(group, d);
        set_tiles();
#pragma omp for schedule(dynamic, 1)
        for (i64 task = 0; task < blocks * heads; task++) {
            i64 start = task / heads * BLOCK, head = task % heads, at = length + start, end = least(start + BLOCK, n);
            const float *from = q + head * group * d;
            for (int i = 0; i < group * (BLOCK / ROWS); i++) {
                take_queries(from + i / 4 * d, q_stride, start + i % 4 * ROWS, 0, n, d, scale * 1.44269504f,
                             r.q + i * ROWS * d);
                clear(r.states + i, d);
            }
            for (i64 t = 0; t < least(sinks, length + end); t += BLOCK) {
                i64 count = least(BLOCK, sinks - t), where = head * sink_stride + t * d;
                lay_exact(sink_k + where, sink_v + where, count, BLOCK, d, r.keys, r.values);
                see_range(&r, group, d, count, -BLOCK, at + 1 - t, start, n);
            }
            i64 stop = length + end - origin;
            for (i64 t = most(most(at - recent + 1, sink) - origin, 0); t < stop; t += BLOCK) {
                i64 count = least(BLOCK, stop - t), where = head * run_stride + t * d;
                lay_exact(run_k + where, run_v + where, count, BLOCK, d, r.keys, r.values);
                see_range(&r, group, d, count, at - recent + 1 - origin - t, at + 1 - origin - t, start, n);
            }
            for (int i = 0; i < group * (BLOCK / ROWS); i++)
                give(r.states + i, out + (head * group + i / 4) * d, out_stride, start + i % 4 * ROWS, 0, n, d);
        }
        release_tiles();
        free(r.all);
    }
}
