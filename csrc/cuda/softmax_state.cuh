// The state of a softmax row whose keys come in parts: what every attention kernel keeps of a row
// beside its sum of weighted values, in registers, in shared memory and between CTAs.
//
// Scores are powers of two: they have the factor log2(e). Weights are 2^(score - max). The sums of
// weighted values are relative to max, too: whoever changes max multiplies them by the factor that
// the method returns. Kernels differ in when they raise max, not in what that does.
//
// Source: online softmax, as in FlashAttention-2 (arXiv 2307.08691), section 3.1.
#pragma once

#include "cuda/attention_math.cuh"

namespace bytetx {

constexpr float kNoMax = -3.0e38f;  // below every score, and finite: -inf - (-inf) would be NaN

struct alignas(8) SoftmaxState {
    float max;  // the largest score so far, or near it: weights are relative to this
    float sum;  // all weights

    __device__ __forceinline__ void clear() {
        max = kNoMax;
        sum = 0.0f;
    }

    __device__ __forceinline__ float weight(float score) const { return exp2_approx(score - max); }

    // The weight of a score that is product * scale, rounded once.
    __device__ __forceinline__ float weight(float product, float scale) const {
        return exp2_approx(fmaf(product, scale, -max));
    }

    // Makes `most` the maximum; returns the factor of what was summed before.
    __device__ __forceinline__ float raise(float most) {
        const float factor = exp2_approx(max - most);
        max = most;
        sum *= factor;
        return factor;
    }

    // Raises the maximum by whole powers of two, which rounds nothing; returns the factor.
    __device__ __forceinline__ float raise_by(int powers) {
        const float factor = __int_as_float((127 - powers) << 23);
        sum *= factor;
        max += static_cast<float>(powers);
        return factor;
    }

    // Joining the states of parts of the keys: first all maxima, then all sums. add() returns the
    // factor of the part's sums.
    __device__ __forceinline__ void cover(const SoftmaxState& part) { max = fmaxf(max, part.max); }

    __device__ __forceinline__ float add(const SoftmaxState& part) {
        const float factor = exp2_approx(part.max - max);
        sum += part.sum * factor;
        return factor;
    }
};

// Joins the sums of a row's next keys to those of the keys before them. It has the same bits
// wherever it is done, in a CTA that has both parts or in one that reads them from memory: hence
// every rounding is named.
struct JoinFactors {
    float kept, added;

    __device__ __forceinline__ JoinFactors(SoftmaxState& joined, SoftmaxState next) {
        const float most = fmaxf(joined.max, next.max);
        kept = exp2_approx(__fsub_rn(joined.max, most));
        added = exp2_approx(__fsub_rn(next.max, most));
        joined = {most, one(joined.sum, next.sum)};
    }

    __device__ __forceinline__ float one(float joined, float next) const {
        return __fmaf_rn(next, added, __fmul_rn(joined, kept));
    }

    __device__ __forceinline__ void add(float4& joined, float4 next) const {
        joined = {one(joined.x, next.x), one(joined.y, next.y), one(joined.z, next.z),
                  one(joined.w, next.w)};
    }
};

}  // namespace bytetx
