// Decode attention over 4-bit keys and values in fragment order; compiled by NVRTC, so without any header.
//
// One CTA serves all query heads of a KV head over one split of its tokens. Tokens are the M of mma.m16n8k16 and query
// heads its N. Every warp streams its own tiles of 32 tokens through a ring in shared memory in which each lane reads
// back the codes it fetched itself; a 32-bit word is one operand of one product, see kernels/kv4_pack/fragment.py.
//
// Codes 0..15 become fp16 without arithmetic: four bits low in the mantissa, under exponent 0, are the subnormal
// code * 2^-24 (or 2^-20, four bits further up), which tensor cores multiply exactly. Step, middle and the codes'
// offset of 8 are folded out: q.k = step (q.n - 8 sum q) + middle sum(q), sum p v = (p step).(n - 8) + sum(p middle).
//
// In a decode step the same launch also stores the new token's key and value, and serves the streaming heads: their
// window is a handful of exact tokens, for one CTA a head that has no packed history and leaves its result whole.
//
// HEAD_DIM, WARPS and STAGES are set by the host.
#include "common.cuh"

constexpr int D = HEAD_DIM;
constexpr int THREADS = WARPS * 32;
constexpr int HEADS = 8;           // query heads of one product; the unused ones are zero
constexpr int TILE = 32;           // tokens
constexpr int TILES = 4;           // a block of the pool
constexpr int STEPS = D / 16;      // words of a lane for 16 tokens
constexpr int CHUNKS = D / 32;     // 16-byte pieces of a lane for a tile's keys, or its values
constexpr int SIDE = CHUNKS * 512; // bytes of a tile's keys, or its values
constexpr int STAGE = 2 * SIDE + TILE * 8;
constexpr int RING = WARPS * STAGES * STAGE;

constexpr int EXACT_TILES = 16;    // tiles that take as long as the first look at exact tokens
constexpr float NONE = -1e30f; // below every score; finite, so that differences stay numbers
constexpr float ROOM = 4.f;    // a new reference leaves the largest weight at 2^ROOM ...
constexpr float LIMIT = 8.f;   // ... and stays until one passes 2^LIMIT, so that weight * step fits fp16

struct Params {
    const float *q;                       // [heads + windows, group, D]
    char *exact_k;                        // fp16 [heads, n, D]
    char *exact_v;
    const char *keys;                     // [heads, blocks, TILES * SIDE]
    const char *values;
    const char *scales;                   // fp16 [heads, blocks, TILES * TILE, 4]
    const int *table;                     // blocks of the history, in order
    const int *lengths;                   // as Clock of the host; null: as below
    float *partial;                       // [heads, splits, group, D]
    float2 *sums;                         // [heads, splits, group]: reference, sum of weights
    float *out;                           // [heads + windows, group, D]
    const float *new_k;                   // [heads + windows, D], or null
    const float *new_v;
    char *window_k;                       // fp16 [windows, n, D]
    char *window_v;
    long long exact_stride, key_stride, value_stride, scale_stride, window_stride; // bytes from head to head
    float scale;
    int group, splits, exact, blocks, heads;
};

// The host's Clock: tokens that count, and the row of the new one.
enum { EXACT_TOKENS, PACKED_BLOCKS, EXACT_ROW, WINDOW_TOKENS, WINDOW_ROW };

__device__ __forceinline__ float power(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float2 widen(unsigned pair) {
    float2 f;
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h;}"
        : "=f"(f.x), "=f"(f.y)
        : "r"(pair));
    return f;
}

// Saturates: an infinite weight would turn the whole sum into NaN.
__device__ __forceinline__ unsigned narrow(float low, float high) {
    unsigned pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(fminf(high, 65504.f)), "f"(fminf(low, 65504.f)));
    return pair;
}

__device__ __forceinline__ unsigned transpose(unsigned pair) {
    unsigned turned;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(turned) : "r"(pair));
    return turned;
}

__device__ __forceinline__ void mma(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Rows 0-7 of the operand come out as code * 2^-24, rows 8-15 as code * 2^-20.
__device__ __forceinline__ void unpack(unsigned word, unsigned (&a)[4]) {
    a[0] = word & 0x000f000fu;
    a[1] = word & 0x00f000f0u;
    word >>= 8;
    a[2] = word & 0x000f000fu;
    a[3] = word & 0x00f000f0u;
}

__device__ __forceinline__ unsigned shared_address(const void *p) { return (unsigned)__cvta_generic_to_shared(p); }

template <int BYTES> __device__ __forceinline__ void fetch(unsigned to, const char *from) {
    if constexpr (BYTES == 16)
        asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(from), "n"(BYTES) : "memory");
}

// What a CTA's warps leave for each other.
struct Shared {
    float peak[WARPS][HEADS];
    float mass[WARPS][HEADS];
};

// Running softmax of one warp over its tokens; a lane has query heads 2 column and 2 column + 1. Weights are taken
// against a reference that follows the maximum only when it has to, since every move rescales all sums.
struct Sums {
    float value[STEPS][4] = {};         // [16 channels]: rows `row` and `row + 8`, of both heads
    float peak[2] = {NONE, NONE};       // the reference, log2
    float mass[2] = {}, drift[2] = {};  // sum of weights, and of weights * middle: over this lane's tokens

    // high: this lane's largest score of each head.
    __device__ __forceinline__ void follow(const float (&high)[2]) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float top = high[h];
#pragma unroll
            for (int x = 4; x < 32; x *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, x));
            top = fmaxf(peak[h], top - ROOM);
            const float factor = power(peak[h] - top);
            peak[h] = top, mass[h] *= factor, drift[h] *= factor;
#pragma unroll
            for (int m = 0; m < STEPS; m++) value[m][h] *= factor, value[m][h + 2] *= factor;
        }
    }
};

// Unpacked tokens from .. from + 15 of a head, by one warp, through two slots of its ring. Rows are padded by 16 bytes
// against bank conflicts and then fill a slot. Behind the last token its row is read again, with weight 0.
__device__ __forceinline__ void attend_exact(Sums &sums, const unsigned (&query)[STEPS][2], const char *keys,
                                             const char *values, int from, int count, const char *ring) {
    constexpr int PIECES = D / 8; // of a row
    constexpr int ROW = 2 * D + 16;
    static_assert(16 * ROW <= STAGE && STAGES >= 2, "");
    const int lane = threadIdx.x % 32, row = lane / 4, column = lane % 4;
    const unsigned to = shared_address(ring);
#pragma unroll
    for (int i = lane; i < 16 * PIECES; i += 32) {
        const long long at = (long long)min(from + i / PIECES, count - 1) * (2 * D) + i % PIECES * 16;
        const unsigned slot = to + i / PIECES * ROW + i % PIECES * 16;
        fetch<16>(slot, keys + at);
        fetch<16>(slot + STAGE, values + at);
    }
    asm volatile("cp.async.commit_group;\ncp.async.wait_group 0;" ::: "memory");
    __syncwarp();
    float score[4] = {};
#pragma unroll
    for (int s = 0; s < STEPS / 2; s++) {
        const uint4 u = *(const uint4 *)(ring + row * ROW + s * 64 + column * 16);
        const uint4 v = *(const uint4 *)(ring + (row + 8) * ROW + s * 64 + column * 16);
        const unsigned first[4] = {u.x, v.x, u.y, v.y}, second[4] = {u.z, v.z, u.w, v.w};
        mma(score, first, query[2 * s][0], query[2 * s][1]);
        mma(score, second, query[2 * s + 1][0], query[2 * s + 1][1]);
    }
    if (from + row >= count) score[0] = score[1] = NONE;
    if (from + row + 8 >= count) score[2] = score[3] = NONE;
    const float high[2] = {fmaxf(score[0], score[2]), fmaxf(score[1], score[3])};
    if (__any_sync(~0u, high[0] - sums.peak[0] > LIMIT || high[1] - sums.peak[1] > LIMIT)) sums.follow(high);
    unsigned weight[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const float first = power(score[2 * r] - sums.peak[0]), second = power(score[2 * r + 1] - sums.peak[1]);
        sums.mass[0] += first, sums.mass[1] += second;
        weight[r] = transpose(narrow(first, second));
    }
    const unsigned at = to + STAGE + (lane / 16 * 8 + lane % 8) * ROW + lane / 8 % 2 * 16;
#pragma unroll
    for (int m = 0; m < STEPS; m++) {
        unsigned a[4];
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3]) : "r"(at + m * 32) : "memory");
        mma(sums.value[m], a, weight[0], weight[1]);
    }
    __syncwarp(); // the slots are free
}

// One warp's view of the packed history of a head.
struct Stream {
    const char *keys, *values, *scales;
    const int *table;
    unsigned ring;
    int lane, end;

    __device__ __forceinline__ int look_up(int tile) const { return tile < end ? table[tile / TILES] : 0; }

    __device__ __forceinline__ void fetch_tile(int block, int tile, int slot) const {
        if (tile >= end) return;
        const long long at = (long long)block * TILES + tile % TILES;
        const char *k = keys + at * SIDE + lane * 16, *v = values + at * SIDE + lane * 16;
        const unsigned to = ring + slot * STAGE + lane * 16;
#pragma unroll
        for (int i = 0; i < CHUNKS; i++) fetch<16>(to + i * 512, k + i * 512);
        fetch<8>(ring + slot * STAGE + 2 * SIDE + lane * 8, scales + at * (TILE * 8) + lane * 8);
#pragma unroll
        for (int i = 0; i < CHUNKS; i++) fetch<16>(to + SIDE + i * 512, v + i * 512);
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) kv4_decode(const __grid_constant__ Params p) {
    extern __shared__ __align__(128) char memory[];
    Shared &shared = *(Shared *)(memory + RING);
    const bool window = blockIdx.x >= p.splits * p.heads;
    const int head = window ? blockIdx.x - p.splits * p.heads + p.heads : blockIdx.x / p.splits;
    const int split = window ? 0 : blockIdx.x % p.splits;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int row = lane / 4, column = lane % 4; // of a fragment
    const int exact = p.lengths ? p.lengths[window ? WINDOW_TOKENS : EXACT_TOKENS] : p.exact;
    const int tiles = window ? 0 : (p.lengths ? p.lengths[PACKED_BLOCKS] : p.blocks) * TILES;

    // Exact tokens are the front of the first split and count as the tiles that take as long.
    const int front = exact ? exact / 8 + EXACT_TILES : 0;
    const int begin = max((int)((long long)(tiles + front) * split / p.splits) - front, 0);
    const int end = max((int)((long long)(tiles + front) * (split + 1) / p.splits) - front, 0);

    const char *ring = memory + warp * STAGES * STAGE;
    const Stream stream{p.keys + head * p.key_stride,
                        p.values + head * p.value_stride,
                        p.scales + head * p.scale_stride,
                        p.table,
                        shared_address(ring),
                        lane,
                        end};
    int ahead = begin + warp, block = 0; // the tile to be fetched next, and its block, read one fetch earlier
    const auto prime = [&] {
        int blocks[STAGES];
#pragma unroll
        for (int s = 0; s < STAGES; s++) blocks[s] = stream.look_up(ahead + s * WARPS);
#pragma unroll
        for (int s = 0; s < STAGES - 1; s++, ahead += WARPS) {
            stream.fetch_tile(blocks[s], ahead, s);
            asm volatile("cp.async.commit_group;");
        }
        block = blocks[STAGES - 1];
    };
    if (split) prime(); // of tokens that were packed in an earlier step: nothing to wait for
    wait_for_grid();

    char *own_k = window ? p.window_k + (head - p.heads) * p.window_stride : p.exact_k + head * p.exact_stride;
    char *own_v = window ? p.window_v + (head - p.heads) * p.window_stride : p.exact_v + head * p.exact_stride;
    if (p.new_k && split == 0) {
        const long long at = p.lengths[window ? WINDOW_ROW : EXACT_ROW] * (2ll * D);
        for (int i = threadIdx.x; i < D / 2; i += THREADS) {
            const float2 k = ((const float2 *)(p.new_k + (long long)head * D))[i];
            const float2 v = ((const float2 *)(p.new_v + (long long)head * D))[i];
            ((unsigned *)(own_k + at))[i] = narrow(k.x, k.y);
            ((unsigned *)(own_v + at))[i] = narrow(v.x, v.y);
        }
        __syncthreads();
    }

    // Queries as operands: a lane's eight neighbouring channels of head `row` serve two steps.
    unsigned query[STEPS][2];
    float whole[2], start[2]; // sum(q) and -8 sum(q as rounded) of this lane's two heads
    {
        float sum = 0, rounded = 0;
        const float4 *q = (const float4 *)(p.q + ((long long)head * p.group + row) * D + column * 8);
#pragma unroll
        for (int s = 0; s < STEPS / 2; s++) {
            float x[8] = {};
            if (row < p.group) {
                const float4 a = q[s * 8], b = q[s * 8 + 1];
                x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w, x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
            }
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float low = x[2 * i] * p.scale, high = x[2 * i + 1] * p.scale;
                const unsigned pair = narrow(low, high);
                const float2 back = widen(pair);
                query[2 * s + i / 2][i % 2] = pair;
                sum += low + high, rounded += back.x + back.y;
            }
        }
#pragma unroll
        for (int x = 1; x < 4; x *= 2) {
            sum += __shfl_xor_sync(~0u, sum, x);
            rounded += __shfl_xor_sync(~0u, rounded, x);
        }
#pragma unroll
        for (int h = 0; h < 2; h++) {
            whole[h] = __shfl_sync(~0u, sum, (2 * column + h) * 4);
            start[h] = __shfl_sync(~0u, rounded, (2 * column + h) * 4) * -8.f;
        }
    }

    Sums sums;
    if (split == 0) {
        for (int from = warp * 16; from < exact; from += WARPS * 16)
            attend_exact(sums, query, own_k, own_v, from, exact, ring);
#pragma unroll
        for (int m = 0; m < STEPS; m++)
#pragma unroll
            for (int i = 0; i < 4; i++) sums.value[m][i] *= i < 2 ? 0x1p-24f : 0x1p-20f; // as `unpack`
        prime();
    }
    // -8 in the two scales of `unpack`, as one more product: sums stay centred, where a bias of 8 would eat their bits.
    const unsigned offset[4] = {0x80088008u, 0x80808080u, 0x80088008u, 0x80808080u};

    int slot = 0;
    for (int tile = begin + warp; tile < end; tile += WARPS, ahead += WARPS) {
        asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
        __syncwarp(); // the scales come from other lanes, and nobody reads the slot that is filled next
        stream.fetch_tile(block, ahead, slot == 0 ? STAGES - 1 : slot - 1);
        block = stream.look_up(ahead + WARPS);
        asm volatile("cp.async.commit_group;");
        const char *stage = ring + slot * STAGE;
        slot = slot == STAGES - 1 ? 0 : slot + 1;

        unsigned words[2 * STEPS];
#pragma unroll
        for (int i = 0; i < CHUNKS; i++) *(uint4 *)&words[4 * i] = *(const uint4 *)(stage + i * 512 + lane * 16);
        uint2 scales[2][2];
#pragma unroll
        for (int i = 0; i < 4; i++) scales[i / 2][i % 2] = *(const uint2 *)(stage + 2 * SIDE + (i * 8 + row) * 8);

        float raw[2][4];
#pragma unroll
        for (int t = 0; t < 2; t++)
#pragma unroll
            for (int i = 0; i < 4; i++) raw[t][i] = start[i % 2] * (i < 2 ? 0x1p-24f : 0x1p-20f);
#pragma unroll
        for (int k = 0; k < STEPS; k++)
#pragma unroll
            for (int t = 0; t < 2; t++) {
                unsigned a[4];
                unpack(words[t * STEPS + k], a);
                mma(raw[t], a, query[k][0], query[k][1]);
            }
#pragma unroll
        for (int i = 0; i < CHUNKS; i++) *(uint4 *)&words[4 * i] = *(const uint4 *)(stage + SIDE + i * 512 + lane * 16);

        float score[2][4];
        const auto scores = [&](float base0, float base1) {
#pragma unroll
            for (int t = 0; t < 2; t++)
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const float2 k = widen(scales[t][i / 2].x);
                    const float base = fmaf(k.y, whole[i % 2], i % 2 ? base1 : base0);
                    score[t][i] = fmaf(k.x * (i < 2 ? 0x1p24f : 0x1p20f), raw[t][i], base);
                }
        };
        scores(-sums.peak[0], -sums.peak[1]);
        float high[2];
        const auto highest = [&] {
#pragma unroll
            for (int h = 0; h < 2; h++)
                high[h] = fmaxf(fmaxf(score[0][h], score[0][h + 2]), fmaxf(score[1][h], score[1][h + 2]));
        };
        highest();
        if (__any_sync(~0u, fmaxf(high[0], high[1]) > LIMIT)) {
            scores(0, 0); // not from the differences: far from the reference they have lost their bits
            highest();
            sums.follow(high);
            scores(-sums.peak[0], -sums.peak[1]);
        }

        unsigned weight[2][2];
#pragma unroll
        for (int t = 0; t < 2; t++)
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const float2 v = widen(scales[t][r].y);
                const float first = power(score[t][2 * r]), second = power(score[t][2 * r + 1]);
                sums.mass[0] += first, sums.mass[1] += second;
                sums.drift[0] = fmaf(first, v.y, sums.drift[0]), sums.drift[1] = fmaf(second, v.y, sums.drift[1]);
                weight[t][r] = transpose(narrow(first * v.x, second * v.x));
            }
#pragma unroll
        for (int t = 0; t < 2; t++)
#pragma unroll
            for (int m = 0; m < STEPS; m++) {
                unsigned a[4];
                unpack(words[t * STEPS + m], a);
                mma(sums.value[m], a, weight[t][0], weight[t][1]);
                mma(sums.value[m], offset, weight[t][0], weight[t][1]);
            }
    }

    let_next_grid_start();

    // Join the warps: references first, then sums in them.
#pragma unroll
    for (int h = 0; h < 2; h++)
#pragma unroll
        for (int x = 4; x < 32; x *= 2) {
            sums.mass[h] += __shfl_xor_sync(~0u, sums.mass[h], x);
            sums.drift[h] += __shfl_xor_sync(~0u, sums.drift[h], x);
        }
    if (row == 0)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            shared.peak[warp][2 * column + h] = sums.peak[h];
            shared.mass[warp][2 * column + h] = sums.mass[h];
        }
    __syncthreads(); // and the rings are free
    const auto mass_of = [&](int g, float top) {
        float mass = 0;
        for (int w = 0; w < WARPS; w++) mass = fmaf(shared.mass[w][g], power(shared.peak[w][g] - top), mass);
        return mass;
    };
    const auto top_of = [&](int g) {
        float top = NONE;
        for (int w = 0; w < WARPS; w++) top = fmaxf(top, shared.peak[w][g]);
        return top;
    };
    float(*rows)[HEADS][D + 4] = (float(*)[HEADS][D + 4])memory; // padded against bank conflicts
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int g = 2 * column + h;
        if (g >= p.group) break;
        const float factor = power(sums.peak[h] - top_of(g));
#pragma unroll
        for (int m = 0; m < STEPS; m++) {
            rows[warp][g][m * 16 + row] = fmaf(sums.value[m][h], 0x1p24f, sums.drift[h]) * factor;
            rows[warp][g][m * 16 + row + 8] = fmaf(sums.value[m][h + 2], 0x1p20f, sums.drift[h]) * factor;
        }
    }
    __syncthreads();
    const long long place = ((long long)head * p.splits + split) * p.group;
    for (int i = threadIdx.x; i < p.group * D; i += THREADS) {
        float total = 0;
#pragma unroll
        for (int w = 0; w < WARPS; w++) total += rows[w][i / D][i % D];
        if (window)
            p.out[(long long)head * p.group * D + i] = total / mass_of(i / D, top_of(i / D));
        else
            p.partial[place * D + i] = total;
    }
    if (window) return;
    if (threadIdx.x < p.group) {
        const int g = threadIdx.x;
        const float top = top_of(g);
        p.sums[place + g] = make_float2(top, mass_of(g, top));
    }
}

constexpr int MERGE_THREADS = 512;
constexpr int MOST_SPLITS = 512;
constexpr int EARLY = 9; // rows of a thread: those of all splits on up to 144 multiprocessors, head size 128

// out [heads, group, D] of the splits' partial sums; one CTA a query head.
extern "C" __global__ void __launch_bounds__(MERGE_THREADS) kv4_merge(const __grid_constant__ Params p) {
    constexpr int QUADS = D / 4;
    constexpr int SLICES = MERGE_THREADS / QUADS;
    constexpr int MERGE_WARPS = MERGE_THREADS / 32;
    __shared__ float weight[MOST_SPLITS];
    __shared__ float reduce[2][MERGE_WARPS];
    __shared__ float4 rows[SLICES][QUADS];
    const int g = blockIdx.x, head = blockIdx.y, thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    const int slice = thread / QUADS, quad = thread % QUADS;
    const long long place = (long long)head * p.splits * p.group + g;
    const float4 *partial = (const float4 *)p.partial + place * QUADS + quad;
    const long long step = (long long)p.group * QUADS; // from split to split
    let_next_grid_start();
    wait_for_grid();

    const float2 own = thread < p.splits ? p.sums[place + (long long)thread * p.group] : make_float2(NONE, 0);
    float4 first[EARLY] = {}; // on their way while the weights are found
#pragma unroll
    for (int i = 0; i < EARLY; i++)
        if (slice < SLICES && slice + i * SLICES < p.splits) first[i] = partial[(slice + i * SLICES) * step];
    float top = own.x;
    for (int x = 16; x; x /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, x));
    if (lane == 0) reduce[0][warp] = top;
    __syncthreads();
    for (int w = 0; w < MERGE_WARPS; w++) top = fmaxf(top, reduce[0][w]);
    const float factor = own.y > 0 ? power(own.x - top) : 0.f;
    weight[thread] = factor;
    float mass = own.y * factor;
    for (int x = 16; x; x /= 2) mass += __shfl_xor_sync(~0u, mass, x);
    if (lane == 0) reduce[1][warp] = mass;
    __syncthreads();
    float4 total = make_float4(0, 0, 0, 0);
    const auto add = [&](float w, float4 x) {
        total.x += w * x.x, total.y += w * x.y, total.z += w * x.z, total.w += w * x.w;
    };
    if (slice < SLICES) {
#pragma unroll
        for (int i = 0; i < EARLY; i++) add(weight[min(slice + i * SLICES, MOST_SPLITS - 1)], first[i]);
        for (int s = slice + EARLY * SLICES; s < p.splits; s += SLICES) add(weight[s], partial[s * step]);
        rows[slice][quad] = total;
    }
    __syncthreads();
    if (slice == 0) {
        mass = 0;
        for (int w = 0; w < MERGE_WARPS; w++) mass += reduce[1][w];
#pragma unroll
        for (int s = 1; s < SLICES; s++) add(1, rows[s][quad]);
        const float inverse = 1.f / mass;
        *(float4 *)(p.out + ((long long)head * p.group + g) * D + quad * 4) =
            make_float4(total.x * inverse, total.y * inverse, total.z * inverse, total.w * inverse);
    }
}
