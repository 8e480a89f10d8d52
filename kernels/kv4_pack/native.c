/* A chunk's keys and values on their way into the cache: to fp16, and block by block to 4 bits (layout int4pack with
   panels of 64). The codes are those of quant/kv4.py, bit for bit. */

#include "native.h"

enum { LONGEST = 128, PANEL = 64 };

static const float MIN_STEP = 0x1p-20f; /* as in quant/kv4.py */

/* `before` tokens of held [heads, held_stride] (fp16), then x [n, heads, d] (rows `stride` floats apart), joined as
   fp16 [heads, before + n, d]. */
static void join(const float *x, i64 stride, const uint16_t *held, i64 before, i64 n, i64 head, int d, uint16_t *to) {
    memcpy(to, held, before * d * 2);
    to += before * d;
    for (i64 t = 0; t < n; t++, to += d)
        for (int c = 0; c < d; c += LANES)
            _mm256_storeu_si256((void *)(to + c), _mm512_cvtps_ph(_mm512_loadu_ps(x + t * stride + head * d + c),
                                                                 _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

void join_exact(const float *k, const float *v, i64 stride, const uint16_t *held_k, const uint16_t *held_v,
                i64 held_stride, i64 before, i64 n, i64 heads, int d, uint16_t *own_k, uint16_t *own_v, int threads) {
    i64 size = (before + n) * d;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (i64 task = 0; task < 2 * heads; task++) {
        i64 head = task / 2;
        if (task % 2)
            join(v, stride, held_v + head * held_stride, before, n, head, d, own_v + head * size);
        else
            join(k, stride, held_k + head * held_stride, before, n, head, d, own_k + head * size);
    }
}

/* x fp16 [d] -> codes [d], and step and middle in fp16; share: the part of the range that a step is. With `wide` codes
   have 8 bits: their high halves [d], then the low ones. */
static void quantize(const uint16_t *x, int d, int wide, float share, uint8_t *codes, uint16_t *scales) {
    __m512 lowest = _mm512_set1_ps(INFINITY), highest = _mm512_set1_ps(-INFINITY);
    for (int c = 0; c < d; c += LANES) {
        __m512 v = _mm512_cvtph_ps(_mm256_loadu_si256((const void *)(x + c)));
        lowest = _mm512_min_ps(lowest, v);
        highest = _mm512_max_ps(highest, v);
    }
    float low = _mm512_reduce_min_ps(lowest), high = _mm512_reduce_max_ps(highest);
    scales[0] = _cvtss_sh(fmaxf((high - low) * share, MIN_STEP), 0);
    float step = _cvtsh_ss(scales[0]);
    scales[1] = _cvtss_sh(wide ? ((low + high) * 0.5f + step * 8.5f) * (1.f / 17) : (low + high) * 0.5f + step * 0.5f, 0);
    float centre = wide ? _cvtsh_ss(scales[1]) * 17 - step * 8 : _cvtsh_ss(scales[1]), half = wide ? 128 : 8;
    __m512 middle = _mm512_set1_ps(centre), inverse = _mm512_set1_ps(1.f / step);
    for (int c = 0; c < d; c += LANES) {
        __m512 v = _mm512_cvtph_ps(_mm256_loadu_si256((const void *)(x + c)));
        v = _mm512_mul_ps(_mm512_sub_ps(v, middle), inverse);
        v = _mm512_min_ps(_mm512_max_ps(v, _mm512_set1_ps(-half)), _mm512_set1_ps(half - 1));
        __m512i code = _mm512_add_epi32(_mm512_cvtps_epi32(v), _mm512_set1_epi32((int)half));
        if (wide) {
            _mm_storeu_si128((void *)(codes + d + c), _mm512_cvtepi32_epi8(_mm512_and_si512(code, _mm512_set1_epi32(15))));
            code = _mm512_srli_epi32(code, 4);
        }
        _mm_storeu_si128((void *)(codes + c), _mm512_cvtepi32_epi8(code));
    }
}

/* Whole blocks of `size` tokens (a multiple of the panel, at most LONGEST) of fp16 keys and values [heads, stride] into
   the pool's blocks `ids`; strides of the pool in bytes (scales: in halves). With `wide` the upper half of the d
   channels is stored, in 8 bits. */
void write_blocks(const uint16_t *k, const uint16_t *v, i64 stride, const int32_t *ids, i64 blocks, int size, i64 heads,
                  int d, int wide, float share, uint8_t *keys, i64 k_head, i64 k_block, uint8_t *values, i64 v_head,
                  i64 v_panel, i64 v_block, uint16_t *scales, i64 s_head, i64 s_block, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (blocks > 1)
    for (i64 task = 0; task < heads * blocks; task++) {
        int skip = wide ? d / 2 : 0;
        i64 head = task / blocks, block = task % blocks, from = head * stride + block * size * d;
        uint8_t codes[LONGEST * 256];
        uint16_t *to = scales + head * s_head + ids[block] * s_block;
        for (int t = 0; t < size; t++) quantize(k + from + t * d + skip, d - skip, wide, share, codes + t * d, to + 4 * t);
        uint8_t *bytes = keys + head * k_head + ids[block] * k_block;
        for (int t = 0; t < size; t += PANEL)
            for (int c = 0; c < d; c++)
                for (int j = 0; j < PANEL / 2; j++)
                    *bytes++ = codes[(t + j) * d + c] | codes[(t + j + PANEL / 2) * d + c] << 4;
        for (int t = 0; t < size; t++) quantize(v + from + t * d + skip, d - skip, wide, share, codes + t * d, to + 4 * t + 2);
        for (int c = 0; c < d; c += PANEL) {
            bytes = values + head * v_head + c / PANEL * v_panel + ids[block] * v_block;
            for (int t = 0; t < size; t++)
                for (int j = 0; j < PANEL / 2; j++)
                    *bytes++ = codes[t * d + c + j] | codes[t * d + c + j + PANEL / 2] << 4;
        }
    }
}
