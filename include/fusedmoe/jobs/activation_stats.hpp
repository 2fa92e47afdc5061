#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include <fusedmoe/status.hpp>

namespace fusedmoe {

/// What two statistics of one layer have in common; others are another model's.
struct ActivationStatsSizes {
  int64_t experts = 0, hidden = 0, intermediate = 0;
  bool operator==(const ActivationStatsSizes&) const = default;
  std::string ToString() const;  ///< "8 experts, hidden 64, intermediate 32"
};

/// What calibration saw of the inputs of each expert's projections: largest magnitudes, and how many tokens
/// they come from. Vectors have an entry for each expert.
struct LayerActivationStats {
  int64_t hidden = 0, intermediate = 0;  ///< of the layer
  std::vector<float> gate_up_amax;       ///< input of gate and up; 0 where no token came
  std::vector<float> down_amax;          ///< input of down
  std::vector<int64_t> tokens;
  ActivationStatsSizes sizes() const { return {static_cast<int64_t>(tokens.size()), hidden, intermediate}; }
};

/// Statistics of some layers, by number.
struct ActivationStats {
  std::map<int64_t, LayerActivationStats> layers;
  /// Takes the larger amax and adds the counts of another calibration. kUsage when layers of one number
  /// differ in experts or sizes.
  Status Merge(const ActivationStats& other);
};

/// A safetensors file with layers.N.gate_up_amax and layers.N.down_amax (F32 [E]), layers.N.tokens
/// (I64 [E]) and layers.N.sizes (I64 [2]: hidden, intermediate). Reading refuses (kBadInput) values that are
/// negative or not finite, and layers that are not whole.
Result<ActivationStats> ReadActivationStats(const std::string& path);
Status WriteActivationStats(const std::string& path, const ActivationStats& stats);
/// Merges `stats` into what the file holds, or writes it where there is none, and returns all. Calls of
/// several processes for one file take turns, so that nothing is lost. Errors: as of the three above.
Result<ActivationStats> AddToActivationStats(const std::string& path, const ActivationStats& stats);

}  // namespace fusedmoe
