// Weights of the decode-step kernel: the warp that streams them, and the products of the others.
#pragma once

#include "common/row.cuh"
#include "cuda/decode_step_sync.cuh"
#include "cuda/mma.cuh"

namespace bytetx::decode {

// One thread: all weights of this CTA.
template <typename C>
__device__ __forceinline__ void produce(const DecodeStepParams& p, Smem<C>& s) {
    using S = Smem<C>;
    const int total = p.num_layers * C::kLayerSlots;
    int slot = 0, layer = 0;            // source of the copy
    int freed = 0, freed_parity = 0;    // slot whose ring entry is overwritten
    int landed = 0, landed_parity = 0;  // oldest copy under way
    int at = 0;
#pragma unroll 1
    for (int i = 0; i < total; ++i) {
        if (i >= S::kRingSlots) {
            await(&s.empty[s.slots[freed].batch], freed_parity);
            if (++freed == C::kLayerSlots) {
                freed = 0;
                freed_parity ^= 1;
            }
        }
        const Slot own = s.slots[slot];
        const auto* from =
            static_cast<const uint8_t*>((&s.layers[layer].qkv)[own.product]) + own.offset;
        const int k = own.product == 1   ? C::AttnOut::kK
                      : own.product == 3 ? C::FfnOut::kK
                                         : C::kHidden;
#pragma unroll 1
        for (int half = 0; half < 2; ++half) {
            if (2 * i + half >= kWindow) {
                await(&s.full[landed], landed_parity);
                if (++landed == 2 * S::kRingSlots) {
                    landed = 0;
                    landed_parity ^= 1;
                }
            }
            uint64_t* barrier = &s.full[2 * at + half];
            const int bytes = kBlockRows / 2 * own.row_bytes;
            if (bytes == 0) {
                arrive(barrier);
                continue;
            }
            Barrier::arrive_and_expect(barrier, bytes);
            if (own.row_bytes == 2 * k) {  // rows of one part adjoin
                load_bytes(from + half * bytes, barrier, s.ring[at] + half * bytes, bytes,
                           L2Policy::evict_first);
                continue;
            }
            uint8_t* to = s.ring[at] + half * (kSlotBytes / 2);
            const uint8_t* half_from = from + half * (kBlockRows / 2) * (2 * k);
#pragma unroll 1
            for (int row = 0; row < kBlockRows / 2; ++row) {
                load_bytes(half_from + row * (2 * k), barrier, to + row * (2 * kSlotK),
                           own.row_bytes, L2Policy::evict_first);
            }
        }
        if (++slot == C::kLayerSlots) {
            slot = 0;
            ++layer;
        }
        if (++at == S::kRingSlots) at = 0;
    }
}

// A warp's part in the products: it has an eighth of each part of k, for all of the CTA's rows.
template <typename C>
struct Multiplier {
    using S = Smem<C>;
    const DecodeStepParams& p;
    S& s;
    int cta, warp, lane;
    int slot = 0, ring_parity = 0;  // position in the ring
    int buffer = 0;                 // index into s.sums

    __device__ Multiplier(const DecodeStepParams& params, S& smem, int of_cta)
        : p(params),
          s(smem),
          cta(of_cta),
          warp(static_cast<int>(threadIdx.x) / 32),
          lane(static_cast<int>(threadIdx.x) % 32) {}

    // Values derived from these are computed again: over a layer they would not fit in registers.
    __device__ __forceinline__ void forget() {
        asm volatile("" : "+r"(cta), "+r"(warp), "+r"(lane));
    }

    // A batch of a product's weights, in registers.
    template <typename P>
    struct Weights {
        uint4 values[P::kBatchSlots][kSteps];
    };

    template <typename P>
    struct Partials {
        float sums[P::kBatchTiles][P::kChains][4];
    };

    // The chunk of eight numbers in 128 that a lane reads in a step, of row lane / 4 of a slot.
    // Lanes of odd rows swap neighbouring steps: then eight lanes that read at once have different
    // banks. The columns of the vector's matrix are swapped alike, and a row takes its sum from a
    // column of its own parity.
    __device__ int chunk(int step) const { return 4 * (step ^ (lane / 4 & 1)) + lane % 4; }

    // batch: of all of the layer's.
    template <typename P>
    __device__ __forceinline__ void take(Weights<P>& w, int batch) {
        forget();
        const int own = lane / 4 * P::kRowBytes + warp * (2 * kWarpK);
        const int even = own + 16 * chunk(0), odd = own + 16 * chunk(1);
        if (lane < 2 * P::kBatchSlots) {  // a lane a barrier
            int half = 2 * slot + lane, half_parity = ring_parity;
            if (half >= 2 * S::kRingSlots) {
                half -= 2 * S::kRingSlots;
                half_parity ^= 1;
            }
            await(&s.full[half], half_parity);
        }
        __syncwarp();
#pragma unroll
        for (int i = 0; i < P::kBatchSlots; ++i) {
            const uint8_t* from = s.ring[slot];
            if (++slot == S::kRingSlots) {
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
        if (lane == 0) arrive(&s.empty[batch]);  // pairs with the wait in produce()
    }

    // The batch's sums of this warp, from its slice of the input; first_part: of the batch.
    template <typename P>
    __device__ __forceinline__ void multiply(Partials<P>& partials, const Weights<P>& w,
                                             int first_part) {
#pragma unroll
        for (int part = 0; part < P::kBatchParts; ++part) {
            uint4 x[kSteps];
#pragma unroll
            for (int step = 0; step < kSteps; ++step) {
                x[step] = *reinterpret_cast<const uint4*>(
                    &s.slice[warp][(first_part + part) * kWarpK + 8 * chunk(step)]);
            }
#pragma unroll
            for (int step = 0; step < kSteps; ++step) {
#pragma unroll
                for (int tile = 0; tile < P::kBatchTiles; ++tile) {
                    const int blocks = P::kIsWhole ? P::blocks_of(tile) : P::kTileBlocks;
                    const int first = tile * P::kTileBlocks * P::kBatchParts + part * blocks;
                    const uint4 a = w.values[first][step];
                    const uint4 b = blocks == 2 ? w.values[first + 1][step] : uint4{};
                    float(&c)[4] = partials.sums[tile][P::chain(part, step)];
                    mma<__nv_bfloat16>(c, {a.x, b.x, a.y, b.y}, x[step].x, x[step].y);
                    mma<__nv_bfloat16>(c, {a.z, b.z, a.w, b.w}, x[step].z, x[step].w);
                }
            }
        }
    }

    // To s.sums, where the warps' sums meet.
    template <typename P>
    __device__ __forceinline__ void put_sums(const Partials<P>& partials, int first_tile) {
        if (lane % 4 != 0) return;
        const bool is_odd = lane / 4 & 1;
        float* to = &s.sums[buffer][16 * first_tile + lane / 4][warp];
#pragma unroll
        for (int tile = 0; tile < P::kBatchTiles; ++tile) {
            float low = 0.0f, high = 0.0f;
#pragma unroll
            for (int chain = 0; chain < P::kChains; ++chain) {
                const float(&c)[4] = partials.sums[tile][chain];
                low += is_odd ? c[1] : c[0];
                high += is_odd ? c[3] : c[2];
            }
            to[16 * tile * kSumStride] = low;
            const int blocks = P::kIsWhole ? P::blocks_of(tile) : P::kTileBlocks;
            if (blocks == 2) to[(16 * tile + 8) * kSumStride] = high;
        }
    }

    // All of a product. put() waits for its input, and puts the warp's slice of it.
    template <typename P, int kFirstBatch, typename Put>
    __device__ __forceinline__ void product(const Put& put) {
        Weights<P> w;
        take<P>(w, kFirstBatch);
        put();
        __syncwarp();
        Partials<P> partials{};
        if constexpr (P::kBatches == 1) {
            multiply<P>(partials, w, 0);
            put_sums<P>(partials, 0);
        } else {
            int part = 0, tile = 0;
#pragma unroll 1
            for (int batch = kFirstBatch;;) {
                multiply<P>(partials, w, part);
                part += P::kBatchParts;
                if (part == P::kParts) {
                    put_sums<P>(partials, tile);
                    partials = {};
                    part = 0;
                    tile += P::kBatchTiles;
                }
                if (++batch == kFirstBatch + P::kBatches) break;
                take<P>(w, batch);
            }
        }
    }

    // Over the warps, when all have put theirs.
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

    __device__ __forceinline__ void put_squares(float squares) {
        squares = row_sum<32>(squares);
        if (lane == 0) s.sums[buffer][C::kMaxRows][warp] = squares;
    }

    // Four neighbouring numbers of the warp's slice of a part.
    __device__ __forceinline__ void put_four(int part, uint2 four) {
        *reinterpret_cast<uint2*>(&s.slice[warp][part * kWarpK + 4 * lane]) = four;
    }
};

}  // namespace bytetx::decode
