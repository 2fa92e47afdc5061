#pragma once

#include <optional>

#include "support/golden.hpp"

namespace fusedmoe::golden {

/// The INT8 quantizers of the topic `integer` (int8_token, int8_tensor_static, int8_group,
/// int8_block_dequantize); nothing when the case is none of them.
std::optional<Outcome> RunInt8Activations(const GoldenCase& golden_case);

}  // namespace fusedmoe::golden
