#include "cpu/norms.h"

namespace bytetx {

void layer_norm(const NormParams& p, const Launch& launch) {
    cpu::run_norm("layer_norm", p, launch, cpu::row_kernels(launch.isa).layer_norm);
}

}  // namespace bytetx
