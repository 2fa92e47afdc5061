#pragma once

#include <random>
#include <string>
#include <vector>

#include <fusedmoe/quant.hpp>
#include <fusedmoe/weights.hpp>

#include "device_array.hpp"
#include "experts/cuda/prefill/prefill.hpp"
#include "prefill_cases.hpp"
#include "quant/activation_quantizer.hpp"
#include "weights/fragment_pack.hpp"

namespace fusedmoe::cuda {

/// One case: the layer, its tokens, the kernels on them, and what the definition says.
class PrefillCaseRun {
 public:
  explicit PrefillCaseRun(const PrefillCase& c);

  /// Whether this build has the kernels of its format (FMOE_CUDA_FORMATS).
  bool IsBuilt() const;

  /// Prints a line; whether all was as it should be.
  bool Run();

 private:
  void Fail(const std::string& what);

  // ---- prefill_check.cu
  bool ChooseLayout();
  CanonicalExpert DrawExpert();
  void MakeWeights();
  void DrawRoutes();
  void DrawTokens();
  bool Plan();
  bool MakeOperand();
  void RunTwice();
  void Forward(std::vector<uint8_t>& result);

  // ---- prefill_definition.cu
  void DecodeInputs();
  void CheckOperandRows();
  void DecodeWeights();
  std::vector<float> ReferenceMids() const;
  bool AddReference(const std::vector<float>& mids, float mid_batch_scale, int64_t token,
                    std::vector<double>& want) const;
  void CheckOutputs(const std::vector<float>& mids);
  /// The local expert of a route, -1: none.
  int ExpertOf(int64_t route) const;

  const PrefillCase& c_;
  bool failed_ = false;
  std::mt19937 generator_;
  Scheme scheme_;
  const ActivationFormat& activation_ = scheme_.activation;
  const bool gated_ = c_.activation.gated();
  const bool static_scale_ = activation_.static_tensor_scale;
  const bool by_batch_ = activation_.quantized() && NeedsTensorScale(activation_) && !static_scale_;
  FragmentSpec spec_;
  LayerShape shape_;

  std::vector<CanonicalExpert> experts_;
  std::vector<std::vector<float>> dense_[3];  ///< of gate, up, down: [expert][row][col]
  std::vector<float> input_scale_, mid_scale_;
  DeviceArray<uint8_t> blocks_[2];
  DeviceArray<float> tensor_scales_[2], row_scales_[2], biases_[2];
  DeviceWeights device_;

  const int64_t num_tokens_ = c_.batched ? c_.experts * c_.tokens : c_.tokens;
  const int64_t top_k_ = c_.batched ? 1 : c_.top_k;
  const int64_t in_bytes_ = DTypeBits(c_.in) / 8, out_bytes_ = DTypeBits(c_.out) / 8;
  std::vector<int32_t> counts_, ids_, map_;
  std::vector<float> weights_;
  std::vector<uint8_t> x_;
  DeviceArray<uint8_t> d_x_;
  DeviceArray<int32_t> d_ids_, d_counts_, d_map_;
  DeviceArray<float> d_weights_, d_input_scale_, d_mid_scale_;

  PrefillPlan plan_;
  bool by_route_ = false;  ///< operand rows are of routes
  bool plain_ = false;     ///< tokens are operand rows as they stand
  int64_t operand_rows_ = 0, operand_cols_ = 0;
  DeviceArray<uint16_t> operand_;
  DeviceArray<float> row_scale_, group_scale_;
  DeviceArray<uint32_t> amax_;
  ExpertsCall call_;
  ActivationRows source_;  ///< what the operand rows were made of

  std::vector<uint8_t> y_;
  std::vector<float> inputs_;  ///< decoded
  float input_batch_scale_ = 1.0F;
};

}  // namespace fusedmoe::cuda
