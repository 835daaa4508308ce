// The ops that _cuda alone has: plans made on the device, GEMMs by tiling, ops of several GPUs.
#pragma once

#include <algorithm>
#include <vector>

#include "bindings.h"
#include "cache_ops.h"
#include "comm_ops.h"
#include "gate_ops.h"
#include "linear_norm_ops.h"

namespace bytetx {
namespace {

void bind_quantize_rows(py::module_& m) {
    m.def(
        "quantize_rows",
        [](Address x, Address out_fp8, Address out_scale, int64_t total_tokens, int64_t hidden_size,
           int dtype, int device, Address stream, int num_threads, int isa) {
            quantize_rows({pointer(x), pointer<uint8_t>(out_fp8), pointer<float>(out_scale),
                           total_tokens, hidden_size, to_dtype(dtype)},
                          {device, pointer(stream), num_threads, static_cast<Isa>(isa)});
        },
        ReleaseGil());
}

void bind_most_likely(py::module_& m) {
    m.def(
        "most_likely",
        [](Address logits, Address seats, Address out, Address last_tokens, int64_t num_rows,
           int64_t vocab_size, int dtype, int device, Address stream, int num_threads, int isa) {
            most_likely({pointer(logits), pointer<int32_t>(seats), pointer<int32_t>(out),
                         pointer<int32_t>(last_tokens), num_rows, vocab_size, to_dtype(dtype)},
                        {device, pointer(stream), num_threads, static_cast<Isa>(isa)});
        },
        ReleaseGil());
}

void bind_sample(py::module_& m) {
    m.def(
        "sample",
        [](Address logits, Address temperature, Address top_k, Address top_p, Address min_p,
           Address seeds, Address positions, Address out, int64_t num_rows, int64_t vocab_size,
           int dtype, int device, Address stream, int num_threads, int isa) {
            sample({pointer(logits), pointer<float>(temperature), pointer<int64_t>(top_k),
                    pointer<float>(top_p), pointer<float>(min_p), pointer<int64_t>(seeds),
                    pointer<int64_t>(positions), pointer<int32_t>(out), num_rows, vocab_size,
                    to_dtype(dtype)},
                   {device, pointer(stream), num_threads, static_cast<Isa>(isa)});
        },
        ReleaseGil());
}

void bind_planned_attention(py::module_& m) {
    m.def("attention_tile_rows", &attention_tile_rows);
    m.def("attention_plan_bytes", &attention_plan_bytes);
    m.def(
        "attention_plan",
        [](Address cu_seqlens, Address plan, int64_t plan_bytes, int64_t batch_size,
           int64_t total_tokens, int tile_rows, int window, bool causal, int device, Address stream,
           int num_threads, int isa) {
            attention_plan({pointer<int32_t>(cu_seqlens), pointer<int32_t>(plan), plan_bytes,
                            batch_size, total_tokens, tile_rows, window, causal},
                           {device, pointer(stream), num_threads, static_cast<Isa>(isa)});
        },
        ReleaseGil());
    m.def(
        "planned_attention",
        [](Address q, Address k, Address v, Address out, Address plan, Address relative_bias,
           Address bias_positions, int64_t batch_size, int64_t total_tokens, int tile_rows,
           int num_heads, int num_kv_heads, int head_dim, int relative_bias_span, int window,
           bool causal, int64_t q_stride, int64_t k_stride, int64_t v_stride, int64_t out_stride,
           float softmax_scale, int dtype, int device, Address stream, int num_threads, int isa) {
            planned_attention({pointer(q),
                               pointer(k),
                               pointer(v),
                               pointer(out),
                               pointer<int32_t>(plan),
                               pointer<float>(relative_bias),
                               pointer<int32_t>(bias_positions),
                               batch_size,
                               total_tokens,
                               tile_rows,
                               num_heads,
                               num_kv_heads,
                               head_dim,
                               relative_bias_span,
                               window,
                               causal,
                               q_stride,
                               k_stride,
                               v_stride,
                               out_stride,
                               softmax_scale,
                               to_dtype(dtype)},
                              {device, pointer(stream), num_threads, static_cast<Isa>(isa)});
        },
        ReleaseGil());
}

// (name, rows, columns, whether it is for few rows) by index
py::list list_tilings(int32_t count, LinearTiling (*tiling)(int32_t)) {
    py::list tilings;
    for (int32_t i = 0; i < count; ++i) {
        const LinearTiling t = tiling(i);
        tilings.append(py::make_tuple(t.name, t.rows, t.columns, t.is_for_few_rows));
    }
    return tilings;
}

void bind_linear(py::module_& m) {
    m.def("linear_tilings", [] { return list_tilings(num_linear_tilings(), linear_tiling); });
    m.def(
        "linear",
        [](Address a, Address b, Address bias, Address residual, Address d, int64_t rows, int64_t n,
           int64_t k, int activation, bool gated, int tiling, int splits, int dtype, int device,
           Address stream, int num_threads, int isa) {
            linear({pointer(a), pointer(b), pointer(bias), pointer(residual), pointer(d), rows, n,
                    k, static_cast<Activation>(activation), gated, tiling, splits, to_dtype(dtype)},
                   {device, pointer(stream), num_threads, static_cast<Isa>(isa)});
        },
        ReleaseGil());
}

void bind_gate_rows(py::module_& m) {
    m.def(
        "gate_rows",
        [](Address both, Address out, int64_t rows, int64_t n, int activation, int dtype,
           int device, Address stream, int num_threads, int isa) {
            gate_rows({pointer(both), pointer(out), rows, n, static_cast<Activation>(activation),
                       to_dtype(dtype)},
                      {device, pointer(stream), num_threads, static_cast<Isa>(isa)});
        },
        ReleaseGil());
}

void bind_linear_norm(py::module_& m) {
    m.def("linear_norm_workspace_bytes", linear_norm_workspace_bytes);
    m.def(
        "linear_norm",
        [](Address a, Address b, Address bias, Address residual, Address weight, Address shift,
           Address d, Address workspace, int64_t rows, int64_t n, int64_t k, float eps, int dtype,
           int device, Address stream, int num_threads, int isa) {
            linear_norm(
                {pointer(a), pointer(b), pointer(bias), pointer(residual), pointer(weight),
                 pointer(shift), pointer(d), pointer(workspace), rows, n, k, eps, to_dtype(dtype)},
                {device, pointer(stream), num_threads, static_cast<Isa>(isa)});
        },
        ReleaseGil());
}

PagedPlanParams paged_plan_params(Address cu_seqlens, Address kv_seqlens, Address plan,
                                  int64_t plan_bytes, int64_t batch_size, int64_t total_tokens,
                                  int max_seqlen, int max_kv_seqlen, int num_heads,
                                  int num_kv_heads, int window) {
    return {pointer<int32_t>(cu_seqlens),
            pointer<int32_t>(kv_seqlens),
            pointer<int32_t>(plan),
            plan_bytes,
            batch_size,
            total_tokens,
            max_seqlen,
            max_kv_seqlen,
            num_heads,
            num_kv_heads,
            window,
            paged_tile_tokens(num_heads, num_kv_heads)};
}

void bind_planned_paged_attention(py::module_& m) {
    m.def("paged_plan_bytes",  // of the plan, and of the workspace of calls with it
          [](int64_t batch_size, int64_t total_tokens, int max_seqlen, int max_kv_seqlen,
             int num_heads, int num_kv_heads, int window, int head_dim) {
              const PagedPlanParams p =
                  paged_plan_params(0, 0, 0, 0, batch_size, total_tokens, max_seqlen, max_kv_seqlen,
                                    num_heads, num_kv_heads, window);
              return py::make_tuple(paged_plan_bytes(p),
                                    planned_paged_attention_workspace_bytes(p, head_dim));
          });
    m.def(
        "paged_plan",
        [](Address cu_seqlens, Address kv_seqlens, Address plan, int64_t plan_bytes,
           int64_t batch_size, int64_t total_tokens, int max_seqlen, int max_kv_seqlen,
           int num_heads, int num_kv_heads, int window, int device, Address stream, int num_threads,
           int isa) {
            paged_plan(paged_plan_params(cu_seqlens, kv_seqlens, plan, plan_bytes, batch_size,
                                         total_tokens, max_seqlen, max_kv_seqlen, num_heads,
                                         num_kv_heads, window),
                       {device, pointer(stream), num_threads, static_cast<Isa>(isa)});
        },
        ReleaseGil());
    m.def(
        "planned_paged_attention",
        [](Address q, Address k_cache, Address v_cache, Address out, Address page_table,
           Address cu_seqlens, Address kv_seqlens, Address plan, int64_t plan_bytes,
           Address workspace, int64_t workspace_bytes, int64_t batch_size, int64_t total_tokens,
           int max_seqlen, int max_kv_seqlen, int num_heads, int num_kv_heads, int window,
           int head_dim, int64_t max_pages, int page_size, int64_t q_stride, float softmax_scale,
           int dtype, int settled, int device, Address stream, int num_threads, int isa) {
            planned_paged_attention(
                {pointer(q), pointer(k_cache), pointer(v_cache), pointer(out),
                 pointer<int32_t>(page_table),
                 paged_plan_params(cu_seqlens, kv_seqlens, plan, plan_bytes, batch_size,
                                   total_tokens, max_seqlen, max_kv_seqlen, num_heads, num_kv_heads,
                                   window),
                 pointer(workspace), workspace_bytes, max_pages, page_size, head_dim, q_stride,
                 softmax_scale, to_dtype(dtype), settled},
                {device, pointer(stream), num_threads, static_cast<Isa>(isa)});
        },
        ReleaseGil());
}

void bind_rotary_write_kv(py::module_& m) {
    m.def(
        "rotary_write_kv",
        [](Address q, Address k, Address v, Address k_cache, Address v_cache, Address cos,
           Address sin, Address q_norm, Address k_norm, Address position_ids, Address slot_mapping,
           int64_t total_tokens, int num_heads, int num_kv_heads, int head_dim, int num_pairs,
           bool is_interleaved, int64_t q_stride, int64_t k_stride, int64_t v_stride, float eps,
           int dtype, int device, Address stream, int num_threads, int isa) {
            rotary_write_kv({pointer(q),
                             pointer(k),
                             pointer(v),
                             pointer(k_cache),
                             pointer(v_cache),
                             pointer<float>(cos),
                             pointer<float>(sin),
                             pointer(q_norm),
                             pointer(k_norm),
                             pointer<int32_t>(position_ids),
                             pointer<int32_t>(slot_mapping),
                             total_tokens,
                             num_heads,
                             num_kv_heads,
                             head_dim,
                             num_pairs,
                             is_interleaved,
                             q_stride,
                             k_stride,
                             v_stride,
                             eps,
                             to_dtype(dtype)},
                            {device, pointer(stream), num_threads, static_cast<Isa>(isa)});
        },
        ReleaseGil());
}

void bind_fp8_linear(py::module_& m) {
    m.def("fp8_linear_tilings",
          [] { return list_tilings(num_fp8_linear_tilings(), fp8_linear_tiling); });
    m.def(
        "fp8_linear",
        [](Address a, Address b, Address a_scale, Address b_scale, Address bias, Address d,
           int64_t rows, int64_t n, int64_t k, int activation, bool is_d_fp8, float d_scale,
           int tiling, int dtype, int device, Address stream, int num_threads, int isa) {
            fp8_linear(
                {pointer<uint8_t>(a), pointer<uint8_t>(b), pointer<float>(a_scale),
                 pointer<float>(b_scale), pointer<float>(bias), pointer(d), rows, n, k,
                 static_cast<Activation>(activation), is_d_fp8, d_scale, tiling, to_dtype(dtype)},
                {device, pointer(stream), num_threads, static_cast<Isa>(isa)});
        },
        ReleaseGil());
}

PeerMemory make_peer_memory(const std::vector<Address>& buffers, const std::vector<Address>& flags,
                            Address epochs, int64_t buffer_bytes, int64_t num_flags, Address fault,
                            int64_t timeout_cycles, int rank) {
    if (buffers.empty() || buffers.size() > kMaxPeers || flags.size() != buffers.size()) {
        throw std::invalid_argument("a group has 1 to 8 ranks, with a buffer and flags each; got " +
                                    std::to_string(buffers.size()) + " buffers");
    }
    PeerMemory p{};
    for (size_t i = 0; i < buffers.size(); ++i) {
        p.buffers[i] = pointer(buffers[i]);
        p.flags[i] = pointer<uint32_t>(flags[i]);
    }
    p.epochs = pointer<uint32_t>(epochs);
    p.buffer_bytes = buffer_bytes;
    p.num_flags = num_flags;
    p.fault = pointer<PeerFault>(fault);
    p.timeout_cycles = timeout_cycles;
    p.rank = rank;
    p.size = static_cast<int32_t>(buffers.size());
    return p;
}

void copy_offsets(const std::vector<int64_t>& from, const PeerMemory& peers, RowOffsets& to) {
    if (from.size() != static_cast<size_t>(peers.size) + 1) {
        throw std::invalid_argument("row_offsets must be one more than ranks, got " +
                                    std::to_string(from.size()));
    }
    std::copy(from.begin(), from.end(), to);
}

void bind_gemm_sum(py::module_& m, const char* name,
                   void (*op)(const GemmSumParams&, const Launch&)) {
    m.def(
        name,
        [op](Address a, Address b, Address partial, int64_t rows, int64_t n, int64_t k, int tiling,
             int splits, Address bias, Address residual, Address out, Address sum_out,
             Address norm_weight, Address norm_bias, int64_t rows_summed, float eps, bool is_rms,
             bool adds_parts, const PeerMemory& peers, const std::vector<int64_t>& row_offsets,
             int dtype, int device, Address stream, int num_threads, int isa) {
            const DType type = to_dtype(dtype);
            GemmSumParams p{};
            p.linear = {pointer(a), pointer(b),       nullptr, pointer(partial), nullptr, rows, n,
                        k,          Activation::none, false,   tiling,           splits,  type};
            p.norm = {nullptr,
                      pointer(residual),
                      pointer(out),
                      pointer(sum_out),
                      pointer(norm_weight),
                      pointer(norm_bias),
                      nullptr,
                      nullptr,
                      rows_summed,
                      n,
                      eps,
                      type};
            p.bias = pointer(bias);
            p.peers = peers;
            copy_offsets(row_offsets, peers, p.row_offsets);
            p.is_rms = is_rms;
            p.adds_parts = adds_parts;
            op(p, {device, pointer(stream), num_threads, static_cast<Isa>(isa)});
        },
        ReleaseGil());
}

// Ops that several GPUs do together.
void bind_comm(py::module_& m) {
    py::class_<PeerMemory>(m, "PeerMemory").def(py::init(&make_peer_memory));
    m.def(
        "all_gather_gemm",
        [](Address a, Address b, Address bias, Address d, int64_t rows, int64_t n, int64_t k,
           int activation, bool gated, int tiling, const PeerMemory& peers,
           const std::vector<int64_t>& row_offsets, int dtype, int device, Address stream,
           int num_threads, int isa) {
            AllGatherGemmParams p{};
            p.linear = {pointer(a),
                        pointer(b),
                        pointer(bias),
                        nullptr,
                        pointer(d),
                        rows,
                        n,
                        k,
                        static_cast<Activation>(activation),
                        gated,
                        tiling,
                        1,
                        to_dtype(dtype)};
            p.peers = peers;
            copy_offsets(row_offsets, peers, p.row_offsets);
            all_gather_gemm(p, {device, pointer(stream), num_threads, static_cast<Isa>(isa)});
        },
        ReleaseGil());
    m.def("push_tilings", [] { return list_tilings(num_push_tilings(), push_tiling); });
    bind_gemm_sum(m, "gemm_reduce_scatter", &gemm_reduce_scatter);
    bind_gemm_sum(m, "gemm_all_reduce", &gemm_all_reduce);
    bind_gemm_sum(m, "all_reduce_rows", &all_reduce_rows);
    bind_gemm_sum(m, "all_reduce_two_shot", &all_reduce_two_shot);
    bind_gemm_sum(m, "sum_copies", &sum_copies);
    m.def(
        "meet",
        [](const PeerMemory& peers, int device, Address stream, int num_threads, int isa) {
            meet(peers, {device, pointer(stream), num_threads, static_cast<Isa>(isa)});
        },
        ReleaseGil());
    m.def(
        "await_copies",
        [](const PeerMemory& peers, uint32_t sources, bool is_early, int device, Address stream,
           int num_threads, int isa) {
            const Launch launch{device, pointer(stream), num_threads, static_cast<Isa>(isa)};
            await_copies(peers, sources, is_early, launch);
        },
        ReleaseGil());
    m.def(
        "send_copy",
        [](const PeerMemory& peers, int to, Address place, Address rows, int64_t bytes,
           bool is_early, int device, Address stream, int num_threads, int isa) {
            send_copy(peers, to, pointer(place), pointer(rows), bytes, is_early,
                      {device, pointer(stream), num_threads, static_cast<Isa>(isa)});
        },
        ReleaseGil());
    m.def(
        "gemm_add_parts",
        [](Address a, Address b, Address bias, Address residual, Address d, int64_t rows, int64_t n,
           int64_t k, int tiling, Address parts, int64_t part_rows, int rank, int size, int dtype,
           int device, Address stream, int num_threads, int isa) {
            const LinearParams linear{pointer(a),
                                      pointer(b),
                                      pointer(bias),
                                      pointer(residual),
                                      pointer(d),
                                      rows,
                                      n,
                                      k,
                                      Activation::none,
                                      false,
                                      tiling,
                                      1,
                                      to_dtype(dtype)};
            gemm_add_parts({linear, pointer(parts), part_rows, rank, size},
                           {device, pointer(stream), num_threads, static_cast<Isa>(isa)});
        },
        ReleaseGil());
}

}  // namespace
}  // namespace bytetx
