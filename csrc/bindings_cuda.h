// The ops that _cuda alone has: plans made on the device, GEMMs by tiling, ops of several GPUs.
#pragma once

#include <vector>

#include "bindings.h"
#include "cache_ops.h"
#include "comm_ops.h"
#include "decode_step_ops.h"
#include "gate_ops.h"
#include "grouped_ops.h"
#include "linear_norm_ops.h"
#include "linear_rotary_ops.h"
#include "low_rank_ops.h"
#include "maxsim_ops.h"
#include "padding_ops.h"
#include "split_norm_ops.h"

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
py::tuple paged_bytes(const py::object& fields) {
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
    py::class_<PeerMemory>(m, "PeerMemory")
        .def(py::init(&make_peer_memory), py::kw_only(), py::arg("buffers"), py::arg("flags"),
             py::arg("epochs"), py::arg("buffer_bytes"), py::arg("num_flags"), py::arg("fault"),
             py::arg("timeout_cycles"), py::arg("rank"));
    m.def("gemm_all_reduce_tilings",
          [] { return list_tilings(num_gemm_all_reduce_tilings(), gemm_all_reduce_tiling); });
    bind<&all_gather_gemm>(m, "all_gather_gemm");
    bind<&gemm_reduce_scatter>(m, "gemm_reduce_scatter");
    bind<&gemm_all_reduce>(m, "gemm_all_reduce");
    bind<&all_reduce_one_shot>(m, "all_reduce_one_shot");
    bind<&all_reduce_two_shot>(m, "all_reduce_two_shot");
    bind<&sum_copies>(m, "sum_copies");
    bind<&barrier>(m, "barrier");
    bind<&send_copy>(m, "send_copy");
    bind<&wait_copies>(m, "wait_copies");
}

void bind_cuda(py::module_& m) {
    m.attr("arch") = "sm_90a";
    m.def("linear_tilings", [] { return list_tilings(num_linear_tilings(), linear_tiling); });
    bind<&linear>(m, "linear");
    bind<&linear_any>(m, "linear_any");
    bind<&gate_rows>(m, "gate_rows");
    bind<&low_rank>(m, "low_rank");
    bind<&linear_norm_workspace_bytes>(m, "linear_norm_workspace_bytes", {"m", "n"});
    bind<&linear_norm>(m, "linear_norm");
    bind<&linear_rotary>(m, "linear_rotary");
    bind<&split_norm>(m, "split_norm");
    m.def("fp8_linear_tilings",
          [] { return list_tilings(num_fp8_linear_tilings(), fp8_linear_tiling); });
    bind<&fp8_linear>(m, "fp8_linear");
    bind<&grouped_linear>(m, "grouped_linear");
    bind<&grouped_rows>(m, "grouped_rows");
    bind<&quantize_rows>(m, "quantize_rows");
    bind<&argmax>(m, "argmax");
    bind<&sample>(m, "sample");
    bind<&attention_tile_rows>(m, "attention_tile_rows",
                               {"batch_size", "total_tokens", "head_dim"});
    bind<&attention_plan_bytes>(m, "attention_plan_bytes",
                                {"batch_size", "total_tokens", "tile_rows", "batch_invariant"});
    bind<&attention_plan>(m, "attention_plan");
    bind<&planned_attention>(m, "planned_attention");
    bind<&paged_tile_tokens>(m, "paged_tile_tokens", {"num_heads", "num_kv_heads", "head_dim"});
    m.def("paged_plan_bytes", &paged_bytes);
    bind<&paged_plan>(m, "paged_plan");
    bind<&planned_paged_attention>(m, "planned_paged_attention");
    bind<&rotary_write_kv>(m, "rotary_write_kv");
    bind<&decode_step_workspace_bytes>(m, "decode_step_workspace_bytes",
                                       {"device", "hidden_size", "inner_size", "num_heads",
                                        "num_kv_heads", "head_dim", "has_bias"});
    bind<&decode_step>(m, "decode_step");
    bind<&maxsim_of_one>(m, "maxsim_of_one");
    bind<&count_tokens>(m, "count_tokens");
    bind<&pack_padded>(m, "pack_padded");
    bind<&unpack_padded>(m, "unpack_padded");
    bind_comm(m);
}

}  // namespace
}  // namespace bytetx
