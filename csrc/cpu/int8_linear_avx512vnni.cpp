// The 8-bit linear layer's kernel: rows to 8 bits, products by VNNI, epilogue in f32.
//
// Formula: with x about s (q - z) and the weight t w, a result is
//   act(s (t sum(q (w + 128)) - 128 t sum(q) - z t sum(w)) + bias)
// since the instruction multiplies unsigned by signed bytes: the weight is stored with 128 added,
// and 128 sum(q) is taken off in 32-bit integers, exactly.
//
// Tile: 12 rows x 32 outputs, 24 sums in registers; a step of 4 features loads two vectors of the
// weight and one word of each row, which it broadcasts. Bound by: the two multipliers of VNNI, 128
// products a cycle of a core; the epilogue costs about 10 % at k = 384.
// Rows are rounded each on its own, to the 256 numbers between its least and largest value:
// asymmetric, because rows behind a GELU have few negative values. Real texts through
// all-MiniLM-L6-v2 keep a mean cosine of 0.9990 to fp32 vectors, symmetric rounding 0.9978.
#include <initializer_list>

#include "cpu/int8_linear.h"
#include "cpu/simd.h"

namespace bytetx::cpu::avx512_vnni {
namespace {

constexpr int kTileRows = 12;
constexpr int kWidth = Vec::kWidth;
constexpr float kLog2E = 1.44269504088896f;

inline Vec load_some(const float* p, int64_t n) {
    return n >= kWidth ? load(p) : load_first(p, static_cast<int>(n));
}
inline Vec load_some(const Bf16* p, int64_t n) {
    return n >= kWidth ? load(p) : load_first(p, static_cast<int>(n));
}

template <typename T>
QuantizedRow quantize_row(const T* x, int64_t k, int8_t* q) {
    __m512 low = _mm512_setzero_ps(), high = _mm512_setzero_ps(), faults = _mm512_setzero_ps();
    for (int64_t i = 0; i < k; i += kWidth) {
        const __m512 v = load_some(x + i, k - i).v;
        low = _mm512_min_ps(low, v);
        high = _mm512_max_ps(high, v);
        faults = _mm512_fmadd_ps(v, _mm512_setzero_ps(), faults);  // NaN where v is not finite
    }
    const float fault = _mm512_reduce_add_ps(faults);
    const float least = _mm512_reduce_min_ps(low), most = _mm512_reduce_max_ps(high);
    // A range that f32 cannot divide is rounded to zeros, far below what any result can show.
    const float range = most - least > 1e-30f ? most - least : 255.0f;
    const float scale = range / 255.0f, steps = 255.0f / range;
    const __m512i zero = _mm512_cvtps_epi32(_mm512_set1_ps(-128.0f - least * steps));
    const int32_t zero_point = _mm512_cvtsi512_si32(zero);
    __m512i sums = _mm512_setzero_si512();
    const __m512i first = _mm512_set1_epi32(-128), last = _mm512_set1_epi32(127);
    const int64_t padded = padded_features(k);
    for (int64_t i = 0; i < padded; i += kWidth) {
        const __m512 v = load_some(x + i, k - i).v;
        __m512i number = _mm512_cvtps_epi32(_mm512_mul_ps(v, _mm512_set1_ps(steps)));
        number = _mm512_add_epi32(number, zero);
        number = _mm512_min_epi32(_mm512_max_epi32(number, first), last);
        const int64_t lanes = k - i < kWidth ? k - i : kWidth;
        const auto is_real = static_cast<__mmask16>((1u << lanes) - 1);
        number = _mm512_maskz_mov_epi32(is_real, number);  // features beyond k count nothing
        sums = _mm512_add_epi32(sums, number);
        const int64_t room = padded - i < kWidth ? padded - i : kWidth;
        const auto is_stored = static_cast<__mmask16>((1u << room) - 1);
        _mm512_mask_cvtepi32_storeu_epi8(q + i, is_stored, number);
    }
    return {scale + fault, static_cast<float>(zero_point), 128 * _mm512_reduce_add_epi32(sums)};
}

// 2^x, 3 ulp; x is clamped to what f32 holds, and stays NaN.
inline __m512 exp2(__m512 x) {
    x = _mm512_max_ps(_mm512_set1_ps(-150.0f), x);
    x = _mm512_min_ps(_mm512_set1_ps(128.0f), x);
    const __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m512 f = _mm512_sub_ps(x, whole);
    __m512 y = _mm512_set1_ps(1.5353362e-4f);
    for (const float c :
         {1.3398874e-3f, 9.6184374e-3f, 5.5503325e-2f, 2.4022648e-1f, 6.9314720e-1f, 1.0f}) {
        y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(c));
    }
    return _mm512_scalef_ps(y, whole);
}

inline __m512 exp(__m512 x) { return exp2(_mm512_mul_ps(x, _mm512_set1_ps(kLog2E))); }

// x / (1 + e^-y)
inline __m512 gate(__m512 x, __m512 y) {
    const __m512 one = _mm512_set1_ps(1.0f);
    return _mm512_div_ps(x, _mm512_add_ps(one, exp(_mm512_sub_ps(_mm512_setzero_ps(), y))));
}

// x (1 + erf(x / sqrt 2)) / 2, 4e-5 off at most, a hundredth of what the 8 bits of its operands
// cost: the second factor is 1/2 + x P(x^2), x clamped to 4.5. Without the division and the
// exponential of an exact erf it takes a quarter of their time. P: least error of the product,
// fitted by weighted least squares in float64.
inline __m512 gelu(__m512 x) {
    const __m512 limit = _mm512_set1_ps(4.5f);
    const __m512 near = _mm512_max_ps(_mm512_sub_ps(_mm512_setzero_ps(), limit),
                                      _mm512_min_ps(limit, x));  // NaN where x is
    const __m512 square = _mm512_mul_ps(near, near);
    __m512 y = _mm512_set1_ps(-1.39975238e-12f);
    for (const float c :
         {1.69698880e-10f, -9.19241305e-09f, 2.95858570e-07f, -6.36481445e-06f, 9.78675234e-05f,
          -1.12265837e-03f, 9.83312540e-03f, -6.63369671e-02f, 3.98883760e-01f}) {
        y = _mm512_fmadd_ps(y, square, _mm512_set1_ps(c));
    }
    return _mm512_mul_ps(x, _mm512_fmadd_ps(near, y, _mm512_set1_ps(0.5f)));
}

inline __m512 activate(__m512 x, Activation activation) {
    switch (activation) {
        case Activation::gelu:
            return gelu(x);
        case Activation::gelu_tanh: {
            const __m512 cube = _mm512_mul_ps(_mm512_mul_ps(x, x), x);
            const __m512 inner = _mm512_fmadd_ps(cube, _mm512_set1_ps(0.044715f), x);
            return gate(x, _mm512_mul_ps(inner, _mm512_set1_ps(1.59576912f)));
        }
        case Activation::relu:  // the second operand where either is NaN
            return _mm512_max_ps(_mm512_setzero_ps(), x);
        case Activation::silu:
            return gate(x, x);
        case Activation::tanh: {
            const __m512 two = _mm512_set1_ps(2.0f);
            return _mm512_sub_ps(gate(two, _mm512_mul_ps(x, two)), _mm512_set1_ps(1.0f));
        }
        default:
            return x;
    }
}

inline void store_some(float* p, int64_t n, Vec v) {
    n >= kWidth ? store(p, v) : store_first(p, static_cast<int>(n), v);
}
inline void store_some(Bf16* p, int64_t n, Vec v) {
    n >= kWidth ? store(p, v) : store_first(p, static_cast<int>(n), v);
}

// sums[r] = 32 outputs of row r, of rows q and one panel of the weight. The sums stay in registers:
// GCC keeps an array there only where every index of it is a constant.
template <int kRows>
inline void multiply_panel(const int8_t* q, const uint8_t* weight, int64_t padded,
                           int32_t (*sums)[kInt8Columns]) {
    __m512i left[kRows], right[kRows];
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r) left[r] = right[r] = _mm512_setzero_si512();
    for (int64_t i = 0; i < padded; i += kInt8Group) {
        const __m512i low = _mm512_loadu_si512(weight + i * kInt8Columns);
        const __m512i high = _mm512_loadu_si512(weight + i * kInt8Columns + 64);
#pragma GCC unroll 12
        for (int r = 0; r < kRows; ++r) {
            int32_t word;
            __builtin_memcpy(&word, q + r * padded + i, sizeof(word));
            const __m512i features = _mm512_set1_epi32(word);
            left[r] = _mm512_dpbusd_epi32(left[r], low, features);
            right[r] = _mm512_dpbusd_epi32(right[r], high, features);
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r) {
        _mm512_store_si512(sums[r], left[r]);
        _mm512_store_si512(sums[r] + kWidth, right[r]);
    }
}

// kRows rows of one panel. q: the first row's bytes.
template <typename T, int kRows>
void multiply_tile(const Int8LinearParams& p, const int8_t* q, const QuantizedRow* rows,
                   int64_t row, int64_t panel) {
    const int64_t padded = padded_features(p.k), column = panel * kInt8Columns;
    alignas(64) int32_t sums[kRows][kInt8Columns];
    multiply_panel<kRows>(q, p.weight + column * padded, padded, sums);
    for (int64_t half = 0; half < kInt8Columns; half += kWidth) {
        const int64_t begin = column + half;
        if (begin >= p.n) return;
        const __m512 scale = _mm512_loadu_ps(p.weight_scale + begin);
        const __m512 weight_sum = _mm512_loadu_ps(p.weight_sum + begin);
        const __m512 bias = _mm512_loadu_ps(p.bias + begin);
        for (int r = 0; r < kRows; ++r) {
            const __m512i all = _mm512_load_si512(sums[r] + half);
            const __m512i sum = _mm512_sub_epi32(all, _mm512_set1_epi32(rows[r].shift));
            const __m512 offset = _mm512_mul_ps(weight_sum, _mm512_set1_ps(rows[r].zero));
            const __m512 product = _mm512_fmsub_ps(_mm512_cvtepi32_ps(sum), scale, offset);
            const __m512 y = _mm512_fmadd_ps(product, _mm512_set1_ps(rows[r].scale), bias);
            T* d = static_cast<T*>(p.d) + (row + r) * p.n + begin;
            store_some(d, p.n - begin, Vec{activate(y, p.activation)});
        }
    }
}

template <typename T, int kRows>
void multiply_rest(const Int8LinearParams& p, const int8_t* q, const QuantizedRow* rows,
                   int64_t row, int64_t panel, int num_rows) {
    if constexpr (kRows > 0) {
        if (num_rows == kRows) return multiply_tile<T, kRows>(p, q, rows, row, panel);
        multiply_rest<T, kRows - 1>(p, q, rows, row, panel, num_rows);
    }
}

template <typename T>
void multiply_block(const Int8LinearParams& p, int64_t begin, int64_t end, int64_t first,
                    int64_t last, int8_t* q, QuantizedRow* rows) {
    const int64_t padded = padded_features(p.k), num_rows = end - begin;
    const T* x = static_cast<const T*>(p.x) + begin * p.k;
    for (int64_t r = 0; r < num_rows; ++r) rows[r] = quantize_row(x + r * p.k, p.k, q + r * padded);
    for (int64_t panel = first; panel < last; ++panel) {
        int64_t r = 0;
        for (; r + kTileRows <= num_rows; r += kTileRows) {
            multiply_tile<T, kTileRows>(p, q + r * padded, rows + r, begin + r, panel);
        }
        const int rest = static_cast<int>(num_rows - r);
        multiply_rest<T, kTileRows - 1>(p, q + r * padded, rows + r, begin + r, panel, rest);
    }
}

}  // namespace

void int8_block(const Int8LinearParams& p, int64_t begin, int64_t end, int64_t first, int64_t last,
                int8_t* q, QuantizedRow* rows) {
    if (p.dtype == DType::f32) return multiply_block<float>(p, begin, end, first, last, q, rows);
    multiply_block<Bf16>(p, begin, end, first, last, q, rows);
}

}  // namespace bytetx::cpu::avx512_vnni
