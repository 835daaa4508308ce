#include "cpu/norms.h"

namespace bytetx {

void rms_norm(const NormParams& p, const Launch& launch) {
    cpu::run_norm("rms_norm", p, launch, cpu::row_kernels(launch.isa).rms_norm);
}

}  // namespace bytetx
