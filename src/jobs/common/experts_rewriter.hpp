#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include <fusedmoe/checkpoint.hpp>

#include "checkpoint/access.hpp"
#include "checkpoint/storage/storage.hpp"
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
  /// GGUF files only: the names that the layer gets.
  std::optional<checkpoint::LayerNames> renamed;
};

/// The module of one projection in the new checkpoint: that of the source where each expert has its own;
/// "<block>.experts.<e>.gate_proj" and so on where the source keeps them in one tensor.
std::string TargetModule(const SourceLayer& layer, int64_t expert, checkpoint::Projection projection);
/// What the modules of all its experts begin with: "model.layers.3.mlp.experts.".
std::string ExpertStem(const SourceLayer& layer);

/// A tensor that belongs to no routed expert, and its name in the new checkpoint.
struct CopiedTensor {
  const TensorInfo* info = nullptr;
  std::string name;
};

/// The experts of a checkpoint and all that is beside them. Of a GGUF file: its MoE layers alone, under the
/// names that Hugging Face has for them; attention, embeddings and vocabulary are left out.
class ExpertsRewriter {
 public:
  static Result<ExpertsRewriter> Open(std::shared_ptr<const Checkpoint> checkpoint);

  const std::vector<SourceLayer>& layers() const { return layers_; }
  const Checkpoint& checkpoint() const { return *checkpoint_; }
  /// What no output may replace: the checkpoint and its files.
  std::vector<std::string> SourcePaths() const;
  /// Every tensor which belongs to no routed expert, by its new name; those of a GGUF file that are left out
  /// are not among them.
  std::vector<CopiedTensor> Copied() const;
  /// Units that copy them.
  std::vector<Unit> CopiedUnits() const;
  /// Tensors that the new checkpoint lacks.
  int64_t left_out() const;
  /// Matrices that stay as they are, as modules: routers, attention, shared experts, embeddings. What is
  /// around stacks of experts (those of draft layers) ends in a dot, as checkpoint::InWordsOf takes it.
  std::vector<std::string> UnquantizedModules() const;
  /// config.json of the source (of a GGUF file: what its metadata say) with this JSON object as its
  /// quantization_config (empty: without one), and with none in the objects that it nests.
  std::string ConfigWith(const std::string& quantization) const;

 private:
  void Rename(SourceLayer& layer);

  std::shared_ptr<const Checkpoint> checkpoint_;
  std::vector<SourceLayer> layers_;
  std::set<std::string_view> expert_tensors_;
  bool gguf_ = false;
  bool experts_alone_ = false;  // other tensors but those of the MoE layers are left out
  std::map<std::string, std::string, std::less<>> renames_;  // of GGUF: tensors that are copied
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
