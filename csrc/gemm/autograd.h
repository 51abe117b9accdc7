// What gemm.cpp and mlp.cpp share of autograd and registration.
#pragma once

#include "binding/autograd.h"
#include "binding/gradient_slots.h"
#include "gemm/product.h"

namespace cuda_ext {

// As a number: a saved string is an allocation more.
inline void save_activation(AutogradContext* ctx, const ActivationName& name) {
  save_option(ctx, "activation", int64_t(parse_activation("backward", name)));
}
inline ActivationName saved_activation(const AutogradContext* ctx) {
  return name_of(Activation(saved_option<int64_t>(ctx, "activation")));
}

// The layouts that no kernel reads: each op refuses them in words.
inline void register_refusals(torch::Library& m, std::initializer_list<const char*> ops) {
  for (const char* op : ops) {
    for (const auto key : {c10::DispatchKey::SparseCPU, c10::DispatchKey::SparseCsrCPU, c10::DispatchKey::MkldnnCPU})
      m.impl(op, torch::dispatch(key, torch::CppFunction::makeFromBoxedFunction<&no_layout_kernel>()));
  }
}

}  // namespace cuda_ext
