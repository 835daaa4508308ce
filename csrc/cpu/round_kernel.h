// Weights to rows of codes: rounding of numbers, and GGUF's blocks.
//
// A group's scale s, and with 4 bits its least value m, are rounded to f16 before its codes are
// found, so that errors are those of what is stored. Of a few candidates the one with the least
// square error is taken; with 4 bits the line through the best codes is the last candidate.
//
// A vector holds one feature of as many groups of a row as it has lanes, which are turned round in
// L1 first: no sum goes over lanes, and no branch depends on a group. Bound by: arithmetic, some 70
// vector operations a feature with 4 bits.
#pragma once

#include "cpu/group_kernel.h"

namespace bytetx::cpu::BYTETX_SIMD {

constexpr int kLanes = Vec::kWidth;  // groups at a time
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

// Numbers rounded to f16; and which of x and y, lane by lane.
#if defined(__AVX512F__)
inline Vec in_half(Vec x) {
    return {_mm512_cvtph_ps(_mm512_cvtps_ph(x.v, _MM_FROUND_TO_NEAREST_INT))};
}
inline Vec where_less(Vec a, Vec b, Vec x, Vec y) {
    return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ), y.v, x.v)};
}
#elif defined(BYTETX_NEON)
inline Vec in_half(Vec x) {
    return each_half([](float32x4_t v) { return vcvt_f32_f16(vcvt_f16_f32(v)); }, x);
}
inline Vec where_less(Vec a, Vec b, Vec x, Vec y) {
    return {vbslq_f32(vcltq_f32(a.low, b.low), x.low, y.low),
            vbslq_f32(vcltq_f32(a.high, b.high), x.high, y.high)};
}
#else
inline Vec in_half(Vec x) {
    return {_mm256_cvtph_ps(_mm256_cvtps_ph(x.v, _MM_FROUND_TO_NEAREST_INT))};
}
inline Vec where_less(Vec a, Vec b, Vec x, Vec y) {
    return {_mm256_blendv_ps(y.v, x.v, _mm256_cmp_ps(a.v, b.v, _CMP_LT_OQ))};
}
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

// Features of kLanes groups: [feature][group].
using Turned = float[kGroupFeatures][kLanes];

// Scales and least values as they are stored, one of each group, and the square errors of the codes
// that they give.
struct Choice {
    Vec scale, least, steps, first, error;
};

template <int kBits>
inline Choice choice(Vec scale, Vec least) {
    Choice made;
    made.scale = in_half(scale);
    made.least = kBits == 8 ? broadcast(-128.0f) * made.scale : in_half(least);
    // 1 / scale, and 0 for 0: f16 has no other number whose square is below this.
    made.steps = divide(made.scale, max(made.scale * made.scale, broadcast(1e-20f)));
    made.first = broadcast(0.0f) - made.least * made.steps;
    made.error = broadcast(0.0f);
    return made;
}

// Codes from 0 on, whole numbers.
template <int kBits>
inline Vec encode(Vec w, const Choice& by) {
    const Vec place = multiply_add(w, by.steps, by.first);
    return round(min(max(place, broadcast(0.0f)), broadcast((1 << kBits) - 1)));
}

template <int kBits>
inline void add_error(Vec w, Choice& by) {
    const Vec miss = multiply_add(encode<kBits>(w, by), by.scale, by.least) - w;
    by.error = multiply_add(miss, miss, by.error);
}

inline Choice better(const Choice& first, const Choice& second) {
    const auto one = [&](Vec a, Vec b) { return where_less(second.error, first.error, b, a); };
    return {one(first.scale, second.scale), one(first.least, second.least),
            one(first.steps, second.steps), one(first.first, second.first),
            one(first.error, second.error)};
}

inline Choice best_choice8(const Turned& turned, Vec low, Vec high) {
    const Vec scale = max(high, broadcast(0.0f) - low) * broadcast(1.0f / 127.0f);
    Choice whole = choice<8>(scale, low), narrow = choice<8>(scale * broadcast(0.985f), low);
    for (int64_t i = 0; i < kGroupFeatures; ++i) {
        const Vec w = load(turned[i]);
        add_error<8>(w, whole);
        add_error<8>(w, narrow);
    }
    return better(whole, narrow);
}

// Ranges between least and largest value, that of Q4_0 (code 0 is the largest in size), and the
// line through the best codes.
inline Choice best_choice4(const Turned& turned, Vec low, Vec high) {
    const auto shrunk = [&](float by) {
        return choice<4>((high - low) * broadcast(by / 15.0f), low * broadcast(by));
    };
    const Vec none = broadcast(0.0f);
    const Vec extreme = where_less(none - low, high, high, low);
    Choice whole = shrunk(1.0f), second = shrunk(0.95f), third = shrunk(0.9f);
    Choice fourth = shrunk(0.85f), even = choice<4>(extreme * broadcast(-0.125f), extreme);
    for (int64_t i = 0; i < kGroupFeatures; ++i) {
        const Vec w = load(turned[i]);
        add_error<4>(w, whole);
        add_error<4>(w, second);
        add_error<4>(w, third);
        add_error<4>(w, fourth);
        add_error<4>(w, even);
    }
    const Choice best = better(better(better(whole, second), better(third, fourth)), even);
    Vec sum_codes = none, sum = none, squares = none, products = none;
    for (int64_t i = 0; i < kGroupFeatures; ++i) {
        const Vec w = load(turned[i]), code = encode<4>(w, best);
        sum_codes = sum_codes + code;
        sum = sum + w;
        squares = multiply_add(code, code, squares);
        products = multiply_add(code, w, products);
    }
    const Vec share = broadcast(1.0f / static_cast<float>(kGroupFeatures));
    const Vec mean = sum_codes * share, middle = sum * share;
    const Vec spread = max(squares * share - mean * mean, broadcast(1e-6f));
    const Vec slope = divide(products * share - mean * middle, spread);
    Choice line = choice<4>(slope, middle - slope * mean);
    for (int64_t i = 0; i < kGroupFeatures; ++i) add_error<4>(load(turned[i]), line);
    return better(best, line);
}

// The first `count` of kLanes groups, scaled, to blocks of a row.
template <int kBits>
inline void round_groups(const Turned& turned, int64_t count, uint8_t* row) {
    constexpr int64_t kBytes = kBits == 8 ? kCodedBytes8 : kCodedBytes4;
    Vec low = load(turned[0]), high = low;
    for (int64_t i = 1; i < kGroupFeatures; ++i) {
        low = min(low, load(turned[i]));
        high = max(high, load(turned[i]));
    }
    const Choice best =
        kBits == 8 ? best_choice8(turned, low, high) : best_choice4(turned, low, high);
    int8_t codes[kGroupFeatures][kLanes];
    constexpr float kFirst = kBits == 8 ? 128.0f : 0.0f;
    for (int64_t i = 0; i < kGroupFeatures; ++i) {
        const Vec code = encode<kBits>(load(turned[i]), best);
        store_bytes(codes[i], rounded(code - broadcast(kFirst)));
    }
    float scales[kLanes], leasts[kLanes];
    store(scales, best.scale);
    store(leasts, best.least);
    for (int64_t lane = 0; lane < count; ++lane, row += kBytes) {
        put_half(row, to_half(scales[lane]));
        if constexpr (kBits == 8) {
            for (int64_t i = 0; i < kGroupFeatures; ++i) {
                row[2 + i] = static_cast<uint8_t>(codes[i][lane]);
            }
        } else {
            put_half(row + 2, to_half(leasts[lane]));
            for (int64_t i = 0; i < kGroupFeatures / 2; ++i) {
                row[4 + i] =
                    static_cast<uint8_t>(codes[i][lane] | codes[i + kGroupFeatures / 2][lane] << 4);
            }
        }
    }
}

// One row of numbers that `read(group, numbers)` gives, kGroupFeatures at a time.
template <int kBits, class Read>
inline void round_row_of(int64_t groups, float factor, uint8_t* row, Read&& read) {
    constexpr int64_t kBytes = kBits == 8 ? kCodedBytes8 : kCodedBytes4;
    __builtin_memcpy(row + groups * kBytes, &factor, sizeof(factor));
    if (factor != factor) {
        __builtin_memset(row, 0, groups * kBytes);
        return;
    }
    const float inverse = 1.0f / factor;
    alignas(64) Turned turned;
    for (int64_t begin = 0; begin < groups; begin += kLanes, row += kLanes * kBytes) {
        const int64_t count = groups - begin < kLanes ? groups - begin : kLanes;
        for (int64_t lane = 0; lane < kLanes; ++lane) {
            float numbers[kGroupFeatures];
            read(begin + (lane < count ? lane : 0), numbers);
            for (int64_t i = 0; i < kGroupFeatures; ++i) turned[i][lane] = numbers[i] * inverse;
        }
        round_groups<kBits>(turned, count, row);
    }
}

template <int kBits, typename T>
inline void round_row(const void* x, int64_t k, uint8_t* row) {
    const int64_t groups = (k + kGroupFeatures - 1) / kGroupFeatures;
    const T* from = static_cast<const T*>(x);
    Vec most = broadcast(0.0f), faults = most;
    for (int64_t i = 0; i < k; i += Vec::kWidth) {
        const Vec some = load_some(from + i, k - i);
        most = max(most, max(some, broadcast(0.0f) - some));
        faults = multiply_add(some, broadcast(0.0f), faults);  // NaN where one is not finite
    }
    const float factor = row_factor(reduce_max(most)) + reduce_sum(faults);
    round_row_of<kBits>(groups, factor, row, [&](int64_t group, float* numbers) {
        const T* some = from + group * kGroupFeatures;
        const int64_t count = k - group * kGroupFeatures;
        if (count >= kGroupFeatures) {
            for (int64_t i = 0; i < kGroupFeatures; ++i) numbers[i] = to_float(some[i]);
            return;
        }
        for (int64_t i = 0; i < kGroupFeatures; ++i) {
            numbers[i] = to_float(some[i < count ? i : count - 1]);
        }
    });
}

// Q6_K: 16 groups of 16 numbers with scales of 8 bits; two bits of a number are apart.
inline void decode_q6_k(const uint8_t* block, int64_t group, float* numbers) {
    const uint8_t* low = block + group / 4 * 64 + group % 2 * 32;
    const uint8_t* high = block + 128 + group / 4 * 32;
    const auto* scales = reinterpret_cast<const int8_t*>(block + 192) + group * 2;
    const int half = group % 4 / 2 * 4, pair = static_cast<int>(group % 4) * 2;
    const float d = half_at(block + 208);
    uint8_t codes[kGroupFeatures];
    for (int64_t i = 0; i < kGroupFeatures; i += 8) {
        uint64_t first, last;
        __builtin_memcpy(&first, low + i, sizeof(first));
        __builtin_memcpy(&last, high + i, sizeof(last));
        const uint64_t both =
            (first >> half & 0x0f0f0f0f0f0f0f0f) | (last >> pair & 0x0303030303030303) << 4;
        __builtin_memcpy(codes + i, &both, sizeof(both));
    }
    for (int64_t part = 0; part < 2; ++part) {
        const float scale = d * static_cast<float>(scales[part]);
        for (int64_t i = part * 16; i < part * 16 + 16; ++i) {
            numbers[i] = static_cast<float>(codes[i] - 32) * scale;
        }
    }
}

template <int kBits>
inline void round_q6_k(const uint8_t* blocks, int64_t groups, uint8_t* row) {
    constexpr int64_t kBytes = 210, kGroups = 8;
    float largest = 0.0f, faults = 0.0f;
    for (int64_t i = 0; i < groups / kGroups; ++i) {
        const float d = __builtin_fabsf(half_at(blocks + i * kBytes + 208));
        largest = d > largest ? d : largest;
        faults += d * 0.0f;
    }
    // Codes and scales are -32 and -128 at most.
    const float factor = row_factor(largest * 4096.0f) + faults;
    round_row_of<kBits>(groups, factor, row, [&](int64_t group, float* numbers) {
        decode_q6_k(blocks + group / kGroups * kBytes, group % kGroups, numbers);
    });
}

// One group's of the 8 scales and 8 minima, 6 bits each, in 12 bytes of Q4_K.
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
            constexpr uint64_t kLow = 0x0f0f0f0f0f0f0f0f;
            for (int64_t j = 0; j < kGroupFeatures / 2; j += 8) {
                uint64_t first, last;
                __builtin_memcpy(&first, codes + j, sizeof(first));
                __builtin_memcpy(&last, codes + j + kGroupFeatures / 2, sizeof(last));
                const uint64_t both = (first >> shift & kLow) | (last >> shift & kLow) << 4;
                __builtin_memcpy(row + 4 + j, &both, sizeof(both));
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
    if (format == SavedFormat::q6_k) {
        return bits == 8 ? round_q6_k<8>(blocks, groups, row) : round_q6_k<4>(blocks, groups, row);
    }
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
