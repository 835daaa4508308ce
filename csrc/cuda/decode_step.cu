// All layers of a decoder for the next token of one sequence, in one launch.
//
//   h = rms_norm(x); q, k, v = qkv(h); q, k = rotary(head_norm(q, k)); k, v to their page
//   x += attn_out(softmax(q k') v);  x += ffn_out(silu(gate(rms_norm(x))) * value(rms_norm(x)))
//
// 128 CTAs of eight warps and a producer warp stay for the whole step. Each has an equal part of
// the rows of every weight. The producer streams them, layer after layer, through a ring in shared
// memory and waits for nothing but free slots. The others take a product's weights from the ring
// into registers while its input is on the way.
//
// Between products, numbers travel as packets (decode_step_sync.cuh). A layer has five exchanges:
//
//   x --> qkv --> attention --> attn_out --> ffn_in --> ffn_out --> x
//
// and one more inside attention where the keys are divided over CTAs. A warp has 1/8 of a product's
// k for all rows of the CTA: it needs only its own slice of the input, multiplies on the tensor
// cores (the vector is a matrix of equal columns), and the partial sums meet in shared memory. The
// norm's scale is applied to the sums: 1 / rms(x) is one number.
//
// Bytes: all weights once, keys and values once. x stays in f32 between layers. Bound by the trips
// of packets for few keys: 2.6 TB/s of weights and keys with 50 keys, 2.2 with 500, 2.0 with 4000
// (Qwen3-0.6B's shape, H100, 2026-11-26).
// Source: the design follows "Look Ma, No Bubbles!" (Hazy Research, 2025).

#include <cuda_bf16.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>

#include "common/check.cuh"
#include "common/launch.cuh"
#include "cuda/decode_step_sync.cuh"
#include "decode_step_ops.h"

namespace bytetx {
namespace decode {
namespace {

constexpr int kCtas = 128;  // CTAs for 132 SMs; every matrix divides by it
constexpr int kWarps = 8;   // that multiply; one more copies weights
constexpr int kThreads = kWarps * 32;
constexpr int kHeadDim = 128;
constexpr int kSlotRows = 8, kSlotK = 1024;  // rows and features of a weight in one slot
constexpr int kSlotBytes = kSlotRows * kSlotK * 2;
constexpr int kSteps = kSlotK / kWarps / 32;  // steps per slot and warp, two mma each
constexpr int kSumStride = kWarps + 4;        // floats; no bank conflicts
constexpr int kTableKeys = 512;               // keys of a CTA whose cache slots are kept
// Half slots that are copied to at a time. More of them queue at the memory, and packets that are
// in the L2 wait behind them: without a limit a step took 473 us, with two 430, four 417, three 410
// (100 keys, H100).
constexpr int kWindow = 3;
constexpr int kCopies = 4;          // copies of packets that every CTA reads
constexpr float kNoScore = -1e30f;  // finite: differences of two are 0
constexpr float kLog2e = 1.4426950408889634f;

// d = a row block of a weight [rows of all CTAs, k] times a vector. With eight rows, slots hold one
// part of k after another; with more, all of k and one part of the rows after another.
template <int rows, int k>
struct Product {
    static constexpr int kRows = rows, kK = k;
    static constexpr bool kIsDeep = rows == kSlotRows;
    static constexpr int kSlots = rows * k / (kSlotRows * kSlotK);
    static constexpr int kTiles = kIsDeep ? 1 : rows / 16;
    static constexpr int kParts = kIsDeep ? kSlots : 1;  // parts of the vector, kSlotK numbers each
    static_assert(k % kSlotK == 0 && (kIsDeep || (k == kSlotK && rows % 16 == 0)));
};

template <int hidden, int inner, int heads, int kv_heads>
struct Config {
    static constexpr int kHidden = hidden, kInner = inner, kHeads = heads, kKvHeads = kv_heads;
    static constexpr int kQkvRows = (heads + 2 * kv_heads) * kHeadDim;
    static constexpr int kAttended = heads * kHeadDim;
    static constexpr int kSplits = kCtas / kv_heads;  // CTAs a KV head
    using Qkv = Product<kQkvRows / kCtas, hidden>;
    using AttnOut = Product<hidden / kCtas, kAttended>;
    using FfnIn = Product<2 * inner / kCtas, hidden>;
    using FfnOut = Product<hidden / kCtas, inner>;
    static constexpr int kLayerSlots =
        Qkv::kSlots + AttnOut::kSlots + FfnIn::kSlots + FfnOut::kSlots;
    static constexpr int kRingSlots = 12;
    static constexpr int kAttnOutSlot = Qkv::kSlots;  // index among a layer's slots
    static constexpr int kFfnInSlot = kAttnOutSlot + AttnOut::kSlots;
    static constexpr int kFfnOutSlot = kFfnInSlot + FfnIn::kSlots;
    static constexpr int kMaxRows = FfnIn::kRows > Qkv::kRows ? FfnIn::kRows : Qkv::kRows;
    static constexpr int kMaxParts =
        FfnOut::kParts > AttnOut::kParts ? FfnOut::kParts : AttnOut::kParts;
    static_assert(heads == 2 * kv_heads && kSplits == 16);
    static_assert(kLayerSlots >= kRingSlots);
};

// Packets, twice: layers take turns. When a CTA writes those of layer i + 2, every CTA has read
// those of layer i, for it has sent what layer i + 1 needed.
template <typename C>
struct Workspace {
    struct Common {                           // packets that every CTA reads
        uint64_t x[C::kHidden];               // after the feed-forward half
        uint64_t middle[C::kHidden];          // after the attention half
        uint64_t attended[C::kAttended / 2];  // two bf16 a packet
        uint64_t inner[C::kInner / 2];        // two bf16 a packet
    };
    struct Layer {
        Common copies[kCopies];     // CTA i reads copy i % kCopies
        uint64_t qkv[C::kQkvRows];  // f32
        uint64_t split[C::kKvHeads][C::kSplits][2]
                      [kHeadDim];                            // unscaled sums of a part of the keys
        uint64_t split_rows[C::kKvHeads][C::kSplits][2][2];  // its maximum and its sum of weights
    };
    Layer layers[2];
    uint32_t epoch;  // the last tag of the step before
};

template <typename C>
struct Smem {
    alignas(128) uint8_t ring[C::kRingSlots][kSlotBytes];
    float attended[kWarps][2][kHeadDim];
    float2 attended_rows[kWarps][2];  // maximum, sum of weights
    alignas(16) float sums[2][C::kMaxRows + 1][kSumStride];
    alignas(16) __nv_bfloat16 slice[kWarps][C::kMaxParts * kSlotK / kWarps];
    alignas(16) float q[2][kHeadDim];
    alignas(16) __nv_bfloat16 k[kHeadDim];
    alignas(16) __nv_bfloat16 v[kHeadDim];
    alignas(16) float cos[kHeadDim / 2], sin[kHeadDim / 2];  // at the new token's position
    int past;                                                // keys before the new one
    int slots[kTableKeys];                                   // cache slots of the CTA's first keys
    DecodeStepLayer layers[kMaxDecodeStepLayers];  // a new line of parameters would be read late
    uint32_t offset[C::kLayerSlots];               // position of a slot's first byte in its weight
    uint64_t full[2 * C::kRingSlots];              // one per half of a slot
    uint64_t empty[4];                             // one per product of a layer
};

__device__ __forceinline__ void sync_warps() {
    asm volatile("bar.sync 1, %0;" ::"n"(kThreads) : "memory");
}

// The first warp reads the sums before the others fill the queue of shared memory with weights.
__device__ __forceinline__ void let_first_warp_read(int warp) {
    if (warp == 0) {
        asm volatile("bar.arrive 2, %0;" ::"n"(kThreads) : "memory");
    } else {
        asm volatile("bar.sync 2, %0;" ::"n"(kThreads) : "memory");
    }
}

__device__ __forceinline__ void mma(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2,
                                    uint32_t a3, uint32_t b0, uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ __forceinline__ uint4 load_kv(const uint8_t* from) {
    uint4 value;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "l"(from));
    return value;
}

__device__ __forceinline__ void unpack(float (&to)[8], const uint4& from) {
    const uint32_t words[4] = {from.x, from.y, from.z, from.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float2 both = unpack_bf16(words[i]);
        to[2 * i] = both.x;
        to[2 * i + 1] = both.y;
    }
}

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int by = 16; by > 0; by /= 2) x += __shfl_xor_sync(0xffffffffu, x, by);
    return x;
}

template <int kLanes>
__device__ __forceinline__ float group_max(float x) {
#pragma unroll
    for (int by = kLanes / 2; by > 0; by /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, by));
    return x;
}

template <int kLanes>
__device__ __forceinline__ float group_sum(float x) {
#pragma unroll
    for (int by = kLanes / 2; by > 0; by /= 2) x += __shfl_xor_sync(0xffffffffu, x, by);
    return x;
}

// The products of a layer, in the order in which their weights are read.
template <typename C>
struct Slots {
    static __device__ int product(int slot) {
        return (slot >= C::kAttnOutSlot) + (slot >= C::kFfnInSlot) + (slot >= C::kFfnOutSlot);
    }

    // Byte offset of this CTA's part of the slot in the weight.
    static __device__ uint32_t offset(int slot, int cta) {
        const int which = product(slot);
        if (which == 0) return (cta * C::Qkv::kRows + 8 * slot) * C::Qkv::kK * 2;
        if (which == 1) {
            return cta * 8 * C::AttnOut::kK * 2 + (slot - C::kAttnOutSlot) * kSlotK * 2;
        }
        if (which == 3) return cta * 8 * C::FfnOut::kK * 2 + (slot - C::kFfnOutSlot) * kSlotK * 2;
        // Eight gates, then their values.
        const int pair = (slot - C::kFfnInSlot) / 2, is_value = (slot - C::kFfnInSlot) % 2;
        const int first = cta * C::FfnIn::kRows / 2 + 8 * pair;
        return (64 * (first / 32) + first % 32 + 32 * is_value) * C::FfnIn::kK * 2;
    }
};

// One thread: all weights of this CTA.
template <typename C>
__device__ __forceinline__ void produce(const DecodeStepParams& p, Smem<C>& s) {
    const uint64_t policy = evict_first_policy();
    const int total = p.num_layers * C::kLayerSlots;
    int slot = 0, layer = 0;            // source of the copy
    int freed = 0, freed_parity = 0;    // slot whose ring entry is overwritten
    int landed = 0, landed_parity = 0;  // oldest copy under way
    int at = 0;
#pragma unroll 1
    for (int i = 0; i < total; ++i) {
        if (i >= C::kRingSlots) {
            await(&s.empty[Slots<C>::product(freed)], freed_parity);
            if (++freed == C::kLayerSlots) {
                freed = 0;
                freed_parity ^= 1;
            }
        }
        const int which = Slots<C>::product(slot);
        const auto* from =
            static_cast<const uint8_t*>((&s.layers[layer].qkv)[which]) + s.offset[slot];
        const int stride = which == 1   ? C::AttnOut::kK * 2
                           : which == 3 ? C::FfnOut::kK * 2
                                        : kSlotK * 2;
#pragma unroll 1
        for (int half = 0; half < 2; ++half) {
            if (2 * i + half >= kWindow) {
                await(&s.full[landed], landed_parity);
                if (++landed == 2 * C::kRingSlots) {
                    landed = 0;
                    landed_parity ^= 1;
                }
            }
            uint64_t* barrier = &s.full[2 * at + half];
            uint8_t* to = s.ring[at] + half * (kSlotBytes / 2);
            const uint8_t* half_from = from + half * (kSlotRows / 2) * stride;
            expect_bytes(barrier, kSlotBytes / 2);
            if (stride == kSlotK * 2) {
                copy_weights(to, half_from, kSlotBytes / 2, barrier, policy);
                continue;
            }
#pragma unroll 1
            for (int row = 0; row < kSlotRows / 2; ++row) {
                copy_weights(to + row * kSlotK * 2, half_from + row * stride, kSlotK * 2, barrier,
                             policy);
            }
        }
        if (++slot == C::kLayerSlots) {
            slot = 0;
            ++layer;
        }
        if (++at == C::kRingSlots) at = 0;
    }
}

template <typename C>
struct Step {
    using Layer = typename Workspace<C>::Layer;
    using Common = typename Workspace<C>::Common;
    static constexpr int kItems = 4;                        // pairs of keys that a warp has at once
    static constexpr int kBlockKeys = kItems * 2 * kWarps;  // keys that a CTA has at once

    const DecodeStepParams& p;
    Smem<C>& s;
    int cta, warp, lane;
    int slot = 0, ring_parity = 0;  // position in the ring
    int parity = 0;                 // phase of the layer's barriers
    int page_shift;
    int buffer = 0;         // index into s.sums
    float residual = 0.0f;  // row `lane % 8` of the CTA's eight

    // Attention: this CTA has keys [first_key, end_key) of KV head kv_head, and the new key where
    // has_new is true.
    int kv_head, split, num_splits, first_key, end_key, past;
    bool has_new;

    __device__ Step(const DecodeStepParams& params, Smem<C>& smem, int of_cta)
        : p(params),
          s(smem),
          cta(of_cta),
          warp(static_cast<int>(threadIdx.x) / 32),
          lane(static_cast<int>(threadIdx.x) % 32) {}

    // Values derived from these are computed again: over a layer they would not fit in registers.
    __device__ __forceinline__ void forget() {
        asm volatile("" : "+r"(cta), "+r"(warp), "+r"(lane));
    }

    __device__ bool attends() const { return split < num_splits; }

    // A product's weights of this warp, in registers.
    template <typename P>
    struct Weights {
        uint4 values[P::kSlots][kSteps];
    };

    // The chunk of eight numbers in 128 that a lane reads in a step, of row lane / 4 of a slot.
    // Lanes of odd rows swap neighbouring steps: then eight lanes that read at once have different
    // banks. The columns of the vector's matrix are swapped alike, and a row takes its sum from a
    // column of its own parity.
    __device__ int chunk(int step) const { return 4 * (step ^ (lane / 4 & 1)) + lane % 4; }

    template <int kProduct, typename P>
    __device__ __forceinline__ void take(Weights<P>& w) {
        forget();
        const int own = lane / 4 * (kSlotK * 2) + warp * (kSlotK / kWarps * 2);
        const int even = own + 16 * chunk(0), odd = own + 16 * chunk(1);
        if (lane < 2 * P::kSlots) {  // a lane a barrier
            int half = 2 * slot + lane, half_parity = ring_parity;
            if (half >= 2 * C::kRingSlots) {
                half -= 2 * C::kRingSlots;
                half_parity ^= 1;
            }
            await(&s.full[half], half_parity);
        }
        __syncwarp();
#pragma unroll
        for (int i = 0; i < P::kSlots; ++i) {
            const uint8_t* from = s.ring[slot];
            if (++slot == C::kRingSlots) {
                slot = 0;
                ring_parity ^= 1;
            }
#pragma unroll
            for (int step = 0; step < kSteps; ++step) {
                w.values[i][step] = *reinterpret_cast<const uint4*>(
                    from + (step % 2 == 0 ? even : odd) + 128 * (step / 2));
            }
        }
        __syncwarp();
        if (lane == 0) arrive(&s.empty[kProduct]);  // pairs with the wait in produce()
    }

    // The partial sums of this warp, from its slice of the input in s.slice.
    template <typename P>
    __device__ __forceinline__ void multiply(const Weights<P>& w) {
        __syncwarp();
        constexpr int kChains = P::kIsDeep ? P::kSlots : 2 * P::kTiles;
        float sums[kChains][4] = {};
#pragma unroll
        for (int part = 0; part < P::kParts; ++part) {
            uint4 x[kSteps];
#pragma unroll
            for (int step = 0; step < kSteps; ++step) {
                x[step] = *reinterpret_cast<const uint4*>(
                    &s.slice[warp][part * (kSlotK / kWarps) + 8 * chunk(step)]);
            }
#pragma unroll
            for (int step = 0; step < kSteps; ++step) {
                if constexpr (P::kIsDeep) {
                    const uint4 a = w.values[part][step];
                    mma(sums[part], a.x, 0, a.y, 0, x[step].x, x[step].y);
                    mma(sums[part], a.z, 0, a.w, 0, x[step].z, x[step].w);
                } else {
#pragma unroll
                    for (int tile = 0; tile < P::kTiles; ++tile) {
                        const uint4 a = w.values[2 * tile][step], b = w.values[2 * tile + 1][step];
                        float(&c)[4] = sums[2 * tile + step % 2];
                        mma(c, a.x, b.x, a.y, b.y, x[step].x, x[step].y);
                        mma(c, a.z, b.z, a.w, b.w, x[step].z, x[step].w);
                    }
                }
            }
        }
        if (lane % 4 != 0) return;
        const bool is_odd = lane / 4 & 1;
        float* to = &s.sums[buffer][lane / 4][warp];
        if constexpr (P::kIsDeep) {
            float sum = 0.0f;
#pragma unroll
            for (int part = 0; part < P::kParts; ++part) {
                sum += is_odd ? sums[part][1] : sums[part][0];
            }
            *to = sum;
        } else {
#pragma unroll
            for (int tile = 0; tile < P::kTiles; ++tile) {
                const float(&a)[4] = sums[2 * tile];
                const float(&b)[4] = sums[2 * tile + 1];
                to[16 * tile * kSumStride] = is_odd ? a[1] + b[1] : a[0] + b[0];
                to[(16 * tile + 8) * kSumStride] = is_odd ? a[3] + b[3] : a[2] + b[2];
            }
        }
    }

    __device__ __forceinline__ float total(int row) const {
        const auto* from = reinterpret_cast<const float4*>(s.sums[buffer][row]);
        float4 sum = from[0];
#pragma unroll
        for (int i = 1; i < kWarps / 4; ++i) {
            const float4 more = from[i];
            sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w;
        }
        return (sum.x + sum.y) + (sum.z + sum.w);
    }

    // 1 / rms(x), from the squares that the warps have left.
    __device__ __forceinline__ float norm_scale() const {
        return rsqrtf(total(C::kMaxRows) * (1.0f / C::kHidden) + p.eps);
    }

    // x's slice times the norm's weight, and the sum of its squares.
    __device__ __forceinline__ void put_normed(float4 x, uint2 norm_weight) {
        const float2 low = unpack_bf16(norm_weight.x), high = unpack_bf16(norm_weight.y);
        *reinterpret_cast<uint2*>(&s.slice[warp][4 * lane]) =
            make_uint2(pack_bf16(x.x * low.x, x.y * low.y), pack_bf16(x.z * high.x, x.w * high.y));
        const float squares = warp_sum(x.x * x.x + x.y * x.y + x.z * x.z + x.w * x.w);
        if (lane == 0) s.sums[buffer][C::kMaxRows][warp] = squares;
    }

    // Weights of norms are read a layer ahead: a load from memory waits behind megabytes of
    // matrices.
    struct Norms {
        uint2 attn, ffn;
        uint2 head;  // warps 0 and 1: q's, warp 2: k's
    };

    __device__ __forceinline__ Norms load_norms(int layer) const {
        const DecodeStepLayer& from = s.layers[layer];
        Norms norms{load_four(from.attn_norm, threadIdx.x), load_four(from.ffn_norm, threadIdx.x),
                    make_uint2(0, 0)};
        const void* head = warp < 2 ? from.q_norm : from.k_norm;
        if (head != nullptr) norms.head = load_four(head, lane);
        return norms;
    }

    static __device__ __forceinline__ uint2 load_four(const void* weights, unsigned index) {
        uint2 value;
        asm volatile("ld.global.nc.v2.u32 {%0, %1}, [%2];"
                     : "=r"(value.x), "=r"(value.y)
                     : "l"(static_cast<const uint2*>(weights) + index));
        return value;
    }

    __device__ __forceinline__ float4 receive_x(const uint64_t* x, uint32_t tag) const {
        return unpack_x(Mail<2>(x + 4 * threadIdx.x, 2).await_four(tag));
    }

    static __device__ float4 unpack_x(uint4 four) {
        return make_float4(__uint_as_float(four.x), __uint_as_float(four.y),
                           __uint_as_float(four.z), __uint_as_float(four.w));
    }

    static __device__ float4 unpack_four(uint2 four) {
        const float2 low = unpack_bf16(four.x), high = unpack_bf16(four.y);
        return make_float4(low.x, low.y, high.x, high.y);
    }

    __device__ Common& own_copy(Layer& packets) const { return packets.copies[cta % kCopies]; }

    __device__ int slot_of(int key) const {
        return key - first_key < kTableKeys ? s.slots[key - first_key] : page_slot(key);
    }

    __device__ int page_slot(int key) const {
        const int page = p.page_table[key >> page_shift];
        return (page << page_shift) + (key & ((1 << page_shift) - 1));
    }

    // Byte offset of the part of a key or value that this lane reads.
    __device__ int64_t kv_offset(int slot_index) const {
        return ((int64_t{slot_index} * C::kKvHeads + kv_head) * kHeadDim + lane % 16 * 8) * 2;
    }

    // Once a layer: kept over the products, these numbers would not fit in registers.
    __device__ __forceinline__ void find_keys() {
        page_shift = __ffs(p.page_size) - 1;
        kv_head = cta / C::kSplits;
        split = cta % C::kSplits;
        past = s.past;
        num_splits = past <= p.one_cta_keys ? 1 : C::kSplits;
        const int part = num_splits == 1 ? past : (past + C::kSplits - 1) / C::kSplits;
        first_key = min(split * part, past);
        end_key = min(first_key + part, past);
        has_new = split == num_splits - 1;
    }

    __device__ void begin() {
        if (threadIdx.x == 0) s.past = p.kv_seqlens[0] - 1;
        sync_warps();
        find_keys();
        const int thread = static_cast<int>(threadIdx.x);
        if (thread < kHeadDim / 2) {
            const int64_t row = int64_t{p.position_ids[0]} * (kHeadDim / 2);
            s.cos[thread] = p.cos[row + thread];
            s.sin[thread] = p.sin[row + thread];
        }
        const int num_keys = attends() ? min(end_key - first_key, kTableKeys) : 0;
        for (int i = thread; i < num_keys; i += kThreads) s.slots[i] = page_slot(first_key + i);
        residual = __bfloat162float(static_cast<const __nv_bfloat16*>(p.x)[8 * cta + lane % 8]);
        sync_warps();
    }

    struct Keys {
        uint4 k[kItems], v[kItems];
    };

    __device__ int first_of(int base, int item) const { return base + 2 * (warp + kWarps * item); }

    __device__ __forceinline__ void load(Keys& keys, int layer, int base) const {
#pragma unroll
        for (int i = 0; i < kItems; ++i) {
            if (first_of(base, i) >= end_key) break;
            const int key = min(first_of(base, i) + lane / 16, end_key - 1);
            const int64_t offset = kv_offset(slot_of(key));
            keys.k[i] = load_kv(static_cast<const uint8_t*>(s.layers[layer].k_cache) + offset);
            keys.v[i] = load_kv(static_cast<const uint8_t*>(s.layers[layer].v_cache) + offset);
        }
    }

    // A CTA's keys and values of the next layer into the L2, by the warps that prepare no head.
    __device__ __forceinline__ void prefetch(int layer) const {
        const auto* keys = static_cast<const uint8_t*>(s.layers[layer].k_cache);
        const auto* values = static_cast<const uint8_t*>(s.layers[layer].v_cache);
#pragma unroll 1
        for (int key = first_key + 2 * (warp - 4) + lane / 16; key < end_key; key += 8) {
            const int64_t offset = kv_offset(slot_of(key));
            asm volatile("prefetch.global.L2 [%0];" ::"l"(keys + offset));
            asm volatile("prefetch.global.L2 [%0];" ::"l"(values + offset));
        }
    }

    // Warps 0 and 1: q's heads, 2: k's, 3: v's, into shared memory; the new key and value to
    // their slot.
    __device__ __forceinline__ void prepare_head(int layer, const Layer& packets, uint32_t tag,
                                                 uint2 norm) {
        const bool is_q = warp < 2, is_v = warp == 3;
        const bool has_norm = !is_v && s.layers[layer].q_norm != nullptr;
        const int head = is_q ? 2 * kv_head + warp : C::kHeads + (warp - 2) * C::kKvHeads + kv_head;
        const float4 four =
            unpack_x(Mail<2>(packets.qkv + head * kHeadDim + 4 * lane, 2).await_four(tag));
        float x[4] = {four.x, four.y, four.z, four.w};
        if (has_norm) {
            const float2 low = unpack_bf16(norm.x), high = unpack_bf16(norm.y);
            const float weight[4] = {low.x, low.y, high.x, high.y};
            const float squares = x[0] * x[0] + x[1] * x[1] + x[2] * x[2] + x[3] * x[3];
            const float scale = rsqrtf(warp_sum(squares) * (1.0f / kHeadDim) + p.eps);
#pragma unroll
            for (int i = 0; i < 4; ++i) x[i] *= scale * weight[i];
        }
        if (!is_v) {
            const float* c = s.cos + 4 * lane % (kHeadDim / 2);
            const float* t = s.sin + 4 * lane % (kHeadDim / 2);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float other = __shfl_xor_sync(0xffffffffu, x[i], 16);
                x[i] = x[i] * c[i] + (lane < 16 ? -other : other) * t[i];
            }
        }
        if (is_q) {
            const float scale = p.softmax_scale * kLog2e;
            *reinterpret_cast<float4*>(&s.q[warp][4 * lane]) =
                make_float4(x[0] * scale, x[1] * scale, x[2] * scale, x[3] * scale);
            return;
        }
        const uint2 rounded = make_uint2(pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]));
        *reinterpret_cast<uint2*>(&(is_v ? s.v : s.k)[4 * lane]) = rounded;
        const int new_slot = p.slot_mapping[0];
        if (!has_new || new_slot < 0) return;
        auto* cache = static_cast<uint2*>(is_v ? s.layers[layer].v_cache : s.layers[layer].k_cache);
        cache[(int64_t{new_slot} * C::kKvHeads + kv_head) * (kHeadDim / 4) + lane] = rounded;
    }

    // Softmax state of both query heads over this warp's keys so far; a lane has the keys of its
    // half of the warp, and features 8 * (lane % 16) and on.
    struct Rows {
        float max[2] = {kNoScore, kNoScore};
        float sum[2] = {};
        float acc[2][8] = {};
    };

    // keys: those from `base` on; the new key and value come from shared memory.
    __device__ __forceinline__ void attend(Rows& rows, Keys& keys, int base) {
        float score[2][kItems], max[2] = {rows.max[0], rows.max[1]};
        {
            float q[2][8];
#pragma unroll
            for (int h = 0; h < 2; ++h) {
#pragma unroll
                for (int j = 0; j < 8; ++j) q[h][j] = s.q[h][lane % 16 * 8 + j];
            }
#pragma unroll
            for (int i = 0; i < kItems; ++i) {
                score[0][i] = score[1][i] = kNoScore;
                if (first_of(base, i) >= end_key + has_new) break;
                const int key = first_of(base, i) + lane / 16;
                if (has_new && key == past) {
                    keys.k[i] = reinterpret_cast<const uint4*>(s.k)[lane % 16];
                    keys.v[i] = reinterpret_cast<const uint4*>(s.v)[lane % 16];
                }
                float k[8];
                unpack(k, keys.k[i]);
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    float sum = 0.0f;
#pragma unroll
                    for (int j = 0; j < 8; ++j) sum = fmaf(q[h][j], k[j], sum);
                    sum = group_sum<16>(sum);
                    score[h][i] = key < end_key + has_new ? sum : kNoScore;
                    max[h] = fmaxf(max[h], score[h][i]);
                }
            }
        }
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const float shrink = exp2f(rows.max[h] - max[h]);
            rows.max[h] = max[h];
            rows.sum[h] *= shrink;
#pragma unroll
            for (int j = 0; j < 8; ++j) rows.acc[h][j] *= shrink;
        }
#pragma unroll
        for (int i = 0; i < kItems; ++i) {
            if (first_of(base, i) >= end_key + has_new) break;
            const bool is_key = first_of(base, i) + lane / 16 < end_key + has_new;
            float v[8];
            unpack(v, keys.v[i]);
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const float weight = is_key ? exp2f(score[h][i] - max[h]) : 0.0f;
                rows.sum[h] += weight;
#pragma unroll
                for (int j = 0; j < 8; ++j) {
                    rows.acc[h][j] = is_key ? fmaf(weight, v[j], rows.acc[h][j]) : rows.acc[h][j];
                }
            }
        }
    }

    // keys: the warp's first, loaded before.
    __device__ __forceinline__ void attention(Keys& keys, int layer, Layer& packets, uint32_t tag,
                                              uint2 head_norm) {
        if (warp < 4) {
            prepare_head(layer, packets, tag, head_norm);
        } else if (layer + 1 < p.num_layers) {
            prefetch(layer + 1);
        }
        sync_warps();
        forget();
        Rows rows;
#pragma unroll 1
        for (int base = first_key;;) {
            const int next = base + kBlockKeys;
            Keys more{};
            load(more, layer, next);
            attend(rows, keys, base);
            if (next >= end_key + has_new) break;
            keys = more;
            base = next;
        }
        join_halves(rows);
        sync_warps();
        send_rows(packets, tag);
        if (num_splits > 1) join_splits(packets, tag);
    }

    __device__ __forceinline__ void join_halves(Rows& rows) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const float max = fmaxf(rows.max[h], __shfl_xor_sync(0xffffffffu, rows.max[h], 16));
            const float shrink = exp2f(rows.max[h] - max);
            float sum = rows.sum[h] * shrink;
            sum += __shfl_xor_sync(0xffffffffu, sum, 16);
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                rows.acc[h][j] *= shrink;
                rows.acc[h][j] += __shfl_xor_sync(0xffffffffu, rows.acc[h][j], 16);
            }
            rows.max[h] = max;
            rows.sum[h] = sum;
        }
        float own[8];  // half a warp stores a head
#pragma unroll
        for (int j = 0; j < 8; ++j) own[j] = lane < 16 ? rows.acc[0][j] : rows.acc[1][j];
        auto* to = reinterpret_cast<float4*>(&s.attended[warp][lane / 16][lane % 16 * 8]);
        to[0] = make_float4(own[0], own[1], own[2], own[3]);
        to[1] = make_float4(own[4], own[5], own[6], own[7]);
        if (lane % 16 == 0) {
            s.attended_rows[warp][lane / 16] = lane < 16 ? make_float2(rows.max[0], rows.sum[0])
                                                         : make_float2(rows.max[1], rows.sum[1]);
        }
    }

    // The CTA's sums of feature `thread`, over all warps.
    __device__ __forceinline__ void send_rows(Layer& packets, uint32_t tag) {
        const int thread = static_cast<int>(threadIdx.x), h = thread / kHeadDim;
        const int feature = thread % kHeadDim;
        float max = kNoScore;
#pragma unroll
        for (int w = 0; w < kWarps; ++w) max = fmaxf(max, s.attended_rows[w][h].x);
        float sum = 0.0f, acc = 0.0f;
#pragma unroll
        for (int w = 0; w < kWarps; ++w) {
            const float2 row = s.attended_rows[w][h];
            const float shrink = exp2f(row.x - max);
            sum = fmaf(row.y, shrink, sum);
            acc = fmaf(s.attended[w][h][feature], shrink, acc);
        }
        if (num_splits == 1) {
            acc /= sum;
            const float next = __shfl_down_sync(0xffffffffu, acc, 1);
            const int index = (2 * kv_head * kHeadDim + thread) / 2;
            if (thread % 2 != 0) return;
#pragma unroll
            for (int copy = 0; copy < kCopies; ++copy) {
                send(&packets.copies[copy].attended[index], pack_bf16(acc, next), tag);
            }
            return;
        }
        send(&packets.split[kv_head][split][h][feature], acc, tag);
        if (feature < 2) {
            send(&packets.split_rows[kv_head][split][h][feature], feature == 0 ? max : sum, tag);
        }
    }

    // A CTA joins 16 of the 256 features of its KV head: two a warp, a split a lane.
    __device__ __forceinline__ void join_splits(Layer& packets, uint32_t tag) {
        const int index = 16 * split + 2 * warp + lane / 16, h = index / kHeadDim;
        const int from = lane % 16;
        float acc;
        uint2 row;
        receive_split(acc, row, &packets.split[kv_head][from][h][index % kHeadDim],
                      packets.split_rows[kv_head][from][h], tag);
        const float max = __uint_as_float(row.x);
        const float shrink = exp2f(max - group_max<16>(max));
        const float sum = group_sum<16>(__uint_as_float(row.y) * shrink);
        const float value = group_sum<16>(acc * shrink) / sum;
        const float next = __shfl_down_sync(0xffffffffu, value, 16);
        const uint32_t both = __shfl_sync(0xffffffffu, pack_bf16(value, next), 0);
        if (lane < kCopies) {
            const int at = (2 * kv_head * kHeadDim + 16 * split) / 2 + warp;
            send(&packets.copies[lane].attended[at], both, tag);
        }
    }

    // A warp's slice of pairs of bf16, part after part.
    template <int kParts>
    __device__ __forceinline__ void put_pairs(Mail<kParts>& mail, uint32_t tag) {
        uint2 pairs[kParts];
        mail.await_pairs(pairs, tag);
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
            *reinterpret_cast<uint2*>(&s.slice[warp][part * (kSlotK / kWarps) + 4 * lane]) =
                pairs[part];
        }
    }

    // The sums of the CTA's eight rows are added to x, which a lane sends to one of the copies.
    template <typename P>
    __device__ __forceinline__ void add_to_x(uint64_t (Common::*to)[C::kHidden], Layer& packets,
                                             uint32_t tag) {
        static_assert(P::kRows == 8 && kCopies == 4);
        sync_warps();
        if (warp == 0) {
            residual += total(lane % 8);
            send(&(packets.copies[lane / 8].*to)[8 * cta + lane % 8], residual, tag);
        }
        let_first_warp_read(warp);
        buffer ^= 1;
    }

    __device__ void run(Workspace<C>& workspace, uint32_t epoch) {
        Norms norms = load_norms(0);
#pragma unroll 1
        for (int i = 0; i < p.num_layers; ++i) {
            Layer& packets = workspace.layers[i & 1];
            const uint32_t tag = epoch + 1 + i;
            Keys keys;
            {
                Weights<typename C::Qkv> w;
                // The first look at packets comes before the weights: its trip takes as long.
                Mail<2> mail(own_copy(workspace.layers[(i - 1) & 1]).x + 4 * threadIdx.x, 2);
                take<0>(w);
                float4 x;
                if (i == 0) {
                    x = unpack_four(static_cast<const uint2*>(p.x)[threadIdx.x]);
                } else {
                    x = unpack_x(mail.await_four(tag - 1));
                }
                put_normed(x, norms.attn);
                multiply(w);
            }
            find_keys();
            if (attends()) load(keys, i, first_key);
            sync_warps();
            if (warp == 0) {
                static_assert(C::Qkv::kRows == 32);
                send(&packets.qkv[cta * 32 + lane], total(lane) * norm_scale(), tag);
            }
            buffer ^= 1;
            if (attends()) {
                attention(keys, i, packets, tag, norms.head);
            }
            {
                using P = typename C::AttnOut;
                Weights<P> w;
                Mail<P::kParts> mail(own_copy(packets).attended + 2 * threadIdx.x, kSlotK / 2);
                take<1>(w);
                put_pairs(mail, tag);
                multiply(w);
                add_to_x<P>(&Common::middle, packets, tag);
            }
            {
                Weights<typename C::FfnIn> w;
                Mail<2> mail(own_copy(packets).middle + 4 * threadIdx.x, 2);
                take<2>(w);
                put_normed(unpack_x(mail.await_four(tag)), norms.ffn);
                multiply(w);
                sync_warps();
                if (warp == 0) send_inner(packets, tag);
                let_first_warp_read(warp);
                buffer ^= 1;
            }
            norms = load_norms(min(i + 1, p.num_layers - 1));
            {
                using P = typename C::FfnOut;
                Weights<P> w;
                Mail<P::kParts> mail(own_copy(packets).inner + 2 * threadIdx.x, kSlotK / 2);
                take<3>(w);
                put_pairs(mail, tag);
                multiply(w);
                add_to_x<P>(&Common::x, packets, tag);
            }
            parity ^= 1;
        }
        if (cta == 0) finish(workspace, epoch);
    }

    __device__ __forceinline__ void send_inner(Layer& packets, uint32_t tag) {
        constexpr int kOwn = C::FfnIn::kRows / 2;
        static_assert(kOwn <= 32 && kOwn % 8 == 0);
        float value = 0.0f;
        if (lane < kOwn) {
            const float scale = norm_scale();
            const int row = 16 * (lane / 8) + lane % 8;
            const float gate = total(row) * scale;
            value = gate / (1.0f + __expf(-gate)) * (total(row + 8) * scale);
        }
        const uint32_t both = pack_bf16(value, __shfl_down_sync(0xffffffffu, value, 1));
        constexpr int kPackets = kOwn / 2;
#pragma unroll
        for (int first = 0; first < kCopies * kPackets; first += 32) {
            const int index = (first + lane) % kPackets, copy = (first + lane) / kPackets;
            const uint32_t data = __shfl_sync(0xffffffffu, both, 2 * index);
            if (copy < kCopies)
                send(&packets.copies[copy].inner[cta * kPackets + index], data, tag);
        }
    }

    // The last norm. Its input comes from every CTA, so that none reads the epoch after this.
    __device__ void finish(Workspace<C>& workspace, uint32_t epoch) {
        const uint32_t tag = epoch + p.num_layers;
        const float4 weight = unpack_four(load_four(p.final_norm, threadIdx.x));
        const float4 x = receive_x(own_copy(workspace.layers[(p.num_layers - 1) & 1]).x, tag);
        const float squares = warp_sum(x.x * x.x + x.y * x.y + x.z * x.z + x.w * x.w);
        if (lane == 0) s.sums[buffer][C::kMaxRows][warp] = squares;
        sync_warps();
        const float scale = norm_scale();
        static_cast<uint2*>(p.out)[threadIdx.x] =
            make_uint2(pack_bf16(x.x * scale * weight.x, x.y * scale * weight.y),
                       pack_bf16(x.z * scale * weight.z, x.w * scale * weight.w));
        if (threadIdx.x == 0) workspace.epoch = tag;
    }
};

template <typename C>
__global__ void __launch_bounds__(kThreads + 32, 1)
    decode_step_kernel(const __grid_constant__ DecodeStepParams p) {
    extern __shared__ __align__(128) uint8_t raw[];
    auto& s = *reinterpret_cast<Smem<C>*>(raw);
    auto& workspace = *static_cast<Workspace<C>*>(p.workspace);
    const int cta = static_cast<int>(blockIdx.x);
    if (threadIdx.x == 0) {
        for (uint64_t& barrier : s.full) init_barrier(&barrier, 1);
        for (int i = 0; i < 4; ++i) init_barrier(&s.empty[i], kWarps);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    const auto* table = reinterpret_cast<const uint64_t*>(&p.layers);
    const int num_pointers = p.num_layers * static_cast<int>(sizeof(DecodeStepLayer) / 8);
    for (int i = static_cast<int>(threadIdx.x); i < num_pointers; i += kThreads + 32) {
        reinterpret_cast<uint64_t*>(s.layers)[i] = table[i];
    }
    if (threadIdx.x < C::kLayerSlots) {
        s.offset[threadIdx.x] = Slots<C>::offset(static_cast<int>(threadIdx.x), cta);
    }
    __syncthreads();
    if (threadIdx.x >= kThreads) {
        if (threadIdx.x == kThreads) produce<C>(p, s);
        return;
    }
    const uint32_t epoch = *const_cast<const volatile uint32_t*>(&workspace.epoch);
    Step<C> step(p, s, cta);
    step.begin();
    step.run(workspace, epoch);
}

using Qwen3Small = Config<1024, 3072, 16, 8>;  // Qwen3-0.6B

template <typename F>
bool dispatch_config(int hidden, int inner, int heads, int kv_heads, F&& f) {
    if (hidden == 1024 && inner == 3072 && heads == 16 && kv_heads == 8) {
        f.template operator()<Qwen3Small>();
        return true;
    }
    return false;
}

template <typename C>
void launch(const DecodeStepParams& p, cudaStream_t stream) {
    allow_smem_once<decode_step_kernel<C>>(sizeof(Smem<C>));
    // CTAs wait for one another: all must be resident.
    cudaLaunchAttribute attribute;
    attribute.id = cudaLaunchAttributeCooperative;
    attribute.val.cooperative = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = kCtas;
    config.blockDim = kThreads + 32;
    config.dynamicSmemBytes = sizeof(Smem<C>);
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = 1;
    BYTETX_CUDA_CHECK(cudaLaunchKernelEx(&config, decode_step_kernel<C>, p));
}

}  // namespace
}  // namespace decode

int64_t decode_step_workspace_bytes(int32_t device, int32_t hidden_size, int32_t inner_size,
                                    int32_t num_heads, int32_t num_kv_heads) {
    int num_sms = 0;
    BYTETX_CUDA_CHECK(cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device));
    if (num_sms < decode::kCtas) return 0;  // an H100 PCIe, or a part of a GPU
    int64_t bytes = 0;
    decode::dispatch_config(hidden_size, inner_size, num_heads, num_kv_heads, [&]<typename C>() {
        bytes = static_cast<int64_t>(sizeof(decode::Workspace<C>));
    });
    return bytes;
}

void decode_step(const DecodeStepParams& p, const Launch& launch) {
    if (p.num_layers < 1 || p.num_layers > kMaxDecodeStepLayers) {
        throw std::invalid_argument("decode_step takes 1 to 64 layers, got " +
                                    std::to_string(p.num_layers));
    }
    const DeviceGuard guard(launch.device);
    const bool is_known = decode::dispatch_config(
        p.hidden_size, p.inner_size, p.num_heads, p.num_kv_heads,
        [&]<typename C>() { decode::launch<C>(p, static_cast<cudaStream_t>(launch.stream)); });
    if (!is_known) {
        throw std::invalid_argument("decode_step has no kernel for hidden_size " +
                                    std::to_string(p.hidden_size) + ", inner_size " +
                                    std::to_string(p.inner_size));
    }
}

}  // namespace bytetx
