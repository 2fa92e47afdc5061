#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include <fusedmoe/checkpoint.hpp>

#include "checkpoint/access.hpp"
#include "checkpoint/storage.hpp"
#include "jobs/common/output_checkpoint.hpp"

namespace fusedmoe::jobs {

/// A layer of the source, and the modules that its experts become.
struct SourceLayer {
  int64_t layer = 0;
  std::shared_ptr<const checkpoint::LayerContext> context;
  ExpertSource experts;
  bool gated = true;
  bool has_bias = false;
  /// Dtype of bias tensors; F32 where biases of experts were cut out of a fused tensor of another dtype.
  DType bias_dtype = DType::kF32;
};

/// The module of one projection in the new checkpoint: that of the source where each expert has its own;
/// "<block>.experts.<e>.gate_proj" and so on where the source keeps them in one tensor.
std::string TargetModule(const SourceLayer& layer, int64_t expert, checkpoint::Projection projection);

/// The experts of a checkpoint and all that is beside them.
class ExpertsRewriter {
 public:
  static Result<ExpertsRewriter> Open(std::shared_ptr<const Checkpoint> checkpoint);

  const std::vector<SourceLayer>& layers() const { return layers_; }
  const Checkpoint& checkpoint() const { return *checkpoint_; }
  /// Units that copy every tensor which belongs to no routed expert.
  std::vector<Unit> CopiedUnits() const;
  /// Matrices that stay as they are, as modules: routers, attention, shared experts, embeddings.
  std::vector<std::string> UnquantizedModules() const;
  /// config.json of the source with this JSON object as its quantization_config (empty: without one).
  Result<std::string> ConfigWith(const std::string& quantization) const;

 private:
  std::shared_ptr<const Checkpoint> checkpoint_;
  std::vector<SourceLayer> layers_;
  std::set<std::string_view> expert_tensors_;
};

/// The tensors of an expert as they will be written, and their data.
std::vector<TensorSpec> ExpertSpecs(const SourceLayer& layer, int64_t expert,
                                    const checkpoint::StorageRow& row, const Scheme& scheme,
                                    const checkpoint::StorageOptions& options);
Result<std::vector<NamedTensor>> StoreExpert(const SourceLayer& layer, int64_t expert,
                                             const checkpoint::StorageRow& row,
                                             const CanonicalExpert& matrices,
                                             const checkpoint::StorageOptions& options);

/// The same as plain matrices of `dtype`: "<module>.weight".
std::vector<TensorSpec> PlainSpecs(const SourceLayer& layer, int64_t expert, DType dtype);

/// Appends the bias of a projection in the dtype of the layer, when there is one.
Status AppendBias(const SourceLayer& layer, const CanonicalMatrix& matrix, const std::string& module,
                  std::vector<NamedTensor>& tensors);

}  // namespace fusedmoe::jobs
