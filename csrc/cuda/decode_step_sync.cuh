// How the CTAs of the decode-step kernel pass numbers on, and how weights enter shared memory.
//
// A *packet* is eight bytes: four of data and the tag of a layer of a step. It is written and read
// as one, so that a reader that sees the tag sees the data: no counter, no fence, and one trip
// through the L2 between the CTA that computes a number and the CTA that reads it (the protocol is
// NCCL's "LL"). Tags never repeat, and so nothing has to be cleared.
#pragma once

#include <cstdint>

#include "common/ptx.cuh"
#include "cuda/decode_step_types.cuh"

namespace bytetx::decode {

// Waits end in a trap: a bug must not hang the GPU. A wait's turn takes 0.5 us or more.
constexpr int kMaxTurns = 1 << 22;

__device__ __forceinline__ uint64_t make_packet(uint32_t data, uint32_t tag) {
    return uint64_t{tag} << 32 | data;
}

__device__ __forceinline__ void send(uint64_t* to, uint32_t data, uint32_t tag) {
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(to), "l"(make_packet(data, tag))
                 : "memory");
}

__device__ __forceinline__ void send(uint64_t* to, float data, uint32_t tag) {
    send(to, __float_as_uint(data), tag);
}

__device__ __forceinline__ void look(uint64_t& a, uint64_t& b, const uint64_t* at) {
    asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];"
                 : "=l"(a), "=l"(b)
                 : "l"(at)
                 : "memory");
}

__device__ __forceinline__ void look(uint64_t& a, const uint64_t* at) {
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(a) : "l"(at) : "memory");
}

__device__ __forceinline__ bool has_tag(uint64_t packet, uint32_t tag) {
    return static_cast<uint32_t>(packet >> 32) == tag;
}

// The packets of a vector of k numbers that a thread reads for its warp's slice: four neighbouring
// numbers of each part of kSlotK, which are kPairs pairs of packets. It looks for the first time
// when it is made, and waits for nothing then. What is past the vector's end is 0.
template <int k, int kPairs>
struct Mail {
    static constexpr int kParts = ceil_div(k, kSlotK);
    static constexpr int kStride = kThreads * 2 * kPairs;  // packets of a part
    const uint64_t* from;
    uint64_t a[kParts][kPairs], b[kParts][kPairs];

    __device__ __forceinline__ explicit Mail(const uint64_t* packets)
        : from(packets + 2 * kPairs * threadIdx.x) {
        look_for_all();
    }

    static __device__ __forceinline__ bool has(int part) {
        return (part + 1) * kSlotK <= k || part * kSlotK + 4 * static_cast<int>(threadIdx.x) < k;
    }

    __device__ __forceinline__ void look_for_all() {
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
#pragma unroll
            for (int i = 0; i < kPairs; ++i) {
                if (has(part)) look(a[part][i], b[part][i], from + part * kStride + 2 * i);
            }
        }
    }

    __device__ __forceinline__ void await_pairs(uint2 (&data)[kParts][kPairs], uint32_t tag) {
        for (int turn = 0;; ++turn) {
            bool is_there = true;
#pragma unroll
            for (int part = 0; part < kParts; ++part) {
#pragma unroll
                for (int i = 0; i < kPairs; ++i) {
                    is_there &=
                        !has(part) || (has_tag(a[part][i], tag) && has_tag(b[part][i], tag));
                }
            }
            if (is_there) break;
            if (turn > kMaxTurns) __trap();
            look_for_all();
        }
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
#pragma unroll
            for (int i = 0; i < kPairs; ++i) {
                data[part][i] = has(part) ? make_uint2(static_cast<uint32_t>(a[part][i]),
                                                       static_cast<uint32_t>(b[part][i]))
                                          : make_uint2(0, 0);
            }
        }
    }
};

// Neighbouring packets, 2 * kPairs of them.
template <int kPairs>
__device__ __forceinline__ void receive(float (&data)[2 * kPairs], const uint64_t* from,
                                        uint32_t tag) {
    uint64_t a[kPairs], b[kPairs];
    for (int turn = 0;; ++turn) {
        bool is_there = true;
#pragma unroll
        for (int i = 0; i < kPairs; ++i) look(a[i], b[i], from + 2 * i);
#pragma unroll
        for (int i = 0; i < kPairs; ++i) is_there &= has_tag(a[i], tag) && has_tag(b[i], tag);
        if (is_there) break;
        if (turn > kMaxTurns) __trap();
    }
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
        data[2 * i] = __uint_as_float(static_cast<uint32_t>(a[i]));
        data[2 * i + 1] = __uint_as_float(static_cast<uint32_t>(b[i]));
    }
}

// One packet and, elsewhere, the two of a state.
__device__ __forceinline__ void receive_split(float& one, SoftmaxState& state,
                                              const uint64_t* one_from, const uint64_t* state_from,
                                              uint32_t tag) {
    uint64_t a, b, c;
    for (int turn = 0;; ++turn) {
        look(a, one_from);
        look(b, c, state_from);
        if (has_tag(a, tag) && has_tag(b, tag) && has_tag(c, tag)) break;
        if (turn > kMaxTurns) __trap();
    }
    one = __uint_as_float(static_cast<uint32_t>(a));
    state = {__uint_as_float(static_cast<uint32_t>(b)), __uint_as_float(static_cast<uint32_t>(c))};
}

// Barrier::wait() that ends in a trap.
__device__ __forceinline__ bool is_over(const uint64_t* barrier, int parity) {
    uint32_t is_done;
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\n"
        "selp.u32 %0, 1, 0, done;\n"
        "}\n"
        : "=r"(is_done)
        : "r"(smem_address(barrier)), "r"(parity)
        : "memory");
    return is_done != 0;
}

__device__ __forceinline__ void await(const uint64_t* barrier, int parity) {
    for (int turn = 0; !is_over(barrier, parity); ++turn) {
        if (turn > kMaxTurns) __trap();
    }
}

// Behind the CTA's reads of weights, before the next copy to their slot.
__device__ __forceinline__ void arrive(uint64_t* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(smem_address(barrier))
                 : "memory");
}

// The first warp reads the sums before the others fill the queue of shared memory with weights.
__device__ __forceinline__ void let_first_warp_read(int warp) {
    if (warp == 0) {
        asm volatile("bar.arrive 2, %0;" ::"n"(kThreads) : "memory");
    } else {
        asm volatile("bar.sync 2, %0;" ::"n"(kThreads) : "memory");
    }
}

// ---- loads of what no kernel writes meanwhile

__device__ __forceinline__ uint4 load_kv(const uint8_t* from) {
    uint4 value;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "l"(from));
    return value;
}

__device__ __forceinline__ void prefetch_kv(const uint8_t* from) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
}

// Words `index` * kWords and on: volatile, for the compiler would move the load to its use.
template <int kWords>
__device__ __forceinline__ void load_words(uint32_t (&to)[kWords], const void* from, int index) {
    const auto* at = static_cast<const uint32_t*>(from) + kWords * index;
    if constexpr (kWords == 2) {
        asm volatile("ld.global.nc.v2.u32 {%0, %1}, [%2];" : "=r"(to[0]), "=r"(to[1]) : "l"(at));
    } else {
        static_assert(kWords == 1);
        asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(to[0]) : "l"(at));
    }
}

__device__ __forceinline__ void load_half(uint16_t& to, const uint16_t* from) {
    asm volatile("ld.global.nc.u16 %0, [%1];" : "=h"(to) : "l"(from));
}

__device__ __forceinline__ float2 unpack_bf16(uint32_t both) {
    return make_float2(__uint_as_float(both << 16), __uint_as_float(both & 0xffff0000u));
}

}  // namespace bytetx::decode
