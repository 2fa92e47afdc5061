#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <fusedmoe/config.hpp>
#include <fusedmoe/quant.hpp>
#include <fusedmoe/status.hpp>
#include <fusedmoe/tensor.hpp>
#include <fusedmoe/weights.hpp>

namespace fusedmoe {

namespace checkpoint {
struct Access;
}

/// How the bytes of a file become those of a tensor, a copy in any case: kPread reads, kMmap copies out of a
/// private mapping; kAuto is kPread today.
enum class IoMode : uint8_t { kAuto, kMmap, kPread };

struct CheckpointOptions {
  IoMode io = IoMode::kAuto;
  /// "" decides by family; else "in_out", "out_in" (axis order of tensors that hold gate and up, or all
  /// experts), with ",interleaved" or ",chunked".
  std::string expert_layout;
  bool allow_partial = false;  ///< tolerate tensors that the index names and no shard holds
  /// For jobs that write weights: decodes what safetensors formats cannot store. GGUF's integers except Q4_0
  /// and Q8_0 become F32, affine matrices of MLX the dtype of their scales. False: routed experts keep their
  /// codes.
  bool decode_blocks = false;
};

/// One tensor of the checkpoint, as its header describes it.
struct TensorInfo {
  std::string name;
  DType dtype = DType::kF32;
  Shape shape;
  std::string file;  ///< relative to the directory
  int64_t bytes = 0;
  /// Why Load refuses it (a dtype or rank that this library does not know); empty: it does not.
  std::string problem;
};

/// The router of a layer and what goes with it; E counts zero experts too. What LoadRouter gives owns its
/// memory, is finite, and has its biases in F32.
struct RouterWeights {
  Tensor weight;               ///< [E, H] BF16, F16 or F32
  Tensor bias;                 ///< [E] BF16, F16 or F32, added to the logits; empty: none
  Tensor correction_bias;      ///< [E] BF16, F16 or F32, selection only; empty: none
  Tensor token_id_to_experts;  ///< of hash routing, [vocabulary, top_k] I32 or I64; empty: none
};

/// Experts that every token visits.
struct SharedExpertWeights {
  ExpertSource source;  ///< one expert
  Tensor gate;          ///< F32 [H]: sigmoid(hidden . gate) scales the output; empty: none
};

/// What a layer is, read without touching its weights.
struct LayerDescription {
  int64_t layer = 0;
  std::string family;  ///< row of the family table, e.g. "qwen3_moe"
  MoeConfig config;
  Scheme scheme;
  std::string producer;  ///< "modelopt", "compressed-tensors", "none", ...
  std::optional<Scheme> shared_scheme;
  int64_t expert_bytes = 0;  ///< on disk, all experts
  /// What its router does that no method here has, so that the caller routes; empty: the layer routes itself.
  std::string routed_by_caller;
};

/// A Hugging Face checkpoint directory: config.json, one or several safetensors files, quantization metadata;
/// or a GGUF file (also the only one in a directory without config.json).
/// Immutable after Open; all calls are safe from many threads. Untrusted input: everything is validated, and
/// errors name the file and the tensor.
class Checkpoint {
 public:
  /// Reads configuration and headers, no weights. Errors: kBadInput, with file and tensor, for what is
  /// malformed or missing; kUnsupported for a model_type or a quantization that this library does not know.
  static Result<std::shared_ptr<const Checkpoint>> Open(const std::string& directory,
                                                        const CheckpointOptions& options = {});
  ~Checkpoint();

  /// True for a file that Open takes: one that begins like a GGUF file, or has its name.
  static bool IsFile(const std::string& path);

  const std::string& directory() const;  ///< what was opened
  /// Paths of all that it is read from: files with tensors, their index, and those that configure.
  std::vector<std::string> Files() const;
  const std::string& family() const;    ///< "qwen3_moe": its row in the table of families
  const std::string& producer() const;  ///< whose metadata say how it is quantized: "modelopt"
  int64_t num_layers() const;           ///< all of the model, with and without routed experts
  /// Layers that hold routed experts, ascending.
  const std::vector<int64_t>& moe_layers() const;
  /// Every tensor, by name.
  const std::vector<TensorInfo>& tensors() const;
  /// The data of one tensor, a copy that outlives the checkpoint. kBadInput when there is none of that name
  /// or its TensorInfo has a `problem`.
  Result<Tensor> Load(std::string_view tensor) const;

  /// This and the next four take a layer of moe_layers(). Errors: kUsage for one that the model does not
  /// have, kBadInput, with file and tensor, where what belongs to it is missing or malformed.
  Result<LayerDescription> Describe(int64_t layer) const;
  /// Empty where the caller routes (RoutingMethod::kCustom).
  Result<RouterWeights> LoadRouter(int64_t layer) const;
  /// The routed experts in canonical form. `parallel` selects this rank's share: a TP slice of the
  /// intermediate size, or its experts of an EP placement (global ids in `global_ids`; empty: all, in order).
  Result<ExpertSource> Experts(int64_t layer, const ParallelConfig& parallel = {},
                               const std::vector<int64_t>& global_ids = {}) const;
  /// Nothing when the routed experts read the hidden states themselves. Quantized projections come decoded.
  Result<std::optional<LatentWeights>> Latent(int64_t layer) const;
  /// Nothing when the layer has no shared expert.
  Result<std::optional<SharedExpertWeights>> SharedExperts(int64_t layer,
                                                           const ParallelConfig& parallel = {}) const;

 private:
  friend struct checkpoint::Access;
  struct Impl;
  explicit Checkpoint(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace fusedmoe
