// The only file that makes Python modules. It is compiled twice: as _cpu, and with BYTETX_CUDA as
// _cuda.

#include "bindings.h"

#include "build_facts.h"
#include "cache_ops.h"
#include "disentangled_ops.h"

#ifdef BYTETX_CUDA
#include "bindings_cuda.h"
#else
#include "bf16_ops.h"
#include "bindings_text_ring.h"
#include "bindings_wordpiece.h"
#include "coded_rows_ops.h"
#include "cpu/isa.h"
#include "cpu/maxsim_tiles.h"
#include "cpu/step_block.h"
#include "cpu_step_ops.h"
#include "int8_ops.h"
#include "panel_ops.h"
#endif

namespace bytetx {

#ifndef BYTETX_CUDA

template <>
struct FromPython<const CpuStepLayers*> {
    static const CpuStepLayers* convert(py::handle value) {
        return value.cast<const CpuStepLayers*>();
    }
};

#endif

namespace {

void bind_common(py::module_& m) {
    bind<&layer_norm>(m, "layer_norm");
    bind<&rms_norm>(m, "rms_norm");
    bind<&embed>(m, "embed");
    bind<&pool_workspace_bytes>(m, "pool_workspace_bytes",
                                {"total_tokens", "max_seqlen", "hidden_size"});
    bind<&pool>(m, "pool");
    bind<&rotary>(m, "rotary");
    bind<&write_kv>(m, "write_kv");
    bind<&disentangled_attention>(m, "disentangled_attention");
}

#ifndef BYTETX_CUDA

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

// The numbers of an int32 array, and how many there are; null for None.
std::pair<int32_t*, int64_t> int32_array(const py::object& array, bool is_written) {
    if (array.is_none()) return {nullptr, 0};
    const py::buffer_info info = py::buffer(array).request(is_written);
    if (info.itemsize != 4 || info.ndim != 1 || info.strides[0] != 4) {
        throw py::value_error("needs int32 numbers that lie behind one another");
    }
    return {static_cast<int32_t*>(info.ptr), info.size};
}

void write_step_block(const py::object& layout, const py::object& block,
                      const py::object& input_ids, const py::object& seqlens,
                      const py::object& token_type_ids, const py::object& prompt_tokens) {
    const auto [ids, total_tokens] = int32_array(input_ids, false);
    const auto [lengths, batch_size] = int32_array(seqlens, false);
    const auto [types, num_types] = int32_array(token_type_ids, false);
    const auto [prompts, num_prompts] = int32_array(prompt_tokens, false);
    const auto params = FromPython<cpu::StepBlockLayout>::convert(layout);
    if (batch_size > params.num_texts || total_tokens > params.total_tokens ||
        (types != nullptr && num_types != total_tokens) ||
        (prompts != nullptr && num_prompts != batch_size)) {
        throw py::value_error("the texts do not fit the block");
    }
    const cpu::StepTexts texts{ids, lengths, types, prompts, total_tokens, batch_size};
    int32_t* out = int32_array(block, true).first;
    const py::gil_scoped_release release;
    cpu::write_step_block(params, texts, out);
}

// out: int32, at least maxsim_tiles_size() of them.
int64_t maxsim_tiles(Address cu_documents, int64_t num_documents, int64_t tile,
                     const py::object& out) {
    const auto* bounds = pointer<int64_t>(cu_documents);
    const auto [numbers, size] = int32_array(out, true);
    if (tile < 1 || size < cpu::maxsim_tiles_size(num_documents, bounds[num_documents], tile)) {
        throw py::value_error("the tiles may not fit");
    }
    return cpu::maxsim_tiles(bounds, num_documents, tile, numbers);
}

int64_t paged_attention_bytes(Address cu_seqlens, Address kv_seqlens, int64_t batch_size,
                              int num_heads, int num_kv_heads, int head_dim, int window,
                              bool batch_invariant, int num_threads) {
    PagedAttentionParams p{};
    p.cu_seqlens = pointer<int32_t>(cu_seqlens);
    p.kv_seqlens = pointer<int32_t>(kv_seqlens);
    p.batch_size = batch_size;
    p.num_heads = num_heads;
    p.num_kv_heads = num_kv_heads;
    p.head_dim = head_dim;
    p.window = window;
    p.batch_invariant = batch_invariant;
    return paged_attention_workspace_bytes(p, num_threads);
}

CpuStepLayers make_step_layers(const py::list& layers) {
    std::vector<CpuStepLayer> made;
    for (const py::handle layer : layers) made.push_back(FromPython<CpuStepLayer>::convert(layer));
    return CpuStepLayers(std::move(made));
}

void bind_cpu(py::module_& m) {
    py::class_<CpuStepLayers>(m, "CpuStepLayers").def(py::init(&make_step_layers));
    bind<&cpu_decode_step_workspace_bytes>(
        m, "cpu_decode_step_workspace_bytes",
        {"layers", "cu_seqlens", "kv_seqlens", "batch_size", "hidden_size", "inner_size",
         "num_heads", "num_kv_heads", "head_dim", "gate_block", "dtype", "batch_invariant",
         "num_threads"});
    bind<&cpu_decode_step>(m, "cpu_decode_step");
    m.def("isa", [] { return cpu::isa_name(cpu::machine_isa()); });
    m.def("isa_set", [] { return static_cast<int>(cpu::machine_isa()); });
    bind<&varlen_attention_workspace_bytes>(m, "varlen_attention_workspace_bytes",
                                            {"batch_size", "head_dim", "num_threads"});
    bind<&varlen_attention>(m, "varlen_attention");
    bind<&disentangled_attention_workspace_bytes>(m, "disentangled_attention_workspace_bytes",
                                                  {"batch_size", "head_dim", "num_threads"});
    bind<&paged_attention_bytes>(
        m, "paged_attention_workspace_bytes",
        {"cu_seqlens", "kv_seqlens", "batch_size", "num_heads", "num_kv_heads", "head_dim",
         "window", "batch_invariant", "num_threads"});
    bind<&paged_attention>(m, "paged_attention");
    m.def("flatten_int_lists", &flatten_int_lists);
    m.def("write_step_block", &write_step_block);
    m.def("maxsim_tiles", &maxsim_tiles);
    m.def("int8_linear_isa", &int8_linear_isa);
    bind<&int8_linear_workspace_bytes>(m, "int8_linear_workspace_bytes", {"m", "k", "num_threads"});
    bind<&int8_linear>(m, "int8_linear");
    m.def("bf16_linear_isa", &bf16_linear_isa);
    bind<&bf16_linear_workspace_bytes>(m, "bf16_linear_workspace_bytes", {"k", "num_threads"});
    bind<&bf16_linear>(m, "bf16_linear");
    m.def("panel_linear_isa", &panel_linear_isa);
    bind<&panel_linear_workspace_bytes>(m, "panel_linear_workspace_bytes", {"m", "k"});
    bind<&panel_linear>(m, "panel_linear");
    bind<&gate_blocks>(m, "gate_blocks");
    bind<&round_rows>(m, "round_rows");
    bind<&convert_rows>(m, "convert_rows");
    bind<&stack_rows>(m, "stack_rows");
    bind_text_ring(m);
    bind_wordpiece(m);
    m.attr("why_no_cuda") = why_no_cuda();
}

#endif

}  // namespace
}  // namespace bytetx

PYBIND11_MODULE(BYTETX_MODULE, m) {
    m.attr("source_hash") = bytetx::source_hash();
    bytetx::bind_common(m);
#ifdef BYTETX_CUDA
    bytetx::bind_cuda(m);
#else
    bytetx::bind_cpu(m);
#endif
}
