// The only file that makes Python modules. It is compiled twice: as _cpu, and with BYTETX_CUDA as
// _cuda. Tensors arrive as addresses that bytetx/ops/ has checked. Every op ends in the same four
// arguments (device, stream, num_threads, isa), which make a Launch.

#include "bindings.h"

#include "cache_ops.h"
#include "source_hash.h"

#ifdef BYTETX_CUDA
#include "bindings_cuda.h"
#else
#include "cpu/isa.h"
#endif

namespace bytetx {
namespace {

void bind_norm(py::module_& m, const char* name, void (*norm)(const NormParams&, const Launch&)) {
    m.def(
        name,
        [norm](Address x, Address residual, Address out, Address sum_out, Address weight,
               Address bias, Address out_fp8, Address out_scale, int64_t total_tokens,
               int64_t hidden_size, float eps, int dtype, int device, Address stream,
               int num_threads, int isa) {
            norm({pointer(x), pointer(residual), pointer(out), pointer(sum_out), pointer(weight),
                  pointer(bias), pointer<uint8_t>(out_fp8), pointer<float>(out_scale), total_tokens,
                  hidden_size, eps, to_dtype(dtype)},
                 {device, pointer(stream), num_threads, static_cast<Isa>(isa)});
        },
        ReleaseGil());
}

void bind_embed(py::module_& m) {
    m.def(
        "embed",
        [](Address input_ids, Address position_ids, Address token_type_ids, Address word,
           Address position, Address token_type, Address inputs_embeds, Address norm_weight,
           Address norm_bias, Address out, Address bad_ids, int64_t total_tokens,
           int64_t hidden_size, int64_t num_words, int64_t num_positions, int64_t num_token_types,
           float eps, int dtype, int device, Address stream, int num_threads, int isa) {
            embed({pointer<int32_t>(input_ids), pointer<int32_t>(position_ids),
                   pointer<int32_t>(token_type_ids), pointer(word), pointer(position),
                   pointer(token_type), pointer(inputs_embeds), pointer(norm_weight),
                   pointer(norm_bias), pointer(out), pointer<int32_t>(bad_ids), total_tokens,
                   hidden_size, num_words, num_positions, num_token_types, eps, to_dtype(dtype)},
                  {device, pointer(stream), num_threads, static_cast<Isa>(isa)});
        },
        ReleaseGil());
}

void bind_pool(py::module_& m) {
    m.def("pool_workspace_bytes", &pool_workspace_bytes);
    m.def(
        "pool",
        [](Address x, Address cu_seqlens, Address first_tokens, Address out, Address workspace,
           int64_t workspace_bytes, int64_t batch_size, int64_t total_tokens, int64_t max_seqlen,
           int64_t hidden_size, int mode, bool normalize, int dtype, int device, Address stream,
           int num_threads, int isa) {
            pool(
                {pointer(x), pointer<int32_t>(cu_seqlens), pointer<int32_t>(first_tokens),
                 pointer<float>(out), pointer(workspace), workspace_bytes, batch_size, total_tokens,
                 max_seqlen, hidden_size, static_cast<PoolMode>(mode), normalize, to_dtype(dtype)},
                {device, pointer(stream), num_threads, static_cast<Isa>(isa)});
        },
        ReleaseGil());
}

void bind_cache_rows(py::module_& m) {
    m.def(
        "rotary",
        [](Address x, Address cos, Address sin, Address position_ids, int64_t total_tokens,
           int64_t num_positions, int num_heads, int head_dim, int num_pairs, bool is_interleaved,
           int64_t x_stride, int dtype, int device, Address stream, int num_threads, int isa) {
            rotary({pointer(x), pointer<float>(cos), pointer<float>(sin),
                    pointer<int32_t>(position_ids), total_tokens, num_positions, num_heads,
                    head_dim, num_pairs, is_interleaved, x_stride, to_dtype(dtype)},
                   {device, pointer(stream), num_threads, static_cast<Isa>(isa)});
        },
        ReleaseGil());
    m.def(
        "write_kv",
        [](Address k, Address v, Address k_cache, Address v_cache, Address slot_mapping,
           int64_t total_tokens, int64_t num_slots, int64_t row_elements, int64_t k_stride,
           int64_t v_stride, int dtype, int device, Address stream, int num_threads, int isa) {
            write_kv({pointer(k), pointer(v), pointer(k_cache), pointer(v_cache),
                      pointer<int32_t>(slot_mapping), total_tokens, num_slots, row_elements,
                      k_stride, v_stride, to_dtype(dtype)},
                     {device, pointer(stream), num_threads, static_cast<Isa>(isa)});
        },
        ReleaseGil());
}

#ifndef BYTETX_CUDA

void bind_varlen_attention(py::module_& m) {
    m.def("varlen_attention_workspace_bytes", &varlen_attention_workspace_bytes);
    m.def(
        "varlen_attention",
        [](Address q, Address k, Address v, Address out, Address cu_seqlens, Address relative_bias,
           Address bias_positions, Address workspace, int64_t workspace_bytes, int64_t batch_size,
           int64_t total_tokens, int max_seqlen, int num_heads, int num_kv_heads, int head_dim,
           int relative_bias_span, int window, bool causal, int64_t q_stride, int64_t k_stride,
           int64_t v_stride, int64_t out_stride, float softmax_scale, int dtype, int device,
           Address stream, int num_threads, int isa) {
            varlen_attention({pointer(q),
                              pointer(k),
                              pointer(v),
                              pointer(out),
                              pointer<int32_t>(cu_seqlens),
                              pointer<float>(relative_bias),
                              pointer<int32_t>(bias_positions),
                              pointer(workspace),
                              workspace_bytes,
                              batch_size,
                              total_tokens,
                              max_seqlen,
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

void bind_paged_attention(py::module_& m) {
    m.def("paged_attention_workspace_bytes",
          [](Address cu_seqlens, Address kv_seqlens, int64_t batch_size, int num_heads,
             int num_kv_heads, int head_dim, int window, int num_threads) {
              PagedAttentionParams p{};
              p.cu_seqlens = pointer<int32_t>(cu_seqlens);
              p.kv_seqlens = pointer<int32_t>(kv_seqlens);
              p.batch_size = batch_size;
              p.num_heads = num_heads;
              p.num_kv_heads = num_kv_heads;
              p.head_dim = head_dim;
              p.window = window;
              return paged_attention_workspace_bytes(p, num_threads);
          });
    m.def(
        "paged_attention",
        [](Address q, Address k_cache, Address v_cache, Address out, Address cu_seqlens,
           Address page_table, Address kv_seqlens, Address workspace, int64_t workspace_bytes,
           int64_t batch_size, int64_t total_tokens, int64_t num_pages, int64_t max_pages,
           int page_size, int num_heads, int num_kv_heads, int head_dim, int window,
           int64_t q_stride, float softmax_scale, int dtype, int device, Address stream,
           int num_threads, int isa) {
            paged_attention({pointer(q),
                             pointer(k_cache),
                             pointer(v_cache),
                             pointer(out),
                             pointer<int32_t>(cu_seqlens),
                             pointer<int32_t>(page_table),
                             pointer<int32_t>(kv_seqlens),
                             pointer(workspace),
                             workspace_bytes,
                             batch_size,
                             total_tokens,
                             num_pages,
                             max_pages,
                             page_size,
                             num_heads,
                             num_kv_heads,
                             head_dim,
                             window,
                             q_stride,
                             softmax_scale,
                             to_dtype(dtype)},
                            {device, pointer(stream), num_threads, static_cast<Isa>(isa)});
        },
        ReleaseGil());
}

// Numbers of lists of int behind one another; false where something else is among them, a number
// does not fit int32, or there are not `total` of them. About 3 ns a number.
bool flatten_int_lists(const py::list& lists, Address out, int64_t total) {
    auto* next = pointer<int32_t>(out);
    const int32_t* end = next + total;
    for (const py::handle list : lists) {
        if (!PyList_CheckExact(list.ptr()) || PyList_GET_SIZE(list.ptr()) > end - next)
            return false;
        for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list.ptr()); ++i) {
            PyObject* number = PyList_GET_ITEM(list.ptr(), i);
            if (!PyLong_CheckExact(number)) return false;  // bool is not exactly an int
            int overflow = 0;
            const long long value = PyLong_AsLongLongAndOverflow(number, &overflow);
            if (overflow != 0 || value != static_cast<int32_t>(value)) return false;
            *next++ = static_cast<int32_t>(value);
        }
    }
    return next == end;
}

#endif

}  // namespace
}  // namespace bytetx

PYBIND11_MODULE(BYTETX_MODULE, m) {
    m.attr("source_hash") = bytetx::source_hash();
    bytetx::bind_norm(m, "layer_norm", &bytetx::layer_norm);
    bytetx::bind_norm(m, "rms_norm", &bytetx::rms_norm);
    bytetx::bind_embed(m);
    bytetx::bind_pool(m);
    bytetx::bind_cache_rows(m);
#ifdef BYTETX_CUDA
    m.attr("arch") = "sm_90a";
    bytetx::bind_linear(m);
    bytetx::bind_gate_rows(m);
    bytetx::bind_linear_norm(m);
    bytetx::bind_fp8_linear(m);
    bytetx::bind_quantize_rows(m);
    bytetx::bind_most_likely(m);
    bytetx::bind_sample(m);
    bytetx::bind_planned_attention(m);
    bytetx::bind_planned_paged_attention(m);
    bytetx::bind_rotary_write_kv(m);
    bytetx::bind_comm(m);
#else
    m.def("isa", [] { return bytetx::cpu::isa_name(bytetx::cpu::best_isa()); });
    bytetx::bind_varlen_attention(m);
    bytetx::bind_paged_attention(m);
    m.def("flatten_int_lists", &bytetx::flatten_int_lists);
#endif
}
