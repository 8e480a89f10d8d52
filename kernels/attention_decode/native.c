/* Attention of one token over packed blocks as they lie (layout int4pack with panels of 64), in fp32.

   A key panel has a channel's codes of 64 tokens side by side, a value panel a token's codes of 64 channels: scores
   have tokens in their lanes, results channels, and nothing is summed across lanes. Step and middle are folded out:
   q.k = step (q.n) + middle sum(q), and sum p v = (p step).n + sum(p middle). */

#include "native.h"

enum { BLOCK = 128, QUERIES = 4, WIDEST = 256 };

/* What a few queries of one KV head have seen so far. */
typedef struct {
    float most[QUERIES], sum[QUERIES], out[QUERIES][WIDEST];
} State;

static inline __m512i bytes16(const uint8_t *x) { return _mm512_cvtepu8_epi32(_mm_loadu_si128((const void *)x)); }

/* Step and middle of 16 tokens' keys (part 0) or values (part 1) of scales [tokens, 4]. */
static inline void steps16(const uint16_t *scales, int part, __m512 *step, __m512 *middle) {
    __m512i even = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
    __m512i word = _mm512_permutex2var_epi32(_mm512_loadu_si512(scales), _mm512_add_epi32(even, _mm512_set1_epi32(part)),
                                             _mm512_loadu_si512(scales + 32));
    *step = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(word));
    *middle = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32(word, 16)));
}

/* Turns scores [count] into weights, under a maximum that may rise; gives the sum of all weights to the state. */
static inline void weigh(float *scores, int count, State *state, int query, int d) {
    __m512 high = _mm512_set1_ps(-INFINITY), sum = _mm512_setzero_ps();
    for (int t = 0; t < count; t += LANES) high = _mm512_max_ps(high, _mm512_loadu_ps(scores + t));
    float before = state->most[query], now = fmaxf(before, _mm512_reduce_max_ps(high));
    if (now > before) {
        float less = expf(before - now);
        state->most[query] = now;
        state->sum[query] *= less;
        for (int c = 0; c < d; c += LANES) {
            float *at = state->out[query] + c;
            _mm512_storeu_ps(at, _mm512_mul_ps(_mm512_loadu_ps(at), _mm512_set1_ps(less)));
        }
    }
    for (int t = 0; t < count; t += LANES) {
        __m512 weight = exp_ps(_mm512_sub_ps(_mm512_loadu_ps(scores + t), _mm512_set1_ps(now)));
        sum = _mm512_add_ps(sum, weight);
        _mm512_storeu_ps(scores + t, weight);
    }
    state->sum[query] += _mm512_reduce_add_ps(sum);
}

/* A packed block of `size` tokens; q [count, d] is scaled, total its sums. `count` is known to the compiler. */
static inline __attribute__((always_inline)) void see_packed(const float *q, const float *total, const int count, int d,
                                                             const uint8_t *k, const uint8_t *v, i64 v_panel,
                                                             const uint16_t *scales, int size, State *state) {
    float scores[QUERIES][BLOCK], stepped[QUERIES][BLOCK];
    for (int panel = 0; panel < size / 64; panel++, k += d * 32) {
        __m512 sums[QUERIES][4];
        for (int i = 0; i < count; i++)
            for (int j = 0; j < 4; j++) sums[i][j] = _mm512_setzero_ps();
        for (int c = 0; c < d; c++) {
            __m512i a = bytes16(k + c * 32), b = bytes16(k + c * 32 + 16);
            __m512 codes[4] = {low_codes(a), low_codes(b), high_codes(a), high_codes(b)};
            for (int i = 0; i < count; i++)
                for (int j = 0; j < 4; j++)
                    sums[i][j] = _mm512_fmadd_ps(_mm512_set1_ps(q[i * d + c]), codes[j], sums[i][j]);
        }
        for (int j = 0; j < 4; j++) {
            int t = panel * 64 + j * LANES;
            __m512 step, middle;
            steps16(scales + 4 * t, 0, &step, &middle);
            for (int i = 0; i < count; i++)
                _mm512_storeu_ps(scores[i] + t, _mm512_fmadd_ps(sums[i][j], step,
                                                               _mm512_mul_ps(middle, _mm512_set1_ps(total[i]))));
        }
    }
    __m512 middles[QUERIES];
    for (int i = 0; i < count; i++) weigh(scores[i], size, state, i, d), middles[i] = _mm512_setzero_ps();
    for (int t = 0; t < size; t += LANES) {
        __m512 step, middle;
        steps16(scales + 4 * t, 1, &step, &middle);
        for (int i = 0; i < count; i++) {
            __m512 weight = _mm512_loadu_ps(scores[i] + t);
            _mm512_storeu_ps(stepped[i] + t, _mm512_mul_ps(weight, step));
            middles[i] = _mm512_fmadd_ps(weight, middle, middles[i]);
        }
    }
    float rest[QUERIES];
    for (int i = 0; i < count; i++) rest[i] = _mm512_reduce_add_ps(middles[i]);
    for (int panel = 0; panel < d / 64; panel++, v += v_panel) {
        __m512 sums[QUERIES][4];
        for (int i = 0; i < count; i++)
            for (int j = 0; j < 4; j++)
                sums[i][j] = _mm512_add_ps(_mm512_loadu_ps(state->out[i] + panel * 64 + j * LANES),
                                           _mm512_set1_ps(rest[i]));
        for (int t = 0; t < size; t++) {
            __m512i a = bytes16(v + t * 32), b = bytes16(v + t * 32 + 16);
            __m512 codes[4] = {low_codes(a), low_codes(b), high_codes(a), high_codes(b)};
            for (int i = 0; i < count; i++)
                for (int j = 0; j < 4; j++)
                    sums[i][j] = _mm512_fmadd_ps(_mm512_set1_ps(stepped[i][t]), codes[j], sums[i][j]);
        }
        for (int i = 0; i < count; i++)
            for (int j = 0; j < 4; j++) _mm512_storeu_ps(state->out[i] + panel * 64 + j * LANES, sums[i][j]);
    }
}

/* The sum of each of 16 vectors, in its lane. */
static inline __m512 sums16(const __m512 v[16]) {
    __m512 quarter[4];
    for (int i = 0; i < 4; i++) {
        const __m512 *w = v + 4 * i;
        __m512 a = _mm512_add_ps(_mm512_unpacklo_ps(w[0], w[1]), _mm512_unpackhi_ps(w[0], w[1]));
        __m512 b = _mm512_add_ps(_mm512_unpacklo_ps(w[2], w[3]), _mm512_unpackhi_ps(w[2], w[3]));
        __m512d low = _mm512_unpacklo_pd(_mm512_castps_pd(a), _mm512_castps_pd(b));
        __m512d high = _mm512_unpackhi_pd(_mm512_castps_pd(a), _mm512_castps_pd(b));
        quarter[i] = _mm512_add_ps(_mm512_castpd_ps(low), _mm512_castpd_ps(high));
    }
    __m512 a = _mm512_add_ps(_mm512_shuffle_f32x4(quarter[0], quarter[1], 0x88),
                             _mm512_shuffle_f32x4(quarter[0], quarter[1], 0xdd));
    __m512 b = _mm512_add_ps(_mm512_shuffle_f32x4(quarter[2], quarter[3], 0x88),
                             _mm512_shuffle_f32x4(quarter[2], quarter[3], 0xdd));
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
}

/* Up to 128 tokens as they are: k, v fp16 [tokens, d]. */
static void see_exact(const float *q, int count, int d, const uint16_t *k, const uint16_t *v, int tokens, State *state) {
    float scores[QUERIES][BLOCK], keys[LANES * WIDEST];
    for (int t = 0; t < tokens; t += LANES) {
        int here = (int)least(LANES, tokens - t);
        for (int i = 0; i < here * d; i += LANES) _mm512_storeu_ps(keys + i, from_half(k + t * d + i));
        for (int i = 0; i < count; i++) {
            __m512 products[LANES];
            for (int j = 0; j < LANES; j++) {
                products[j] = _mm512_setzero_ps();
                for (int c = 0; c < d && j < here; c += LANES)
                    products[j] = _mm512_fmadd_ps(_mm512_loadu_ps(q + i * d + c), _mm512_loadu_ps(keys + j * d + c),
                                                  products[j]);
            }
            __m512 none = _mm512_set1_ps(-INFINITY);
            _mm512_storeu_ps(scores[i] + t, _mm512_mask_mov_ps(none, lanes(here), sums16(products)));
        }
    }
    for (int i = 0; i < count; i++) weigh(scores[i], tokens, state, i, d);
    for (int c = 0; c < d; c += LANES) {
        __m512 sums[QUERIES];
        for (int i = 0; i < QUERIES; i++) sums[i] = _mm512_loadu_ps(state->out[i < count ? i : 0] + c);
        for (int t = 0; t < tokens; t++) {
            __m512 value = from_half(v + t * d + c);
            for (int i = 0; i < QUERIES; i++) /* queries that are not there repeat the first: no branches */
                sums[i] = _mm512_fmadd_ps(_mm512_set1_ps(scores[i < count ? i : 0][t]), value, sums[i]);
        }
        for (int i = 0; i < count; i++) _mm512_storeu_ps(state->out[i] + c, sums[i]);
    }
}

/* Makes `count` queries from `from` [count, d] ready. */
static inline void take(const float *from, int count, int d, float scale, float *own, float *total) {
    for (int i = 0; i < count; i++) {
        total[i] = 0;
        for (int c = 0; c < d; c++) total[i] += own[i * d + c] = from[i * d + c] * scale;
    }
}

static inline void clear(State *state, int count, int d) {
    for (int i = 0; i < count; i++) {
        state->most[i] = -INFINITY, state->sum[i] = 0;
        memset(state->out[i], 0, d * 4);
    }
}

/* out [heads, group, d] of q [heads, group, d]: exact tokens fp16 [heads, exact_head], then blocks table[0 ..] of
   `size` tokens (64 or 128); strides of the packed blocks in bytes (scales: in halves). */
void decode(const float *q, float *out, const uint16_t *exact_k, const uint16_t *exact_v, i64 exact_head, i64 exact,
            const uint8_t *k, i64 k_head, i64 k_block, const uint8_t *v, i64 v_head, i64 v_panel, i64 v_block,
            const uint16_t *scales, i64 s_head, i64 s_block, const int32_t *table, i64 blocks, int size, i64 heads,
            int group, int d, float scale, int threads) {
    i64 teams = parts(group, QUERIES);
    /* Stretches of the history, so that threads finish together; the first has the exact tokens too. */
    i64 stretches = most(1, least(blocks * size / (2 * BLOCK), 4 * threads));
    State *states = aligned_alloc(64, parts(sizeof(State) * heads * teams * stretches, 64) * 64);
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
    for (i64 task = 0; task < heads * teams * stretches; task++) {
        i64 head = task / (teams * stretches), team = task / stretches % teams, stretch = task % stretches;
        int count = (int)least(QUERIES, group - team * QUERIES);
        float own[QUERIES * WIDEST], total[QUERIES];
        State *state = states + task;
        take(q + (head * group + team * QUERIES) * d, count, d, scale, own, total);
        clear(state, count, d);
        for (i64 t = 0; stretch == 0 && t < exact; t += BLOCK)
            see_exact(own, count, d, exact_k + head * exact_head + t * d, exact_v + head * exact_head + t * d,
                      (int)least(BLOCK, exact - t), state);
        for (i64 b = blocks * stretch / stretches; b < blocks * (stretch + 1) / stretches; b++) {
            const uint8_t *keys = k + head * k_head + table[b] * k_block;
            const uint8_t *values = v + head * v_head + table[b] * v_block;
            const uint16_t *own_scales = scales + head * s_head + table[b] * s_block;
            switch (count) {
                case 1: see_packed(own, total, 1, d, keys, values, v_panel, own_scales, size, state); break;
                case 2: see_packed(own, total, 2, d, keys, values, v_panel, own_scales, size, state); break;
                case 3: see_packed(own, total, 3, d, keys, values, v_panel, own_scales, size, state); break;
                default: see_packed(own, total, 4, d, keys, values, v_panel, own_scales, size, state);
            }
        }
    }
    for (i64 row = 0; row < heads * group; row++) {
        i64 head = row / group, i = row % group % QUERIES;
        const State *first = states + (head * teams + row % group / QUERIES) * stretches;
        float top = -INFINITY, sum = 0, *to = out + row * d;
        for (i64 s = 0; s < stretches; s++) top = fmaxf(top, first[s].most[i]);
        memset(to, 0, d * 4);
        for (i64 s = 0; s < stretches; s++) {
            float weight = expf(first[s].most[i] - top);
            sum += weight * first[s].sum[i];
            for (int c = 0; c < d; c++) to[c] += weight * first[s].out[i][c];
        }
        for (int c = 0; c < d; c++) to[c] /= sum;
    }
    free(states);
}

/* One query a head over a window as it lies: k, v fp16 [heads, stride], of which `held` tokens are seen; the first `sink`
   of them meet `near` [heads, group, d], the others q. */
void decode_window(const float *q, const float *near, float *out, const uint16_t *k, const uint16_t *v, i64 stride,
                   i64 sink, i64 held, i64 heads, int group, int d, float scale, int threads) {
    i64 teams = parts(group, QUERIES);
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1) if (heads * teams > 1)
    for (i64 task = 0; task < heads * teams; task++) {
        i64 head = task / teams, team = task % teams, row = head * group + team * QUERIES;
        int count = (int)least(QUERIES, group - team * QUERIES);
        float own[QUERIES * WIDEST], total[QUERIES];
        State state;
        clear(&state, count, d);
        i64 ends[2] = {least(sink, held), held};
        for (int part = 0, t = 0; part < 2; part++) {
            take((part ? q : near) + row * d, count, d, scale, own, total);
            for (int step; t < ends[part]; t += step) {
                step = (int)least(BLOCK, ends[part] - t);
                see_exact(own, count, d, k + head * stride + t * d, v + head * stride + t * d, step, &state);
            }
        }
        for (int i = 0; i < count; i++)
            for (int c = 0; c < d; c++) out[(row + i) * d + c] = state.out[i][c] / state.sum[i];
    }
}
