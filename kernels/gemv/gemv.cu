// One row times a weight matrix, read once at the speed of memory; compiled by NVRTC.
//
// A warp takes one row of the weight at a time and always has DEPTH 16-byte loads a lane on their way, also across rows
// and before the kernel in front has ended, since weights do not depend on it. Scales, bias and the sum with what `out`
// holds already are applied where the product is known.
//
// INT8 is set by the host: 1 for int8 weights and codes with an exact int32 sum, 0 for bf16 on both sides.
#include "common.cuh"

constexpr int WARPS = 8;
constexpr int DEPTH = 4;
constexpr int SPAN = DEPTH * 32; // 16-byte pieces of a warp's loads

struct Params {
    const char *weight;        // [rows, bytes]
    const char *x;             // [bytes]
    const float *channels;     // [rows]: a scale for each output; null: 1
    const float *token;        // one scale for all of them; null: 1
    const float *bias;         // [rows]; null: 0
    float *out;                // [rows]
    int rows, bytes, add;
};

__device__ __forceinline__ uint4 stream(const char *from) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from));
    return v;
}

#if INT8
typedef int Sum;
__device__ __forceinline__ int dot(unsigned a, unsigned b, int sum) {
    int out;
    asm("dp4a.s32.s32 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(sum));
    return out;
}
#else
typedef float Sum;
__device__ __forceinline__ float dot(unsigned a, unsigned b, float sum) {
    sum = fmaf(__uint_as_float(a << 16), __uint_as_float(b << 16), sum);
    return fmaf(__uint_as_float(a & 0xffff0000u), __uint_as_float(b & 0xffff0000u), sum);
}
#endif

extern "C" __global__ void __launch_bounds__(WARPS * 32, 4) gemv(const __grid_constant__ Params p) {
    extern __shared__ uint4 x[]; // zero behind the last piece
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int pieces = p.bytes / 16, steps = (pieces + SPAN - 1) / SPAN;
    const int stride = gridDim.x * WARPS;
    int row = blockIdx.x * WARPS + warp;
    const auto load = [&](int r, int piece) {
        return r < p.rows && piece < pieces ? stream(p.weight + (long long)r * p.bytes + piece * 16) : make_uint4(0, 0, 0, 0);
    };

    let_next_grid_start();
    uint4 ahead[DEPTH];
#pragma unroll
    for (int i = 0; i < DEPTH; i++) ahead[i] = load(row, i * 32 + lane);
    wait_for_grid();
    for (int i = threadIdx.x; i < steps * SPAN; i += WARPS * 32)
        x[i] = i < pieces ? ((const uint4 *)p.x)[i] : make_uint4(0, 0, 0, 0);
    __syncthreads();

    const float token = p.token ? *p.token : 1.f;
    for (; row < p.rows; row += stride) {
        Sum sum = 0;
        for (int step = 0; step < steps; step++) {
            const bool more = step + 1 < steps;
            const int next_row = more ? row : row + stride, next = more ? (step + 1) * SPAN : 0;
#pragma unroll
            for (int i = 0; i < DEPTH; i++) {
                const uint4 w = ahead[i], v = x[step * SPAN + i * 32 + lane];
                ahead[i] = load(next_row, next + i * 32 + lane);
                sum = dot(w.x, v.x, sum), sum = dot(w.y, v.y, sum);
                sum = dot(w.z, v.z, sum), sum = dot(w.w, v.w, sum);
            }
        }
#pragma unroll
        for (int s = 16; s; s /= 2) sum += __shfl_xor_sync(~0u, sum, s);
        if (lane == 0) {
            float y = (float)sum * (p.channels ? p.channels[row] : 1.f) * token;
            if (p.bias) y += p.bias[row];
            p.out[row] = p.add ? p.out[row] + y : y;
        }
    }
}
