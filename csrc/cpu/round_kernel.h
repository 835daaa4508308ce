// Weights to rows of codes: rounding of numbers, and GGUF's blocks.
//
// A group's scale s, and with 4 bits its least value m, are rounded to f16 before its codes are
// found, so that errors are those of what is stored. Of a few candidates the one with the least
// square error is taken; with 4 bits the line through the best codes is the last candidate. About
// 6 candidates of some 12 vector operations each: the arithmetic bounds it.
#pragma once

#include "cpu/group_kernel.h"

namespace bytetx::cpu::BYTETX_SIMD {

constexpr int kWeightVectors = static_cast<int>(kGroupFeatures) / Vec::kWidth;
// Scaled rows are below 2^10, so that f16 scales are normal numbers in groups 2^22 times smaller
// than their row's largest.
constexpr int kLargestExponent = 10;
constexpr int kLeastExponent = -100;

#if defined(__AVX512F__)
inline uint16_t to_half(float x) {
    const __m256i half = _mm512_cvtps_ph(_mm512_set1_ps(x), _MM_FROUND_TO_NEAREST_INT);
    return static_cast<uint16_t>(_mm_cvtsi128_si32(_mm256_castsi256_si128(half)));
}
inline float from_half(uint16_t x) {
    return _mm512_cvtss_f32(_mm512_cvtph_ps(_mm256_set1_epi16(static_cast<int16_t>(x))));
}
#elif defined(BYTETX_NEON)
inline uint16_t to_half(float x) {
    return vget_lane_u16(vreinterpret_u16_f16(vcvt_f16_f32(vdupq_n_f32(x))), 0);
}
inline float from_half(uint16_t x) {
    return vgetq_lane_f32(vcvt_f32_f16(vreinterpret_f16_u16(vdup_n_u16(x))), 0);
}
#else
inline uint16_t to_half(float x) {
    return static_cast<uint16_t>(_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT));
}
inline float from_half(uint16_t x) { return _cvtsh_ss(x); }
#endif

inline float half_at(const uint8_t* p) {
    uint16_t half;
    __builtin_memcpy(&half, p, sizeof(half));
    return from_half(half);
}
inline void put_half(uint8_t* p, uint16_t half) { __builtin_memcpy(p, &half, sizeof(half)); }

// A power of two that makes numbers up to `largest` smaller than 2^kLargestExponent; 1 for 0.
inline float row_factor(float largest) {
    if (!(largest > 0.0f)) return 1.0f;
    int exponent = kLeastExponent;  // largest < 2^exponent
    const float least = __builtin_ldexpf(1.0f, kLeastExponent);
    if (largest >= least) __builtin_frexpf(largest, &exponent);
    return __builtin_ldexpf(1.0f, exponent - kLargestExponent);
}

// A scale and a least value as they are stored, and the square error of the codes that they give.
struct Choice {
    float scale, least, error;
};

using GroupWeights = Vec[kWeightVectors];

// Codes of w from 0 on, whole numbers.
template <int kBits>
inline void encode(const GroupWeights& w, const Choice& by, GroupWeights& codes) {
    const Vec steps = broadcast(by.scale == 0.0f ? 1.0f : 1.0f / by.scale);
    const Vec none = broadcast(0.0f), top = broadcast((1 << kBits) - 1);
#pragma GCC unroll 4
    for (int i = 0; i < kWeightVectors; ++i) {
        codes[i] = min(max(round((w[i] - broadcast(by.least)) * steps), none), top);
    }
}

template <int kBits>
inline Choice choice(const GroupWeights& w, float scale, float least) {
    Choice made;
    made.scale = from_half(to_half(scale));
    made.least = kBits == 8 ? -128.0f * made.scale : from_half(to_half(least));
    GroupWeights codes;
    encode<kBits>(w, made, codes);
    Vec error = broadcast(0.0f);
#pragma GCC unroll 4
    for (int i = 0; i < kWeightVectors; ++i) {
        const Vec miss =
            multiply_add(codes[i], broadcast(made.scale), broadcast(made.least)) - w[i];
        error = multiply_add(miss, miss, error);
    }
    made.error = reduce_sum(error);
    return made;
}

// Without a branch, which nothing could predict.
inline Choice better(const Choice& first, const Choice& second) {
    const bool takes = second.error < first.error;
    return {takes ? second.scale : first.scale, takes ? second.least : first.least,
            takes ? second.error : first.error};
}

inline Choice best_choice8(const GroupWeights& w, float low, float high) {
    const float scale = (high > -low ? high : -low) / 127.0f;
    return better(choice<8>(w, scale, 0.0f), choice<8>(w, scale * 0.985f, 0.0f));
}

// Ranges between least and largest value, that of Q4_0 (code 0 is the largest in size), and the
// line through the best codes.
inline Choice best_choice4(const GroupWeights& w, float low, float high) {
    const float range = (high - low) * (1.0f / 15.0f), extreme = high > -low ? high : low;
    Choice best = choice<4>(w, range, low);
    best = better(best, choice<4>(w, range * 0.95f, low * 0.95f));
    best = better(best, choice<4>(w, range * 0.9f, low * 0.9f));
    best = better(best, choice<4>(w, range * 0.85f, low * 0.85f));
    best = better(best, choice<4>(w, extreme * -0.125f, extreme));
    GroupWeights codes;
    encode<4>(w, best, codes);
    Vec sum_codes = codes[0], sum = w[0], squares = codes[0] * codes[0], products = codes[0] * w[0];
#pragma GCC unroll 4
    for (int i = 1; i < kWeightVectors; ++i) {
        sum_codes = sum_codes + codes[i];
        sum = sum + w[i];
        squares = multiply_add(codes[i], codes[i], squares);
        products = multiply_add(codes[i], w[i], products);
    }
    constexpr float kShare = 1.0f / static_cast<float>(kGroupFeatures);
    const float mean = reduce_sum(sum_codes) * kShare, middle = reduce_sum(sum) * kShare;
    const float spread = reduce_sum(squares) * kShare - mean * mean;
    const float product = reduce_sum(products) * kShare - mean * middle;
    const float slope = product / (spread > 1e-6f ? spread : 1e-6f);
    return better(best, choice<4>(w, slope, middle - slope * mean));
}

template <int kBits>
inline void put_codes(const GroupWeights& w, const Choice& by, int8_t* bytes) {
    constexpr float kFirst = kBits == 8 ? 128.0f : 0.0f;
    GroupWeights codes;
    encode<kBits>(w, by, codes);
#pragma GCC unroll 4
    for (int i = 0; i < kWeightVectors; ++i) {
        store_bytes(bytes + i * Vec::kWidth, rounded(codes[i] - broadcast(kFirst)));
    }
}

template <int kBits, typename T>
inline void round_row(const void* x, int64_t k, uint8_t* row) {
    constexpr int64_t kBytes = kBits == 8 ? kCodedBytes8 : kCodedBytes4;
    const int64_t groups = (k + kGroupFeatures - 1) / kGroupFeatures;
    const T* from = static_cast<const T*>(x);
    Vec most = broadcast(0.0f), faults = most;
    for (int64_t i = 0; i < k; i += Vec::kWidth) {
        const Vec some = load_some(from + i, k - i);
        most = max(most, max(some, broadcast(0.0f) - some));
        faults = multiply_add(some, broadcast(0.0f), faults);  // NaN where one is not finite
    }
    const float fault = reduce_sum(faults), factor = row_factor(reduce_max(most)) + fault;
    __builtin_memcpy(row + groups * kBytes, &factor, sizeof(factor));
    if (factor != factor) return __builtin_memset(row, 0, groups * kBytes), void();
    const Vec inverse = broadcast(1.0f / factor);
    for (int64_t group = 0; group < groups; ++group, row += kBytes) {
        const int64_t begin = group * kGroupFeatures, count = k - begin;
        T whole[kGroupFeatures];
        const T* numbers = from + begin;
        if (count < kGroupFeatures) {
            for (int64_t i = 0; i < kGroupFeatures; ++i) {
                whole[i] = numbers[i < count ? i : count - 1];
            }
            numbers = whole;
        }
        GroupWeights w;
#pragma GCC unroll 4
        for (int i = 0; i < kWeightVectors; ++i) {
            w[i] = load(numbers + i * Vec::kWidth) * inverse;
        }
        Vec low = w[0], high = w[0];
#pragma GCC unroll 4
        for (int i = 1; i < kWeightVectors; ++i) {
            low = min(low, w[i]);
            high = max(high, w[i]);
        }
        int8_t codes[kGroupFeatures];
        if constexpr (kBits == 8) {
            const Choice best = best_choice8(w, reduce_min(low), reduce_max(high));
            put_half(row, to_half(best.scale));
            put_codes<8>(w, best, codes);
            __builtin_memcpy(row + 2, codes, sizeof(codes));
        } else {
            const Choice best = best_choice4(w, reduce_min(low), reduce_max(high));
            put_half(row, to_half(best.scale));
            put_half(row + 2, to_half(best.least));
            put_codes<4>(w, best, codes);
            for (int64_t i = 0; i < kGroupFeatures / 2; ++i) {
                row[4 + i] = static_cast<uint8_t>(codes[i] | codes[i + kGroupFeatures / 2] << 4);
            }
        }
    }
}

// Of Q4_K's 8 scales and 8 minima of 6 bits in 12 bytes, those of one group.
inline void six_bits(const uint8_t* packed, int group, int& scale, int& low) {
    if (group < 4) {
        scale = packed[group] & 63;
        low = packed[group + 4] & 63;
    } else {
        scale = (packed[group + 4] & 15) | packed[group - 4] >> 6 << 4;
        low = packed[group + 4] >> 4 | packed[group] >> 6 << 4;
    }
}

inline void convert_q4_k(const uint8_t* blocks, int64_t groups, uint8_t* row) {
    constexpr int64_t kBytes = 144, kGroups = 8;
    float largest = 0.0f, faults = 0.0f;
    for (int64_t i = 0; i < groups / kGroups; ++i) {
        const uint8_t* block = blocks + i * kBytes;
        const float d = half_at(block), low = half_at(block + 2);
        faults += d * 0.0f + low * 0.0f;
        for (int group = 0; group < kGroups; ++group) {
            int scale, least;
            six_bits(block + 4, group, scale, least);
            const float one = __builtin_fabsf(d * static_cast<float>(scale));
            const float other = __builtin_fabsf(low * static_cast<float>(least));
            largest = one > largest ? one : largest;
            largest = other > largest ? other : largest;
        }
    }
    const float factor = row_factor(largest) + faults, inverse = 1.0f / factor;
    __builtin_memcpy(row + groups * kCodedBytes4, &factor, sizeof(factor));
    for (int64_t i = 0; i < groups / kGroups; ++i) {
        const uint8_t* block = blocks + i * kBytes;
        const float d = half_at(block), low = half_at(block + 2);
        for (int group = 0; group < kGroups; ++group, row += kCodedBytes4) {
            int scale, least;
            six_bits(block + 4, group, scale, least);
            put_half(row, to_half(d * static_cast<float>(scale) * inverse));
            put_half(row + 2, to_half(-low * static_cast<float>(least) * inverse));
            const uint8_t* codes = block + 16 + group / 2 * kGroupFeatures;
            const int shift = group % 2 * 4;  // groups of a pair are the halves of 32 bytes
            for (int64_t j = 0; j < kGroupFeatures / 2; ++j) {
                const int first = codes[j] >> shift & 15;
                row[4 + j] = static_cast<uint8_t>(
                    first | (codes[j + kGroupFeatures / 2] >> shift & 15) << 4);
            }
        }
    }
}

template <int kBits>
inline void convert_groups(const uint8_t* blocks, int64_t groups, SavedFormat format,
                           uint8_t* row) {
    constexpr int64_t kBytes = kBits == 8 ? kCodedBytes8 : kCodedBytes4;
    constexpr int64_t kHalf = kGroupFeatures / 2;
    float factor = 1.0f;
    uint8_t* end = row + groups * kBytes;
    for (; row < end; row += kBytes) {
        factor += half_at(blocks) * 0.0f;
        if (format == SavedFormat::q8_0 || format == SavedFormat::q4_1) {
            if (format == SavedFormat::q4_1) factor += half_at(blocks + 2) * 0.0f;
            __builtin_memcpy(row, blocks, kBytes);
            blocks += kBytes;
            continue;
        }
        __builtin_memcpy(row, blocks, 2);
        if constexpr (kBits == 4) {  // Q4_0
            const uint16_t least = to_half(-8.0f * half_at(blocks));
            put_half(row + 2, least);
            factor += from_half(least) * 0.0f;
            __builtin_memcpy(row + 4, blocks + 2, kHalf);
            blocks += 2 + kHalf;
        } else {
            const bool has_fifth = format == SavedFormat::q5_0;
            uint32_t fifth = 0;
            if (has_fifth) __builtin_memcpy(&fifth, blocks + 2, sizeof(fifth));
            const uint8_t* codes = blocks + (has_fifth ? 6 : 2);
            const int middle = has_fifth ? 16 : 8;
            for (int64_t i = 0; i < kHalf; ++i) {
                const int low = (codes[i] & 15) | (fifth >> i & 1) << 4;
                const int high = codes[i] >> 4 | (fifth >> (i + kHalf) & 1) << 4;
                row[2 + i] = static_cast<uint8_t>(low - middle);
                row[2 + kHalf + i] = static_cast<uint8_t>(high - middle);
            }
            blocks += (has_fifth ? 6 : 2) + kHalf;
        }
    }
    __builtin_memcpy(end, &factor, sizeof(factor));
}

inline void convert_row(const uint8_t* blocks, int64_t groups, SavedFormat format, int32_t bits,
                        uint8_t* row) {
    if (format == SavedFormat::q4_k) return convert_q4_k(blocks, groups, row);
    if (bits == 8) return convert_groups<8>(blocks, groups, format, row);
    convert_groups<4>(blocks, groups, format, row);
}

// Declared here so that the constant, which another file names, is not file-local.
extern const GroupKernelTable kGroupKernels;

constexpr GroupKernelTable make_group_kernels() {
    return {{stage_groups<Int8, float>, multiply_groups<Int8, float>},
            {stage_groups<Int8, Bf16>, multiply_groups<Int8, Bf16>},
            {stage_groups<Int4, float>, multiply_groups<Int4, float>},
            {stage_groups<Int4, Bf16>, multiply_groups<Int4, Bf16>},
            round_row<8, float>,
            round_row<8, Bf16>,
            round_row<4, float>,
            round_row<4, Bf16>,
            convert_row};
}

}  // namespace bytetx::cpu::BYTETX_SIMD
