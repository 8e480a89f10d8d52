// int8 x int8 product for many rows on Hopper (sm_90a), with scales, bias and the residual sum behind it; by NVRTC.
//
// A CTA has 128 x 256 sums, which two warpgroups keep in registers, 64 rows each. A third warpgroup's only work is to
// have the copy engine fetch tiles of 128 channels, STAGES of them ahead. Two CTAs, one below the other, are a cluster:
// each fetches its own rows of codes and one half of the 256 weight rows for both, since what the L2 cache gives is the
// limit otherwise. CTAs stay and take one pair of tiles after another; a band of rows is walked before the next.
//
// KIND is set by the host: what `out` is. SUM is fp32 that is added to; GATED is bf16, silu(gate) * up of the two halves
// of the weight's rows, for which a tile takes 128 rows of each half.
#include "common.cuh"

constexpr int M = 128, N = 256, K = 128; // of a CTA's tile; K is a step, and the width of the copy engine's swizzle
constexpr int STAGES = 4;
constexpr int THREADS = 384;
constexpr int CODES = M * K, STEP = (M + N) * K, HALF = N / 2 * K; // bytes
enum { FP32, FP16, BF16, SUM, GATED };
typedef unsigned long long u64;

struct alignas(64) Map {
    char opaque[128]; // CUtensorMap
};

struct Params {
    Map codes, weight;     // [m, k] in boxes of M x K, [n, k] in boxes of N / 2 x K
    const float *token;    // [m]; null: 1
    const float *channels; // [n]
    const float *bias;     // [n]; null: 0
    char *out;             // [m, stride] in elements
    long long stride;
    int m, width, steps;    // rows, columns of `out`, steps of 128 channels
    int down, across, band; // pairs of tiles; tiles; pairs in a band
};

constexpr int WIDTH = KIND == GATED ? N / 2 : N; // columns of `out` that a tile gives

__device__ __forceinline__ unsigned shared_at(const void *p) { return (unsigned)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void wait_for(unsigned barrier, unsigned parity) {
    asm volatile("{\n.reg .pred over;\nagain:\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 over, [%0], %1;\n"
                 "@!over bra again;\n}" ::"r"(barrier), "r"(parity) : "memory");
}

__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

__device__ __forceinline__ void fetch(unsigned to, const Map *map, int channel, int row, unsigned barrier) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
                 ::"r"(to), "l"(map), "r"(channel), "r"(row), "r"(barrier) : "memory");
}

__device__ __forceinline__ void fetch_for_both(unsigned to, const Map *map, int channel, int row, unsigned barrier) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
                 "[%0], [%1, {%2, %3}], [%4], %5;"
                 ::"r"(to), "l"(map), "r"(channel), "r"(row), "r"(barrier), "h"((short)3) : "memory");
}

// Rows of K bytes in the copy engine's 128-byte swizzle, groups of eight rows 1,024 bytes apart.
__device__ __forceinline__ u64 operand(unsigned at) {
    return ((at & 0x3ffff) >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}

#define S8(i) "+r"(s[i]), "+r"(s[i + 1]), "+r"(s[i + 2]), "+r"(s[i + 3]), "+r"(s[i + 4]), "+r"(s[i + 5]), "+r"(s[i + 6]), "+r"(s[i + 7])
#define S32(i) S8(i), S8(i + 8), S8(i + 16), S8(i + 24)

// s (+)= 64 rows of 32 codes times 256 rows of 32 weights, in the background.
__device__ __forceinline__ void multiply(int (&s)[128], u64 a, u64 b, int more) {
    asm volatile(
        "{\n.reg .pred more;\nsetp.ne.b32 more, %130, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n256k32.s32.s8.s8 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
        "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63,"
        "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95,"
        "%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,"
        "%122,%123,%124,%125,%126,%127}, %128, %129, more;\n}"
        : S32(0), S32(32), S32(64), S32(96)
        : "l"(a), "l"(b), "r"(more));
}

__device__ __forceinline__ unsigned narrow(float2 x) {
    unsigned both;
    if (KIND == FP16) asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(x.y), "f"(x.x));
    else asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(x.y), "f"(x.x));
    return both;
}

// Lane t of four gives w[i] to lane i and gets, in order, what the four had for it.
__device__ __forceinline__ void exchange(unsigned (&w)[4], int t) {
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
        unsigned got = __shfl_xor_sync(~0u, t & 1 ? w[i] : w[i + 1], 1);
        if (t & 1) w[i] = got;
        else w[i + 1] = got;
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        unsigned got = __shfl_xor_sync(~0u, t & 2 ? w[i] : w[i + 2], 2);
        if (t & 2) w[i] = got;
        else w[i + 2] = got;
    }
}

struct Tile {
    int row, column;
};

__device__ __forceinline__ Tile tile_at(const Params &p, int index, int rank) {
    const int first = index / (p.band * p.across) * p.band, within = index % (p.band * p.across);
    const int height = min(p.down - first, p.band);
    return {(2 * (first + within % height) + rank) * M, within / height * WIDTH};
}

__device__ __forceinline__ float gated(float gate, float up) { return __fdividef(gate, 1.0f + __expf(-gate)) * up; }

// What a tile's sums are multiplied with and what is added, in shared memory.
struct Scales {
    float channels[N], bias[N], token[M];
};

// A warpgroup's 64 x 256 sums, scaled, to memory. A lane has two neighbours of every eight columns of two rows.
__device__ __forceinline__ void finish(const Params &p, const int (&s)[128], const Scales &with, int group, Tile at) {
    constexpr int STEPS = WIDTH / 16; // four groups of eight columns, of the upper and of the lower row in turn
    constexpr int AHEAD = 4;
    const int lane = threadIdx.x % 32, t = lane % 4;
    const int within = group * 64 + threadIdx.x / 32 % 4 * 16 + lane / 4;
    const auto row = [&](int step) { return within + 8 * (step % 2); };
    const auto column = [&](int step, int i) { return at.column + 8 * (step / 2 * 4 + i) + 2 * t; };
    const auto line = [&](int step) { return p.out + (at.row + row(step)) * p.stride * (KIND == FP32 || KIND == SUM ? 4 : 2); };
    const auto scaled = [&](int j, int lower) {
        const float2 scale = *(const float2 *)(with.channels + 8 * j + 2 * t), more = *(const float2 *)(with.bias + 8 * j + 2 * t);
        const float token = with.token[within + 8 * lower];
        return make_float2((float)s[4 * j + 2 * lower] * scale.x * token + more.x,
                           (float)s[4 * j + 2 * lower + 1] * scale.y * token + more.y);
    };
    float2 held[AHEAD][4]; // of what is added to, on its way
    const auto load = [&](int step) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int c = column(step, i);
            held[step % AHEAD][i] = at.row + row(step) < p.m && c < p.width ? *(const float2 *)(line(step) + 4 * c) : make_float2(0, 0);
        }
    };
    if (KIND == SUM)
#pragma unroll
        for (int step = 0; step < AHEAD; step++) load(step);
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
        const int j = step / 2 * 4;
        const bool inside = at.row + row(step) < p.m;
        asm volatile("" ::: "memory"); // one after the other: there are no registers for more
        float2 x[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            x[i] = scaled(j + i, step % 2);
            if (KIND == GATED) {
                const float2 up = scaled((j + i + WIDTH / 8) % (N / 8), step % 2);
                x[i] = make_float2(gated(x[i].x, up.x), gated(x[i].y, up.y));
            }
        }
        if constexpr (KIND == FP32 || KIND == SUM) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int c = column(step, i);
                if (KIND == SUM) x[i] = make_float2(x[i].x + held[step % AHEAD][i].x, x[i].y + held[step % AHEAD][i].y);
                if (inside && c < p.width) *(float2 *)(line(step) + 4 * c) = x[i];
            }
            if (KIND == SUM && step + AHEAD < STEPS) load(step + AHEAD);
        } else {
            unsigned w[4];
#pragma unroll
            for (int i = 0; i < 4; i++) w[i] = narrow(x[i]);
            exchange(w, t);
            const int c = at.column + 8 * (j + t);
            if (inside && c < p.width) *(uint4 *)(line(step) + 2 * c) = make_uint4(w[0], w[1], w[2], w[3]);
        }
    }
}

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(THREADS, 1)
    gemm(const __grid_constant__ Params p) {
    extern __shared__ char room[];
    __shared__ Scales scales[2];
    __shared__ u64 barriers[2 * STAGES];
    char *tiles = (char *)(((u64)room + 1023) & ~1023ull);
    const unsigned base = shared_at(tiles), full = shared_at(barriers), empty = full + 8 * STAGES;
    unsigned rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    const int count = p.down * p.across, clusters = gridDim.x / 2;

    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(full + 8 * i) : "memory");
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 16;" ::"r"(empty + 8 * i) : "memory"); // warps of both CTAs
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    cluster_sync();

    const int apart = KIND == GATED ? p.width : N / 2; // rows of the weight from one half of a tile to the other
    const int channels = KIND == GATED ? 2 * p.width : p.width;
    int stage = 0;
    unsigned parity = 0;
    if (threadIdx.x < 128) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (threadIdx.x == 0)
            for (int index = blockIdx.x / 2; index < count; index += clusters) {
                const Tile at = tile_at(p, index, rank);
                for (int step = 0; step < p.steps; step++) {
                    const unsigned to = base + stage * STEP, ready = full + 8 * stage;
                    wait_for(empty + 8 * stage, parity ^ 1);
                    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(ready), "r"(STEP) : "memory");
                    fetch(to, &p.codes, step * K, at.row, ready);
                    fetch_for_both(to + CODES + rank * HALF, &p.weight, step * K, at.column + rank * apart, ready);
                    if (++stage == STAGES) stage = 0, parity ^= 1;
                }
            }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        const int mine = threadIdx.x - 128, group = mine / 128, lane = threadIdx.x % 32;
        const auto let_go = [&](int which) { // a lane for each CTA: both halves of the weight's tile were read
            if (lane < 2)
                asm volatile("{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\n"
                             "mbarrier.arrive.shared::cluster.b64 _, [there];\n}"
                             ::"r"(empty + 8 * which), "r"(lane) : "memory");
        };
        int turn = 0;
        for (int index = blockIdx.x / 2; index < count; index += clusters, turn ^= 1) {
            const Tile at = tile_at(p, index, rank);
            const int channel = at.column + mine % (N / 2) + mine / (N / 2) * apart;
            Scales &with = scales[turn];
            with.channels[mine] = channel < channels ? p.channels[channel] : 0.0f;
            with.bias[mine] = p.bias && channel < channels ? p.bias[channel] : 0.0f;
            if (mine < M) with.token[mine] = !p.token ? 1.0f : at.row + mine < p.m ? p.token[at.row + mine] : 0.0f;
            int s[128];
            int last = 0;
            for (int step = 0; step < p.steps; step++) {
                wait_for(full + 8 * stage, parity);
                const unsigned from = base + stage * STEP;
                const u64 a = operand(from + group * (CODES / 2)), b = operand(from + CODES);
                asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
                for (int part = 0; part < K / 32; part++) multiply(s, a + 2 * part, b + 2 * part, step + part);
                asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
                asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory"); // those of the step before are done
                if (step) let_go(last);
                last = stage;
                if (++stage == STAGES) stage = 0, parity ^= 1;
            }
            asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
            for (int i = 0; i < 128; i++) asm volatile("" : "+r"(s[i])::"memory"); // not read before they are there
            let_go(last);
            asm volatile("bar.sync 1, 256;" ::: "memory"); // both groups have written their scales
            finish(p, s, with, group, at);
        }
    }
    cluster_sync(); // nothing arrives at a CTA that has ended
}
