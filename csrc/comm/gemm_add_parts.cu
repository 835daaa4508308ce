// The last GEMM of a reduce-scatter whose rows copy engines move: of this rank's own rows, to whose
// products is added what the other ranks have sent.
//
//   d = a b^T + bias + residual + sum over the other ranks of part[rank]          f32 inside
//
// The arrays are added in the order of this line, one after the other, as linear_residual.cuh
// brings them by TMA while the other warpgroup multiplies. So the sum is made under the products:
// what is left behind them is a norm's two arrays, where sum_rows.cu has tp_size + 3.
#include <stdexcept>
#include <string>

#include "comm_ops.h"
#include "common/check.cuh"
#include "cuda/linear_launch.cuh"

namespace bytetx {
namespace gemm {
namespace {

// The residual comes first, then the parts in the order of their ranks.
struct PartsParams : ResidualParams {
    CUtensorMap parts_map;  // {n, m, size}
    int rank, size;

    __device__ __forceinline__ int num_residuals() const { return size; }

    template <typename T>
    __device__ __forceinline__ void fetch_residual(int index, uint64_t* full, T* to, int column,
                                                   int row) const {
        if (index == 0) return ResidualParams::fetch_residual(0, full, to, column, row);
        const auto hint = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_FIRST);
        const int source = index <= rank ? index - 1 : index;
        cute::SM90_TMA_LOAD_3D::copy(&parts_map, full, hint, to, column, row, source);
    }
};

template <typename C>
CUtensorMap make_parts_map(const GemmAddPartsParams& o) {
    const LinearParams& l = o.linear;
    const auto row_bytes = cuuint64_t(l.n) * kElementBytes;
    const cuuint64_t sizes[3] = {cuuint64_t(l.n), cuuint64_t(l.m), cuuint64_t(o.size)};
    const cuuint64_t strides[2] = {row_bytes, cuuint64_t(o.part_rows) * row_bytes};
    const cuuint32_t box[3] = {kResidualColumns, C::kTileM, 1};
    return encode_map(l, o.parts, 3, sizes, strides, box);
}

template <typename T, typename Tile>
void launch_add_parts(const GemmAddPartsParams& o, cudaStream_t stream) {
    using C = Config<T, WithResidual<Tile>>;
    const PartsParams p{{make_params<C>(o.linear), make_residual_map<C>(o.linear)},
                        make_parts_map<C>(o),
                        o.rank,
                        o.size};
    launch_persistent<C, gemm_residual_kernel<C, PartsParams>, sizeof(ResidualSmem<C>)>(p, stream);
}

template <typename Tile>
void launch_tile(const GemmAddPartsParams& o, cudaStream_t stream) {
    if (o.linear.dtype == DType::f16) return launch_add_parts<cutlass::half_t, Tile>(o, stream);
    launch_add_parts<cutlass::bfloat16_t, Tile>(o, stream);
}

}  // namespace
}  // namespace gemm

namespace {

void check(const GemmAddPartsParams& p) {
    const LinearParams& l = p.linear;
    const auto fail = [&](const std::string& need) {
        throw std::invalid_argument("gemm_add_parts needs " + need +
                                    "; got m, n, k = " + std::to_string(l.m) + ", " +
                                    std::to_string(l.n) + ", " + std::to_string(l.k) + " on rank " +
                                    std::to_string(p.rank) + " of " + std::to_string(p.size));
    };
    if (p.size < 1 || p.size > kMaxPeers) fail("1 to 8 ranks");
    if (p.rank < 0 || p.rank >= p.size) fail("a rank below the number of ranks");
    if (l.m < 0 || l.m > INT32_MAX || l.n <= 0 || l.n > INT32_MAX) fail("0 <= m and 0 < n < 2^31");
    if (l.n % 32 != 0) fail("n % 32 == 0");
    if (l.k <= 0 || l.k % 8 != 0 || l.k > INT32_MAX) fail("k > 0 and k % 8 == 0");
    if (l.dtype == DType::f32) fail("f16 or bf16");
    if (l.m > 0 && l.residual == nullptr) fail("a residual");
    if (l.gated || l.activation != Activation::none) fail("no activation and no gates");
    if (p.part_rows < l.m) fail("parts of m rows at least, not " + std::to_string(p.part_rows));
}

}  // namespace

void gemm_add_parts(const GemmAddPartsParams& p, const Launch& launch) {
    check(p);
    const std::string tiling = linear_tiling(p.linear.tiling).name;
    if (p.linear.m == 0) return;
    const DeviceGuard guard(launch.device);
    const auto stream = static_cast<cudaStream_t>(launch.stream);
    if (tiling == "128x128") {
        gemm::launch_tile<gemm::Tiling<2, 128, 6, 2>>(p, stream);
    } else if (tiling == "128x192") {
        gemm::launch_tile<gemm::Tiling<2, 192, 5, 2>>(p, stream);
    } else {
        throw std::invalid_argument("gemm_add_parts has the tilings 128x128 and 128x192, got " +
                                    tiling);
    }
    BYTETX_CUDA_CHECK(cudaGetLastError());
}

}  // namespace bytetx
