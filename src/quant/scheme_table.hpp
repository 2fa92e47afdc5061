#pragma once

#include <span>
#include <string>
#include <string_view>

#include <fusedmoe/quant.hpp>

namespace fusedmoe {

/// A line of schemes.inc. The formats lack what the granularity adds.
struct SchemeRow {
  SchemeInfo info;
  WeightFormat weight;
  ActivationFormat activation;
};

/// The lookup of ParseScheme over any table.
///
/// Granularity words, for the weights and, after an underscore, for the activations:
///   tensor        one F32 scale for the matrix; activations: one dynamic scale for the batch
///   channel       one scale for each output row; activations: one for each token
///   gN            groups of N along the reduction; activations: one scale for each token
///   outN          blocks of N output rows by one column
///   blockRxC      R rows by C columns, blockN for N x N; activations: groups of C
///   static        (alone or as a suffix) the activations have one stored scale
///   token/tensor/dynamic  the activations have a dynamic scale for each token / for the batch / for the
///   batch
///   groupN        (alone) the activations have a dynamic scale for each token and N columns: where those of
///                 the weights are e8m0, such a one, rounded up
/// Where a table lists one gN, outN, blockN or groupN, every N is understood. "token" and "block" alone stand
/// for "channel" and "block128".
Result<Scheme> ParseSchemeIn(std::span<const SchemeRow> table, std::string_view name);

/// The lookup of SchemeNameFor over any table.
Result<std::string> SchemeNameIn(std::span<const SchemeRow> table, const WeightFormat& weight,
                                 const ActivationFormat& activation);

}  // namespace fusedmoe
