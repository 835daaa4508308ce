// Barriers and indices for pipelines of a producer and its consumers.
#pragma once

namespace bytetx {

// A place in a ring of kSize buffers, and the parity of the barrier phase it is in.
template <int kSize>
struct RingIndex {
    int index = 0, phase = 0;
    __device__ __forceinline__ void advance() {
        if (++index == kSize) {
            index = 0;
            phase ^= 1;
        }
    }
    __device__ __forceinline__ void advance(int steps) {
        const int sum = index + steps;
        phase ^= sum / kSize & 1;
        index = sum % kSize;
    }
};

// The same of `size` buffers, which only the launch knows.
struct AnyRingIndex {
    int size;
    int index = 0, phase = 0;
    __device__ __forceinline__ void advance() {
        if (++index == size) {
            index = 0;
            phase ^= 1;
        }
    }
};

// Makes a value that is the same in every lane known as such: loops over it then run on uniform
// registers, which wgmma's descriptors need anyway.
__device__ __forceinline__ int uniform(int value) { return __shfl_sync(0xffffffffu, value, 0); }

}  // namespace bytetx
