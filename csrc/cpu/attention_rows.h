// Where the rows of k and v lie: packed, or in pages.
#pragma once

#include <cstdint>

#include "cpu/attention.h"

namespace {

using bytetx::cpu::AttentionInput;

// Rows of one head of k or v, by key: packed rows, or pages that stand in any order.
template <typename T>
struct KeyRows {
    const T* base;
    int64_t stride;
    const int32_t* pages;  // null: packed rows
    int page_shift;

    const T* operator()(int key) const {
        if (pages == nullptr) return base + key * stride;
        const int64_t slot = int64_t{pages[key >> page_shift]} << page_shift;
        return base + (slot + (key & ((1 << page_shift) - 1))) * stride;
    }
};

template <typename T>
KeyRows<T> key_rows(const AttentionInput& in, const void* rows, int64_t stride, int64_t sequence,
                    int kv_head) {
    const int32_t* pages = in.page_table;
    if (pages != nullptr) {
        pages += in.cu_pages == nullptr ? sequence * in.max_pages : in.cu_pages[sequence];
    }
    const int64_t first_row = pages == nullptr ? in.cu_seqlens[sequence] : 0;
    return {static_cast<const T*>(rows) + first_row * stride + kv_head * in.head_dim, stride, pages,
            in.page_shift};
}

// E4M3 codes of one head of k or v in pages, and a scale of each vector (ops/kv_codes.py), by key.
struct CodeRows {
    KeyRows<uint8_t> codes;
    const uint8_t* scales;  // the head's in page 0
    int64_t page_scales;    // from page to page

    // Factor of vectors of Isa::load_words(), whose numbers are 2^8 times too small.
    float factor(int key) const {
        const int64_t page = codes.pages[key >> codes.page_shift];
        const uint8_t scale = scales[page * page_scales + (key & ((1 << codes.page_shift) - 1))];
        const uint32_t bits = scale == 255 ? 0x7fc00000u : (scale + 8u) << 23;
        return __builtin_bit_cast(float, bits);
    }
};

inline CodeRows code_rows(const AttentionInput& in, const void* codes, const uint8_t* scales,
                          int64_t stride, int64_t sequence, int kv_head) {
    return {key_rows<uint8_t>(in, codes, stride, sequence, kv_head),
            scales + (int64_t{kv_head} << in.page_shift),
            int64_t{in.num_kv_heads} << in.page_shift};
}

template <bool kIsFirst, typename A, typename B>
struct Chosen {
    using Type = A;
};
template <typename A, typename B>
struct Chosen<false, A, B> {
    using Type = B;
};

// The type that codes are restored to, exactly: f32, or bf16 where products take pairs of it.
template <class Isa, typename T>
using Restored = typename Chosen<Isa::kPair == 1, float, T>::Type;

// Rows of keys, one behind the other.
template <class Isa, typename R>
void restore_rows(const CodeRows& rows, int first_key, int num_keys, int head_dim, R* out,
                  int64_t stride) {
    using Wide = typename Isa::Wide;
    for (int key = first_key; key < first_key + num_keys; ++key, out += stride) {
        const uint8_t* codes = rows.codes(key);
        const typename Wide::Vec factor = Wide::set1(rows.factor(key));
        for (int i = 0; i < head_dim; i += Wide::kWidth) {
            const typename Wide::Vec small = Wide::load_words(codes + i, head_dim - i);
            Isa::store_row(out + i, Wide::mul(small, factor), head_dim - i);
        }
    }
}

}  // namespace
