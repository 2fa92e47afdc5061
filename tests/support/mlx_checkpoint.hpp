#pragma once

#include <array>
#include <cstdint>
#include <string>

#include <fusedmoe/tensor.hpp>

#include "support/temporary_directory.hpp"

/// Checkpoints as MLX writes them, with drawn experts in affine codes.
namespace fusedmoe::testing_support {

struct MlxBits {
  int bits = 4;
  int64_t group = 64;
};

/// What such a checkpoint has.
struct MlxLayer {
  int64_t experts = 3, hidden = 256, intermediate = 128;
  DType dtype = DType::kBF16;  ///< of scales and biases
  MlxBits gate, up, down;
  bool numbered = false;  ///< a matrix for each expert, as before stacks
};

/// The affine matrices of one projection, [experts, rows, cols]: any codes; scales of both signs, in every
/// seventh group 0; biases that are a few codes, or what such a group is worth, or 0.
struct MlxStack {
  int64_t experts = 0, rows = 0, cols = 0;
  MlxBits stored;
  Tensor words, scales, biases;  ///< U32, and two of the layer's type

  struct Weight {
    double product, bias;  ///< code * scale, and what is added
    double value() const { return product + bias; }
  };
  Weight At(int64_t expert, int64_t row, int64_t col) const;
};

/// A Qwen3-MoE model of one layer. Throws where it cannot be written.
class MlxCheckpoint {
 public:
  explicit MlxCheckpoint(const MlxLayer& layer, uint32_t seed = 1);
  std::string path() const { return directory_.path().string(); }
  /// Hidden states of 5 tokens, as `fusedmoe run` takes them.
  std::string input() const { return directory_ / "input.safetensors"; }
  const MlxStack& gate() const { return stacks_[0]; }
  const MlxStack& up() const { return stacks_[1]; }
  const MlxStack& down() const { return stacks_[2]; }

 private:
  std::array<MlxStack, 3> stacks_;
  test::TemporaryDirectory directory_;
};

}  // namespace fusedmoe::testing_support
