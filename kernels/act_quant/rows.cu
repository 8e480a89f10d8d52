// int8 activations, a CTA a row; compiled by NVRTC. As ref.py: symmetric, one scale a token, nearest (half to even).
//
// A row passes from global memory through registers to shared memory, and from there to codes: read once.
#include "common.cuh"

constexpr int THREADS = 1024;
constexpr int WARPS = THREADS / 32;
constexpr float TINY = 1e-12f;

struct Params {
    const float *x;      // [n, d], or [n, 2 d] gate and up
    const float *weight; // of the norm [d]; null: 1
    const float *scale;  // [n], of the product that gate and up are; null: 1
    char *codes;         // [n, d]
    float *out;          // [n], scales
    float eps;
    int d;               // a multiple of 4
    int turn;            // channels of a block that a Hadamard matrix rotates: 64, or 0
};

// Largest value and sum over the CTA, to all of its threads.
__device__ __forceinline__ float2 over_all(float top, float sum) {
    __shared__ float2 parts[WARPS];
    for (int s = 16; s; s /= 2) {
        top = fmaxf(top, __shfl_xor_sync(~0u, top, s));
        sum += __shfl_xor_sync(~0u, sum, s);
    }
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = make_float2(top, sum);
    __syncthreads();
    const float2 part = parts[threadIdx.x % 32];
    top = part.x, sum = part.y;
    for (int s = 16; s; s /= 2) {
        top = fmaxf(top, __shfl_xor_sync(~0u, top, s));
        sum += __shfl_xor_sync(~0u, sum, s);
    }
    return make_float2(top, sum);
}

__device__ __forceinline__ float largest(float4 v) {
    return fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w)));
}

__device__ __forceinline__ unsigned code(float x, float factor) { return (unsigned)__float2int_rn(x * factor) & 0xff; }

// Codes of a row whose largest magnitude is `top`, which gives back its scale.
__device__ __forceinline__ float write_codes(const Params &p, const float4 *row, float top) {
    top = fmaxf(top, TINY);
    const float factor = __fmul_rn(__fdiv_rn(1.f, top), 127.f);
    unsigned *codes = (unsigned *)(p.codes + (long long)blockIdx.x * p.d);
    for (int i = threadIdx.x; i < p.d / 4; i += THREADS) {
        const float4 v = row[i];
        codes[i] = code(v.x, factor) | code(v.y, factor) << 8 | code(v.z, factor) << 16 | code(v.w, factor) << 24;
    }
    return __fdiv_rn(top, 127.f);
}

// Rotates every 64 neighbours by a Hadamard matrix: a warp has two channels a lane.
__device__ __forceinline__ void rotate_blocks(float *values, int count) {
    const int lane = threadIdx.x % 32;
    for (int block = threadIdx.x / 32; block < count / 64; block += WARPS) {
        float2 v = *(float2 *)(values + block * 64 + 2 * lane);
        v = make_float2(v.x + v.y, v.x - v.y);
#pragma unroll
        for (int s = 1; s < 32; s *= 2) {
            const float2 other = make_float2(__shfl_xor_sync(~0u, v.x, s), __shfl_xor_sync(~0u, v.y, s));
            const float sign = lane & s ? -1.f : 1.f;
            v = make_float2(fmaf(sign, v.x, other.x), fmaf(sign, v.y, other.y));
        }
        *(float2 *)(values + block * 64 + 2 * lane) = make_float2(v.x * 0.125f, v.y * 0.125f);
    }
}

// The row rotated where the host asks for it; its largest magnitude over this thread's part, given `top` as it was.
__device__ __forceinline__ float rotate(const Params &p, float4 *row, float top) {
    if (!p.turn) return top;
    __syncthreads();
    rotate_blocks((float *)row, p.d);
    __syncthreads();
    top = 0;
    for (int i = threadIdx.x; i < p.d / 4; i += THREADS) top = fmaxf(top, largest(row[i]));
    return top;
}

extern "C" __global__ void __launch_bounds__(THREADS) quantize_rows(const __grid_constant__ Params p) {
    extern __shared__ float4 row[];
    let_next_grid_start();
    wait_for_grid();
    const float4 *x = (const float4 *)(p.x + (long long)blockIdx.x * p.d);
    float top = 0;
    for (int i = threadIdx.x; i < p.d / 4; i += THREADS) {
        row[i] = x[i];
        top = fmaxf(top, largest(row[i]));
    }
    const float scale = write_codes(p, row, over_all(rotate(p, row, top), 0).x);
    if (threadIdx.x == 0) p.out[blockIdx.x] = scale;
}

extern "C" __global__ void __launch_bounds__(THREADS) rms_norm_quantize(const __grid_constant__ Params p) {
    extern __shared__ float4 row[];
    let_next_grid_start();
    wait_for_grid();
    const float4 *x = (const float4 *)(p.x + (long long)blockIdx.x * p.d);
    float top = 0, sum = 0;
    for (int i = threadIdx.x; i < p.d / 4; i += THREADS) {
        float4 v = x[i];
        sum += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
        if (p.weight) {
            const float4 w = ((const float4 *)p.weight)[i];
            v.x *= w.x, v.y *= w.y, v.z *= w.z, v.w *= w.w;
        }
        row[i] = v;
        top = fmaxf(top, largest(v));
    }
    const float2 all = over_all(top, sum);
    const float scale = write_codes(p, row, all.x); // the norm's own factor changes their scale alone
    if (threadIdx.x == 0) p.out[blockIdx.x] = scale * rsqrtf(all.y / p.d + p.eps);
}

extern "C" __global__ void __launch_bounds__(THREADS) gated_quantize(const __grid_constant__ Params p) {
    extern __shared__ float4 row[];
    let_next_grid_start();
    wait_for_grid();
    const float4 *gate = (const float4 *)(p.x + (long long)blockIdx.x * 2 * p.d), *up = gate + p.d / 4;
    const float given = p.scale ? p.scale[blockIdx.x] : 1.f;
    float top = 0;
    for (int i = threadIdx.x; i < p.d / 4; i += THREADS) {
        float4 g = gate[i], u = up[i];
        g.x *= given, g.y *= given, g.z *= given, g.w *= given;
        u.x *= g.x / (1.f + __expf(-g.x)), u.y *= g.y / (1.f + __expf(-g.y));
        u.z *= g.z / (1.f + __expf(-g.z)), u.w *= g.w / (1.f + __expf(-g.w));
        row[i] = u;
        top = fmaxf(top, largest(u));
    }
    const float scale = write_codes(p, row, over_all(rotate(p, row, top), 0).x);
    if (threadIdx.x == 0) p.out[blockIdx.x] = scale * given;
}
