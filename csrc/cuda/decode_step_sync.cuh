// How the CTAs of the decode-step kernel pass numbers on, and how weights enter shared memory.
//
// A *packet* is eight bytes: four of data and the tag of a layer of a step. It is written and read
// as one, so that a reader that sees the tag sees the data: no counter, no fence, and one trip
// through the L2 between the CTA that computes a number and the CTA that reads it (the protocol is
// NCCL's "LL"). Tags never repeat, and so nothing has to be cleared.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

namespace bytetx::decode {

// Waits end in a trap: a bug must not hang the GPU. A wait's turn takes 0.5 us or more.
constexpr int kMaxTurns = 1 << 22;

__device__ __forceinline__ uint32_t smem_address(const void* p) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

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

__device__ __forceinline__ bool has_tag(uint64_t packet, uint32_t tag) {
    return static_cast<uint32_t>(packet >> 32) == tag;
}

// Pairs of neighbouring packets that a thread waits for, `stride` packets apart. It looks for the
// first time when it is made, and waits for nothing then.
template <int kPairs>
struct Mail {
    const uint64_t* from;
    int stride;
    uint64_t a[kPairs], b[kPairs];

    __device__ __forceinline__ Mail(const uint64_t* first, int of_stride)
        : from(first), stride(of_stride) {
        look_for_all();
    }

    __device__ __forceinline__ void look_for_all() {
#pragma unroll
        for (int i = 0; i < kPairs; ++i) look(a[i], b[i], from + i * stride);
    }

    __device__ __forceinline__ void await_pairs(uint2 (&data)[kPairs], uint32_t tag) {
        for (int turn = 0;; ++turn) {
            bool is_there = true;
#pragma unroll
            for (int i = 0; i < kPairs; ++i) is_there &= has_tag(a[i], tag) && has_tag(b[i], tag);
            if (is_there) break;
            if (turn > kMaxTurns) __trap();
            look_for_all();
        }
#pragma unroll
        for (int i = 0; i < kPairs; ++i) {
            data[i] = make_uint2(static_cast<uint32_t>(a[i]), static_cast<uint32_t>(b[i]));
        }
    }

    __device__ __forceinline__ uint4 await_four(uint32_t tag) {
        static_assert(kPairs == 2);
        uint2 data[kPairs];
        await_pairs(data, tag);
        return make_uint4(data[0].x, data[0].y, data[1].x, data[1].y);
    }
};

// One packet and, elsewhere, two.
__device__ __forceinline__ void receive_split(float& one, uint2& two, const uint64_t* one_from,
                                              const uint64_t* two_from, uint32_t tag) {
    uint64_t a, b, c;
    for (int turn = 0;; ++turn) {
        asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(a) : "l"(one_from) : "memory");
        look(b, c, two_from);
        if (has_tag(a, tag) && has_tag(b, tag) && has_tag(c, tag)) break;
        if (turn > kMaxTurns) __trap();
    }
    one = __uint_as_float(static_cast<uint32_t>(a));
    two = make_uint2(static_cast<uint32_t>(b), static_cast<uint32_t>(c));
}

__device__ __forceinline__ void init_barrier(uint64_t* barrier, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(smem_address(barrier)), "r"(count)
                 : "memory");
}

__device__ __forceinline__ void arrive(uint64_t* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(smem_address(barrier))
                 : "memory");
}

__device__ __forceinline__ void await(uint64_t* barrier, int parity) {
    for (int turn = 0;; ++turn) {
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
        if (is_done != 0) return;
        if (turn > kMaxTurns) __trap();
    }
}

__device__ __forceinline__ void expect_bytes(uint64_t* barrier, int bytes) {
    asm volatile(
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(smem_address(barrier)),
        "r"(bytes)
        : "memory");
}

// One thread copies `bytes` of weights, which no later step finds in the L2 anyway.
__device__ __forceinline__ void copy_weights(void* to, const void* from, int bytes,
                                             uint64_t* barrier, uint64_t policy) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
        "[%1], %2, [%3], %4;" ::"r"(smem_address(to)),
        "l"(from), "r"(bytes), "r"(smem_address(barrier)), "l"(policy)
        : "memory");
}

__device__ __forceinline__ uint64_t evict_first_policy() {
    uint64_t policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

__device__ __forceinline__ uint32_t pack_bf16(float a, float b) {
    const __nv_bfloat162 both = __floats2bfloat162_rn(a, b);
    return *reinterpret_cast<const uint32_t*>(&both);
}

__device__ __forceinline__ float2 unpack_bf16(uint32_t both) {
    return make_float2(__uint_as_float(both << 16), __uint_as_float(both & 0xffff0000u));
}

}  // namespace bytetx::decode
