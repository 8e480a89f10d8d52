// What q and k heads go through between their projection and attention, a warp a head; compiled by NVRTC. As ref.py.
//
// HEAD_DIM is set by the host. A head is odd * 2^m channels; the rotation is a Hadamard matrix over the powers of two
// and, for odd 3, a cosine transform of three neighbours (quant/kv4.py's `rotation`).
#include "common.cuh"

constexpr int D = HEAD_DIM;
constexpr int ODD = D % 3 ? 1 : 3;
constexpr int PAIRS = D / 2;
constexpr int WARPS = 8;

struct Params {
    float *heads;        // [n, heads, D]
    const float2 *table; // [n, D / 2]
    const float *centre; // [centred, D]
    long long stride;    // elements from token to token
    int n, placed;       // heads that get positions: the first ones
    int from, count, from2, count2; // two stretches of them that are rotated too
    int keys, centred; // of these, a stretch from which `centre` is subtracted
};

extern "C" __global__ void __launch_bounds__(WARPS * 32) place(const __grid_constant__ Params p) {
    __shared__ float rows[WARPS][D];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const long long at = (long long)blockIdx.x * WARPS + warp;
    const int head = at % p.placed;
    const long long token = at / p.placed;
    let_next_grid_start();
    wait_for_grid();
    if (token >= p.n) return;
    float *row = rows[warp];
    float *own = p.heads + token * p.stride + head * D;
    const bool turned = (unsigned)(head - p.from) < p.count || (unsigned)(head - p.from2) < p.count2;
#pragma unroll
    for (int i = 0; i < (PAIRS + 31) / 32; i++) {
        const int pair = i * 32 + lane;
        if (pair >= PAIRS) break;
        const float2 turn = p.table[token * PAIRS + pair], v = ((const float2 *)own)[pair];
        const float2 out = make_float2(v.x * turn.x - v.y * turn.y, v.x * turn.y + v.y * turn.x);
        ((float2 *)(turned ? row : own))[pair] = out;
    }
    if (!turned) return;

    __syncwarp();
#pragma unroll
    for (int step = ODD; step < D; step *= 2) {
        for (int i = lane; i < PAIRS; i += 32) {
            const int low = i / step * 2 * step + i % step;
            const float a = row[low], b = row[low + step];
            row[low] = a + b, row[low + step] = a - b;
        }
        __syncwarp();
    }
    const float factor = rsqrtf((float)(D / ODD));
    const int key = head - p.keys;
    const float *centre = (unsigned)key < p.centred ? p.centre + key * D : nullptr;
    const auto put = [&](int i, float x) { own[i] = centre ? x - centre[i] : x; };
    for (int i = lane; i < D / ODD; i += 32) {
        const float a = row[i * ODD] * factor;
        if (ODD == 1) {
            put(i, a);
        } else {
            const float b = row[i * ODD + 1 % ODD] * factor, c = row[i * ODD + 2 % ODD] * factor;
            // row vector times the orthonormal cosine transform [k][n]
            const float r3 = 0.577350269f, h2 = 0.707106781f, r6 = 0.408248290f;
            put(i * ODD, a * r3 + b * h2 + c * r6);
            put(i * ODD + 1 % ODD, a * r3 - c * 2 * r6);
            put(i * ODD + 2 % ODD, a * r3 - b * h2 + c * r6);
        }
    }
}
