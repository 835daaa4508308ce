// The activations of grouped_linear().
#pragma once

#include "gemm/epilogue.cuh"

namespace bytetx::grouped {

using namespace gemm;

inline ActivationForm form_of(Activation activation) {
    if (activation == Activation::gelu) return ActivationForm::erf;
    if (activation == Activation::none || activation == Activation::relu) {
        return ActivationForm::linear;
    }
    return ActivationForm::sigmoid;
}

// Where the form is known as a kernel runs.
__device__ __forceinline__ float activate_as(ActivationForm form, float x,
                                             const ActivationConstants& c) {
    if (form == ActivationForm::erf) return activate<ActivationForm::erf>(x, c);
    if (form == ActivationForm::sigmoid) return activate<ActivationForm::sigmoid>(x, c);
    return activate<ActivationForm::linear>(x, c);
}

}  // namespace bytetx::grouped
