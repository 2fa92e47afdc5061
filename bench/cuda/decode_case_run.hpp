#pragma once

#include <cstdint>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "decode_cases.hpp"
#include "experts/cuda/launch.hpp"
#include "experts/cuda/prefill/prefill.hpp"
#include "stored_types.hpp"
#include "tests/weights/canonical.hpp"
#include "weights/fragment_pack.hpp"

namespace fusedmoe::cuda {

/// One case: the layer, its tokens, the kernel on them, and what the definition says.
class DecodeCaseRun {
 public:
  explicit DecodeCaseRun(const DecodeCase& c);

  /// Whether this build has the kernels of its format (FMOE_CUDA_FORMATS).
  bool IsBuilt() const { return HasKernels(spec_.format); }

  /// Prints a line; whether all was as it should be.
  bool Run();

 private:
  struct Packed {
    std::vector<uint8_t> gate_up, down;
    std::vector<float> tensor[2], row[2], bias[2];
  };

  // ---- decode_check.cu
  void DrawExperts();
  void DrawTokens(double weight_rms);
  void DrawRoutes();
  Packed PackAll() const;
  /// Both runs into outputs_; whether they have the same bits. False too where no plan fits.
  bool RunTwice();

  // ---- decode_definition.cu
  void DecodeWeights();
  double UpRms() const;
  struct Row;  // of the output, as the definition has it
  void AddRoute(int64_t route, Row& row);
  void CheckToken(int64_t token);

  bool InCall(int64_t token) const { return !c_.batched || local_[static_cast<size_t>(token)] >= 0; }

  const DecodeCase& c_;
  std::mt19937 generator_;
  std::normal_distribution<float> normal_;
  std::optional<StoredType> type_;
  WeightFormat format_;
  FragmentSpec spec_;
  LayerShape shape_;
  DType element_ = DType::kBF16;  ///< of tokens and of the intermediate

  std::vector<CanonicalExpert> experts_;
  std::vector<std::vector<float>> dense_[3];  ///< of gate, up, down: [expert][row][col]
  const int64_t num_tokens_ = c_.batched ? c_.experts * c_.tokens : c_.tokens;
  const int64_t top_k_ = c_.batched ? 1 : c_.top_k;
  const int64_t x_cols_ = (c_.hidden + 7) / 8 * 8;
  std::vector<float> x_;
  std::vector<uint16_t> x_codes_;
  std::vector<int32_t> counts_, ids_, map_;
  std::vector<float> weights_;
  std::vector<int32_t> local_;  ///< the expert of a route, -1: none here

  DecodePlan plan_;
  std::vector<std::byte> outputs_;
  std::string problem_;
  double worst_ = 0;       ///< error over what is allowed, largest of the outputs
  int64_t undecided_ = 0;  ///< intermediates whose rounding fp32 does not decide
};

}  // namespace fusedmoe::cuda
