// Everything from outside that the kernels use, to be included before an instruction set is chosen: what is declared
// here is compiled for the base CPU, so that the linker can share it.
#pragma once

#include <cstddef>
#include <cstdint>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "half.h"
#include "kernels.h"
