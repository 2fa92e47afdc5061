#pragma once

#include "moe/backend.hpp"

namespace fusedmoe {

/// EMULATION: weights dequantized a row at a time (never a whole 16-bit copy) and rounded to the 16-bit
/// compute dtype; both activations, the intermediate one too, quantized and dequantized. NVFP4 and every
/// OCP-MX scheme. Takes plain rows. Gate and up keep their own tensor and input scales.
extern const Backend kEmulationBackend;

}  // namespace fusedmoe
