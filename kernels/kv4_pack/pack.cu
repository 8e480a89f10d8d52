// Packs a full block of every retrieval head of all layers, two CTAs a head (keys, values); compiled by NVRTC.
//
// Runs at the end of each decode step and leaves at once unless the step filled a block. Codes are those of
// quant/kv4.py, bit for bit, in the order of fragment.py. HEAD_DIM and WIDE are set by the host: with WIDE the upper half
// of the channels is packed, in 8 bits, their high halves in front of the low ones.
#include "common.cuh"

constexpr int D = HEAD_DIM;
constexpr int BLOCK = 128;
constexpr int THREADS = 512;
constexpr int SKIP = WIDE ? D / 2 : 0;
constexpr int PIECE = (D - SKIP) / 16;  // channels that a lane reads of a token: 16 lanes a token
constexpr float HALF = WIDE ? 128.f : 8.f;
constexpr int ROW = D + 4;     // bytes of a token's codes, padded against bank conflicts
constexpr float MIN_STEP = 9.5367431640625e-07f; // 2^-20

struct Params {
    const unsigned short *keys;   // fp16 [heads, 2 BLOCK, D]: the first block, the newest one
    const unsigned short *values;
    unsigned *packed_keys;        // [heads, blocks, BLOCK * D / 8]
    unsigned *packed_values;
    unsigned *scales;             // fp16 [heads, blocks, BLOCK, 4]
    const int *table;             // blocks of the history, in order
    const int *full;              // place in the table of the block that is full; below 0: none
    long long blocks;
    float share;                  // of a token's range, for a step
};

__device__ __forceinline__ float widen(unsigned short half) {
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(half));
    return f;
}

__device__ __forceinline__ unsigned short narrow(float x) {
    unsigned short half;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(x));
    return half;
}

extern "C" __global__ void __launch_bounds__(THREADS) kv4_pack(const __grid_constant__ Params p) {
    __shared__ unsigned char codes[BLOCK * ROW];
    let_next_grid_start();
    wait_for_grid();
    if (*p.full < 0) return;
    const long long place = (long long)blockIdx.x * p.blocks + p.table[*p.full];
    const bool value = blockIdx.y;
    const unsigned short *from = (value ? p.values : p.keys) + ((long long)blockIdx.x * 2 + 1) * BLOCK * D;
    const int lane = threadIdx.x % 16;
    for (int token = threadIdx.x / 16; token < BLOCK; token += THREADS / 16) {
        float x[PIECE], low = 3e38f, high = -3e38f;
#pragma unroll
        for (int i = 0; i < PIECE; i++) {
            x[i] = widen(from[token * D + SKIP + i * 16 + lane]);
            low = fminf(low, x[i]), high = fmaxf(high, x[i]);
        }
        for (int s = 8; s; s /= 2) {
            low = fminf(low, __shfl_xor_sync(~0u, low, s));
            high = fmaxf(high, __shfl_xor_sync(~0u, high, s));
        }
        // No step of this may be fused: the codes must not depend on who computes them.
        const unsigned short step = narrow(fmaxf(__fmul_rn(__fadd_rn(high, -low), p.share), MIN_STEP));
        const float size = widen(step), inverse = __fdiv_rn(1.f, size);
        const float up = __fadd_rn(__fmul_rn(__fadd_rn(low, high), 0.5f), __fmul_rn(size, WIDE ? 8.5f : 0.5f));
        const unsigned short middle = narrow(WIDE ? __fmul_rn(up, 1.f / 17) : up);
        const float center = WIDE ? __fadd_rn(__fmul_rn(widen(middle), 17.f), __fmul_rn(size, -8.f)) : widen(middle);
#pragma unroll
        for (int i = 0; i < PIECE; i++) {
            const float c = rintf(__fmul_rn(__fadd_rn(x[i], -center), inverse));
            const unsigned char code = (unsigned char)(fminf(fmaxf(c, -HALF), HALF - 1) + HALF);
            unsigned char *to = codes + token * ROW + i * 16 + lane;
            if (WIDE) to[0] = code >> 4, to[SKIP] = code & 15;
            else to[0] = code;
        }
        if (lane == 0) p.scales[(place * BLOCK + token) * 2 + value] = step | (unsigned)middle << 16;
    }
    __syncthreads();
    unsigned *to = (value ? p.packed_values : p.packed_keys) + place * (BLOCK * D / 8);
    for (int at = threadIdx.x; at < BLOCK * D / 8; at += THREADS) {
        const int column = at / 4 % 4, row = at / 16 % 8, chunk = at / 128;
        const int word = chunk % (D / 32) * 4 + at % 4, tile = chunk / (D / 32);
        const int first = tile * 32 + word / (D / 16) * 16, step = word % (D / 16);
        unsigned packed = 0;
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const int half = i / 4, far = i / 2 % 2, upper = i % 2;
            const int token = value ? first + 2 * column + half + 8 * far : first + row + 8 * upper;
            const int channel = value ? step * 16 + row + 8 * upper
                                      : step / 2 * 32 + column * 8 + step % 2 * 4 + far * 2 + half;
            packed |= (unsigned)codes[token * ROW + channel] << (16 * half + 8 * far + 4 * upper);
        }
        to[at] = packed;
    }
}
