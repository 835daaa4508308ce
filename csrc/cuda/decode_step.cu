// All layers of a decoder for the next token of one sequence, in one launch.
//
//   h = rms_norm(x); q, k, v = qkv(h); q, k = rotary(head_norm(q, k)); k, v to their page
//   x += attn_out(softmax(q k') v);  x += ffn_out(silu(gate(rms_norm(x))) * value(rms_norm(x)))
//
// 128 CTAs of eight warps and a producer warp stay for the whole step. Each has an equal part of
// the rows of every weight. The producer streams them, layer after layer, through a ring in shared
// memory and waits for nothing but free slots. The others take a product's first weights from the
// ring into registers while its input is on the way (decode_step_products.cuh).
//
// Between products, numbers travel as packets (decode_step_sync.cuh). A layer has five exchanges:
//
//   x --> qkv --> attention --> attn_out --> ffn_in --> ffn_out --> x
//
// and one more inside attention (decode_step_attention.cuh) where the keys are divided over CTAs. A
// warp has 1/8 of a product's k for all rows of the CTA: it needs only its own slice of the input,
// multiplies on the tensor cores (the vector is a matrix of equal columns), and the partial sums
// meet in shared memory. The norm's scale is applied to the sums: 1 / rms(x) is one number.
//
// Bytes: all weights once, keys and values once. x stays in f32 between layers. Bound by the trips
// of packets for few keys: 2.6 TB/s of weights and keys with 50 keys, 2.2 with 500, 2.0 with 4000
// (Qwen3-0.6B's shape, H100, 2026-11-26).
// Source: the design follows "Look Ma, No Bubbles!" (Hazy Research, 2025).

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "common/check.cuh"
#include "common/launch.cuh"
#include "cuda/decode_step_attention.cuh"
#include "decode_step_ops.h"

namespace bytetx {
namespace decode {
namespace {

template <typename C>
struct Step : Attention<C> {
    using Base = Attention<C>;
    using Base::buffer, Base::cta, Base::lane, Base::p, Base::s, Base::warp;
    using Layer = typename Workspace<C>::Layer;
    using Common = typename Workspace<C>::Common;
    using X = float4[C::kXParts];  // a thread's numbers of x, four of each part
    static constexpr int kBiasRounds = C::kHasBias ? ceil_div(C::Qkv::kOwnBlocks, 4) : 0;

    float residual[C::kXBlocks];  // row `lane % 8` of each of the CTA's blocks of x

    using Base::Base;

    __device__ void begin() {
        Base::begin_attention();
        const auto* x = static_cast<const __nv_bfloat16*>(p.x);
        const int first = kBlockRows * C::FfnOut::first_group(cta);
#pragma unroll
        for (int block = 0; block < C::kXBlocks; ++block) {
            const int row = min(first + kBlockRows * block + lane % 8, C::kHidden - 1);
            residual[block] = __bfloat162float(x[row]);
        }
    }

    // Weights of norms are read a layer ahead: a load from memory waits behind megabytes of
    // matrices. So are biases, by the warp that adds them.
    struct Norms {
        uint32_t attn[C::kXParts][2], ffn[C::kXParts][2];
        uint32_t head[Base::kWords];  // k's for warp 2, else q's
        uint16_t bias[kBiasRounds + 1];
    };

    __device__ __forceinline__ Norms load_norms(int layer) const {
        const DecodeStepLayer& from = s.layers[layer];
        Norms norms{};
        load_four(norms.attn, from.attn_norm);
        load_four(norms.ffn, from.ffn_norm);
        const void* head = Base::has_queries() ? from.q_norm : from.k_norm;
        if (head != nullptr) load_words(norms.head, head, lane);
        if constexpr (C::kHasBias) {
            const auto* bias = static_cast<const uint16_t*>(from.qkv_bias);
            const int rows = C::Qkv::num_rows(cta);
            if (warp == 0 && bias != nullptr) {
#pragma unroll
                for (int i = 0; i < kBiasRounds; ++i) {
                    const int row = min(32 * i + lane, rows - 1);
                    load_half(norms.bias[i], bias + kBlockRows * C::Qkv::first_group(cta) + row);
                }
            }
        }
        return norms;
    }

    // Whether x has this thread's numbers of a part.
    static __device__ __forceinline__ bool has(int part) { return Mail<C::kHidden, 2>::has(part); }

    // bf16 of a thread: four of each part.
    static __device__ __forceinline__ void load_four(uint32_t (&to)[C::kXParts][2],
                                                     const void* from) {
#pragma unroll
        for (int part = 0; part < C::kXParts; ++part) {
            if (has(part)) load_words(to[part], from, part * kThreads + threadIdx.x);
        }
    }

    static __device__ __forceinline__ float4 unpack_four(const uint32_t (&four)[2]) {
        const float2 low = unpack_bf16(four[0]), high = unpack_bf16(four[1]);
        return make_float4(low.x, low.y, high.x, high.y);
    }

    static __device__ __forceinline__ uint2 pack_four(float4 x) {
        return make_uint2(pack_pair<__nv_bfloat16>(x.x, x.y), pack_pair<__nv_bfloat16>(x.z, x.w));
    }

    static __device__ __forceinline__ float4 scaled(float4 x, float4 by) {
        return make_float4(x.x * by.x, x.y * by.y, x.z * by.z, x.w * by.w);
    }

    static __device__ __forceinline__ float squares_of(const X& x) {
        float squares = 0.0f;
#pragma unroll
        for (int part = 0; part < C::kXParts; ++part) {
            const float4 own = x[part];
            squares += own.x * own.x + own.y * own.y + own.z * own.z + own.w * own.w;
        }
        return squares;
    }

    static __device__ __forceinline__ void await_x(X& x, Mail<C::kHidden, 2>& mail, uint32_t tag) {
        uint2 pairs[C::kXParts][2];
        mail.await_pairs(pairs, tag);
#pragma unroll
        for (int part = 0; part < C::kXParts; ++part) {
            x[part] =
                make_float4(__uint_as_float(pairs[part][0].x), __uint_as_float(pairs[part][0].y),
                            __uint_as_float(pairs[part][1].x), __uint_as_float(pairs[part][1].y));
        }
    }

    // x's slice times the norm's weight, and the sum of its squares.
    __device__ __forceinline__ void put_normed(const X& x, const uint32_t (&norm)[C::kXParts][2]) {
#pragma unroll
        for (int part = 0; part < C::kXParts; ++part) {
            Base::put_four(part, pack_four(scaled(x[part], unpack_four(norm[part]))));
        }
        Base::put_squares(squares_of(x));
    }

    // A warp's slice of pairs of bf16, part after part.
    template <int k>
    __device__ __forceinline__ void put_pairs(Mail<k, 1>& mail, uint32_t tag) {
        uint2 pairs[Mail<k, 1>::kParts][1];
        mail.await_pairs(pairs, tag);
#pragma unroll
        for (int part = 0; part < Mail<k, 1>::kParts; ++part) {
            Base::put_four(part, pairs[part][0]);
        }
    }

    __device__ Common& own_copy(Layer& packets) const { return packets.copies[cta % kCopies]; }

    __device__ void run(Workspace<C>& workspace, uint32_t epoch) {
        Norms norms = load_norms(0);
#pragma unroll 1
        for (int i = 0; i < p.num_layers; ++i) {
            Layer& packets = workspace.layers[i & 1];
            const uint32_t tag = epoch + 1 + i;
            typename Base::Keys keys;
            {
                // The first look at packets comes before the weights: its trip takes as long.
                Mail<C::kHidden, 2> mail(own_copy(workspace.layers[(i - 1) & 1]).x);
                Base::template product<typename C::Qkv, 0>([&] {
                    X x;
                    if (i == 0) {
                        uint32_t words[C::kXParts][2] = {};
                        load_four(words, p.x);
#pragma unroll
                        for (int part = 0; part < C::kXParts; ++part) {
                            x[part] = unpack_four(words[part]);
                        }
                    } else {
                        await_x(x, mail, tag - 1);
                    }
                    put_normed(x, norms.attn);
                });
            }
            Base::find_keys();
            if (Base::attends()) Base::load(keys, i, Base::first_key);
            sync_threads<kThreads>();
            if (warp == 0) send_qkv(packets, tag, norms.bias);
            buffer ^= 1;
            if (Base::attends()) Base::attention(keys, i, packets, tag, norms.head);
            {
                Mail<C::kAttended, 1> mail(own_copy(packets).attended);
                Base::template product<typename C::AttnOut, C::kAttnOutBatch>(
                    [&] { put_pairs(mail, tag); });
                add_to_x(&Common::middle, packets, tag);
            }
            {
                Mail<C::kHidden, 2> mail(own_copy(packets).middle);
                Base::template product<typename C::FfnIn, C::kFfnInBatch>([&] {
                    X x;
                    await_x(x, mail, tag);
                    put_normed(x, norms.ffn);
                });
                sync_threads<kThreads>();
                if (warp == 0) send_inner(packets, tag);
                let_first_warp_read(warp);
                buffer ^= 1;
            }
            norms = load_norms(min(i + 1, p.num_layers - 1));
            {
                Mail<C::kInner, 1> mail(own_copy(packets).inner);
                Base::template product<typename C::FfnOut, C::kFfnOutBatch>(
                    [&] { put_pairs(mail, tag); });
                add_to_x(&Common::x, packets, tag);
            }
        }
        if (cta == 0) finish(workspace, epoch);
    }

    __device__ __forceinline__ void send_qkv(Layer& packets, uint32_t tag,
                                             const uint16_t (&bias)[kBiasRounds + 1]) {
        const int num_rows = C::Qkv::num_rows(cta);
        const float scale = Base::norm_scale();
        uint64_t* to = packets.qkv + kBlockRows * C::Qkv::first_group(cta);
#pragma unroll
        for (int i = 0; i < ceil_div(C::Qkv::kOwnBlocks, 4); ++i) {
            const int row = 32 * i + lane;
            float sum = Base::total(min(row, kBlockRows * C::Qkv::kOwnBlocks - 1)) * scale;
            if constexpr (C::kHasBias) sum += __uint_as_float(uint32_t{bias[i]} << 16);
            if (row < num_rows) send(to + row, sum, tag);
        }
    }

    // Gates times values: two of them are a packet, which two lanes compute.
    __device__ __forceinline__ void send_inner(Layer& packets, uint32_t tag) {
        using P = typename C::FfnIn;
        constexpr int kRoundGroups =
            std::min(P::kOwnGroups, 4);  // each eight gates and eight values
        constexpr int kPackets = kBlockRows * kRoundGroups / 2;
        const int num_packets = P::num_rows(cta) / 2;
        const int first_packet = kBlockRows / 2 * P::first_group(cta);
        const float scale = Base::norm_scale();
#pragma unroll 1
        for (int round = 0; round < P::kOwnGroups; round += kRoundGroups) {
            float value = 0.0f;
            const int group = round + lane / 8;
            if (lane < kBlockRows * kRoundGroups && group < P::kOwnGroups) {
                const int row = 16 * group + lane % 8;
                const float gate = Base::total(row) * scale;
                value = gate / (1.0f + __expf(-gate)) * (Base::total(row + 8) * scale);
            }
            const uint32_t both =
                pack_pair<__nv_bfloat16>(value, __shfl_down_sync(kFullMask, value, 1));
#pragma unroll
            for (int first = 0; first < kCopies * kPackets; first += 32) {
                const int index = (first + lane) % kPackets, copy = (first + lane) / kPackets;
                const uint32_t data = __shfl_sync(kFullMask, both, 2 * index);
                const int packet = kBlockRows / 2 * round + index;  // among the CTA's
                if (copy < kCopies && packet < num_packets) {
                    send(&packets.copies[copy].inner[first_packet + packet], data, tag);
                }
            }
        }
    }

    // The sums of the CTA's rows are added to x; a lane sends a row to one of the copies.
    __device__ __forceinline__ void add_to_x(uint64_t (Common::*to)[C::kHidden], Layer& packets,
                                             uint32_t tag) {
        using P = typename C::FfnOut;
        static_assert(kBlockRows * kCopies == 32 && C::AttnOut::kGroups == P::kGroups);
        sync_threads<kThreads>();
        if (warp == 0) {
            const int first = kBlockRows * P::first_group(cta) + lane % 8;
#pragma unroll
            for (int block = 0; block < C::kXBlocks; ++block) {
                residual[block] += Base::total(kBlockRows * block + lane % 8);
                if (block < P::num_groups(cta)) {
                    send(&(packets.copies[lane / 8].*to)[first + kBlockRows * block],
                         residual[block], tag);
                }
            }
        }
        let_first_warp_read(warp);
        buffer ^= 1;
    }

    // The last norm. Its input needs what every CTA has sent, so that none reads the epoch after
    // this.
    __device__ void finish(Workspace<C>& workspace, uint32_t epoch) {
        const uint32_t tag = epoch + p.num_layers;
        uint32_t weight[C::kXParts][2] = {};
        load_four(weight, p.final_norm);
        Mail<C::kHidden, 2> mail(own_copy(workspace.layers[(p.num_layers - 1) & 1]).x);
        X x;
        await_x(x, mail, tag);
        Base::put_squares(squares_of(x));
        sync_threads<kThreads>();
        const float scale = Base::norm_scale();
        auto* out = static_cast<uint2*>(p.out) + threadIdx.x;
#pragma unroll
        for (int part = 0; part < C::kXParts; ++part) {
            const float4 normed = scaled(scaled(x[part], make_float4(scale, scale, scale, scale)),
                                         unpack_four(weight[part]));
            if (has(part)) out[part * kThreads] = pack_four(normed);
        }
        if (threadIdx.x == 0) workspace.epoch = tag;
    }
};

template <typename C>
__global__ void __launch_bounds__(kThreads + 32, 1)
    decode_step_kernel(const __grid_constant__ DecodeStepParams p) {
    extern __shared__ __align__(128) uint8_t raw[];
    auto& s = *reinterpret_cast<Smem<C>*>(raw);
    auto& workspace = *static_cast<Workspace<C>*>(p.workspace);
    const int cta = static_cast<int>(blockIdx.x), thread = static_cast<int>(threadIdx.x);
    if (thread == 0) {
        for (uint64_t& barrier : s.full) Barrier::init(&barrier, 1);
        for (uint64_t& barrier : s.empty) Barrier::init(&barrier, kWarps);
        fence_barrier_init();
    }
    const auto* table = reinterpret_cast<const uint64_t*>(&p.layers);
    const int num_pointers = p.num_layers * static_cast<int>(sizeof(DecodeStepLayer) / 8);
    for (int i = thread; i < num_pointers; i += kThreads + 32) {
        reinterpret_cast<uint64_t*>(s.layers)[i] = table[i];
    }
    for (int i = thread; i < C::kLayerSlots; i += kThreads + 32) s.slots[i] = C::slot(i, cta);
    if constexpr (C::kHasGaps) {  // weights that are not copied meet zeros: they must be numbers
        auto* ring = reinterpret_cast<uint4*>(s.ring);
        for (int i = thread; i < static_cast<int>(sizeof(s.ring) / 16); i += kThreads + 32) {
            ring[i] = make_uint4(0, 0, 0, 0);
        }
        __syncwarp();         // keeps the compiler from moving them
        fence_async_reads();  // before the copies
    }
    __syncthreads();
    if (thread >= kThreads) {
        if (thread == kThreads) produce<C>(p, s);
        return;
    }
    const uint32_t epoch = *const_cast<const volatile uint32_t*>(&workspace.epoch);
    Step<C> step(p, s, cta);
    step.begin();
    step.run(workspace, epoch);
}

// A shape is here where it is at least 1.2 times as fast as kernel after kernel (docs/kernels).
using Qwen3Of600M = Config<1024, 3072, 16, 8, 128>;
using Qwen2Of500M = Config<896, 4864, 14, 2, 64, true>;
using SmolLm2Of135M = Config<576, 1536, 9, 3, 64>;
using SmolLm2Of360M = Config<960, 2560, 15, 5, 64>;

struct Sizes {
    int hidden, inner, heads, kv_heads, head_dim;
    bool has_bias;
};

template <typename... Cs, typename F>
bool dispatch_any(const Sizes& sizes, F&& f) {
    const auto try_one = [&]<typename C>() {
        const bool is_same = sizes.hidden == C::kHidden && sizes.inner == C::kInner &&
                             sizes.heads == C::kHeads && sizes.kv_heads == C::kKvHeads &&
                             sizes.head_dim == C::kHeadDim && (C::kHasBias || !sizes.has_bias);
        if (is_same) f.template operator()<C>();
        return is_same;
    };
    return (try_one.template operator()<Cs>() || ...);
}

template <typename F>
bool dispatch_config(const Sizes& sizes, F&& f) {
    return dispatch_any<Qwen3Of600M, Qwen2Of500M, SmolLm2Of135M, SmolLm2Of360M>(sizes, f);
}

template <typename C>
void launch(const DecodeStepParams& p, cudaStream_t stream) {
    static_assert(sizeof(Smem<C>) <= kSmemBytes);
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
                                    int32_t num_heads, int32_t num_kv_heads, int32_t head_dim,
                                    bool has_bias) {
    int num_sms = 0;
    BYTETX_CUDA_CHECK(cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device));
    if (num_sms < decode::kCtas) return 0;  // an H100 PCIe, or a part of a GPU
    int64_t bytes = 0;
    decode::dispatch_config(
        {hidden_size, inner_size, num_heads, num_kv_heads, head_dim, has_bias},
        [&]<typename C>() { bytes = static_cast<int64_t>(sizeof(decode::Workspace<C>)); });
    return bytes;
}

void decode_step(const DecodeStepParams& p, const Launch& launch) {
    if (p.num_layers < 1 || p.num_layers > kMaxDecodeStepLayers) {
        throw std::invalid_argument("decode_step takes 1 to 64 layers, got " +
                                    std::to_string(p.num_layers));
    }
    const DeviceGuard guard(launch.device);
    const bool is_known = decode::dispatch_config(
        {p.hidden_size, p.inner_size, p.num_heads, p.num_kv_heads, p.head_dim,
         p.layers[0].qkv_bias != nullptr},
        [&]<typename C>() { decode::launch<C>(p, static_cast<cudaStream_t>(launch.stream)); });
    if (!is_known) {
        throw std::invalid_argument("decode_step has no kernel for hidden_size " +
                                    std::to_string(p.hidden_size) + ", inner_size " +
                                    std::to_string(p.inner_size) + ", head_dim " +
                                    std::to_string(p.head_dim));
    }
}

}  // namespace bytetx
