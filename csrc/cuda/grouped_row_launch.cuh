// One row by grouped_linear(), codes of 4 bits: the kernel that streams them, and its launch.
//
// A CTA an SM has whole strips of 16 outputs, so that no sum crosses CTAs; its warps share k. Each
// warp copies its own blocks of codes into a ring of its own, in one sequence over all strips of
// the CTA: neither a strip's end nor a barrier stops the copies. Threads and shared memory leave
// room for the next kernel's CTA beside this one, whose ring fills while this kernel still runs.
#pragma once

#include <algorithm>
#include <atomic>

#include "common/launch.cuh"
#include "cuda/grouped_codes.cuh"
#include "cuda/grouped_epilogue.cuh"
#include "cuda/mma.cuh"
#include "gemm/launch.cuh"
#include "grouped_ops.h"

namespace bytetx::grouped {

using namespace gemm;

constexpr int kRowWarps = 12;
constexpr int kRowUnits = 4;                     // whose sums wait for the others'
constexpr int kRowSmemBytes = 227 * 1024;        // the most that a CTA may have
constexpr int kBlockWords = kBlockFeatures / 2;  // x has so many a block

struct GroupedRow {
    GroupedLinearParams o;
    ActivationConstants activation;
    ActivationForm form;
    int units;  // strips of outputs; gated: strips of gates, each with that of its values
    int num_k_blocks;
};

// A step of a warp is two strips of 64 features: gates and values of a block, or an output's of two
// blocks. Slots of the ring have the codes of both and then their numbers.
template <CodeKind kKind>
struct RowRing {
    using C = Codes<kKind>;
    static constexpr int kStages = 5;
    static_assert(bits_of(kKind) == 4);  // with 8 an earlier form was slower
    static constexpr int kSlotBytes = 2 * (C::kStripBytes + C::kStripNumberBytes);
    static constexpr int kStageBytes = kRowWarps * kSlotBytes, kBytes = kStages * kStageBytes;
};

// Ring, words of x in whole steps, sums.
template <CodeKind kKind>
constexpr int row_smem_bytes(int num_k_blocks, int halves) {
    return RowRing<kKind>::kBytes + (num_k_blocks + 1) / 2 * 2 * kBlockWords * 4 +
           kRowUnits * halves * kRowWarps * kStripOutputs * 4;
}

// 16 bytes, of which the first `bytes` are read and others are zeros. They arrive when the thread's
// group of copies has: commit_copies(), wait_for_copies().
__device__ __forceinline__ void copy_16_bytes(uint32_t to, const uint8_t* from, int bytes = 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::); }

template <int kGroups>
__device__ __forceinline__ void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kGroups) : "memory");
}

__device__ __forceinline__ void prefetch_line(const void* address) {
    asm volatile("prefetch.global.L1 [%0];" ::"l"(address));
}

template <typename T, CodeKind kKind, bool kGated>
__global__ void __launch_bounds__(kRowWarps * 32, 2)
    grouped_row_kernel(const __grid_constant__ GroupedRow p) {
    using C = Codes<kKind>;
    using Ring = RowRing<kKind>;
    constexpr int kHalves = kGated ? 2 : 1;
    constexpr int kUnitSums = kHalves * kRowWarps * kStripOutputs;
    extern __shared__ __align__(128) uint8_t row_smem[];
    release_next_kernel();

    const GroupedLinearParams& o = p.o;
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    constexpr int kStepBlocks = kGated ? 1 : 2;
    const int num_steps = (p.num_k_blocks + kStepBlocks - 1) / kStepBlocks;  // all warps together
    auto* const words = reinterpret_cast<uint32_t*>(row_smem + Ring::kBytes);
    auto* const sums = reinterpret_cast<float*>(words + (p.num_k_blocks + 1) / 2 * 2 * kBlockWords);
    const uint32_t own_smem = smem_address(row_smem) + static_cast<uint32_t>(lane * 16);

    const int first_unit = static_cast<int>(blockIdx.x), step = static_cast<int>(gridDim.x);
    const int num_units = (p.units - first_unit + step - 1) / step;

    // Where copies are. Numbers of both strips are copied by neighbouring lanes.
    constexpr int kNumberLanes = C::kStripNumberBytes / 16;
    constexpr int kSecondCodes = kGated ? C::kStrips / 2 * C::kStripBytes : C::kBytes;
    constexpr int kSecondNumbers = kGated ? C::kStrips / 2 * C::kStripNumberBytes : C::kBytes;
    constexpr int kUnitsOfBlock = C::kStrips / kHalves;
    const int strip = first_unit % kUnitsOfBlock;  // all units of the CTA have it
    const uint8_t* codes =
        o.codes +
        (int64_t{first_unit / kUnitsOfBlock} * p.num_k_blocks + warp * kStepBlocks) * C::kBytes +
        strip * C::kStripBytes + lane * 16;
    const int numbers =  // from a lane's codes to its numbers
        C::kNumbersAt + strip * (C::kStripNumberBytes - C::kStripBytes) - lane * 16 +
        lane % kNumberLanes * 16 + (lane < kNumberLanes ? 0 : kSecondNumbers);
    const int to_next_unit =
        (step / kUnitsOfBlock * p.num_k_blocks - num_steps * kStepBlocks) * C::kBytes;
    int place = warp * Ring::kSlotBytes;  // the slot that is read, and written next
    int at_step = warp, units_left = num_units;
    // A warp has every kRowWarps-th step of all units together.
    const auto to_steps = [&] {
        while (at_step >= num_steps) {
            at_step -= num_steps;
            codes += to_next_unit;
            --units_left;
        }
    };
    to_steps();
    const auto copy_strips = [&] {
        if (units_left > 0) {
            // Zeros where k has no second block.
            const bool has_second = kGated || 2 * at_step + 1 < p.num_k_blocks;
            const int second = has_second ? 16 : 0;
            const uint32_t to = own_smem + static_cast<uint32_t>(place);
#pragma unroll
            for (int i = 0; i < C::kStripBytes; i += 512) {
                copy_16_bytes(to + i, codes + i);
                copy_16_bytes(to + C::kStripBytes + i, codes + kSecondCodes + i, second);
            }
            if (lane < 2 * kNumberLanes) {
                copy_16_bytes(to + 2 * C::kStripBytes, codes + numbers,
                              lane < kNumberLanes ? 16 : second);
            }
            codes += kRowWarps * kStepBlocks * C::kBytes;
            at_step += kRowWarps;
            to_steps();
        }
        commit_copies();
        place += Ring::kStageBytes;
        if (place >= Ring::kBytes) place -= Ring::kBytes;
    };
#pragma unroll 1
    for (int i = 0; i < Ring::kStages - 1; ++i) copy_strips();

    // Factors and biases are on their way early.
    const T* const bias = static_cast<const T*>(o.bias);
    const T* const residual = static_cast<const T*>(o.residual);
    const auto output_of = [&](int thread, int unit) {  // gated: of a gate; -1: none
        unit += thread / kStripOutputs;
        if (thread >= kRowUnits * kStripOutputs || unit >= num_units) return -1;
        const int at = first_unit + unit * step, within = thread % kStripOutputs;
        const int output = kGated ? at / 2 * kBlockOutputs + at % 2 * kStripOutputs + within
                                  : at * kStripOutputs + within;
        return output < o.n ? output : -1;
    };
    const auto prefetch = [&](int output) {
        if (output < 0) return;
#pragma unroll
        for (int h = 0; h < kHalves; ++h) {
            prefetch_line(o.factor + output + h * kBlockOutputs / 2);
            if (bias != nullptr) prefetch_line(bias + output + h * kBlockOutputs / 2);
        }
    };
    prefetch(output_of(static_cast<int>(threadIdx.x), 0));
    wait_for_prior_kernel();
    // Words of x in the order of operand b: for lane % 4 those of a block side by side.
    for (int i = static_cast<int>(threadIdx.x); i < (p.num_k_blocks + 1) / 2 * 16;
         i += kRowWarps * 32) {
        uint4 eight = {0, 0, 0, 0};
        if (i * 8 < o.k) eight = static_cast<const uint4*>(o.x)[i];
        uint32_t* own = words + i / 8 * kBlockWords + i % 8;
        own[0] = eight.x, own[8] = eight.y, own[16] = eight.z, own[24] = eight.w;
    }
    __syncthreads();

    constexpr int kStepWords = kStepBlocks * kBlockWords;
    int at = warp * kStepWords + lane % 4 * 8;
    for (int unit = 0; unit < num_units; ++unit, at -= num_steps * kStepWords) {
        float parts[2][4] = {};
        for (; at < num_steps * kStepWords; at += kRowWarps * kStepWords) {
            wait_for_copies<Ring::kStages - 2>();
            __syncwarp();  // all lanes' copies are there, and the slot before was read
            copy_strips();
            const uint8_t* own = row_smem + place;
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const auto* x =
                    reinterpret_cast<const uint4*>(words + at + (kGated ? 0 : h * kBlockWords));
                uint32_t a[16];
                weights_of_strip<T, kKind>(own + h * C::kStripBytes,
                                           own + 2 * C::kStripBytes + h * C::kStripNumberBytes,
                                           lane, o.form, a);
#pragma unroll
                for (int j = 0; j < 4; j += 2) {
                    const uint4 four = x[j / 2];
                    const uint32_t first[4] = {a[4 * j], a[4 * j + 1], a[4 * j + 2], a[4 * j + 3]};
                    const uint32_t second[4] = {a[4 * j + 4], a[4 * j + 5], a[4 * j + 6],
                                                a[4 * j + 7]};
                    mma<T>(parts[h], first, four.x, four.y);
                    mma<T>(parts[h], second, four.z, four.w);
                }
            }
        }
        if constexpr (!kGated) {
#pragma unroll
            for (int e = 0; e < 4; e += 2) parts[0][e] += parts[1][e];
        }
        const int number = unit % kRowUnits;
        if (lane % 4 == 0) {  // all columns are the row
#pragma unroll
            for (int h = 0; h < kHalves; ++h) {
                float* own = sums + number * kUnitSums + (h * kRowWarps + warp) * kStripOutputs;
                own[lane / 4] = parts[h][0];
                own[lane / 4 + 8] = parts[h][2];
            }
        }
        if (number + 1 < kRowUnits && unit + 1 < num_units) continue;
        __syncthreads();
        int thread;  // read again: it would take a register of the loop
        asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
        const int output = output_of(thread, unit - number);
        if (output >= 0) {
            float value[kHalves];
#pragma unroll
            for (int h = 0; h < kHalves; ++h) {
                const float* at = sums + thread / kStripOutputs * kUnitSums +
                                  h * kRowWarps * kStripOutputs + thread % kStripOutputs;
                float sum = 0.0f;
#pragma unroll
                for (int w = 0; w < kRowWarps; ++w) sum += at[w * kStripOutputs];
                value[h] = sum * o.factor[output + h * kBlockOutputs / 2];
                if (bias != nullptr) {
                    value[h] += static_cast<float>(bias[output + h * kBlockOutputs / 2]);
                }
            }
            float found = activate_as(p.form, value[0], p.activation);
            int column = output;
            if constexpr (kGated) {
                found *= value[1];
                column = output / kBlockOutputs * (kBlockOutputs / 2) + output % kBlockOutputs;
            }
            if (residual != nullptr) found += static_cast<float>(residual[column]);
            static_cast<T*>(o.d)[column] = static_cast<T>(found);
        }
        prefetch(output_of(thread, unit + 1));
        __syncthreads();
    }
}

// L1 keeps the least that it may, whatever a launch asks for: an SM that divides its memory anew
// takes no CTA beside those that it has, and the kernels of a layer ask for different sizes.
template <auto kKernel>
void prefer_smem_once() {
    static std::atomic<uint64_t> is_asked{0};  // a bit a device
    int device;
    BYTETX_CUDA_CHECK(cudaGetDevice(&device));
    const uint64_t bit = device < 64 ? uint64_t{1} << device : 0;
    if ((is_asked.load(std::memory_order_acquire) & bit) != 0) return;
    BYTETX_CUDA_CHECK(cudaFuncSetAttribute(kKernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                           cudaSharedmemCarveoutMaxShared));
    is_asked.fetch_or(bit, std::memory_order_release);
}

// Whether shared memory has room for a row of k features.
template <CodeKind kKind>
bool row_fits(int64_t k, bool gated) {
    return row_smem_bytes<kKind>(num_tiles(k, kBlockFeatures), gated ? 2 : 1) <= kRowSmemBytes;
}

template <typename T, CodeKind kKind>
void launch_grouped_row(const GroupedLinearParams& o, cudaStream_t stream) {
    GroupedRow p{};
    p.o = o;
    p.activation = activation_constants(o.activation);
    p.form = form_of(o.activation);
    p.num_k_blocks = num_tiles(o.k, kBlockFeatures);
    p.units = num_tiles(o.n, o.gated ? 2 * kStripOutputs : kStripOutputs);
    const int smem_bytes = row_smem_bytes<kKind>(p.num_k_blocks, o.gated ? 2 : 1);
    constexpr int kMultiple = kBlockOutputs / kStripOutputs;  // a CTA has one strip of its blocks
    const int ctas = std::min(num_tiles(p.units, kMultiple), num_sms() / kMultiple) * kMultiple;
    const LaunchShape shape{dim3(static_cast<unsigned>(ctas)), dim3(kRowWarps * 32), smem_bytes,
                            stream};
    const auto run = [&]<bool kGated>() {
        constexpr auto kKernel = grouped_row_kernel<T, kKind, kGated>;
        allow_smem_once<kKernel>(kRowSmemBytes);
        prefer_smem_once<kKernel>();
        launch_kernel(kKernel, shape, p);
    };
    o.gated ? run.template operator()<true>() : run.template operator()<false>();
}

// Units of the build: those of a block are compiled together (setup.py).
extern template void launch_grouped_row<Half, kFourBits>(const GroupedLinearParams& o,
                                                         cudaStream_t stream);

extern template void launch_grouped_row<BFloat16, kFourBits>(const GroupedLinearParams& o,
                                                             cudaStream_t stream);

extern template void launch_grouped_row<Half, kFourBitsZero>(const GroupedLinearParams& o,
                                                             cudaStream_t stream);

extern template void launch_grouped_row<BFloat16, kFourBitsZero>(const GroupedLinearParams& o,
                                                                 cudaStream_t stream);

}  // namespace bytetx::grouped
