#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <fusedmoe/status.hpp>

#include "checkpoint/layers/layer_spec.hpp"
#include "checkpoint/matrices/matrix_tensors.hpp"

/// Where the matrices of a layer's experts are and how they are stored, told by names, metadata and shapes:
/// no number is read.
namespace fusedmoe::checkpoint {

/// What every loader of a layer shares; kept alive by the sources that it hands out.
struct LayerContext {
  std::shared_ptr<const TensorStore> store;
  std::shared_ptr<const QuantRules> rules;
  LayerSpec spec;
};

enum class Projection : uint8_t { kGate, kUp, kDown };

/// Where one projection of one routed expert is, and its size.
struct Located {
  MatrixPlace place;
  int64_t rows = 0, cols = 0;
};
Located Locate(const LayerContext& context, int64_t expert, Projection projection);
/// How it is stored, with the blocks of fused tensors turned the way they lie.
Result<LinearFormat> RoutedFormat(const LayerContext& context, const Located& located);
/// Gate (where the activation is gated), up, down.
std::vector<Projection> Projections(const LayerContext& context);

/// The scheme of the routed experts. kUnsupported when gate, up and down differ.
Result<Scheme> RoutedScheme(const LayerContext& context);
/// kUnsupported, with both names, when a matrix stored as `format` has another scheme.
Status ExpectScheme(const LayerContext& context, const std::string& base, const LinearFormat& format,
                    const Scheme& scheme);

/// The matrices of the shared experts, which count as one, and their joint size.
struct SharedPlan {
  std::vector<std::pair<Projection, MatrixPlace>> places;
  int64_t intermediate = 0;
};
Result<SharedPlan> PlanShared(const LayerContext& context);
/// How one of them is stored.
Result<LinearFormat> SharedFormat(const LayerContext& context, const SharedPlan& plan,
                                  const MatrixPlace& place);
/// The joint size of the shared experts; 0: none.
Result<int64_t> SharedIntermediate(const LayerContext& context);
Result<Scheme> SharedScheme(const LayerContext& context);

/// Bytes of all routed experts on disk.
int64_t ExpertBytes(const LayerContext& context);

}  // namespace fusedmoe::checkpoint
