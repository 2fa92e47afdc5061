#pragma once

#include <string>
#include <string_view>

#include <fusedmoe/status.hpp>

#include "checkpoint/files/json.hpp"
#include "checkpoint/linear_format.hpp"

namespace fusedmoe::checkpoint {

/// How the modules of a config group are stored: its "weights" and "input_activations", under the format that
/// it names itself, or else `outer_format`. kBadInput for values out of range, kUnsupported for combinations
/// that no kernel here computes; `path` is the file, for errors.
Result<LinearFormat> CompressedTensorsFormat(const JsonValue& group, std::string_view outer_format,
                                             const std::string& path);

}  // namespace fusedmoe::checkpoint
