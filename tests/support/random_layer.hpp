#pragma once

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include <fusedmoe/config.hpp>
#include <fusedmoe/tensor.hpp>
#include <fusedmoe/weights.hpp>

namespace fusedmoe::testing_support {

/// A layer whose weights are drawn from a seeded normal distribution and quantized by `scheme`. Gate and up
/// get tensor scales of their own; static input scales fit activations of about unit variance and differ
/// between experts.
struct RandomLayer {
  MoeConfig config;
  ExpertSource source;
};

/// `config` needs its sizes, activation and bias; num_local_experts defaults to num_experts. `symmetric`: no
/// zero points, where the scheme would allow some.
RandomLayer MakeRandomLayer(MoeConfig config, const std::string& scheme, uint64_t seed,
                            bool symmetric = false);

/// Gives the columns of the scales an order of their own, as activation order leaves them.
void ShuffleGroups(CanonicalMatrix& matrix, std::mt19937_64& random);

/// Normal rows with a few outlier columns, rounded to `dtype`.
Tensor RandomRows(int64_t rows, int64_t cols, DType dtype, uint64_t seed);

/// Projections of unit gain with biases, in BF16, for a layer of these sizes.
LatentWeights RandomLatent(int64_t hidden, int64_t latent, uint64_t seed, bool with_norm = false);

/// Ids without repetition within a token, drawn uniformly, and positive weights that sum to about one.
struct RandomRouting {
  std::vector<int32_t> ids;
  std::vector<float> weights;
};
RandomRouting MakeRandomRouting(int64_t num_tokens, int64_t top_k, int64_t num_experts, uint64_t seed);

/// What goes through a layer: tokens and where they go.
struct Batch {
  Tensor hidden;
  RandomRouting routing;
};

}  // namespace fusedmoe::testing_support
