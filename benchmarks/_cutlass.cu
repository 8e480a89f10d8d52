// An int8 product in CUTLASS 3.x for Hopper, scaled by row and by column in its epilogue; compiled by _cutlass.py.
//
// out [m, n] bf16 = (codes [m, k] @ weight [n, k]^T) * token [m] * channels [n]; all packed row by row, sums in int32
// registers. One compilation is one kernel: TILE_M, TILE_N, CLUSTER_M, CLUSTER_N and PINGPONG (else cooperative) are
// defined outside.

#include <cstdint>

#include <cutlass/cutlass.h>
#include <cutlass/epilogue/collective/collective_builder.hpp>
#include <cutlass/epilogue/fusion/sm90_callbacks_tma_warpspecialized.hpp>
#include <cutlass/gemm/collective/collective_builder.hpp>
#include <cutlass/gemm/device/gemm_universal_adapter.h>
#include <cutlass/gemm/kernel/gemm_universal.hpp>

namespace {

namespace fusion = cutlass::epilogue::fusion;
using cute::Int;

constexpr int STEP = 128;  // of k: one row of the swizzled tile
using Tile = cute::Shape<Int<TILE_M>, Int<TILE_N>, Int<STEP>>;
using Cluster = cute::Shape<Int<CLUSTER_M>, Int<CLUSTER_N>, Int<1>>;

#if PINGPONG
using Loop = cutlass::gemm::KernelTmaWarpSpecializedPingpong;
using Ending = cutlass::epilogue::TmaWarpSpecialized;
#else
using Loop = cutlass::gemm::KernelTmaWarpSpecializedCooperative;
using Ending = cutlass::epilogue::TmaWarpSpecializedCooperative;
#endif

template <class Result>
using Times = fusion::Sm90Compute<cutlass::multiplies, Result, float, cutlass::FloatRoundStyle::round_to_nearest>;
using Token = fusion::Sm90ColBroadcast<0, Tile, float>;    // varies down a column: one value a row
using Channels = fusion::Sm90RowBroadcast<0, Tile, float>; // varies along a row: one value a column
using ByToken = fusion::Sm90EVT<Times<float>, Token, fusion::Sm90AccFetch>;
using ByBoth = fusion::Sm90EVT<Times<cutlass::bfloat16_t>, Channels, ByToken>;

using Row = cutlass::layout::RowMajor;
using Column = cutlass::layout::ColumnMajor; // [k, n] column by column is [n, k] row by row
constexpr int CODES = 16, OUTS = 8;          // elements of 16 bytes, which the copy engine needs

using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Tile, Cluster, cutlass::epilogue::collective::EpilogueTileAuto,
    int32_t, float, void, Row, OUTS, cutlass::bfloat16_t, Row, OUTS, Ending, ByBoth>::CollectiveOp;
using Stages =
    cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(sizeof(typename Epilogue::SharedStorage))>;
using Mainloop = typename cutlass::gemm::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, int8_t, Row, CODES, int8_t, Column, CODES, int32_t, Tile,
    Cluster, Stages, Loop>::CollectiveOp;
using Kernel = cutlass::gemm::kernel::GemmUniversal<cute::Shape<int, int, int, int>, Mainloop, Epilogue>;
using Gemm = cutlass::gemm::device::GemmUniversalAdapter<Kernel>;

}  // namespace

#define EXPORTED extern "C" __attribute__((visibility("default")))

// A cutlass::Status. `swizzle`: tiles, at most, of a band that is walked before the next one.
EXPORTED int product(const void* codes, const void* weight, const void* token, const void* channels, void* out, int m,
                     int n, int k, int swizzle, void* stream) {
    static const auto chip = cutlass::KernelHardwareInfo::make_kernel_hardware_info<Kernel>();
    typename Gemm::Arguments arguments{};
    arguments.mode = cutlass::gemm::GemmUniversalMode::kGemm;
    arguments.problem_shape = {m, n, k, 1};
    const auto along_k = cute::make_stride(static_cast<int64_t>(k), Int<1>{}, int64_t{0});
    const auto along_n = cute::make_stride(static_cast<int64_t>(n), Int<1>{}, int64_t{0});
    arguments.mainloop.ptr_A = static_cast<const int8_t*>(codes);
    arguments.mainloop.dA = along_k;
    arguments.mainloop.ptr_B = static_cast<const int8_t*>(weight);
    arguments.mainloop.dB = along_k;
    arguments.epilogue.thread = {
        {static_cast<const float*>(channels)}, {{static_cast<const float*>(token)}, {}, {}}, {}};
    arguments.epilogue.ptr_D = static_cast<cutlass::bfloat16_t*>(out);
    arguments.epilogue.dD = along_n;
    arguments.hw_info = chip;
    arguments.scheduler.max_swizzle_size = swizzle;
    const cutlass::Status fits = Gemm::can_implement(arguments);
    if (fits != cutlass::Status::kSuccess) {
        return static_cast<int>(fits);
    }
    return static_cast<int>(Gemm{}.run(arguments, nullptr, static_cast<cudaStream_t>(stream)));
}

EXPORTED const char* describe(int status) {
    return cutlass::cutlassGetStatusString(static_cast<cutlass::Status>(status));
}
