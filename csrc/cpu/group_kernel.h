// The kernel of products with weights of 8 and 4 bits in groups: rows to 8 bits, products in
// integers, sums of groups in f32.
//
// Formula: with a group's row about a q and its weights s c + m, a result is
//   act(factor * sum over groups of (s a sum(q c) + m a sum(q)) + bias)
// where 8 bits have no m and c = stored - 128, which is taken off in integers. Codes are stored
// without a sign, since VNNI multiplies unsigned by signed bytes. A row's groups are rounded each
// on its own, because rows of decoders have a few features hundreds of times as large as the
// others.
//
// A strip of 16 outputs keeps each group of 32 features in one block: steps of 4 features of every
// output behind one another (4 bits: two steps share a vector, the first in the low halves), then
// f16 s[16], and with 4 bits f16 m[16]. So one stream is read from memory, once for few rows, and
// for many rows a strip stays in L1.
//
// Without VNNI, bytes of 4 bits are multiplied in pairs into 16 bits: 16 products of 15 * 127 are
// 30480, so that a whole group needs no wider sum. 8 bits would saturate there; their bytes are
// widened to 16 bits and multiplied in pairs into 32.
//
// Tile: 4 rows x 16 outputs with AVX2 and NEON, 8 x 16 with AVX-512, 12 x 16 with VNNI. Bound by:
// memory for few rows, the multipliers for many: of 12 operations of a row's group with VNNI, 8 are
// products of codes, 3 add them up in f32 and 1 unpacks codes. A result depends on its row and
// output alone, bit for bit, and not on the instruction set.
#pragma once

#include "cpu/panels.h"
#include "cpu/simd_math.h"

namespace bytetx::cpu::BYTETX_SIMD {

#if defined(__AVX512F__)
#if defined(__AVX512VNNI__)
constexpr int kGroupRows = 12;
#else
constexpr int kGroupRows = 8;
#endif
struct Words {
    __m512i v;
};
inline Words load_codes(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
inline Words spread(const void* p) {
    int32_t word;
    __builtin_memcpy(&word, p, sizeof(word));
    return {_mm512_set1_epi32(word)};
}
inline Words no_words() { return {_mm512_setzero_si512()}; }
inline Words low_nibbles(Words w) { return {_mm512_and_si512(w.v, _mm512_set1_epi8(15))}; }
inline Words high_nibbles(Words w) { return low_nibbles({_mm512_srli_epi16(w.v, 4)}); }
inline Words even_bytes(Words w) { return {_mm512_and_si512(w.v, _mm512_set1_epi16(255))}; }
inline Words odd_bytes(Words w) { return {_mm512_srli_epi16(w.v, 8)}; }
inline Words add16(Words a, Words b) { return {_mm512_add_epi16(a.v, b.v)}; }
inline Words add32(Words a, Words b) { return {_mm512_add_epi32(a.v, b.v)}; }
inline Words pairs_of_bytes(Words w, Words x) { return {_mm512_maddubs_epi16(w.v, x.v)}; }
inline Words pairs_of_words(Words w, Words x) { return {_mm512_madd_epi16(w.v, x.v)}; }
inline Words ones16() { return {_mm512_set1_epi16(1)}; }
inline Vec floats_of(Words w) { return {_mm512_cvtepi32_ps(w.v)}; }
inline Vec load_half(const uint16_t* p) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p))};
}
inline Words rounded(Vec x) { return {_mm512_cvtps_epi32(x.v)}; }
inline int32_t sum_of(Words w) { return _mm512_reduce_add_epi32(w.v); }
inline void store_bytes(int8_t* p, Words w) {
    _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(w.v));
}
#elif defined(BYTETX_NEON)
constexpr int kGroupRows = 4;
struct Words {
    uint8x16_t low, high;
};
template <typename Half>
inline Words each_half(Half half, Words a) {
    return {half(a.low), half(a.high)};
}
template <typename Half>
inline Words each_half(Half half, Words a, Words b) {
    return {half(a.low, b.low), half(a.high, b.high)};
}
inline int16x8_t as16(uint8x16_t x) { return vreinterpretq_s16_u8(x); }
inline int32x4_t as32(uint8x16_t x) { return vreinterpretq_s32_u8(x); }
inline uint8x16_t bytes_of(int16x8_t x) { return vreinterpretq_u8_s16(x); }
inline uint8x16_t bytes_of(int32x4_t x) { return vreinterpretq_u8_s32(x); }

inline Words load_codes(const uint8_t* p) { return {vld1q_u8(p), vld1q_u8(p + 16)}; }
inline Words spread(const void* p) {
    int32_t word;
    __builtin_memcpy(&word, p, sizeof(word));
    return {bytes_of(vdupq_n_s32(word)), bytes_of(vdupq_n_s32(word))};
}
inline Words no_words() { return {vdupq_n_u8(0), vdupq_n_u8(0)}; }
inline Words low_nibbles(Words w) {
    return each_half([](auto x) { return vandq_u8(x, vdupq_n_u8(15)); }, w);
}
inline Words high_nibbles(Words w) {
    return each_half([](auto x) { return vshrq_n_u8(x, 4); }, w);
}
inline Words even_bytes(Words w) {
    return each_half([](auto x) { return bytes_of(vandq_s16(as16(x), vdupq_n_s16(255))); }, w);
}
inline Words odd_bytes(Words w) {
    const auto odd = [](auto x) {
        return vreinterpretq_u8_u16(vshrq_n_u16(vreinterpretq_u16_u8(x), 8));
    };
    return each_half(odd, w);
}
inline Words add16(Words a, Words b) {
    return each_half([](auto x, auto y) { return bytes_of(vaddq_s16(as16(x), as16(y))); }, a, b);
}
inline Words add32(Words a, Words b) {
    return each_half([](auto x, auto y) { return bytes_of(vaddq_s32(as32(x), as32(y))); }, a, b);
}
inline Words pairs_of_bytes(Words w, Words x) {  // w below 128
    const auto pairs = [](uint8x16_t a, uint8x16_t b) {
        const int8x16_t y = vreinterpretq_s8_u8(a), z = vreinterpretq_s8_u8(b);
        return bytes_of(vpaddq_s16(vmull_s8(vget_low_s8(y), vget_low_s8(z)), vmull_high_s8(y, z)));
    };
    return each_half(pairs, w, x);
}
inline Words pairs_of_words(Words w, Words x) {
    const auto pairs = [](uint8x16_t a, uint8x16_t b) {
        const int16x8_t y = as16(a), z = as16(b);
        return bytes_of(
            vpaddq_s32(vmull_s16(vget_low_s16(y), vget_low_s16(z)), vmull_high_s16(y, z)));
    };
    return each_half(pairs, w, x);
}
inline Words ones16() { return {bytes_of(vdupq_n_s16(1)), bytes_of(vdupq_n_s16(1))}; }
inline Vec floats_of(Words w) { return {vcvtq_f32_s32(as32(w.low)), vcvtq_f32_s32(as32(w.high))}; }
inline Vec load_half(const uint16_t* p) {
    const float16x8_t half = vreinterpretq_f16_u16(vld1q_u16(p));
    return {vcvt_f32_f16(vget_low_f16(half)), vcvt_high_f32_f16(half)};
}
inline Words rounded(Vec x) {
    return {bytes_of(vcvtnq_s32_f32(x.low)), bytes_of(vcvtnq_s32_f32(x.high))};
}
inline int32_t sum_of(Words w) { return vaddvq_s32(vaddq_s32(as32(w.low), as32(w.high))); }
inline void store_bytes(int8_t* p, Words w) {
    vst1_s8(p, vmovn_s16(vcombine_s16(vmovn_s32(as32(w.low)), vmovn_s32(as32(w.high)))));
}
#else
constexpr int kGroupRows = 4;
struct Words {
    __m256i v;
};
inline Words load_codes(const uint8_t* p) { return {_mm256_loadu_si256((const __m256i*)p)}; }
inline Words spread(const void* p) {
    int32_t word;
    __builtin_memcpy(&word, p, sizeof(word));
    return {_mm256_set1_epi32(word)};
}
inline Words no_words() { return {_mm256_setzero_si256()}; }
inline Words low_nibbles(Words w) { return {_mm256_and_si256(w.v, _mm256_set1_epi8(15))}; }
inline Words high_nibbles(Words w) { return low_nibbles({_mm256_srli_epi16(w.v, 4)}); }
inline Words even_bytes(Words w) { return {_mm256_and_si256(w.v, _mm256_set1_epi16(255))}; }
inline Words odd_bytes(Words w) { return {_mm256_srli_epi16(w.v, 8)}; }
inline Words add16(Words a, Words b) { return {_mm256_add_epi16(a.v, b.v)}; }
inline Words add32(Words a, Words b) { return {_mm256_add_epi32(a.v, b.v)}; }
inline Words pairs_of_bytes(Words w, Words x) { return {_mm256_maddubs_epi16(w.v, x.v)}; }
inline Words pairs_of_words(Words w, Words x) { return {_mm256_madd_epi16(w.v, x.v)}; }
inline Words ones16() { return {_mm256_set1_epi16(1)}; }
inline Vec floats_of(Words w) { return {_mm256_cvtepi32_ps(w.v)}; }
inline Vec load_half(const uint16_t* p) {
    return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p))};
}
inline Words rounded(Vec x) { return {_mm256_cvtps_epi32(x.v)}; }
inline int32_t sum_of(Words w) {
    __m128i quad = _mm_add_epi32(_mm256_castsi256_si128(w.v), _mm256_extracti128_si256(w.v, 1));
    quad = _mm_add_epi32(quad, _mm_shuffle_epi32(quad, 0b1110));
    return _mm_cvtsi128_si32(_mm_add_epi32(quad, _mm_shuffle_epi32(quad, 0b01)));
}
inline void store_bytes(int8_t* p, Words w) {
    const __m128i words =
        _mm_packs_epi32(_mm256_castsi256_si128(w.v), _mm256_extracti128_si256(w.v, 1));
    _mm_storel_epi64((__m128i*)p, _mm_packs_epi16(words, words));
}
#endif

constexpr int kStripVectors = static_cast<int>(kStripColumns) / Vec::kWidth;
constexpr int64_t kCodeBytes = sizeof(Words);
constexpr int64_t kStepBytes = 4 * kStripColumns;  // one step of 8 bits, or two of 4
constexpr int64_t kSteps = kGroupFeatures / 4;
// How far before its use the first rows' tile fetches the stream into L2: the processor's own
// prefetchers stop at each page of 4 KiB. One row out of cache, one core of a Xeon: 9.6 to 14 GB/s
// with 4 bits, 12.5 to 16 with 8; 2 KiB gains half of it, 16 KiB no more.
constexpr int64_t kAheadBytes = 8192;

// Where integer sums begin. With VNNI it is the bits of 1.5 * 2^23: an integer below 2^22 that is
// added to them makes them the float that is larger by it, which needs no conversion.
#if defined(__AVX512VNNI__)
constexpr int32_t kFirstSum = 0x4b400000;
constexpr float kFirstFloat = 12582912.0f;
#else
constexpr int32_t kFirstSum = 0;
constexpr float kFirstFloat = 0.0f;
#endif

// sum * scale, rounded once; first: -kFirstFloat * scale, which is exact.
inline Vec scaled(Words sum, Vec scale, Vec first) {
#if defined(__AVX512VNNI__)
    return multiply_add(Vec{_mm512_castsi512_ps(sum.v)}, scale, first);
#else
    static_cast<void>(first);
    return floats_of(sum) * scale;
#endif
}

// A staged row: of each group a, and what its formula needs of sum(q); then the codes q.
struct GroupRow {
    const float* scales;
    const float* sums;  // 4 bits: a sum(q); 8 bits: the integer kFirstSum - 128 sum(q)
    const int8_t* codes;

    GroupRow(const float* row, int64_t groups)
        : scales(row),
          sums(row + groups),
          codes(reinterpret_cast<const int8_t*>(row + 2 * groups)) {}
};

// A width's dot products: kRowBytes of a staged code; start() is where a row's sums of a group
// begin, sum() adds the group's products, finish() makes whole words of them.
struct Int4 {
    static constexpr int64_t kBlockBytes = kGroupBytes4;
    static constexpr int64_t kRowBytes = 1;
    static constexpr bool kHasLeast = true;

    static inline Words start(const float*) { return spread(&kFirstSum); }

    template <int kRows>
    static inline void sum(const uint8_t* block, const int8_t* const* codes, int64_t group,
                           Words (&sums)[kRows][kStripVectors]) {
#pragma GCC unroll 4
        for (int64_t pair = 0; pair < kSteps / 2; ++pair) {
            Words low[kStripVectors], high[kStripVectors];
#pragma GCC unroll 2
            for (int v = 0; v < kStripVectors; ++v) {
                const Words both = load_codes(block + pair * kStepBytes + v * kCodeBytes);
                low[v] = low_nibbles(both);
                high[v] = high_nibbles(both);
            }
#pragma GCC unroll 12
            for (int r = 0; r < kRows; ++r) {
                const int8_t* q = codes[r] + group * kGroupFeatures + pair * 8;
                const Words first = spread(q), second = spread(q + 4);
#pragma GCC unroll 2
                for (int v = 0; v < kStripVectors; ++v) {
                    add(sums[r][v], low[v], first);
                    add(sums[r][v], high[v], second);
                }
            }
        }
    }

    static inline void add(Words& sum, Words w, Words x) {
#if defined(__AVX512VNNI__)
        sum.v = _mm512_dpbusd_epi32(sum.v, w.v, x.v);
#else
        sum = add16(sum, pairs_of_bytes(w, x));
#endif
    }

    static inline Words finish(Words sum) {
#if defined(__AVX512VNNI__)
        return sum;
#else
        return pairs_of_words(sum, ones16());
#endif
    }
};

struct Int8 {
    static constexpr int64_t kBlockBytes = kGroupBytes8;
#if defined(__AVX512VNNI__)
    static constexpr int64_t kRowBytes = 1;
#else
    static constexpr int64_t kRowBytes = 2;  // int16 features 0, 2, 1, 3 of each step
#endif
    static constexpr bool kHasLeast = false;

    static inline Words start(const float* staged) { return spread(staged); }

    template <int kRows>
    static inline void sum(const uint8_t* block, const int8_t* const* codes, int64_t group,
                           Words (&sums)[kRows][kStripVectors]) {
#pragma GCC unroll 12
        for (int64_t step = 0; step < kSteps; ++step) {
            Words w[kStripVectors];
#pragma GCC unroll 2
            for (int v = 0; v < kStripVectors; ++v) {
                w[v] = load_codes(block + step * kStepBytes + v * kCodeBytes);
            }
            const int64_t at = (group * kSteps + step) * 4 * kRowBytes;
#if defined(__AVX512VNNI__)
#pragma GCC unroll 12
            for (int r = 0; r < kRows; ++r) {
                const Words x = spread(codes[r] + at);
                sums[r][0].v = _mm512_dpbusd_epi32(sums[r][0].v, w[0].v, x.v);
            }
#else
            add_half<kRows>(sums, w, codes, at, even_bytes);
            add_half<kRows>(sums, w, codes, at + 4, odd_bytes);
#endif
        }
    }

    template <int kRows, typename Half>
    static inline void add_half(Words (&sums)[kRows][kStripVectors],
                                const Words (&both)[kStripVectors], const int8_t* const* codes,
                                int64_t at, Half half) {
        Words w[kStripVectors];
#pragma GCC unroll 2
        for (int v = 0; v < kStripVectors; ++v) w[v] = half(both[v]);
#pragma GCC unroll 12
        for (int r = 0; r < kRows; ++r) {
            const Words x = spread(codes[r] + at);
#pragma GCC unroll 2
            for (int v = 0; v < kStripVectors; ++v) {
                sums[r][v] = add32(sums[r][v], pairs_of_words(w[v], x));
            }
        }
    }

    static inline Words finish(Words sum) { return sum; }
};

template <class Codes, typename T, int kRows>
[[gnu::noinline]] inline void multiply_group_tile(const PanelProduct& p, const uint8_t* blocks,
                                                  int64_t row, int64_t column) {
    const bool reads_memory = row == 0;  // later rows find the strip in a cache
    const int64_t groups = p.w.features / kGroupFeatures, row_words = group_row_words(p.w.k);
    const float* scales[kRows];
    const float* row_sums[kRows];
    const int8_t* codes[kRows];
    Vec totals[kRows][kStripVectors];
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r) {
        const GroupRow staged(p.rows + (row + r) * row_words, groups);
        scales[r] = staged.scales;
        row_sums[r] = staged.sums;
        codes[r] = staged.codes;
#pragma GCC unroll 2
        for (int v = 0; v < kStripVectors; ++v) totals[r][v] = broadcast(0.0f);
    }
#pragma GCC unroll 1
    for (int64_t group = 0; group < groups; ++group, blocks += Codes::kBlockBytes) {
        if (reads_memory) {
#pragma GCC unroll 9
            for (int64_t i = 0; i < Codes::kBlockBytes; i += 64) {
                __builtin_prefetch(blocks + kAheadBytes + i, 0, 2);
            }
        }
        Words sums[kRows][kStripVectors];
#pragma GCC unroll 12
        for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
            for (int v = 0; v < kStripVectors; ++v) {
                sums[r][v] = Codes::start(row_sums[r] + group);
            }
        }
        Codes::template sum<kRows>(blocks, codes, group, sums);
        const auto* numbers = reinterpret_cast<const uint16_t*>(
            blocks + Codes::kBlockBytes - (Codes::kHasLeast ? 2 : 1) * 2 * kStripColumns);
#pragma GCC unroll 2
        for (int v = 0; v < kStripVectors; ++v) {
            const Vec scale = load_half(numbers + v * Vec::kWidth);
            const Vec first = broadcast(-kFirstFloat) * scale;
            Vec least{};
            if constexpr (Codes::kHasLeast) {
                least = load_half(numbers + kStripColumns + v * Vec::kWidth);
            }
#pragma GCC unroll 12
            for (int r = 0; r < kRows; ++r) {
                const Vec product = scaled(Codes::finish(sums[r][v]), scale, first);
                totals[r][v] = multiply_add(product, broadcast(scales[r][group]), totals[r][v]);
                if constexpr (Codes::kHasLeast) {
                    totals[r][v] = multiply_add(least, broadcast(row_sums[r][group]), totals[r][v]);
                }
            }
        }
    }
    const auto* biases = static_cast<const T*>(p.w.bias);
#pragma GCC unroll 2
    for (int v = 0; v < kStripVectors; ++v) {
        const int64_t begin = column + v * Vec::kWidth, room = p.w.n - begin;
        if (room <= 0) return;
        const Vec factor = load_some(p.w.factor + begin, room);
        const Vec bias = biases != nullptr ? load_some(biases + begin, room) : broadcast(0.0f);
#pragma GCC unroll 12
        for (int r = 0; r < kRows; ++r) {
            const Vec y = multiply_add(totals[r][v], factor, bias);
            store_some(static_cast<T*>(p.d) + (row + r) * p.w.n + begin, room,
                       activate(y, p.activation, [](Vec x) { return exact_gelu(x); }));
        }
    }
}

template <class Codes, typename T, int kRows>
inline void multiply_group_rows(const PanelProduct& p, const uint8_t* blocks, int64_t row,
                                int64_t column, int64_t num_rows) {
    if (num_rows == kRows) return multiply_group_tile<Codes, T, kRows>(p, blocks, row, column);
    if constexpr (kRows > 1) {
        multiply_group_rows<Codes, T, kRows - 1>(p, blocks, row, column, num_rows);
    }
}

// Tiles of nearly equal heights.
template <class Codes, typename T>
inline void multiply_groups(const PanelProduct& p, int64_t first, int64_t last) {
    const int64_t strip_bytes = p.w.features / kGroupFeatures * Codes::kBlockBytes;
    const int64_t num_tiles = (p.m + kGroupRows - 1) / kGroupRows;
    for (int64_t strip = first; strip < last; ++strip) {
        const auto* blocks = static_cast<const uint8_t*>(p.w.weight) + strip * strip_bytes;
        for (int64_t tile = 0; tile < num_tiles; ++tile) {
            const int64_t row = p.m * tile / num_tiles, end = p.m * (tile + 1) / num_tiles;
            multiply_group_rows<Codes, T, kGroupRows>(p, blocks, row, strip * kStripColumns,
                                                      end - row);
        }
    }
}

// A group of a row to 8 bits: x [count] is about scale * q. Returns sum(q).
template <typename T>
inline int32_t round_group(const T* x, int64_t count, float& scale, int8_t* q) {
    constexpr int kVectors = static_cast<int>(kGroupFeatures) / Vec::kWidth;
    const Vec none = broadcast(0.0f);
    Vec values[kVectors], most = none, faults = none;
    for (int i = 0; i < kVectors; ++i) {
        const int64_t room = count - i * Vec::kWidth;
        values[i] = room > 0 ? load_some(x + i * Vec::kWidth, room) : none;
        most = max(most, max(values[i], none - values[i]));
        faults = multiply_add(values[i], none, faults);  // NaN where a value is not finite
    }
    const float largest = reduce_max(most);
    // A size that f32 cannot divide by is rounded to zeros, far below what any result can show.
    const bool is_some = largest > 1e-30f;
    scale = (is_some ? largest / 127.0f : 0.0f) + reduce_sum(faults);
    const Vec steps = broadcast(is_some ? 127.0f / largest : 0.0f);
    Words sum = no_words();
    for (int i = 0; i < kVectors; ++i) {
        const Words code = rounded(values[i] * steps);
        sum = add32(sum, code);
        store_bytes(q + i * Vec::kWidth, code);
    }
    return sum_of(sum);
}

template <class Codes, typename T>
inline void stage_groups(const void* x, int64_t m, int64_t k, float* rows) {
    const int64_t groups = (k + kGroupFeatures - 1) / kGroupFeatures, words = group_row_words(k);
    for (int64_t r = 0; r < m; ++r) {
        const T* from = static_cast<const T*>(x) + r * k;
        float* row = rows + r * words;
        auto* codes = reinterpret_cast<int8_t*>(row + 2 * groups);
        for (int64_t group = 0; group < groups; ++group) {
            const int64_t begin = group * kGroupFeatures;
            int8_t q[kGroupFeatures];
            const int32_t sum = round_group(from + begin, k - begin, row[group], q);
            if constexpr (Codes::kHasLeast) {
                row[groups + group] = row[group] * static_cast<float>(sum);
            } else {
                const int32_t start = kFirstSum - 128 * sum;
                __builtin_memcpy(row + groups + group, &start, sizeof(start));
            }
            if constexpr (Codes::kRowBytes == 1) {
                __builtin_memcpy(codes + begin, q, sizeof(q));
            } else {
                auto* wide = reinterpret_cast<int16_t*>(codes) + begin;
                for (int64_t i = 0; i < kGroupFeatures; i += 4) {
                    wide[i] = q[i];
                    wide[i + 1] = q[i + 2];
                    wide[i + 2] = q[i + 1];
                    wide[i + 3] = q[i + 3];
                }
            }
        }
    }
}

}  // namespace bytetx::cpu::BYTETX_SIMD
