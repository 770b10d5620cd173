// What the instantiation files of the Hopper forward consist of.
#pragma once

#include "../registry.h"
#include "forward.cuh"

#define ATTN_SM90_FORWARD_KERNEL(name, half, head_dim, variant)                                              \
  extern "C" __global__ void __launch_bounds__(                                                              \
      attn_ext::cuda::sm90::forward_tile(head_dim, attn_ext::cuda::sm90::ForwardVariant::variant).threads(), \
      1) name(const __grid_constant__ attn_ext::cuda::sm90::ForwardParams params) {                          \
    attn_ext::cuda::sm90::attn_forward<attn_ext::cuda::half, head_dim,                                       \
                                       attn_ext::cuda::sm90::ForwardVariant::variant>(params);               \
  }                                                                                                          \
  ATTN_REGISTER_KERNEL(name)
