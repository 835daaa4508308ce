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

}  // namespace
