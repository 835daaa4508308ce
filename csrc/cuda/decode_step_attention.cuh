// Attention of the decode-step kernel: one token's query heads of a KV head against its keys.
//
// A CTA has keys [first_key, end_key) of KV head kv_head, and the new key where has_new is true. A
// key or value is read by the lanes of a group, eight features each; a warp has several keys at
// once. Scores are powers of two.
#pragma once

#include "cuda/decode_step_products.cuh"

namespace bytetx::decode {

template <typename C>
struct Attention : Multiplier<C> {
    using Base = Multiplier<C>;
    using Base::cta, Base::lane, Base::p, Base::s, Base::warp;
    using Layer = typename Workspace<C>::Layer;
    static constexpr int kDim = C::kHeadDim, kGroup = C::kGroup;
    static constexpr int kLanes = kDim / 8;    // lanes that read a key
    static constexpr int kKeys = 32 / kLanes;  // keys that a warp has at once
    // Times kKeys, loaded ahead: as many as have registers beside the sums of all heads.
    static constexpr int kItems = kDim == 128 && kGroup <= 2 ? 4 : kGroup <= 5 ? 2 : 1;
    static constexpr int kBlockKeys = kItems * kKeys * kWarps;  // that a CTA has at once
    static constexpr int kWords = kDim / 64;    // a lane's of a whole head, two bf16
    static constexpr int kQWarps = kWarps - 2;  // that prepare query heads

    int page_shift;
    int kv_head, split, num_splits, first_key, end_key, past;
    bool has_new;

    using Base::Base;

    __device__ bool attends() const { return split < num_splits; }

    __device__ int slot_of(int key) const {
        return key - first_key < kTableKeys ? s.cache_slots[key - first_key] : page_slot(key);
    }

    __device__ int page_slot(int key) const {
        const int page = p.page_table[key >> page_shift];
        return (page << page_shift) + (key & ((1 << page_shift) - 1));
    }

    // Byte offset of the part of a key or value that this lane reads.
    __device__ int64_t kv_offset(int cache_slot) const {
        return ((int64_t{cache_slot} * C::kKvHeads + kv_head) * kDim + lane % kLanes * 8) * 2;
    }

    // Once a layer: kept over the products, these numbers would not fit in registers.
    __device__ __forceinline__ void find_keys() {
        page_shift = __ffs(p.page_size) - 1;
        kv_head = cta / kSplits;
        split = kv_head < C::kKvHeads ? cta % kSplits : kSplits;  // the last CTAs have no keys
        past = s.past;
        num_splits = past <= p.one_cta_keys ? 1 : kSplits;
        const int part = num_splits == 1 ? past : (past + kSplits - 1) / kSplits;
        first_key = min(split * part, past);
        end_key = min(first_key + part, past);
        has_new = split == num_splits - 1;
    }

    __device__ __forceinline__ void begin_attention() {
        if (threadIdx.x == 0) s.past = p.kv_seqlens[0] - 1;
        sync_threads<kThreads>();
        find_keys();
        const int thread = static_cast<int>(threadIdx.x);
        if (thread < kDim / 2) {
            const int64_t row = int64_t{p.position_ids[0]} * (kDim / 2);
            s.cos[thread] = p.cos[row + thread];
            s.sin[thread] = p.sin[row + thread];
        }
        const int num_keys = attends() ? min(end_key - first_key, kTableKeys) : 0;
        for (int i = thread; i < num_keys; i += kThreads) {
            s.cache_slots[i] = page_slot(first_key + i);
        }
        sync_threads<kThreads>();
    }

    struct Keys {
        uint4 k[kItems], v[kItems];
    };

    // A warp's keys of an item are first_of() and the next.
    __device__ int first_of(int base, int item) const {
        return base + kKeys * (warp + kWarps * item);
    }

    __device__ __forceinline__ void load(Keys& keys, int layer, int base) const {
#pragma unroll
        for (int i = 0; i < kItems; ++i) {
            if (first_of(base, i) >= end_key) break;
            const int key = min(first_of(base, i) + lane / kLanes, end_key - 1);
            const int64_t offset = kv_offset(slot_of(key));
            keys.k[i] = load_kv(static_cast<const uint8_t*>(s.layers[layer].k_cache) + offset);
            keys.v[i] = load_kv(static_cast<const uint8_t*>(s.layers[layer].v_cache) + offset);
        }
    }

    // A CTA's keys and values of the next layer into the L2, by four warps that have less to do.
    __device__ __forceinline__ void prefetch(int layer) const {
        const auto* keys = static_cast<const uint8_t*>(s.layers[layer].k_cache);
        const auto* values = static_cast<const uint8_t*>(s.layers[layer].v_cache);
#pragma unroll 1
        for (int key = first_key + kKeys * (warp - 4) + lane / kLanes; key < end_key;
             key += 4 * kKeys) {
            const int64_t offset = kv_offset(slot_of(key));
            prefetch_kv(keys + offset);
            prefetch_kv(values + offset);
        }
    }

    // Warps 2 and 3 prepare the key and the value, the others query heads.
    __device__ bool has_queries() const { return warp < 2 || warp > 3; }
    __device__ int first_query() const { return warp < 2 ? warp : warp - 2; }

    // Heads to shared memory, the new key and value also to their slot. norm: of q or of k.
    __device__ __forceinline__ void prepare_heads(int layer, const Layer& packets, uint32_t tag,
                                                  const uint32_t (&norm)[kWords]) {
        const int end = has_queries() ? kGroup : 1;
#pragma unroll 1
        for (int i = has_queries() ? first_query() : 0; i < end; i += kQWarps) {
            prepare_head(layer, packets, tag, norm, i);
        }
    }

    __device__ __forceinline__ void prepare_head(int layer, const Layer& packets, uint32_t tag,
                                                 const uint32_t (&norm)[kWords], int query) {
        constexpr int kOwn = 2 * kWords;  // features of a lane
        const bool is_q = has_queries(), is_v = warp == 3;
        const bool has_norm = !is_v && s.layers[layer].q_norm != nullptr;
        const int head =
            is_q ? kGroup * kv_head + query : C::kHeads + (warp - 2) * C::kKvHeads + kv_head;
        float x[kOwn];
        receive<kWords>(x, packets.qkv + head * kDim + kOwn * lane, tag);
        if (has_norm) {
            float squares = 0.0f;
#pragma unroll
            for (int i = 0; i < kOwn; ++i) squares += x[i] * x[i];
            const float scale = rsqrtf(row_sum<32>(squares) * (1.0f / kDim) + p.eps);
#pragma unroll
            for (int i = 0; i < kWords; ++i) {
                const float2 weight = unpack_bf16(norm[i]);
                x[2 * i] *= scale * weight.x;
                x[2 * i + 1] *= scale * weight.y;
            }
        }
        if (!is_v) {
            const float* c = s.cos + kOwn * lane % (kDim / 2);
            const float* t = s.sin + kOwn * lane % (kDim / 2);
#pragma unroll
            for (int i = 0; i < kOwn; ++i) {
                const float other = __shfl_xor_sync(kFullMask, x[i], 16);
                x[i] = x[i] * c[i] + (lane < 16 ? -other : other) * t[i];
            }
        }
        if (is_q) {
            const float scale = p.softmax_scale * kLog2e;
#pragma unroll
            for (int i = 0; i < kWords; ++i) {
                *reinterpret_cast<float2*>(&s.q[query][kOwn * lane + 2 * i]) =
                    make_float2(x[2 * i] * scale, x[2 * i + 1] * scale);
            }
            return;
        }
        const int new_slot = p.slot_mapping[0];
        const bool is_kept = has_new && new_slot >= 0;
        auto* own = reinterpret_cast<uint32_t*>(is_v ? s.v : s.k) + kWords * lane;
        auto* cache =
            static_cast<uint32_t*>(is_v ? s.layers[layer].v_cache : s.layers[layer].k_cache) +
            (int64_t{is_kept ? new_slot : 0} * C::kKvHeads + kv_head) * (kDim / 2) + kWords * lane;
#pragma unroll
        for (int i = 0; i < kWords; ++i) {
            const uint32_t rounded = pack_pair<__nv_bfloat16>(x[2 * i], x[2 * i + 1]);
            own[i] = rounded;
            if (is_kept) cache[i] = rounded;
        }
    }

    // All query heads over this warp's keys so far; a lane has the keys of its group, and features
    // 8 * (lane % kLanes) and on.
    struct Rows {
        SoftmaxState state[kGroup];
        float acc[kGroup][8];
    };

    static __device__ __forceinline__ void unpack(float (&to)[8], const uint4& from) {
        const uint32_t words[4] = {from.x, from.y, from.z, from.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float2 both = unpack_bf16(words[i]);
            to[2 * i] = both.x;
            to[2 * i + 1] = both.y;
        }
    }

    // keys: those from `base` on; the new key and value come from shared memory.
    __device__ __forceinline__ void attend(Rows& rows, Keys& keys, int base) {
        const int end = end_key + has_new;
#pragma unroll
        for (int i = 0; i < kItems; ++i) {
            if (has_new && first_of(base, i) + lane / kLanes == past) {
                keys.k[i] = reinterpret_cast<const uint4*>(s.k)[lane % kLanes];
                keys.v[i] = reinterpret_cast<const uint4*>(s.v)[lane % kLanes];
            }
        }
#pragma unroll
        for (int head = 0; head < kGroup; head += 2) {
            if (head + 1 < kGroup) {
                attend_heads<2>(rows, keys, base, end, head);
            } else {
                attend_heads<1>(rows, keys, base, end, head);
            }
        }
    }

    // Heads from `head` on: as many as have room for their queries in registers.
    template <int kCount>
    __device__ __forceinline__ void attend_heads(Rows& rows, const Keys& keys, int base, int end,
                                                 int head) {
        float score[kCount][kItems], max[kCount];
        {
            float q[kCount][8];
#pragma unroll
            for (int h = 0; h < kCount; ++h) {
                max[h] = rows.state[head + h].max;
#pragma unroll
                for (int j = 0; j < 8; ++j) q[h][j] = s.q[head + h][lane % kLanes * 8 + j];
            }
#pragma unroll
            for (int i = 0; i < kItems; ++i) {
#pragma unroll
                for (int h = 0; h < kCount; ++h) score[h][i] = kNoMax;
                if (first_of(base, i) >= end) break;
                const bool is_key = first_of(base, i) + lane / kLanes < end;
                float k[8];
                unpack(k, keys.k[i]);
#pragma unroll
                for (int h = 0; h < kCount; ++h) {
                    float sum = 0.0f;
#pragma unroll
                    for (int j = 0; j < 8; ++j) sum = fmaf(q[h][j], k[j], sum);
                    sum = row_sum<kLanes>(sum);
                    score[h][i] = is_key ? sum : kNoMax;
                    max[h] = fmaxf(max[h], score[h][i]);
                }
            }
        }
#pragma unroll
        for (int h = 0; h < kCount; ++h) {
            const float factor = rows.state[head + h].raise(max[h]);
#pragma unroll
            for (int j = 0; j < 8; ++j) rows.acc[head + h][j] *= factor;
        }
#pragma unroll
        for (int i = 0; i < kItems; ++i) {
            if (first_of(base, i) >= end) break;
            const bool is_key = first_of(base, i) + lane / kLanes < end;
            float v[8];
            unpack(v, keys.v[i]);
#pragma unroll
            for (int h = 0; h < kCount; ++h) {
                SoftmaxState& state = rows.state[head + h];
                float(&acc)[8] = rows.acc[head + h];
                const float weight = is_key ? state.weight(score[h][i]) : 0.0f;
                state.sum += weight;
#pragma unroll
                for (int j = 0; j < 8; ++j) acc[j] = is_key ? fmaf(weight, v[j], acc[j]) : acc[j];
            }
        }
    }

    // keys: the warp's first, loaded before.
    __device__ __forceinline__ void attention(Keys& keys, int layer, Layer& packets, uint32_t tag,
                                              const uint32_t (&head_norm)[kWords]) {
        prepare_heads(layer, packets, tag, head_norm);
        if (warp >= 4 && layer + 1 < p.num_layers) prefetch(layer + 1);
        sync_threads<kThreads>();
        Base::forget();
        Rows rows;
#pragma unroll
        for (int h = 0; h < kGroup; ++h) {
            rows.state[h].clear();
#pragma unroll
            for (int j = 0; j < 8; ++j) rows.acc[h][j] = 0.0f;
        }
#pragma unroll 1
        for (int base = first_key;;) {
            const int next = base + kBlockKeys;
            Keys more{};
            load(more, layer, next);
            attend(rows, keys, base);
            if (next >= end_key + has_new) break;
            keys = more;
            base = next;
        }
        join_groups(rows);
        sync_threads<kThreads>();
        send_rows(packets, tag);
        if (num_splits > 1) join_splits(packets, tag);
    }

    // Over the keys of a warp, to shared memory: a group of lanes stores a head.
    __device__ __forceinline__ void join_groups(Rows& rows) {
#pragma unroll
        for (int h = 0; h < kGroup; ++h) {
            float max = rows.state[h].max;
#pragma unroll
            for (int by = kLanes; by < 32; by *= 2) {
                max = fmaxf(max, __shfl_xor_sync(kFullMask, max, by));
            }
            const float factor = rows.state[h].raise(max);
#pragma unroll
            for (int j = 0; j < 8; ++j) rows.acc[h][j] *= factor;
#pragma unroll
            for (int by = kLanes; by < 32; by *= 2) {
                rows.state[h].sum += __shfl_xor_sync(kFullMask, rows.state[h].sum, by);
#pragma unroll
                for (int j = 0; j < 8; ++j) {
                    rows.acc[h][j] += __shfl_xor_sync(kFullMask, rows.acc[h][j], by);
                }
            }
        }
        const int own_group = lane / kLanes;
#pragma unroll
        for (int head = 0; head < kGroup; head += kKeys) {
            float own[8];
            SoftmaxState state = rows.state[head];
#pragma unroll
            for (int j = 0; j < 8; ++j) own[j] = rows.acc[head][j];
#pragma unroll
            for (int h = head + 1; h < min(head + kKeys, kGroup); ++h) {
                if (own_group < h - head) continue;
                state = rows.state[h];
#pragma unroll
                for (int j = 0; j < 8; ++j) own[j] = rows.acc[h][j];
            }
            if (head + own_group >= kGroup) continue;
            auto* to =
                reinterpret_cast<float4*>(&s.attended[warp][head + own_group][lane % kLanes * 8]);
            to[0] = make_float4(own[0], own[1], own[2], own[3]);
            to[1] = make_float4(own[4], own[5], own[6], own[7]);
            if (lane % kLanes == 0) s.attended_states[warp][head + own_group] = state;
        }
    }

    // The CTA's sums over all warps: a thread a feature.
    __device__ __forceinline__ void send_rows(Layer& packets, uint32_t tag) {
        constexpr int kFeatures = kGroup * kDim;
        static_assert(kFeatures % 32 == 0);  // whole warps have one
#pragma unroll
        for (int first = 0; first < kFeatures; first += kThreads) {
            const int index = first + static_cast<int>(threadIdx.x);
            if (first + kThreads > kFeatures && index >= kFeatures) break;
            const int h = index / kDim, feature = index % kDim;
            SoftmaxState state{kNoMax, 0.0f};
#pragma unroll
            for (int w = 0; w < kWarps; ++w) state.cover(s.attended_states[w][h]);
            float acc = 0.0f;
#pragma unroll
            for (int w = 0; w < kWarps; ++w) {
                const float factor = state.add(s.attended_states[w][h]);
                acc = fmaf(s.attended[w][h][feature], factor, acc);
            }
            if (num_splits > 1) {
                send(&packets.split[kv_head][split][h][feature], acc, tag);
                if (feature < 2) {
                    send(&packets.split_states[kv_head][split][h][feature],
                         feature == 0 ? state.max : state.sum, tag);
                }
                continue;
            }
            acc /= state.sum;
            const float next = __shfl_down_sync(kFullMask, acc, 1);
            if (index % 2 == 0) {
#pragma unroll
                for (int copy = 0; copy < kCopies; ++copy) {
                    send(&packets.copies[copy].attended[(kv_head * kFeatures + index) / 2],
                         pack_pair<__nv_bfloat16>(acc, next), tag);
                }
            }
        }
    }

    // A CTA joins its share of the features of its KV head: two a warp, a split a lane.
    __device__ __forceinline__ void join_splits(Layer& packets, uint32_t tag) {
        constexpr int kFeatures = kGroup * kDim, kShare = kFeatures / kSplits;
        static_assert(kSplits == 16 && kFeatures % (2 * kSplits) == 0);
        const int from = lane % kSplits;
#pragma unroll 1
        for (int own = 2 * warp; own < kShare; own += 2 * kWarps) {
            const int index = split * kShare + own + lane / kSplits, h = index / kDim;
            float acc;
            SoftmaxState state;
            receive_split(acc, state, &packets.split[kv_head][from][h][index % kDim],
                          packets.split_states[kv_head][from][h], tag);
            const float factor = state.raise(row_max<kSplits>(state.max));
            const float sum = row_sum<kSplits>(state.sum);
            const float value = row_sum<kSplits>(acc * factor) / sum;
            const float next = __shfl_down_sync(kFullMask, value, kSplits);
            const uint32_t both = __shfl_sync(kFullMask, pack_pair<__nv_bfloat16>(value, next), 0);
            if (lane < kCopies) {
                const int at = (kv_head * kFeatures + split * kShare + own) / 2;
                send(&packets.copies[lane].attended[at], both, tag);
            }
        }
    }
};

}  // namespace bytetx::decode
