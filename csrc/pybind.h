// pybind11 as torch ships it. Torch 2.10 puts those headers, like its own unstable ones, behind a check that
// TORCH_TARGET_VERSION is not set; but no torch type is in them.
#pragma once

#pragma push_macro("TORCH_TARGET_VERSION")
#undef TORCH_TARGET_VERSION
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#pragma pop_macro("TORCH_TARGET_VERSION")
