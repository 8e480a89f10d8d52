/* int8 activations, one scale a token: alone, behind RMSNorm, and behind the gate of an MLP. Rows go to threads. */

#include "native.h"

static const float TINY = 1e-12f; /* as in the reference */

/* codes [d] = nearest(x / largest 127); gives the scale back. x is multiplied by weight (or not: NULL). */
static float quantize(const float *x, const float *weight, int8_t *codes, i64 d, float largest) {
    largest = fmaxf(largest, TINY);
    __m512 inverse = _mm512_set1_ps(1.f / largest * 127.f);
    for (i64 i = 0; i < d; i += LANES) {
        __mmask16 mask = lanes(d - i);
        __m512 v = _mm512_maskz_loadu_ps(mask, x + i);
        if (weight) v = _mm512_mul_ps(v, _mm512_maskz_loadu_ps(mask, weight + i));
        __m512i code = _mm512_cvtps_epi32(_mm512_mul_ps(v, inverse));
        _mm512_mask_cvtepi32_storeu_epi8(codes + i, mask, code);
    }
    return largest / 127.f;
}

/* x [n, d], rows `stride` floats apart -> codes [n, d], scale [n]; with `normed` as behind RMSNorm. */
void quantize_rows(const float *x, const float *weight, int8_t *codes, float *scale, i64 n, i64 d, i64 stride,
                   int normed, float eps, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (n > 1)
    for (i64 row = 0; row < n; row++) {
        const float *from = x + row * stride;
        __m512 largest = _mm512_setzero_ps(), square = _mm512_setzero_ps();
        for (i64 i = 0; i < d; i += LANES) {
            __mmask16 mask = lanes(d - i);
            __m512 v = _mm512_maskz_loadu_ps(mask, from + i);
            square = _mm512_fmadd_ps(v, v, square);
            if (weight) v = _mm512_mul_ps(v, _mm512_maskz_loadu_ps(mask, weight + i));
            largest = _mm512_max_ps(largest, _mm512_abs_ps(v));
        }
        float step = quantize(from, weight, codes + row * d, d, _mm512_reduce_max_ps(largest));
        scale[row] = normed ? step / sqrtf(_mm512_reduce_add_ps(square) / (float)d + eps) : step;
    }
}

/* Every `block` channels of x [d] turned in place (0: none), then quantised; gives the scale back. */
static float turn_and_quantize(float *x, i64 d, int block, int8_t *codes) {
    for (i64 i = 0; block && i < d; i += block) turn(x + i, block);
    __m512 largest = _mm512_setzero_ps();
    for (i64 i = 0; i < d; i += LANES)
        largest = _mm512_max_ps(largest, _mm512_abs_ps(_mm512_maskz_loadu_ps(lanes(d - i), x + i)));
    return quantize(x, NULL, codes, d, _mm512_reduce_max_ps(largest));
}

/* x [n, d], used up. */
void turned_quantize(float *x, int8_t *codes, float *scale, i64 n, i64 d, int block, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (n > 1)
    for (i64 row = 0; row < n; row++) scale[row] = turn_and_quantize(x + row * d, d, block, codes + row * d);
}

/* product [n, 2 d] (gate, up), used up: silu(gate factor) up, every `block` channels turned (0: none), quantised. */
void gated_quantize(float *product, const float *factor, int8_t *codes, float *scale, i64 n, i64 d, int block,
                    int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (n > 1)
    for (i64 row = 0; row < n; row++) {
        float *gate = product + row * 2 * d, *up = gate + d, own = factor ? factor[row] : 1.f;
        for (i64 i = 0; i < d; i += LANES) {
            __mmask16 mask = lanes(d - i);
            __m512 g = _mm512_mul_ps(_mm512_maskz_loadu_ps(mask, gate + i), _mm512_set1_ps(own));
            __m512 out = _mm512_mul_ps(silu_ps(g), _mm512_maskz_loadu_ps(mask, up + i));
            _mm512_mask_storeu_ps(gate + i, mask, out);
        }
        scale[row] = turn_and_quantize(gate, d, block, codes + row * d) * own;
    }
}
