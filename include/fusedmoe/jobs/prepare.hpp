#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <fusedmoe/checkpoint.hpp>
#include <fusedmoe/executor.hpp>
#include <fusedmoe/layer.hpp>
#include <fusedmoe/plan.hpp>

namespace fusedmoe {

/// Backends whose layout is the same bytes on every machine, so that WritePrepared can write it. Those of
/// CPUs and cards follow the machine and are made when a layer is loaded.
std::vector<std::string> BackendsWithLayouts();

/// What WritePrepared made.
struct PrepareReport {
  std::string backend;
  std::string layout_key;
  RecipeText recipe;
  double layout_error = 0.0;  ///< see Plan::layout_error
  int64_t tensors = 0;
  int64_t prepared_bytes = 0;   ///< all tensors, those that lossy steps kept included
  int64_t canonical_bytes = 0;  ///< of these, what lossy steps replaced
  int64_t expert_bytes = 0;     ///< of one expert, prepared or as it was loaded, whichever takes more
  /// The most bytes of tensors that lived at a time while experts were moved, mapped files not counted: the
  /// result and one expert for each thread of the executor. This and expert_bytes are taken from counters of
  /// the process (TensorBytes): what other threads load or release meanwhile is counted in.
  int64_t peak_bytes = 0;
  int64_t experts_at_a_time = 1;
};

/// Writes the routed experts of a layer in the layout of `options.backend`, with layout key, recipe, logical
/// sizes, MoeConfig, scheme and digests of all tensors in the metadata, router and shared expert beside them.
/// Nothing stands under `path` unless it succeeded. `options.executor` moves one expert a thread.
/// kUnsupported with every refusal when the backend cannot run the layer, or has no layout of its own.
Result<PrepareReport> WritePrepared(const Checkpoint& checkpoint, int64_t layer, const LayerOptions& options,
                                    const std::string& path);

/// The canonical tensors of a prepared file again, bit for bit ("gate_up" [E, 2I, H], gate rows first,
/// "down", scales), as a file of the layout "canonical", which REFERENCE runs. Every tensor must have the
/// digest that the file promises (kBadInput names expert and tensor). `backend` not empty: refused
/// (kUnsupported, both keys named) unless the file is in the layout of that backend.
Result<PrepareReport> InvertPrepared(const std::string& prepared, const std::string& path,
                                     const std::string& backend = {});

/// A tensor that is not what it should be; expert -1: one that no expert owns (router, shared expert).
struct DamagedTensor {
  int64_t expert = -1;
  std::string tensor;
  std::string what;
};

/// A prepared file, opened: a layer without its checkpoint. Immutable; safe to use from many threads.
class PreparedLayer {
 public:
  /// Untrusted input: metadata, names, shapes and scalars are checked against each other before anything is
  /// built on them (kBadInput names file and tensor). Digests of tensors are not looked at: FindDamage does.
  static Result<std::shared_ptr<const PreparedLayer>> Open(const std::string& path);
  ~PreparedLayer();

  const std::string& path() const;  ///< as given to Open
  /// Layer number, family and configuration of the checkpoint that it was made from.
  const LayerDescription& description() const;
  const std::string& backend() const;     ///< that it was prepared for
  const std::string& layout_key() const;  ///< "canonical" for what InvertPrepared wrote
  const RecipeText& recipe() const;       ///< steps from the canonical form to these bytes

  /// The layer, run from the prepared bytes as they are. `options.backend` empty: the file's. Another
  /// backend is refused by its layout (kUnsupported, both keys named), and so are several ranks.
  Result<std::unique_ptr<MoeLayer>> Load(const LayerOptions& options = {}) const;
  /// The same through another backend, from the canonical form that the file leads back to: for comparisons.
  Result<std::unique_ptr<MoeLayer>> LoadCanonical(const LayerOptions& options) const;

  /// Tensors whose bytes do not have the digest that the metadata promises, by expert.
  std::vector<DamagedTensor> FindDamage(const Executor& executor = {}) const;
  /// Prepares the layer again and compares byte by byte: from a checkpoint, or (null) from the canonical form
  /// that the file itself leads back to. A checkpoint's router, projections of latent experts and shared
  /// expert are compared too. kUsage when sizes or formats differ.
  Result<std::vector<DamagedTensor>> CompareWith(const Checkpoint* checkpoint, int64_t layer,
                                                 const Executor& executor = {}) const;

 private:
  struct Impl;
  explicit PreparedLayer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace fusedmoe
