#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include <fusedmoe/checkpoint.hpp>
#include <fusedmoe/layer.hpp>
#include <fusedmoe/plan.hpp>

namespace fusedmoe {

/// What WritePrepared made.
struct PrepareReport {
  std::string backend;
  std::string layout_key;
  RecipeText recipe;
  double layout_error = 0.0;  ///< see Plan::layout_error
  int64_t tensors = 0;
  int64_t prepared_bytes = 0;   ///< all tensors, those that lossy steps kept included
  int64_t canonical_bytes = 0;  ///< of these, what lossy steps replaced
  int64_t expert_bytes = 0;     ///< of one expert in the prepared form
  int64_t peak_bytes = 0;       ///< growth of the largest resident size of the process over the preparation
};

/// Writes the routed experts of a layer in the layout of `options.backend`, with layout key, recipe, logical
/// sizes, scheme and configuration in the metadata, and the router beside them (names "router.*"). Nothing
/// stands under `path` unless it succeeded. kUnsupported with every refusal when the backend cannot run the
/// layer, or has no layout of its own.
Result<PrepareReport> WritePrepared(const Checkpoint& checkpoint, int64_t layer, const LayerOptions& options,
                                    const std::string& path);

/// The canonical tensors of a prepared file again, bit for bit ("gate_up" [E, 2I, H], gate rows first,
/// "down", scales). `layout_key` not empty: refused (kUnsupported) unless the file has that layout.
Result<PrepareReport> InvertPrepared(const std::string& prepared, const std::string& path,
                                     const std::string& layout_key = {});

}  // namespace fusedmoe
