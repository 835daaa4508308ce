// The ops that _cuda alone has: plans made on the device, GEMMs by tiling, ops of several GPUs.
#pragma once

#include <vector>

#include "bindings.h"
#include "cache_ops.h"
#include "comm_ops.h"
#include "decode_step_ops.h"
#include "gate_ops.h"
#include "linear_norm_ops.h"
#include "maxsim_ops.h"
#include "padding_ops.h"

namespace bytetx {

template <>
struct FromPython<PeerMemory> {
    static PeerMemory convert(py::handle value) { return value.cast<const PeerMemory&>(); }
};

namespace {

// (name, rows, columns, whether it is for small m) by index
py::list list_tilings(int32_t count, LinearTiling (*tiling)(int32_t)) {
    py::list tilings;
    for (int32_t i = 0; i < count; ++i) {
        const LinearTiling t = tiling(i);
        tilings.append(py::make_tuple(t.name, t.rows, t.columns, t.is_small_m));
    }
    return tilings;
}

// Bytes of the plan, and of the workspace of calls with it; the addresses of p may be 0.
py::tuple paged_bytes(const py::tuple& fields) {
    const auto p = FromPython<PagedPlanParams>::convert(fields);
    return py::make_tuple(paged_plan_bytes(p), planned_paged_attention_workspace_bytes(p));
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

void bind_comm(py::module_& m) {
    py::class_<PeerMemory>(m, "PeerMemory").def(py::init(&make_peer_memory));
    m.def("gemm_all_reduce_tilings",
          [] { return list_tilings(num_gemm_all_reduce_tilings(), gemm_all_reduce_tiling); });
    bind(m, "all_gather_gemm", &all_gather_gemm);
    bind(m, "gemm_reduce_scatter", &gemm_reduce_scatter);
    bind(m, "gemm_all_reduce", &gemm_all_reduce);
    bind(m, "all_reduce_one_shot", &all_reduce_one_shot);
    bind(m, "all_reduce_two_shot", &all_reduce_two_shot);
    bind(m, "sum_copies", &sum_copies);
    bind(m, "barrier", &barrier);
    bind(m, "send_copy", &send_copy);
    bind(m, "wait_copies", &wait_copies);
}

void bind_cuda(py::module_& m) {
    m.attr("arch") = "sm_90a";
    m.def("linear_tilings", [] { return list_tilings(num_linear_tilings(), linear_tiling); });
    bind(m, "linear", &linear);
    bind(m, "linear_any", &linear_any);
    bind(m, "gate_rows", &gate_rows);
    m.def("linear_norm_workspace_bytes", &linear_norm_workspace_bytes);
    bind(m, "linear_norm", &linear_norm);
    m.def("fp8_linear_tilings",
          [] { return list_tilings(num_fp8_linear_tilings(), fp8_linear_tiling); });
    bind(m, "fp8_linear", &fp8_linear);
    bind(m, "quantize_rows", &quantize_rows);
    bind(m, "argmax", &argmax);
    bind(m, "sample", &sample);
    m.def("attention_tile_rows", &attention_tile_rows);
    m.def("attention_plan_bytes", &attention_plan_bytes);
    bind(m, "attention_plan", &attention_plan);
    bind(m, "planned_attention", &planned_attention);
    m.def("paged_tile_tokens", &paged_tile_tokens);
    m.def("paged_plan_bytes", &paged_bytes);
    bind(m, "paged_plan", &paged_plan);
    bind(m, "planned_paged_attention", &planned_paged_attention);
    bind(m, "rotary_write_kv", &rotary_write_kv);
    m.def("decode_step_workspace_bytes", &decode_step_workspace_bytes);
    bind(m, "decode_step", &decode_step);
    bind(m, "maxsim_of_one", &maxsim_of_one);
    bind(m, "count_tokens", &count_tokens);
    bind(m, "pack_padded", &pack_padded);
    bind(m, "unpack_padded", &unpack_padded);
    bind_comm(m);
}

}  // namespace
}  // namespace bytetx
