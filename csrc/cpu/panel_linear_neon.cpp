#include "cpu/panel_kernel.h"

namespace bytetx::cpu::neon {

const PanelKernelTable kPanelKernels = make_panel_kernels();

}  // namespace bytetx::cpu::neon
