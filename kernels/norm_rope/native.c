/* Rotary positions and the rotation of retrieval heads, in place, a token at a time. */

#include "native.h"

/* x [n, heads, d]: neighbouring pairs of the first `placed` heads times table [n, d / 2] (real, imaginary); then heads
   a .. a + a_count - 1 and b .. b + b_count - 1 times the Hadamard matrix; then heads keys .. keys + centred - 1 minus
   centre [centred, d]. */
void place(float *x, i64 stride, const float *table, i64 n, i64 placed, int d, i64 a, i64 a_count, i64 b, i64 b_count,
           const float *centre, i64 keys, i64 centred, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (n > 1)
    for (i64 row = 0; row < n; row++) {
        float *heads = x + row * stride;
        const float *turns = table + row * d;
        for (i64 h = 0; h < placed; h++)
            for (int c = 0; c < d; c += LANES) {
                __mmask16 mask = lanes(d - c);
                float *at = heads + h * d + c;
                __m512 v = _mm512_maskz_loadu_ps(mask, at), w = _mm512_maskz_loadu_ps(mask, turns + c);
                __m512 swapped = _mm512_permute_ps(v, 0xb1);
                __m512 imaginary = _mm512_mul_ps(swapped, _mm512_movehdup_ps(w));
                _mm512_mask_storeu_ps(at, mask, _mm512_fmaddsub_ps(v, _mm512_moveldup_ps(w), imaginary));
            }
        for (i64 h = a; h < a + a_count; h++) turn(heads + h * d, d);
        for (i64 h = b; h < b + b_count; h++) turn(heads + h * d, d);
        float *first = heads + keys * d;
        for (i64 c = 0; c < centred * d; c += LANES) {
            __mmask16 mask = lanes(centred * d - c);
            __m512 v = _mm512_sub_ps(_mm512_maskz_loadu_ps(mask, first + c), _mm512_maskz_loadu_ps(mask, centre + c));
            _mm512_mask_storeu_ps(first + c, mask, v);
        }
    }
}
