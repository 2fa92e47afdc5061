#pragma once

#include <functional>
#include <string>

#include "checkpoint/files/json.hpp"
#include "checkpoint/linear_format.hpp"

namespace fusedmoe::checkpoint {

/// What 'quant_algo' says of the modules of a target of `config_groups`, or of all; `format` null: nothing.
struct AlgorithmOf {
  std::string name;
  const LinearFormat* format = nullptr;
};

/// ModelOpt writes what the algorithm says once more as `config_groups`, in the words of compressed-tensors.
/// Where both are there and differ, whoever reads one computes something else than who reads the other.
Status CompareWithGroups(const JsonValue& groups,
                         const std::function<AlgorithmOf(const std::string& target)>& algorithm_of,
                         const std::string& path);

}  // namespace fusedmoe::checkpoint
